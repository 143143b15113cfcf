"""Upstream's frame sampler: chosen frames of a clip, decoded."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from bagel_wds.clips import EncodedClip
from bagel_wds.config import FrameConfig
from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.frames import FrameRule
from bagel_wds.images import EncodedImage
from bagel_wds.schema import frame_order
from bagel_wds.upstream.draws import ProcessDraws

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.records import Picture

_NUMBER = re.compile(r"_(\d+)\.jpg$")
_VIDEO_SECONDS = 60.0
"""The limit for the frames of one clip."""


class FrameSampler:
    """Gives chosen frames of a clip, as a list of RGB PIL images.

    How many is drawn from the process-wide `numpy.random`, which of them by "rand" from `random`. A clip that is a folder and
    has no more than that is used whole.

    Args:
        max_num_frames: at most so many; -1 is 16, or `min_num_frames` if that is more. (Upstream's default finds no number.)
        min_num_frames: at least so many, where the clip has them.
        sample: "rand", "middle" or "fpsX" with X frames a second.

    Raises:
        ConfigError: for settings that choose nothing.
    """

    def __init__(self, max_num_frames: int = -1, min_num_frames: int = 8, sample: str = "rand") -> None:
        if min_num_frames < 1 or -1 != max_num_frames < min_num_frames:
            raise ConfigError(
                f"min_num_frames={min_num_frames} must be at least 1 and at most max_num_frames={max_num_frames}"
            )
        if not re.fullmatch(r"rand|middle|fps\d+(\.\d+)?", sample):
            raise ConfigError(f"sample={sample!r} is none of 'rand', 'middle', 'fpsX' (X frames a second)")
        self.max_num_frames = max_num_frames
        self.min_num_frames = min_num_frames
        self.sample = sample

    def __call__(self, file_name: str) -> list[Image.Image]:
        """The chosen frames of a video file, or of a folder of frames (a path that ends in `/`, or is one).

        Raises:
            BadSample: if there is none, or a frame cannot be decoded.
        """
        clip = open_clip(file_name)
        try:
            numbers = self._rule().choose(len(clip), ProcessDraws(), getattr(clip, "fps", None))
        except ValueError as error:
            raise BadSample(Reason.VIDEO, f"{file_name}: {error}") from error
        frames = dict(_decoded(clip, sorted(set(numbers))))
        return [frames[number] for number in numbers]

    def _rule(self) -> FrameRule:
        most = (
            max(FrameConfig().max_num_frames, self.min_num_frames)
            if self.max_num_frames == -1
            else self.max_num_frames
        )
        return FrameRule(
            max_num_frames=most, min_num_frames=self.min_num_frames, sample=self.sample, any_frame=False
        )


def _decoded(clip: Sequence[Picture], numbers: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
    if isinstance(clip, EncodedClip):
        for number, levels in clip.levels(numbers, _VIDEO_SECONDS):
            yield number, Image.fromarray(levels)
        return
    for number in numbers:
        picture = clip[number]
        if isinstance(picture, EncodedImage):
            yield number, picture.rgb()


def open_clip(file_name: str) -> Sequence[Picture]:
    """The frames of a clip, still encoded: a video file, or the files of a folder in the order of `*_<number>.jpg`.

    Names without such a number come first, in frame_order order.

    Raises:
        BadSample: if it is not there, or the folder is empty.
    """
    path = Path(file_name)
    try:
        if not path.is_dir():
            return EncodedClip(path.read_bytes())
        names = [name for name in os.listdir(path) if not name.startswith(".")]  # noqa: PTH208 - names are what is sorted
        frames = [
            EncodedImage((path / name).read_bytes(), upright=False)
            for name in sorted(names, key=partial(frame_order, number=_NUMBER))
        ]
    except (OSError, ValueError) as error:
        raise BadSample(
            Reason.VIDEO_MISSING, f"{file_name}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not frames:
        raise BadSample(Reason.VIDEO_MISSING, f"{file_name}: no frame in this folder")
    return tuple(frames)
