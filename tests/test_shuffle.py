"""A shuffle gives the same samples in another order, holds no more than it may, and is the same each time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagel_wds.rng import KeyedDraws
from bagel_wds.shuffle import num_bytes, shuffle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DRAWS = KeyedDraws(42, "shuffle", "t2i_pretrain", 0)


def samples_of(sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Samples that hold so many bytes, numbered in `__key__`."""
    return [{"__key__": number, "json": bytes(size)} for number, size in enumerate(sizes)]


def order(
    sizes: Iterable[int], draws: KeyedDraws = DRAWS, *, max_samples: int = 10, max_bytes: int = 1000
) -> list[int]:
    """The numbers of the samples after a shuffle."""
    return [
        sample["__key__"]
        for sample in shuffle(samples_of(sizes), draws, max_samples=max_samples, max_bytes=max_bytes)
    ]


class Watched:
    """Samples, and what a shuffle holds of them each time it asks for one more."""

    def __init__(self, samples: Sequence[dict[str, Any]]) -> None:
        self.held: dict[int, int] = {}
        self.most_samples = self.most_bytes = 0
        self._samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in self._samples:
            self.most_samples = max(self.most_samples, len(self.held))
            self.most_bytes = max(self.most_bytes, sum(self.held.values()))
            self.held[sample["__key__"]] = num_bytes(sample)
            yield sample


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), max_size=60),
    max_samples=st.integers(1, 70),
    max_bytes=st.integers(0, 200),
    seed=st.integers(0, 9),
)
def test_every_sample_comes_once_and_the_buffer_keeps_its_bounds(
    sizes: list[int], max_samples: int, max_bytes: int, seed: int
) -> None:
    watched = Watched(samples_of(sizes))
    given_out = []
    for sample in shuffle(watched, KeyedDraws(seed), max_samples=max_samples, max_bytes=max_bytes):
        del watched.held[sample["__key__"]]
        given_out.append(sample["__key__"])
        # What it is about to give out is still in hand: one sample more at the most.
        assert len(watched.held) <= max_samples

    assert Counter(given_out) == Counter(range(len(sizes)))
    assert watched.most_samples <= max_samples
    assert watched.most_bytes <= max_bytes


def test_the_buffer_is_filled_to_its_bounds_before_anything_comes_out() -> None:
    watched = Watched(samples_of([10] * 50))
    first = next(shuffle(watched, DRAWS, max_samples=7, max_bytes=1000))

    assert list(watched.held) == list(range(8))
    assert first["__key__"] in range(8)
    watched = Watched(samples_of([10] * 50))
    next(shuffle(watched, DRAWS, max_samples=7, max_bytes=35))
    assert list(watched.held) == list(range(4))


def test_the_order_literally() -> None:
    # A change here is a change of every run that is being resumed: a new version of the state.
    assert order([1] * 20, KeyedDraws(42, "shuffle", "g", 0), max_samples=5) == [
        *(2, 0, 5, 3, 7, 8, 11, 10, 4, 6, 1, 14, 12, 15, 19, 9, 17, 18, 13, 16),
    ]
    assert order([1, 2, 3] * 4, KeyedDraws(42, "shuffle", "g", 0), max_samples=50, max_bytes=6) == [
        *(1, 0, 3, 5, 2, 6, 8, 9, 11, 4, 10, 7),
    ]


def test_the_order_is_a_function_of_the_address_of_its_draws() -> None:
    sizes = [1] * 40
    orders = [
        order(sizes, KeyedDraws(seed, "shuffle", group, stream))
        for seed, group, stream in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]
    ]

    assert order(sizes, KeyedDraws(0, "shuffle", "a", 0)) == orders[0]
    assert len(set(map(tuple, orders))) == 4


def test_a_sample_above_the_bound_passes_alone_and_the_buffer_stays() -> None:
    sizes = [1] * 30 + [500] + [1] * 30
    shuffled = order(sizes, max_samples=10, max_bytes=100)

    assert sorted(shuffled) == list(range(61))
    # Twenty have left the buffer when it comes, and ten are still in it.
    assert shuffled[20] == 30
    assert [number for number in shuffled if number != 30] == [
        number + (number >= 30) for number in order([1] * 60, max_samples=10, max_bytes=100)
    ]


def test_a_sample_at_the_bound_is_held_like_any_other() -> None:
    watched = Watched(samples_of([10] * 3))
    first = next(shuffle(watched, DRAWS, max_samples=5, max_bytes=10))

    # The second sample had to come before the first could leave.
    assert list(watched.held) == [0, 1]
    assert first["__key__"] in (0, 1)


def test_a_buffer_of_no_bytes_passes_samples_on_as_they_come() -> None:
    assert order([3] * 9, max_bytes=0) == list(range(9))
    assert order([], max_bytes=0) == []


def test_any_sample_may_come_first_and_all_places_are_about_as_likely() -> None:
    runs = 3000
    firsts = Counter(order([1] * 6, KeyedDraws(seed), max_samples=100)[0] for seed in range(runs))
    lasts = Counter(order([1] * 6, KeyedDraws(seed), max_samples=100)[-1] for seed in range(runs))

    # 500 each on average, with a standard deviation of 20.
    for counts in (firsts, lasts):
        assert set(counts) == set(range(6))
        assert max(abs(count - runs / 6) for count in counts.values()) < 100


def test_only_encoded_bytes_are_counted() -> None:
    assert num_bytes({"__key__": "k" * 50, "json": b"12", "0.jpg": b"345", "txt": "text", "cls": 7}) == 5


@pytest.mark.parametrize("consumed", [0, 1, 5])
def test_a_shuffle_reads_ahead_no_further_than_its_buffer(consumed: int) -> None:
    watched = Watched(samples_of([1] * 100))
    shuffled = shuffle(watched, DRAWS, max_samples=10, max_bytes=1000)
    for _ in range(consumed):
        next(shuffled)

    assert len(watched.held) == (0 if consumed == 0 else 10 + consumed)
