"""The packer loses nothing, never exceeds its budget, and always goes on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.mixture import MixGroup, Mixture
from bagel_wds.packer import GreedyPacker, PackLimits
from bagel_wds.records import Kind, SamplePlan, Segment
from bagel_wds.rng import KeyedDraws

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def plan(length: int, group: str = "a", key: str = "") -> SamplePlan:
    return SamplePlan(
        key or f"{group}-{length}", group, (Segment(Kind.TEXT, length),), (), (), estimate=length
    )


def limits(budget: int, *, expected: int | None = None, prefer: int = 0, buffer: int = 0) -> PackLimits:
    return PackLimits(
        expected_num_tokens=expected or budget,
        max_num_tokens=budget,
        max_num_tokens_per_sample=budget,
        prefer_buffer_before=prefer,
        max_buffer_size=buffer,
    )


def packs(packer: GreedyPacker, supply: Mixture) -> Iterator[list[str]]:
    while (packed := packer.next_pack(supply)) is not None:
        yield [plan.key for plan in packed]


def one_group(lengths: Iterable[int]) -> Mixture:
    plans = [plan(length, key=f"{i}:{length}") for i, length in enumerate(lengths)]
    return Mixture([MixGroup("a", iter(plans))], KeyedDraws(0))


def test_sample_that_closes_a_pack_opens_the_next() -> None:
    got = list(packs(GreedyPacker(limits(10)), one_group([6, 5, 4, 9])))

    # 5 does not fit beside 6, waits, and 4 comes beside it.
    assert got == [["0:6"], ["1:5", "2:4"], ["3:9"]]


def test_buffer_lets_a_pack_go_on_past_a_sample_that_does_not_fit() -> None:
    packer = GreedyPacker(limits(10, prefer=5, buffer=1))

    assert list(packs(packer, one_group([6, 5, 4, 9]))) == [["0:6", "2:4"], ["1:5"], ["3:9"]]
    # The 5, and then the 9.
    assert packer.deferred == 2


def test_pack_is_given_out_once_it_has_the_expected_tokens() -> None:
    got = list(packs(GreedyPacker(limits(10, expected=7)), one_group([3, 4, 1, 6])))

    assert got == [["0:3", "1:4"], ["2:1", "3:6"]]


def test_mandatory_groups_open_every_pack_in_order() -> None:
    groups = [
        MixGroup("a", iter([plan(1, "a", f"a{i}") for i in range(100)]), weight=5),
        MixGroup("b", iter([plan(2, "b", f"b{i}") for i in range(3)]), weight=0, mandatory=True),
        MixGroup("c", iter([plan(2, "c", f"c{i}") for i in range(3)]), weight=0, mandatory=True),
    ]
    packer = GreedyPacker(limits(6))
    supply = Mixture(groups, KeyedDraws(0))

    first = [packer.next_pack(supply) for _ in range(3)]

    assert [[plan.key for plan in packed or ()] for packed in first] == [
        ["b0", "c0", "a0", "a1"],
        ["b1", "c1", "a2", "a3"],
        ["b2", "c2", "a4", "a5"],
    ]


def test_mandatory_samples_count_against_the_budget() -> None:
    groups = [
        MixGroup("a", iter([plan(6, "a", f"a{i}") for i in range(4)]), weight=0, mandatory=True),
        MixGroup("b", iter([plan(6, "b", f"b{i}") for i in range(4)]), weight=0, mandatory=True),
    ]

    got = list(packs(GreedyPacker(limits(10)), Mixture(groups, KeyedDraws(0))))

    # They do not fit together, so each waits for its turn; none is lost and no pack is over.
    assert Counter(key for pack in got for key in pack) == Counter(
        [f"{g}{i}" for g in "ab" for i in range(4)]
    )
    assert [len(pack) for pack in got] == [1] * 8


def test_sample_without_room_behind_mandatory_ones_is_not_starved() -> None:
    groups = [
        MixGroup("small", iter([plan(5, "small", f"s{i}") for i in range(50)]), weight=0, mandatory=True),
        MixGroup("large", iter([plan(8, "large", "L")]), weight=1),
    ]

    got = list(packs(GreedyPacker(limits(10)), Mixture(groups, KeyedDraws(0))))

    # It closes pack 0, finds no room behind s1 in pack 1, and opens pack 2 ahead of s2.
    assert [number for number, pack in enumerate(got) if "L" in pack] == [2]


def test_buffered_sample_does_not_wait_for_ever_behind_long_mandatory_ones() -> None:
    groups = [
        MixGroup("long", iter([plan(6, "long", f"m{i}") for i in range(99)]), weight=0, mandatory=True),
        MixGroup("a", iter([plan(4 + i % 2, "a", f"a{i}") for i in range(99)])),
    ]
    packer = GreedyPacker(limits(10, prefer=5, buffer=3))
    supply = Mixture(groups, KeyedDraws(0))

    packed = [plan.key for _ in range(20) for plan in packer.next_pack(supply) or ()]

    assert {"a1", "a3", "a5"} <= set(packed)


def test_c48_packer_always_progresses_and_never_exceeds_the_budget() -> None:
    lengths = [(i * 37) % 61 + 3 for i in range(200)]
    got = list(packs(GreedyPacker(limits(64, prefer=32, buffer=4)), one_group(lengths)))

    assert sorted(key for pack in got for key in pack) == sorted(
        f"{i}:{length}" for i, length in enumerate(lengths)
    )
    assert max(sum(int(key.split(":")[1]) for key in pack) for pack in got) <= 64


def test_c48_sample_of_exactly_the_budget_is_packed_and_a_longer_one_refused() -> None:
    assert list(packs(GreedyPacker(limits(64)), one_group([64, 64]))) == [["0:64"], ["1:64"]]
    with pytest.raises(ValueError, match="needs 65 tokens; a pack has 64"):
        GreedyPacker(limits(64)).next_pack(one_group([65]))


def test_empty_supply_gives_no_pack() -> None:
    assert GreedyPacker(limits(64)).next_pack(one_group([])) is None


@given(
    groups=st.lists(
        st.tuples(st.lists(st.integers(1, 30), max_size=40), st.floats(0, 3), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    expected=st.integers(1, 30),
    prefer=st.integers(0, 30),
    buffer=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_every_sample_is_in_exactly_one_pack(
    groups: list[tuple[list[int], float, bool]], expected: int, prefer: int, buffer: int, seed: int
) -> None:
    # A group that is neither drawn nor mandatory is never asked for.
    groups = [(lengths, weight, mandatory or weight == 0) for lengths, weight, mandatory in groups]
    members = [
        MixGroup(
            f"g{n}",
            iter([plan(length, f"g{n}", f"{n}.{i}:{length}") for i, length in enumerate(lengths)]),
            weight,
            mandatory,
        )
        for n, (lengths, weight, mandatory) in enumerate(groups)
    ]
    packer = GreedyPacker(limits(30, expected=expected, prefer=prefer, buffer=buffer))
    held = []
    got = []
    for pack in packs(packer, Mixture(members, KeyedDraws(seed))):
        got.append(pack)
        held.append(len(packer.held))

    every = [
        f"{n}.{i}:{length}" for n, (lengths, _, _) in enumerate(groups) for i, length in enumerate(lengths)
    ]
    assert Counter(key for pack in got for key in pack) == Counter(every)
    assert all(0 < sum(int(key.split(":")[1]) for key in pack) <= 30 for pack in got)
    assert not packer.held
    assert not packer.buffer
    # What waits stays bounded: one of each mandatory group, and those that closed a pack.
    assert max(held, default=0) <= len(groups) + 2


@given(st.lists(st.floats(0, 5), min_size=1, max_size=5), st.integers(0, 999))
def test_groups_are_drawn_by_their_weights(weights: list[float], seed: int) -> None:
    if sum(weights) == 0:
        weights = [1.0]
    members = [MixGroup(str(n), iter(()), weight) for n, weight in enumerate(weights)]
    mixture = Mixture(members, KeyedDraws(seed))

    counts = Counter(mixture.pick() for _ in range(2000))

    for n, weight in enumerate(weights):
        share = weight / sum(weights)
        # Five standard deviations.
        assert abs(counts[str(n)] / 2000 - share) <= 5 * (share * (1 - share) / 2000) ** 0.5 + 1e-9


def test_group_that_ends_leaves_the_mixture() -> None:
    groups = [MixGroup("a", iter([plan(1, "a")])), MixGroup("b", iter([plan(2, "b"), plan(3, "b")]))]

    drawn = [plan.key for plan in Mixture(groups, KeyedDraws(3))]

    assert sorted(drawn) == ["a-1", "b-2", "b-3"]
    assert drawn.index("b-2") < drawn.index("b-3")
