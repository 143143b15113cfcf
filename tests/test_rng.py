"""Draws are a function of their address: pinned values, no collisions, no process-wide generator in sight."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter
from statistics import NormalDist, fmean, pstdev
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import addresses

from bagel_wds.rng import CallOrderDraws, KeyedDraws

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagel_wds.rng import Draws

PINNED = KeyedDraws(42, "t2i_pretrain", "t2i", 0, "a=2Fb-0-12")


# A change of any value in the next three tests is a change of every run that is being resumed: a new version of the state.


def test_draws_of_every_kind_literally() -> None:
    assert [PINNED.random(f"dropout:{i}") for i in range(2)] == [0.6214729740007432, 0.29053399573355154]
    assert [PINNED.choice(n, "caption") for n in (1, 2, 10, 1000)] == [0, 1, 9, 964]
    assert [PINNED.randint(8, 13, f"frames:{i}") for i in range(8)] == [9, 8, 10, 12, 11, 11, 11, 10]
    assert list(PINNED.permutation(10, "epoch:0")) == [3, 8, 4, 0, 9, 6, 5, 7, 1, 2]
    # The last digits of a logarithm are the machine's.
    assert [PINNED.normal(f"timestep:{i}") for i in (3, 4)] == pytest.approx(
        [0.49578935682961806, 0.014767385514009633], rel=1e-12
    )


def test_draws_of_short_addresses_literally() -> None:
    assert KeyedDraws().random("x") == 0.28851242725743587
    assert KeyedDraws(0).random("x") == 0.862317875559424
    assert KeyedDraws("0").random("x") == 0.7164109937327447
    assert KeyedDraws(-1, "größe").random("x") == 0.012886922944227774


def test_draws_in_call_order_literally() -> None:
    draws = CallOrderDraws(42)

    assert draws.random("") == 0.6394267984578837
    assert draws.choice(10, "") == 0
    assert draws.randint(0, 100, "") == 51
    assert draws.permutation(5, "") == [0, 1, 3, 2, 4]
    assert draws.normal("") == pytest.approx(-1.1118801180469204, rel=1e-12)


KINDS: dict[str, Callable[[Draws, str], object]] = {
    "random": lambda draws, purpose: draws.random(purpose),
    "choice": lambda draws, purpose: draws.choice(7, purpose),
    "choice of one": lambda draws, purpose: draws.choice(1, purpose),
    "randint": lambda draws, purpose: draws.randint(8, 12, purpose),
    "normal": lambda draws, purpose: draws.normal(purpose),
    "permutation": lambda draws, purpose: list(draws.permutation(6, purpose)),
}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from(sorted(KINDS)), max_size=30))
def test_draws_in_call_order_are_those_of_the_seeded_generators(seed: int, kinds: list[str]) -> None:
    draws, python, numpy = CallOrderDraws(seed), random.Random(seed), np.random.RandomState(seed)
    directly: dict[str, Callable[[], object]] = {
        "random": python.random,
        "choice": lambda: python.choice(range(7)),
        "choice of one": lambda: python.choice([0]),
        "randint": lambda: int(numpy.randint(8, 12)),
        "normal": lambda: float(numpy.randn()),
        "permutation": lambda: [int(i) for i in numpy.permutation(6)],
    }

    assert [KINDS[kind](draws, f"whatever:{i}") for i, kind in enumerate(kinds)] == [
        directly[kind]() for kind in kinds
    ]


def test_draws_in_call_order_are_those_of_the_process_wide_generators_after_seeding() -> None:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        random.seed(7)
        np.random.seed(7)
        wanted = [
            random.random(),
            random.choice(range(9)),
            int(np.random.randint(3, 30)),
            float(np.random.randn()),
        ]
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    draws = CallOrderDraws(7)

    assert [draws.random(""), draws.choice(9, ""), draws.randint(3, 30, ""), draws.normal("")] == wanted


def test_a_choice_of_nothing_in_call_order_draws_nothing() -> None:
    draws = CallOrderDraws(0)
    with pytest.raises(IndexError):
        draws.choice(0, "frame")

    assert draws.random("") == CallOrderDraws(0).random("")


@settings(max_examples=500, deadline=None)
@given(addresses(), addresses(), st.text("01:si#", max_size=3), st.text("01:si#", max_size=3))
@example(("ab", "c"), ("a", "bc"), "", "")
@example((1,), ("1",), "x", "x")
@example((12,), (1, 2), "x", "x")
@example(("a", "b"), ("a",), "", "b")
@example((), ("",), "", "")
def test_different_addresses_have_different_draws(
    first: tuple[int | str, ...], second: tuple[int | str, ...], purpose: str, other: str
) -> None:
    same = (first, purpose) == (second, other) and list(map(type, first)) == list(map(type, second))
    equal = KeyedDraws(*first).random(purpose) == KeyedDraws(*second).random(other)

    assert equal == same


@settings(max_examples=100, deadline=None)
@given(addresses(), st.sampled_from(sorted(KINDS)))
def test_a_draw_is_the_same_whenever_and_however_often_it_is_asked_for(
    address: tuple[int | str, ...], kind: str
) -> None:
    draws, draw = KeyedDraws(*address), KINDS[kind]
    first = draw(draws, "one")
    for other in KINDS.values():
        other(draws, "two")

    assert first == draw(draws, "one") == draw(KeyedDraws(*address), "one")
    assert first == draw(pickle.loads(pickle.dumps(draws)), "one") == draw(copy.deepcopy(draws), "one")


def test_keys_of_any_bytes_have_draws() -> None:
    odd = b"caf\xe9".decode("utf-8", "surrogateescape")

    assert 0 <= KeyedDraws(0, odd).random("x") < 1
    assert KeyedDraws(0, odd).random("x") != KeyedDraws(0, "café").random("x")
    assert sorted(KeyedDraws(odd).permutation(5, odd)) == [0, 1, 2, 3, 4]


def test_nothing_to_draw_from_is_an_error_that_names_the_purpose() -> None:
    for n in (0, -1):
        with pytest.raises(IndexError, match=f"nothing to choose from \\(n={n}\\) for 'caption'"):
            PINNED.choice(n, "caption")
    with pytest.raises(ValueError, match=r"no integer in 5..4 for 'frames'"):
        PINNED.randint(5, 5, "frames")
    assert list(PINNED.permutation(0, "x")) == []


# Distributions


def test_uniform_draws_fill_the_unit_interval_evenly() -> None:
    values = [PINNED.random(f"n:{i}") for i in range(20_000)]
    tenths = Counter(int(value * 10) for value in values)

    assert all(0 <= value < 1 for value in values)
    # 2000 each on average, with a standard deviation of 42.
    assert max(abs(tenths[tenth] - 2000) for tenth in range(10)) < 210
    assert len(set(values)) == 20_000
    # Neighbours in the counter, or in the seed, know nothing of each other.
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(values[:2000], [KeyedDraws(i).random("n") for i in range(2000)])[0, 1]) < 0.1


@pytest.mark.parametrize("n", [2, 3, 7])
def test_choices_and_integers_are_even(n: int) -> None:
    choices = Counter(PINNED.choice(n, f"choice:{i}") for i in range(7000))
    integers = Counter(PINNED.randint(-3, n - 3, f"integer:{i}") for i in range(7000))

    assert set(choices) == set(range(n))
    assert set(integers) == set(range(-3, n - 3))
    assert max(abs(count - 7000 / n) for count in (*choices.values(), *integers.values())) < 250


def test_permutations_are_even() -> None:
    seen = Counter(tuple(PINNED.permutation(3, f"epoch:{i}")) for i in range(6000))

    # 1000 each on average, with a standard deviation of 29.
    assert len(seen) == 6
    assert max(abs(count - 1000) for count in seen.values()) < 150


def test_normal_draws_are_normal() -> None:
    values = [PINNED.normal(f"timestep:{i}") for i in range(10_000)]

    assert abs(fmean(values)) < 0.05
    assert abs(pstdev(values) - 1) < 0.04
    for bound in (-2, -1, 0, 1, 2):
        share = sum(value < bound for value in values) / len(values)
        assert share == pytest.approx(NormalDist().cdf(bound), abs=0.02)


class Extreme(KeyedDraws):
    """Draws whose bits are all alike."""

    bits = 0

    def _bits(self, purpose: str) -> int:
        return self.bits


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_the_extremes_of_the_bits_stay_within_the_bounds(bits: int) -> None:
    draws = Extreme()
    draws.bits = bits

    assert 0 <= draws.random("x") < 1
    assert draws.choice(3, "x") == (2 if bits else 0)
    assert draws.randint(-1, 2, "x") == (1 if bits else -1)
    assert abs(draws.normal("x")) == pytest.approx(8.21, abs=0.02)


# The process


def test_no_process_wide_generator_is_read_or_reseeded() -> None:
    def states() -> tuple[object, ...]:
        return (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())

    def drawn() -> list[object]:
        return [
            draw(draws, "x") for draws in (KeyedDraws(0, "a"), CallOrderDraws(0)) for draw in KINDS.values()
        ]

    before = states()
    values = drawn()
    assert states() == before
    # Nor do the values depend on how those generators stand.
    random.random()
    np.random.rand()
    torch.rand(1)
    moved = states()
    assert drawn() == values
    assert states() == moved != before
