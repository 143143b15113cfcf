"""A clip in memory, as the file that it came in: its header, and chosen frames of it when they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from bagel_wds.clip_process import clip_decoder
from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]

PROBE_SECONDS = 60.0
"""The limit for looking through a file."""

VERIFY_SECONDS = 600.0
"""The limit for decoding all of a file."""


@dataclass(frozen=True)
class ClipHeader:
    """What planning needs to know of a clip.

    Attributes:
        ext: of its file, by what it holds: mp4, mov, mkv, webm or avi.
        size_hw: height and width of its frames, rotation applied, in pixels.
        frames: how many can be decoded.
        fps: frames a second; where the rate varies, on average.
        duration: in seconds.
        sequential: its frames can only be found by counting from the first one.
    """

    ext: str
    size_hw: tuple[int, int]
    frames: int
    fps: float
    duration: float
    sequential: bool = False

    @classmethod
    def of_json(cls, entry: Mapping[str, Any]) -> ClipHeader:
        """From what `as_json` gave.

        Raises:
            KeyError, TypeError, ValueError: if it is not of that kind.
        """
        header = cls(
            str(entry["ext"]),
            (int(entry["height"]), int(entry["width"])),
            int(entry["frames"]),
            float(entry["fps"]),
            float(entry["duration"]),
            bool(entry.get("sequential")),
        )
        if min(*header.size_hw, header.frames) < 1 or not 0 < header.fps < float("inf"):
            raise ValueError(f"a clip of {header.size_hw} with {header.frames} frames, {header.fps} a second")
        return header

    def as_json(self) -> dict[str, Any]:
        """`ext`, `width`, `height`, `frames`, `fps`, `duration`, and `sequential` if it is."""
        height, width = self.size_hw
        sequential = {"sequential": True} if self.sequential else {}
        numbers = {"frames": self.frames, "fps": self.fps, "duration": self.duration}
        return {"ext": self.ext, "width": width, "height": height, **numbers, **sequential}


def read_clip_header(data: bytes, *, check_end: bool = False, check_frames: bool = False) -> ClipHeader:
    """Look through a clip's file.

    Args:
        data: the whole file.
        check_end: refuse a file that was cut, or holds fewer frames than its header claims.
        check_frames: decode every frame.

    Raises:
        BadSample: `video_...`, see `docs/reasons.md`.
    """
    if not data:
        raise BadSample(Reason.VIDEO_EMPTY, "zero bytes")
    seconds = VERIFY_SECONDS if check_frames else PROBE_SECONDS
    return ClipHeader.of_json(
        clip_decoder().probe(data, check_end=check_end, check_frames=check_frames, seconds=seconds)
    )


@dataclass(frozen=True)
class EncodedClip(Sequence["ClipFrame"]):
    """A clip in memory, still encoded; as a sequence, its frames.

    Attributes:
        data: the file's bytes.
        known: its header, if that is known from elsewhere; None reads it from the bytes when it is asked for.
    """

    data: bytes
    known: ClipHeader | None = None

    @cached_property
    def header(self) -> ClipHeader:
        """What is known of it.

        Raises:
            BadSample: if the bytes have to be looked at, and are no clip.
        """
        return self.known or read_clip_header(self.data)

    @property
    def fps(self) -> float:
        """Frames a second; where the rate varies, on average."""
        return self.header.fps

    def __len__(self) -> int:
        return self.header.frames

    @overload
    def __getitem__(self, number: int) -> ClipFrame: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ClipFrame, ...]: ...
    def __getitem__(self, number: int | slice) -> ClipFrame | tuple[ClipFrame, ...]:
        if isinstance(number, slice):
            return tuple(ClipFrame(self, place) for place in range(len(self))[number])
        return ClipFrame(self, range(len(self))[number])

    def levels(self, numbers: Sequence[int], seconds: float) -> Iterator[tuple[int, Levels]]:
        """Frames, decoded one at a time: (number, uint8 (H, W, 3)).

        Args:
            numbers: of the frames, strictly rising.
            seconds: the limit for all of them.

        Raises:
            BadSample: `video_timeout`; or if one cannot be decoded, or has not the size that was planned.
        """
        header = self.header
        for number, pixels in clip_decoder().frames(
            self.data, numbers, sequential=header.sequential, seconds=seconds
        ):
            if pixels.shape[:2] != header.size_hw:
                raise BadSample(
                    Reason.VIDEO_UNREADABLE,
                    f"frame {number} decoded to {pixels.shape[:2]}, planned as {header.size_hw}",
                )
            yield number, pixels


@dataclass(frozen=True, slots=True)
class ClipFrame:
    """One frame of a clip."""

    clip: EncodedClip
    number: int

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.clip.header.size_hw

    @property
    def num_bytes(self) -> int:
        """Size of the encoded clip, which its first frame stands for."""
        return 0 if self.number else len(self.clip.data)
