"""Which frames of a clip a sample uses: numbers only, nothing is decoded here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bagel_wds.rng import Draws


@dataclass(frozen=True, kw_only=True)
class FrameRule:
    """How many frames of a clip are taken, and which.

    Attributes:
        max_num_frames: at most so many.
        min_num_frames: at least so many, where the clip has them.
        sample: "rand" draws one frame in each of equal intervals, "middle" takes the middle one, "fpsX" takes X
            frames a second.
        any_frame: False leaves the last frame of an interval out of "rand", as upstream does.
    """

    max_num_frames: int = 16
    min_num_frames: int = 8
    sample: str = "rand"
    any_frame: bool = True

    def choose(self, num_frames: int, draws: Draws) -> list[int]:
        """The frames to use of a clip with `num_frames` frames, in order.

        The number wanted is drawn in min..max; a clip that has no more than that is used whole.
        """
        high = max(self.max_num_frames, self.min_num_frames) if self.any_frame else self.max_num_frames
        wanted = draws.randint(self.min_num_frames, high + 1, "frames")
        if num_frames <= wanted:
            return list(range(num_frames))
        return frame_indices(wanted, num_frames, self.sample, draws, any_frame=self.any_frame)


def frame_indices(
    num_frames: int,
    vlen: int,
    sample: str,
    draws: Draws,
    *,
    fix_start: int | None = None,
    input_fps: float = 1,
    max_num_frames: int = -1,
    any_frame: bool = False,
) -> list[int]:
    """Indices of `num_frames` frames among `vlen`; the last is repeated where the clip has too few.

    Args:
        num_frames: how many are wanted ("fpsX" ignores it).
        vlen: how many the clip has.
        sample: "rand", "middle" or "fpsX" with X frames a second.
        draws: where "rand" draws from.
        fix_start: "middle" takes this offset in each interval instead of its middle.
        input_fps: frames a second of the clip, for "fpsX".
        max_num_frames: "fpsX" takes at most so many, if over 0.
        any_frame: let "rand" take the last frame of an interval too, which upstream never does.

    Raises:
        ValueError: if `sample` is none of the three.
    """
    if sample.startswith("fps"):
        step = 1 / float(sample[3:])
        times = np.arange(step / 2, vlen / input_fps + step / 2, step)
        indices = [int(i) for i in np.around(times * input_fps) if i < vlen]
        return indices[:max_num_frames] if max_num_frames > 0 else indices
    if sample not in ("rand", "middle"):
        raise ValueError(f"sample={sample!r} is none of 'rand', 'middle', 'fpsX' (X frames a second)")
    count = min(num_frames, vlen)
    bounds = np.linspace(0, vlen, count + 1).astype(int)
    intervals = [(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
    if sample == "middle":
        offset = fix_start
        indices = [(a + b - 1) // 2 if offset is None else a + offset for a, b in intervals]
    else:
        indices = _one_of_each(intervals, vlen, draws, last=0 if any_frame else 1)
    return indices + [indices[-1]] * (num_frames - count) if indices else indices


def _one_of_each(intervals: list[tuple[int, int]], vlen: int, draws: Draws, last: int) -> list[int]:
    chosen: list[int] = []
    for i, (start, end) in enumerate(intervals):
        try:
            chosen.append(start + draws.choice(max(0, end - last - start), f"frame:{i}"))
        except IndexError:
            # An interval without a choice: upstream turns to a permutation, and so its draws so far are spent.
            return sorted(draws.permutation(vlen, "frames.permutation")[: len(intervals)])
    return chosen
