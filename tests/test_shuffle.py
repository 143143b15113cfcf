"""A shuffle gives the same samples in another order, holds no more than it may, and is the same each time."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagel_wds.records import SampleRef
from bagel_wds.rng import KeyedDraws
from bagel_wds.shuffle import STRETCH, Memory, ShuffleBuffer, is_reference, num_bytes, reference, shuffle

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


class Shards:
    """Placed samples of some sizes, one behind the other in two shards, that can be fetched by their references."""

    def __init__(self, sizes: Sequence[int], scale: int = 1) -> None:
        self.samples: list[dict[str, Any]] = []
        offset = 0
        for number, size in enumerate(sizes):
            ref = SampleRef(number % 2, offset, size * scale, epoch=0)
            self.samples.append({"__key__": f"{number}", "json": bytes(size), "__ref__": ref})
            offset += size * scale
        self.fetched: list[int] = []
        self._by_ref = {sample["__ref__"]: sample for sample in self.samples}

    def fetch(self, refs: Sequence[SampleRef]) -> list[dict[str, Any]]:
        self.fetched.append(len(refs))
        return [self._by_ref[ref] for ref in refs]


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), max_size=60),
    scale=st.sampled_from([1, STRETCH // 50]),
    bare=st.integers(0, 30),
    max_samples=st.integers(1, 20),
    max_bytes=st.integers(0, 300),
    limit=st.integers(0, 200),
    stretches=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_neither_order_nor_samples_nor_state_depend_on_memory(
    sizes: list[int],
    scale: int,
    bare: int,
    max_samples: int,
    max_bytes: int,
    limit: int,
    stretches: int,
    seed: int,
) -> None:
    shards = Shards(sizes, scale)
    # Some come as references to begin with, as where a buffer is filled from an index.
    given_in = [
        reference(sample["__ref__"]) if number < bare else sample
        for number, sample in enumerate(shards.samples)
    ]
    memory = Memory(limit * scale)
    frugal = ShuffleBuffer(fetch=shards.fetch, memory=memory, stretches=stretches)
    plain = ShuffleBuffer()
    bounds = {"max_samples": max_samples, "max_bytes": max_bytes * scale}
    pairs = zip(
        shuffle(given_in, KeyedDraws(seed), buffer=frugal, **bounds),
        shuffle(shards.samples, KeyedDraws(seed), buffer=plain, **bounds),
        strict=True,
    )
    for one, other in pairs:
        assert one == other
        assert frugal.refs().tolist() == plain.refs().tolist()
        kept = [sample for sample in frugal.samples if not is_reference(sample)]
        assert memory.held == sum(map(num_bytes, kept)) <= memory.limit
    assert memory.held == 0


def test_buffers_share_the_memory_of_their_worker_and_give_it_back_when_they_are_left() -> None:
    memory = Memory(100)
    shards = Shards([10] * 30)
    shuffles = [
        shuffle(
            shards.samples,
            KeyedDraws(seed),
            max_samples=8,
            max_bytes=1000,
            buffer=ShuffleBuffer(fetch=shards.fetch, memory=memory),
        )
        for seed in range(3)
    ]
    for running in shuffles:
        assert len(list(islice(running, 5))) == 5
    assert 80 <= memory.held <= 100

    shuffles.clear()
    del running

    assert memory.held == 0
    assert pickle.loads(pickle.dumps(memory)).limit == 100


def test_references_close_to_each_other_are_fetched_together_where_there_is_memory() -> None:
    def fetches(limit: int, stretches: int = 1) -> list[int]:
        shards = Shards([10] * 40)
        buffer = ShuffleBuffer(
            (reference(sample["__ref__"]) for sample in shards.samples),
            fetch=shards.fetch,
            memory=Memory(limit),
            stretches=stretches,
        )
        assert len(list(shuffle([], DRAWS, max_samples=50, max_bytes=1000, buffer=buffer))) == 40
        return shards.fetched

    # Each of two shards in one read; or each sample alone.
    assert fetches(1000) == [20, 20]
    assert fetches(0) == [1] * 40
    # Both in one.
    assert fetches(1000, stretches=2) == [40]
    assert fetches(0, stretches=2) == [1] * 40


def test_samples_without_a_place_are_kept_whatever_the_memory() -> None:
    buffer = ShuffleBuffer(fetch=Shards([]).fetch, memory=Memory(0))

    got = list(shuffle(samples_of([5] * 20), DRAWS, max_samples=6, max_bytes=1000, buffer=buffer))

    assert [sample["__key__"] for sample in got] == order([5] * 20, max_samples=6)
