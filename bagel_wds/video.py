"""The one home of PyAV: what a clip's file holds, and chosen frames of it as RGB.

It is meant to run in a process of its own (`python -m bagel_wds.video`), which `clip_process` starts, asks and, if it is
stuck in native code, kills.

Frames are numbered in the order in which they are shown. Where the file gives each a time (mp4, mov, mkv, webm), a wanted
frame is found by it: packets up to the key frame before it are passed over, and what lies between is decoded. Where it does
not, which `sequential` says, frames are counted from the first one on.

RGB is what the stream says of its YCbCr: matrix BT.709, BT.2020 or BT.601, the last where it says nothing; limited range
unless it says full. Rotation by quarters of a turn is applied; mirroring, pixels that are no squares, fields of interlaced
video and transfer curves (HDR) are left as they are.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import av
import numpy as np
import orjson
from av.stream import Disposition
from av.video.reformatter import ColorRange, Interpolation

from bagel_wds.clip_messages import HEAD, dump
from bagel_wds.containers import find_container, has_end
from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]

MAX_FRAMES = 1_000_000
"""A clip of more frames is refused: nine hours at 30 a second."""

MAX_PIXELS = 1 << 26
"""So is one whose frames have more pixels: 8192 x 8192."""

_DEMUXERS = {"mp4": "mov", "mov": "mov", "mkv": "matroska", "webm": "matroska", "avi": "avi"}
"""FFmpeg is told which to take. Left to itself it may take a text for a playlist, and open what that names."""

_SCALING = Interpolation.BICUBIC | Interpolation.BITEXACT
"""Of the chroma planes. Exact rounding on top would cost five times as much, and is no nearer to the formulas."""


def probe(data: bytes, *, check_end: bool = False, check_frames: bool = False) -> dict[str, Any]:
    """What planning needs to know of a clip, as plain JSON values.

    Frames are counted by the packets that are there, whatever the header claims; the first one is decoded.

    Args:
        data: the whole file.
        check_end: refuse a file that was cut, or holds fewer frames than its header claims.
        check_frames: decode every frame, and count those that come.

    Returns:
        `ext`; `height` and `width`, rotation applied, in pixels; `frames`; `fps`, frames a second, on average where the rate
        varies; `duration` in seconds; `sequential`: frames can only be found by counting.

    Raises:
        BadSample: `video_empty`, `video_unreadable`, `video_no_stream`, `video_no_frames`, `video_too_large`,
            `video_truncated` or `video_frame_count`.
    """
    ext = _container(data)
    if check_end and not has_end(data, ext):
        raise BadSample(Reason.VIDEO_TRUNCATED, f"the {ext} file ends before its container says that it does")
    with _opened(data, ext) as (container, stream):
        found = _scan(container, stream, ext)
        claimed = stream.frames
    if check_end and found.is_cut:
        raise BadSample(Reason.VIDEO_TRUNCATED, f"after {found.num_packets} frames the {ext} file is broken")
    if check_end and claimed > found.num_packets:
        raise BadSample(
            Reason.VIDEO_FRAME_COUNT,
            f"its header claims {claimed} frames, the file holds {found.num_packets}",
        )
    if not found.times:
        raise BadSample(Reason.VIDEO_NO_FRAMES, "no frame can be decoded")
    with _opened(data, ext) as (container, stream):
        size_hw, times = _decode_all(container, stream) if check_frames else _decode_first(container, stream)
        step, rate = float(stream.time_base or 1), float(stream.average_rate or 0)
    sequential = found.sequential
    count = len(found.times)
    if check_frames:
        count = len(times)
        sequential |= times != found.times
    # Sequential: packets tell when they are decoded, which over a whole clip comes to the same.
    seconds = found.ticks * step
    fps = count / seconds if seconds > 0 else rate or 1.0
    return {
        "ext": ext,
        "height": size_hw[0],
        "width": size_hw[1],
        "frames": count,
        "fps": round(fps, 6),
        "duration": round(count / fps, 6),
        "sequential": sequential,
    }


def decode_frames(data: bytes, numbers: Sequence[int], *, sequential: bool) -> Iterator[tuple[int, Levels]]:
    """Frames of a clip, one at a time: (number, uint8 (H, W, 3)), upright.

    Args:
        data: the whole file.
        numbers: of the frames, strictly rising.
        sequential: as `probe` gave it.

    Raises:
        BadSample: if one cannot be decoded.
    """
    left = list(numbers)
    if not sequential:
        for number, pixels in _decode_by_time(data, numbers):
            # Key frames that are none: the rest is found by counting.
            if number != left[0]:
                break
            del left[0]
            yield number, pixels
    if left:
        yield from _decode_by_count(data, left)


def _container(data: bytes) -> str:
    if not data:
        raise BadSample(Reason.VIDEO_EMPTY, "zero bytes")
    ext = find_container(data)
    if ext is None:
        raise BadSample(
            Reason.VIDEO_UNREADABLE, f"neither mp4, mov, mkv, webm nor avi: it starts with {data[:12]!r}"
        )
    return ext


@contextmanager
def _opened(data: bytes, ext: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """A file, and the stream of its pictures; a cover, which an audio file may have, is none."""
    try:
        container = av.open(io.BytesIO(data), "r", format=_DEMUXERS[ext], metadata_errors="replace")
    except av.FFmpegError as error:
        raise BadSample(
            Reason.VIDEO_UNREADABLE, f"the {ext} file cannot be opened: {error.strerror}"
        ) from error
    with container:
        pictures = (s for s in container.streams.video if not s.disposition & Disposition.attached_pic)
        stream = next(pictures, None)
        if stream is None:
            kinds = ", ".join(s.type for s in container.streams) or "nothing"
            raise BadSample(Reason.VIDEO_NO_STREAM, f"the {ext} file holds {kinds}, and no video")
        if stream.codec_context is None:
            raise BadSample(Reason.VIDEO_UNREADABLE, f"the {ext} file's codec is not known")
        if stream.width * stream.height > MAX_PIXELS:
            raise BadSample(
                Reason.VIDEO_TOO_LARGE, f"{stream.width}x{stream.height} is over {MAX_PIXELS} pixels a frame"
            )
        stream.codec_context.thread_count = 1
        yield container, stream


@dataclass(frozen=True)
class _Packets:
    """The packets of a stream.

    Attributes:
        times: of the frames that can be decoded, in order, in ticks; where a packet has no time, any numbers.
        ticks: from the first frame to the end of the last.
        keys: (time, number of the packet) of key frames.
        num_packets: all that are whole.
        sequential: times are not to be trusted.
        is_cut: reading them ended in an error.
    """

    times: list[int]
    ticks: float
    keys: list[tuple[int, int]]
    num_packets: int
    sequential: bool
    is_cut: bool


def _scan(container: InputContainer, stream: VideoStream, ext: str) -> _Packets:
    """Look through the packets; nothing is decoded."""
    times: list[int] = []
    keys: list[tuple[int, int]] = []
    stamps: list[int] = []
    num_packets, latest, last_duration, is_cut = 0, 0, 0, False
    # An AVI counts packets, and calls that the time of the frame.
    sequential, has_key = ext == "avi", False
    try:
        for number, packet in enumerate(container.demux(stream)):
            if not packet.size or packet.is_corrupt:
                continue
            num_packets += 1
            if num_packets > MAX_FRAMES:
                raise BadSample(Reason.VIDEO_TOO_LARGE, f"over {MAX_FRAMES} frames")
            if packet.is_keyframe and packet.pts is not None:
                keys.append((packet.pts, number))
            has_key |= packet.is_keyframe
            # Before the first key frame nothing can be decoded; an edit list passes over frames that others depend on.
            if packet.is_discard or not has_key:
                continue
            stamp = packet.pts if packet.pts is not None else packet.dts
            if stamp is not None:
                stamps.append(stamp)
                if stamp >= latest:
                    latest, last_duration = stamp, packet.duration or 0
            sequential |= packet.pts is None
            times.append(packet.pts if packet.pts is not None else num_packets)
    except av.FFmpegError:
        is_cut = True
    times.sort()
    sequential |= any(a == b for a, b in itertools.pairwise(times))
    return _Packets(times, _span(stamps, last_duration), keys, num_packets, sequential, is_cut)


def _span(stamps: list[int], last_duration: int) -> float:
    """From the first of some times to the end of the last; 0 where that is not known."""
    if not stamps:
        return 0.0
    between = max(stamps) - min(stamps)
    mean = between / (len(stamps) - 1) if len(stamps) > 1 else 0.0
    return between + (last_duration or mean)


def _decode_first(container: InputContainer, stream: VideoStream) -> tuple[tuple[int, int], list[int]]:
    for frame in _decoded(container, stream):
        return _upright_hw(frame), []
    raise BadSample(Reason.VIDEO_NO_FRAMES, "no frame can be decoded")


def _decode_all(container: InputContainer, stream: VideoStream) -> tuple[tuple[int, int], list[int]]:
    """Height and width, and the time of each frame."""
    size_hw: tuple[int, int] | None = None
    times: list[int] = []
    for number, frame in enumerate(_decoded(container, stream)):
        if frame.is_corrupt:
            raise BadSample(Reason.VIDEO_TRUNCATED, f"frame {number} is broken")
        size_hw = size_hw or _upright_hw(frame)
        if _upright_hw(frame) != size_hw:
            raise BadSample(
                Reason.VIDEO_UNREADABLE, f"frame {number} is {_upright_hw(frame)}, those before are {size_hw}"
            )
        times.append(-1 if frame.pts is None else frame.pts)
    if size_hw is None:
        raise BadSample(Reason.VIDEO_NO_FRAMES, "no frame can be decoded")
    return size_hw, times


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """All frames, from the first one on."""
    count = 0
    try:
        for frame in container.decode(stream):
            yield frame
            count += 1
    except av.FFmpegError as error:
        raise BadSample(Reason.VIDEO_TRUNCATED, f"after {count} frames: {error.strerror}") from error


def _decode_by_count(data: bytes, numbers: Sequence[int]) -> Iterator[tuple[int, Levels]]:
    wanted, last = set(numbers), numbers[-1]
    count = 0
    with _opened(data, _container(data)) as (container, stream):
        for number, frame in enumerate(_decoded(container, stream)):
            count += 1
            if number in wanted:
                yield number, _rgb(frame)
            if number == last:
                return
    raise BadSample(
        Reason.VIDEO_TRUNCATED,
        f"frame {last} is wanted, of which the file says that it has it, and {count} come",
    )


def _decode_by_time(data: bytes, numbers: Sequence[int]) -> Iterator[tuple[int, Levels]]:
    """Frames found by their times; what comes out of order, or not at all, was not found."""
    ext = _container(data)
    with _opened(data, ext) as (container, stream):
        found = _scan(container, stream, ext)
    if found.sequential or numbers[-1] >= len(found.times):
        return
    number_of = {found.times[number]: number for number in numbers}
    # (packet to start from, last time wanted from there)
    spans: dict[int, int] = {}
    for time in number_of:
        before = bisect_right(found.keys, time, key=lambda key: key[0]) - 1
        spans[found.keys[before][1] if before >= 0 else 0] = time
    with _opened(data, ext) as (container, stream):
        for frame in _decode_spans(container, stream, list(spans.items()), set(number_of)):
            if frame.pts in number_of and not frame.is_corrupt:
                yield number_of[frame.pts], _rgb(frame)


def _decode_spans(
    container: InputContainer, stream: VideoStream, spans: list[tuple[int, int]], wanted: set[int]
) -> Iterator[VideoFrame]:
    """The frames from each start on, until the last time wanted from there has come; packets between are passed over.

    Frames that are not wanted, and that no other one is predicted from, may be left out.
    """
    (start, last), *rest = spans
    codec = stream.codec_context
    try:
        for number, packet in enumerate(container.demux(stream)):
            if number < start and packet.size:
                continue
            codec.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            for frame in packet.decode():
                yield frame
                while frame.pts is not None and frame.pts >= last:
                    if not rest:
                        return
                    (start, last), *rest = rest
                    if start > number:
                        # Frames that the decoder still holds lie before the next one wanted.
                        codec.flush_buffers()
                        break
    except av.FFmpegError as error:
        raise BadSample(Reason.VIDEO_TRUNCATED, f"a frame cannot be decoded: {error.strerror}") from error


def _turns(frame: VideoFrame) -> int:
    """Quarters of a turn, counterclockwise."""
    return round(frame.rotation / 90) % 4


def _upright_hw(frame: VideoFrame) -> tuple[int, int]:
    return (frame.width, frame.height) if _turns(frame) % 2 else (frame.height, frame.width)


def _rgb(frame: VideoFrame) -> Levels:
    """uint8 (H, W, 3), upright."""
    rgb = frame.reformat(
        format="rgb24",
        src_color_range=frame.color_range,
        dst_color_range=ColorRange.JPEG,
        interpolation=_SCALING,
        threads=1,
    )
    return np.ascontiguousarray(np.rot90(rgb.to_ndarray(), _turns(frame)), np.uint8)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    while head := requests.read(HEAD.size):
        text_bytes, data_bytes = HEAD.unpack(head)
        request = orjson.loads(requests.read(text_bytes))
        data = requests.read(data_bytes)
        _end_within(request["seconds"])
        try:
            if "numbers" in request:
                for number, pixels in decode_frames(
                    data, request["numbers"], sequential=request["sequential"]
                ):
                    replies.write(dump({"frame": number, "shape": pixels.shape}, pixels.nbytes))
                    replies.write(pixels.data)
                    replies.flush()
                answer: dict[str, Any] = {"done": True}
            else:
                answer = probe(data, check_end=request["check_end"], check_frames=request["check_frames"])
        except BadSample as bad:
            answer = {"bad": str(bad.reason), "detail": bad.detail}
        except Exception as error:  # noqa: BLE001 - whatever PyAV meets in a file is a verdict on it
            answer = {"bad": str(Reason.VIDEO_UNREADABLE), "detail": f"{type(error).__name__}: {error}"}
        _end_within(0)
        replies.write(dump(answer))
        replies.flush()


def _end_within(seconds: float) -> None:
    """Have the system end this process, should nobody be left to do so; 0 calls that off."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds and seconds + 5)


def main() -> None:
    """Serve the process that started this one; ends with it."""
    replies = os.fdopen(os.dup(1), "wb")
    # What a codec prints must not come between the replies.
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    av.logging.set_level(av.logging.PANIC)
    replies.write(dump({"ready": True}))
    replies.flush()
    try:
        serve(sys.stdin.buffer, replies)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
