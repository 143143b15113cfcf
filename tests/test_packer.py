"""The packer loses nothing, never exceeds its budget, and always goes on."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.mixture import MixGroup, Mixture
from bagel_wds.packer import BestFitPacker, GreedyPacker, PackLimits
from bagel_wds.records import Kind, SamplePlan, SampleRef, Segment
from bagel_wds.rng import KeyedDraws

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bagel_wds.packer import Packer


def plan(length: int, group: str = "a", key: str = "") -> SamplePlan:
    return SamplePlan(
        key or f"{group}-{length}", group, (Segment(Kind.TEXT, length),), (), (), estimate=length
    )


RULES: list[type[Packer]] = [GreedyPacker, BestFitPacker]


def limits(
    budget: int, *, expected: int | None = None, prefer: int = 0, buffer: int = 0, **look_ahead: int
) -> PackLimits:
    return PackLimits(
        expected_num_tokens=expected or budget,
        max_num_tokens=budget,
        max_num_tokens_per_sample=budget,
        prefer_buffer_before=prefer,
        max_buffer_size=buffer,
        **look_ahead,
    )


def packs(packer: Packer, supply: Mixture) -> Iterator[list[str]]:
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


@pytest.mark.parametrize("rule", RULES)
def test_mandatory_samples_count_against_the_budget(rule: type[Packer]) -> None:
    groups = [
        MixGroup("a", iter([plan(6, "a", f"a{i}") for i in range(4)]), weight=0, mandatory=True),
        MixGroup("b", iter([plan(6, "b", f"b{i}") for i in range(4)]), weight=0, mandatory=True),
    ]

    got = list(packs(rule(limits(10)), Mixture(groups, KeyedDraws(0))))

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


@pytest.mark.parametrize("rule", RULES)
def test_mandatory_groups_that_do_not_fit_together_take_turns(rule: type[Packer]) -> None:
    groups = [MixGroup(g, iter([plan(6, g, f"{g}{i}") for i in range(30)]), 0, mandatory=True) for g in "abc"]
    packer, supply = rule(limits(10)), Mixture(groups, KeyedDraws(0))

    got = [plan.key for _ in range(9) for plan in packer.next_pack(supply) or ()]

    assert got == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_buffered_sample_does_not_wait_for_ever_behind_long_mandatory_ones() -> None:
    groups = [
        MixGroup("long", iter([plan(6, "long", f"m{i}") for i in range(99)]), weight=0, mandatory=True),
        MixGroup("a", iter([plan(4 + i % 2, "a", f"a{i}") for i in range(99)])),
    ]
    packer = GreedyPacker(limits(10, prefer=5, buffer=3))
    supply = Mixture(groups, KeyedDraws(0))

    packed = [plan.key for _ in range(20) for plan in packer.next_pack(supply) or ()]

    assert {"a1", "a3", "a5"} <= set(packed)


@pytest.mark.parametrize("rule", RULES)
def test_c48_packer_always_progresses_and_never_exceeds_the_budget(rule: type[Packer]) -> None:
    lengths = [(i * 37) % 61 + 3 for i in range(200)]
    got = list(packs(rule(limits(64, prefer=32, buffer=4)), one_group(lengths)))

    assert sorted(key for pack in got for key in pack) == sorted(
        f"{i}:{length}" for i, length in enumerate(lengths)
    )
    assert max(sum(int(key.split(":")[1]) for key in pack) for pack in got) <= 64


@pytest.mark.parametrize("rule", RULES)
def test_c48_sample_of_exactly_the_budget_is_packed_and_a_longer_one_refused(rule: type[Packer]) -> None:
    assert list(packs(rule(limits(64)), one_group([64, 64]))) == [["0:64"], ["1:64"]]
    with pytest.raises(ValueError, match="needs 65 tokens; a pack has 64"):
        rule(limits(64)).next_pack(one_group([65]))


@pytest.mark.parametrize("rule", RULES)
def test_empty_supply_gives_no_pack(rule: type[Packer]) -> None:
    packer = rule(limits(64))

    assert packer.next_pack(one_group([])) is None
    assert packer.packs == 0


@pytest.mark.parametrize("rule", RULES)
@given(
    groups=st.lists(
        st.tuples(st.lists(st.integers(1, 30), max_size=40), st.floats(0, 3), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    expected=st.integers(1, 30),
    prefer=st.integers(0, 30),
    buffer=st.integers(0, 5),
    look_ahead=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_sample_is_in_exactly_one_pack(
    rule: type[Packer],
    groups: list[tuple[list[int], float, bool]],
    expected: int,
    prefer: int,
    buffer: int,
    look_ahead: int,
    seed: int,
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
    packer = rule(limits(30, expected=expected, prefer=prefer, buffer=buffer, look_ahead=look_ahead))
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
    assert not list(packer.waiting)
    assert packer.packs == len(got)
    assert packer.tokens == sum(int(key.split(":")[1]) for key in every)
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


def test_best_fit_literally() -> None:
    packer = BestFitPacker(limits(10, look_ahead=4))

    # The look-ahead is 3 5 4 2: the oldest opens, of the rest 5 is the longest in a room of 7, then 2 fits exactly.
    # Then it is 4 6 1 9: behind 4 comes 6. Then 1 9, and nothing after them.
    assert list(packs(packer, one_group([3, 5, 4, 2, 6, 1, 9]))) == [
        ["0:3", "1:5", "3:2"],
        ["2:4", "4:6"],
        ["5:1", "6:9"],
    ]


def test_of_equal_lengths_the_oldest_is_taken() -> None:
    packer = BestFitPacker(limits(10, look_ahead=6))

    assert list(packs(packer, one_group([4, 3, 3, 3, 3, 3]))) == [
        ["0:4", "1:3", "2:3"],
        ["3:3", "4:3", "5:3"],
    ]


def test_best_fit_takes_the_oldest_sample_however_badly_it_fits() -> None:
    packer = BestFitPacker(limits(10, look_ahead=3))

    # Two of 5 fill a pack each time, yet the 6 leads the first; the 1 goes where it fits.
    got = list(packs(packer, one_group([6, 5, 5, 5, 5, 1])))

    assert got[0][0] == "0:6"
    assert [number for number, pack in enumerate(got) if "5:1" in pack] == [len(got) - 1]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=120),
    mandatory=st.lists(st.integers(1, 30), max_size=60),
    look_ahead=st.integers(1, 20),
)
def test_no_sample_waits_longer_than_those_before_it_allow(
    lengths: list[int], mandatory: list[int], look_ahead: int
) -> None:
    groups = [
        MixGroup("m", iter([plan(length, "m", "m") for length in mandatory]), 0, mandatory=True),
        MixGroup("a", iter([plan(length, "a", f"{i}") for i, length in enumerate(lengths)])),
    ]
    packer, supply = BestFitPacker(limits(30, look_ahead=look_ahead)), Mixture(groups, KeyedDraws(0))
    first_seen: dict[str, int] = {}
    waited: list[int] = []
    for number in range(1000):
        packed = packer.next_pack(supply)
        if packed is None:
            break
        for waiting in (*packer.held, *packer.waiting):
            first_seen.setdefault(waiting.key, number)
        waited += [number - first_seen.get(plan.key, number) for plan in packed if plan.group == "a"]

    assert len(waited) == len(lengths)
    # Every second pack at the latest relieves the look-ahead of its oldest.
    assert max(waited) <= 2 * look_ahead + 2


def test_look_ahead_is_bounded_in_bytes_and_has_one_sample_at_least() -> None:
    def of_bytes(number: int) -> SamplePlan:
        ref = SampleRef(0, 1000 * number, 1000, 0)
        return replace(plan(5, key=str(number)), ref=ref)

    def after_one_pack(look_ahead_bytes: int) -> int:
        packer = BestFitPacker(limits(10, look_ahead_bytes=look_ahead_bytes))
        packer.next_pack(Mixture([MixGroup("a", map(of_bytes, range(99)))], KeyedDraws(0)))
        return len(list(packer.waiting))

    # Seven are over 6500 bytes, two of them are packed.
    assert after_one_pack(6500) == 5
    assert after_one_pack(0) == 0


def realistic(group: str, rng: random.Random) -> int:
    """Tokens as BAGEL's groups have them: a picture of up to 1024 px and a caption; pictures and turns; edits."""
    vae = rng.randint(24, 64) * rng.randint(24, 64) + 2
    vit = rng.randint(20, 70) * rng.randint(20, 70) + 2
    text = int(rng.lognormvariate(4, 0.8)) + 2
    if group == "t2i":
        return vae + text
    if group == "vlm":
        return min(16384, rng.randint(0, 3) * vit + 6 * text)
    return min(16384, (2 * vae if rng.random() < 0.9 else vae) + (vit if rng.random() < 0.6 else 0) + text)


