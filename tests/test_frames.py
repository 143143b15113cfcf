"""Frames of a clip: as many as wanted, in order, within the clip, whatever its length (case C46)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagel_wds.frames import FrameRule, frame_indices
from bagel_wds.rng import KeyedDraws


@settings(max_examples=400, deadline=None)
@given(
    frames=st.integers(1, 400),
    least=st.integers(1, 20),
    more=st.integers(0, 20),
    sample=st.sampled_from(["rand", "middle"]),
    seed=st.integers(0, 99),
)
@example(frames=300, least=8, more=0, sample="rand", seed=0)
@example(frames=9, least=8, more=0, sample="rand", seed=0)
def test_c46_frames_rise_strictly_and_are_as_many_as_wanted_or_all(
    frames: int, least: int, more: int, sample: str, seed: int
) -> None:
    rule = FrameRule(max_num_frames=least + more, min_num_frames=least, sample=sample)
    chosen = rule.choose(frames, KeyedDraws(seed))

    assert min(least, frames) <= len(chosen) <= min(least + more, frames)
    assert all(a < b for a, b in itertools.pairwise(chosen))
    assert 0 <= chosen[0] <= chosen[-1] < frames


@pytest.mark.parametrize("frames", [1, 2, 7, 8])
def test_c46_a_short_clip_is_used_whole(frames: int) -> None:
    assert FrameRule().choose(frames, KeyedDraws(0)) == list(range(frames))


def test_c46_every_frame_of_a_clip_can_be_chosen() -> None:
    rule = FrameRule(max_num_frames=4, min_num_frames=4)
    met = {frame for seed in range(300) for frame in rule.choose(20, KeyedDraws(seed))}
    as_upstream = FrameRule(max_num_frames=4, min_num_frames=4, any_frame=False)
    met_upstream = {frame for seed in range(300) for frame in as_upstream.choose(20, KeyedDraws(seed))}

    assert met == set(range(20))
    # BAGEL: never takes the last frame of an interval.
    assert met_upstream == set(range(20)) - {4, 9, 14, 19}


def test_frames_literally() -> None:
    draws = KeyedDraws(0, "k")

    assert frame_indices(4, 20, "middle", draws) == [2, 7, 12, 17]
    assert frame_indices(4, 20, "middle", draws, fix_start=0) == [0, 5, 10, 15]
    assert frame_indices(4, 3, "middle", draws) == [0, 1, 2, 2]
    assert frame_indices(0, 10, "fps1", draws, input_fps=2) == [1, 3, 5, 7, 9]
    assert frame_indices(0, 10, "fps1", draws, input_fps=2, max_num_frames=3) == [1, 3, 5]
    with pytest.raises(ValueError, match="sample='last' is none of 'rand', 'middle', 'fpsX'"):
        frame_indices(4, 20, "last", draws)
