"""Small clips whose frames tell their numbers by their brightness, written with PyAV."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import av
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from av.video.stream import VideoStream
    from numpy.typing import NDArray

STEP = 8
"""Levels between two frames."""

FORMATS = {"mkv": "matroska"}


@cache
def clip(
    *,
    frames: int = 30,
    ext: str = "mp4",
    codec: str = "libx264",
    size_hw: tuple[int, int] = (48, 64),
    rate: int = 10,
    key_every: int = 10,
    b_frames: int = 2,
    rotation: int = 0,
    times: tuple[int, ...] | None = None,
    audio: bool = False,
    index_first: bool = True,
) -> bytes:
    """A file of so many grey frames, number n of brightness 8 n; with `rotation`, a white corner at the top left.

    Args:
        frames: how many.
        ext: of the file.
        codec: likewise.
        size_hw: as it is stored.
        rate: ticks a second, and frames where `times` is None.
        key_every: frames from one key frame to the next, at most.
        b_frames: most of them in a row.
        rotation: counterclockwise, in degrees, that the file asks for.
        times: when each frame is shown, in ticks.
        audio: put silence beside it.
        index_first: of an mp4, its index before its frames.
    """
    # From one brightness to the next is no change of scene.
    threshold = {"libx264": "0", "mpeg4": "1000000000"}.get(codec)
    options = {"g": str(key_every), **({"bf": str(b_frames), "sc_threshold": threshold} if threshold else {})}
    container_options = {"movflags": "faststart"} if index_first and ext == "mp4" else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"clip.{ext}"
        with av.open(str(path), "w", format=FORMATS.get(ext, ext), options=container_options) as container:
            stream = cast("VideoStream", container.add_stream(codec, rate=rate, options=options))
            stream.height, stream.width = size_hw
            stream.pix_fmt = "yuv420p"
            if codec == "mpeg4":
                stream.bit_rate = 4_000_000
            if rotation:
                stream.set_display_rotation(rotation)
            sound = container.add_stream("aac", rate=8000) if audio else None
            if sound is not None:
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
                silence.rate, silence.pts = 8000, 0
                container.mux(sound.encode(silence))
            container.start_encoding()
            for number in range(frames):
                frame = av.VideoFrame.from_ndarray(_grey(number, size_hw, corner=bool(rotation)), "rgb24")
                frame.pts, frame.time_base = times[number] if times else number, Fraction(1, rate)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
            if sound is not None:
                container.mux(sound.encode())
        return path.read_bytes()


def sound_alone(*, cover: bool) -> bytes:
    """An m4a, with a picture of one frame as its cover or without."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sound.mp4"
        with av.open(str(path), "w") as container:
            sound = container.add_stream("aac", rate=8000)
            picture = container.add_stream("mjpeg", rate=1) if cover else None
            if picture is not None:
                picture.height, picture.width, picture.pix_fmt = 48, 64, "yuvj420p"
                picture.disposition = av.stream.Disposition.attached_pic
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            silence.rate, silence.pts = 8000, 0
            container.mux(sound.encode(silence))
            container.mux(sound.encode())
            if picture is not None:
                frame = av.VideoFrame.from_ndarray(_grey(9, (48, 64), corner=False), "rgb24")
                frame.pts = 0
                container.mux(picture.encode(frame))
                container.mux(picture.encode())
        return path.read_bytes()


def _grey(number: int, size_hw: tuple[int, int], *, corner: bool) -> NDArray[np.uint8]:
    pixels = np.full((*size_hw, 3), number * STEP % 256, np.uint8)
    if corner:
        pixels[: size_hw[0] // 3, : size_hw[1] // 3] = 255
    return pixels


def seen(pictures: Sequence[NDArray[np.uint8]]) -> list[int]:
    """The numbers that frames show."""
    return [round(float(np.median(picture)) / STEP) for picture in pictures]