WEIGHTS = {"t2i": 5.0, "vlm": 3.0, "edit": 2.0}


def realistic_mixture(count: int, mandatory: str = "") -> Mixture:
    def plans(group: str) -> Iterator[SamplePlan]:
        rng = random.Random(group)
        return (plan(realistic(group, rng), group, f"{group}{i}") for i in range(count))

    return Mixture(
        [MixGroup(group, plans(group), weight, group == mandatory) for group, weight in WEIGHTS.items()],
        KeyedDraws(0),
    )


@pytest.mark.parametrize("mandatory", ["", "edit"])
def test_best_fit_fills_what_greedy_leaves_empty(mandatory: str) -> None:
    def fill(rule: type[Packer]) -> float:
        packer, supply = rule(PackLimits()), realistic_mixture(10_000, mandatory)
        for _ in range(400):
            packer.next_pack(supply)
        return packer.tokens / packer.packs / packer.limits.max_num_tokens

    assert 0.93 < fill(GreedyPacker) < 0.97
    assert fill(BestFitPacker) > 0.995


def test_best_fit_keeps_the_shares_of_the_groups() -> None:
    packer, supply = BestFitPacker(PackLimits()), realistic_mixture(10_000)
    packed = [plan for _ in range(600) for plan in packer.next_pack(supply) or ()]
    of_group = {group: [plan.key for plan in packed if plan.group == group] for group in WEIGHTS}

    for group, weight in WEIGHTS.items():
        # What is not packed yet is in the look-ahead, and that is all that may lack of a share.
        share = weight / sum(WEIGHTS.values())
        drawn = len(packed) + packer.limits.look_ahead
        spread = 4 * (drawn * share * (1 - share)) ** 0.5
        assert abs(len(of_group[group]) - drawn * share) < packer.limits.look_ahead + spread
        # Nothing is passed over: what was drawn is packed or waits.
        waiting = [plan.key for plan in (*packer.held, *packer.waiting) if plan.group == group]
        every = sorted([*of_group[group], *waiting])
        assert every == sorted(f"{group}{i}" for i in range(len(every)))


@pytest.mark.parametrize("rule", RULES)
def test_packer_goes_on_from_what_it_held(rule: type[Packer]) -> None:
    def start() -> tuple[Packer, Mixture]:
        return rule(limits(64, prefer=32, buffer=4, look_ahead=9)), one_group(
            (i * 37) % 61 + 3 for i in range(150)
        )

    packer, supply = start()
    whole = list(packs(packer, supply))
    for cut in range(1, len(whole), 3):
        before, supply = start()
        list(islice(packs(before, supply), cut))
        after = rule(before.limits)
        after.held.extend(before.held)
        after.go_on_with(list(before.waiting))
        after.overdue = before.overdue

        assert list(packs(after, supply)) == whole[cut:]
