"""Which frames of a clip a sample uses: numbers only, nothing is decoded here."""

from __future__ import annotations

import itertools
import math
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
        fix_start: "middle" takes this offset in each interval instead of its middle.
        clip: only what is shown from the first to the second, in seconds.
        any_frame: False chooses as upstream does: never the last frame of an interval by "rand", any number of frames by
            "fpsX", and in a file that has too few, the last one again and again.
    """

    max_num_frames: int = 16
    min_num_frames: int = 8
    sample: str = "rand"
    fix_start: int | None = None
    clip: tuple[float, float] | None = None
    any_frame: bool = True

    def choose(self, num_frames: int, draws: Draws, fps: float | None = None) -> list[int]:
        """The frames to use of a clip with `num_frames` frames, in order.

        The number wanted is drawn in min..max; a clip that has no more than that is used whole. "fpsX" takes as many as
        its rate asks for, but no fewer than min and no more than max: then they are spread evenly.

        Args:
            num_frames: that the clip has.
            draws: where "rand" and the number wanted come from.
            fps: frames a second of a file; None is a folder of frames, whose rate is not known and taken as 1.

        Raises:
            ValueError: if none can be chosen.
        """
        first, stop = self._bounds(num_frames, fps or 1.0)
        chosen = [first + index for index in self._choose(stop - first, draws, fps)]
        if chosen and chosen[-1] >= num_frames:
            raise ValueError(f"fix_start={self.fix_start} leads to frame {chosen[-1]} of {num_frames}")
        return chosen

    def _bounds(self, num_frames: int, fps: float) -> tuple[int, int]:
        """The frames that `clip` leaves: those that begin to be shown in it, or the first one after its start."""
        if self.clip is None:
            return 0, num_frames
        start, end = self.clip
        # 0.1 s at 30 frames a second is frame 3, though the product is above that.
        first, stop = (math.ceil(second * fps - 1e-6) for second in (start, end))
        stop = max(min(stop, num_frames), first + 1)
        if stop > num_frames:
            raise ValueError(f"clip={list(self.clip)} leaves no frame of a video of {num_frames / fps:g} s")
        return first, stop

    def _choose(self, num_frames: int, draws: Draws, fps: float | None) -> list[int]:
        if self.any_frame and self.sample.startswith("fps"):
            return self._at_rate(num_frames, draws, fps or 1.0)
        high = max(self.max_num_frames, self.min_num_frames) if self.any_frame else self.max_num_frames
        wanted = draws.randint(self.min_num_frames, high + 1, "frames")
        if num_frames <= wanted and (self.any_frame or fps is None):
            return list(range(num_frames))
        return frame_indices(
            wanted,
            num_frames,
            self.sample,
            draws,
            fix_start=self.fix_start,
            input_fps=fps or 1.0,
            any_frame=self.any_frame,
        )

    def _at_rate(self, num_frames: int, draws: Draws, fps: float) -> list[int]:
        step = fps / float(self.sample[3:])
        if step <= 1:
            at_rate = list(range(num_frames))
        else:
            # The middle of each stretch of `step` frames. BAGEL: rounds halves to even numbers, and so takes some twice.
            places = (
                math.ceil((number + 0.5) * step - 0.5 - 1e-9)
                for number in range(math.ceil(num_frames / step))
            )
            at_rate = [place for place in places if place < num_frames]
        wanted = min(max(len(at_rate), self.min_num_frames), self.max_num_frames, num_frames)
        if wanted == len(at_rate):
            return at_rate
        return frame_indices(wanted, num_frames, "middle", draws, any_frame=True)


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
        fix_start: "middle" takes this offset in each interval instead of its middle; with `any_frame`, its last frame
            where that would be beyond it.
        input_fps: frames a second of the clip, for "fpsX".
        max_num_frames: "fpsX" takes at most so many, if over 0.
        any_frame: let "rand" take the last frame of an interval too, which upstream never does, and keep `fix_start`
            within its interval.

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
        indices = [
            (a + b - 1) // 2 if offset is None else min(a + offset, b - 1) if any_frame else a + offset
            for a, b in intervals
        ]
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
