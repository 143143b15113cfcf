"""What a clip's file holds, and its frames: the right ones, upright, in the right colours, whatever the container."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from typing import TYPE_CHECKING

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from video_factory import clip, seen, sound_alone

from bagel_wds import video
from bagel_wds.containers import find_container, has_end
from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILES = [
    ("mp4", "libx264"),
    ("mov", "libx264"),
    ("mkv", "libx264"),
    ("avi", "libx264"),
    ("avi", "mpeg4"),
    ("mp4", "mpeg4"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
]


def frames_of(data: bytes, numbers: list[int], **known: bool) -> list[int]:
    """What the frames of these numbers show."""
    sequential = known.get("sequential", video.probe(data)["sequential"])
    found = list(video.decode_frames(data, numbers, sequential=sequential))
    assert [number for number, _ in found] == numbers
    return seen([pixels for _, pixels in found])


def packets_of(data: bytes) -> list[tuple[int, int]]:
    """(place, bytes) of each packet."""
    with av.open(io.BytesIO(data), "r") as container:
        return [(packet.pos or 0, packet.size) for packet in container.demux(video=0) if packet.size]


def reason_of(data: bytes, **checks: bool) -> Reason:
    with pytest.raises(BadSample) as bad:
        video.probe(data, **checks)
    return bad.value.reason


# Headers


@pytest.mark.parametrize(("ext", "codec"), FILES)
def test_a_header_says_size_frames_and_rate_however_far_it_was_looked(ext: str, codec: str) -> None:
    data = clip(ext=ext, codec=codec)
    looked = [
        video.probe(data),
        video.probe(data, check_end=True),
        video.probe(data, check_end=True, check_frames=True),
    ]

    assert (
        looked
        == [
            {
                "ext": ext,
                "height": 48,
                "width": 64,
                "frames": 30,
                "fps": 10.0,
                "duration": 3.0,
                "sequential": ext == "avi",
            }
        ]
        * 3
    )


@pytest.mark.parametrize("frames", [1, 2, 7, 300])
def test_c46_short_and_long_clips_are_counted_right(frames: int) -> None:
    told = video.probe(clip(frames=frames, rate=25), check_end=True, check_frames=True)

    assert (told["frames"], told["fps"], told["duration"]) == (frames, 25.0, frames / 25)


def test_the_rate_of_a_clip_that_varies_is_its_average() -> None:
    # Ten frames a tenth of a second apart, then ten that stay for a second.
    times = (*range(10), *range(10, 110, 10))
    told = video.probe(clip(frames=20, times=times, ext="mkv"))

    assert told["frames"] == 20
    assert told["duration"] == pytest.approx(10.0, abs=1.0)
    assert told["fps"] == pytest.approx(2.0, abs=0.2)


def test_sound_beside_the_pictures_changes_nothing() -> None:
    assert video.probe(clip(audio=True), check_end=True, check_frames=True) == video.probe(clip())


# Chosen frames


@pytest.mark.parametrize(("ext", "codec"), FILES)
def test_the_frames_asked_for_are_the_frames_given(ext: str, codec: str) -> None:
    data = clip(ext=ext, codec=codec, b_frames=0 if codec == "mpeg4" else 2)

    assert frames_of(data, list(range(30))) == list(range(30))
    assert frames_of(data, [0, 9, 10, 11, 29]) == [0, 9, 10, 11, 29]
    assert frames_of(data, [27]) == [27]


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 29), min_size=1, max_size=8, unique=True).map(sorted),
    ext=st.sampled_from(["mp4", "mkv"]),
    key_every=st.sampled_from([1, 7, 30]),
    b_frames=st.sampled_from([0, 3]),
)
def test_any_frames_of_any_order_of_coding_are_found(
    numbers: list[int], ext: str, key_every: int, b_frames: int
) -> None:
    data = clip(ext=ext, key_every=key_every, b_frames=b_frames)

    assert frames_of(data, numbers) == numbers
    assert frames_of(data, numbers, sequential=True) == numbers


def test_a_frame_is_found_by_its_number_where_the_rate_varies() -> None:
    times = (*range(10), *range(10, 110, 10))

    assert frames_of(clip(frames=20, times=times), [3, 12, 19]) == [3, 12, 19]


def test_frames_that_no_key_frame_is_near_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    # A spy on what becomes RGB would see the wanted ones alone; this one sees what leaves the decoder.
    data = clip(frames=60, key_every=10)
    decoded: list[int | None] = []
    inner = video._decode_spans

    def spy(*args: object) -> object:
        for frame in inner(*args):  # type: ignore[arg-type]
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video, "_decode_spans", spy)
    assert frames_of(data, [22, 53]) == [22, 53 - 32]
    assert len(decoded) <= 3 + 4 + 6


def test_a_key_frame_that_is_none_costs_time_and_no_frame() -> None:
    # All packets of a file are said to be key frames; of them only 0, 10 and 20 are.
    with av.open(io.BytesIO(clip(b_frames=0)), "r") as source:
        packets = list(source.demux(video=0))
        out = io.BytesIO()
        with av.open(out, "w", format="matroska") as container:
            stream = container.add_stream_from_template(source.streams.video[0])
            for packet in packets:
                if packet.dts is not None:
                    packet.is_keyframe = True
                    packet.stream = stream
                    container.mux(packet)

    assert frames_of(out.getvalue(), [15, 16]) == [15, 16]


@pytest.mark.parametrize(
    ("without", "frames", "shown"),
    [(range(3), 20, [10, 20, 29]), ([14], 29, [0, 14, 29]), ([10], 21, [0, 18, 29])],
)
def test_frames_that_are_missing_in_the_middle_shift_no_other(
    without: Iterable[int], frames: int, shown: list[int]
) -> None:
    """Without its first packets, one that others depend on little, and a key frame."""
    with av.open(io.BytesIO(clip(b_frames=0)), "r") as source:
        packets = [packet for packet in source.demux(video=0) if packet.dts is not None]
        out = io.BytesIO()
        with av.open(out, "w", format="matroska") as container:
            stream = container.add_stream_from_template(source.streams.video[0])
            for number, packet in enumerate(packets):
                if number not in without:
                    packet.stream = stream
                    container.mux(packet)
    told = video.probe(out.getvalue(), check_end=True, check_frames=True)

    assert told["frames"] == frames
    assert frames_of(out.getvalue(), [0, frames // 2, frames - 1], sequential=told["sequential"]) == shown


# Pixels


@pytest.mark.parametrize(("rotation", "corner"), [(90, (-1, 0)), (-90, (0, -1)), (180, (-1, -1))])
def test_rotation_is_applied_to_sizes_and_pixels(rotation: int, corner: tuple[int, int]) -> None:
    data = clip(rotation=rotation)
    told = video.probe(data)
    ((_, pixels),) = video.decode_frames(data, [5], sequential=False)
    stored_hw = (48, 64)

    assert (told["height"], told["width"]) == (stored_hw if rotation == 180 else stored_hw[::-1])
    assert pixels.shape[:2] == (told["height"], told["width"])
    assert pixels.flags.c_contiguous
    # Stored, the white corner is at the top left.
    assert pixels[corner].min() > 200
    assert sum(int(pixels[y, x].min()) > 200 for y in (0, -1) for x in (0, -1)) == 1


COEFFICIENTS = {1: (0.2126, 0.0722), 9: (0.2627, 0.0593), 6: (0.299, 0.114), 2: (0.299, 0.114)}
"""Kr and Kb of BT.709, BT.2020 and BT.601, by their numbers in H.273; 2 is "not said"."""


@pytest.mark.parametrize("matrix", list(COEFFICIENTS))
@pytest.mark.parametrize("full_range", [False, True])
def test_colours_are_those_of_the_matrix_and_range_that_the_stream_names(
    matrix: int, full_range: bool
) -> None:
    planes = (120, 100, 150)
    data = io.BytesIO()
    with av.open(data, "w", format="matroska") as container:
        stream = container.add_stream("libx264", rate=10, options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        frame = av.VideoFrame(64, 48, "yuv420p")
        for plane, level in zip(frame.planes, planes, strict=True):
            plane.update(bytes([level]) * plane.buffer_size)
        frame.pts, frame.time_base = 0, Fraction(1, 10)
        for tagged in (frame, stream.codec_context):
            tagged.colorspace, tagged.color_range = matrix, 2 if full_range else 1
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    ((_, pixels),) = video.decode_frames(data.getvalue(), [0], sequential=False)

    red, blue = COEFFICIENTS[matrix]
    y, cb, cr = float(planes[0]), planes[1] - 128.0, planes[2] - 128.0
    if not full_range:
        y, cb, cr = (y - 16) * 255 / 219, cb * 255 / 224, cr * 255 / 224
    r, b = y + 2 * (1 - red) * cr, y + 2 * (1 - blue) * cb
    g = (y - red * r - blue * b) / (1 - red - blue)
    assert np.abs(pixels[20, 20] - np.array([r, g, b])).max() <= 1.5


# Files that will not do (C45)


def claims(data: bytes, frames: int) -> bytes:
    """An AVI whose header claims so many frames."""
    place = data.index(b"avih") + 8 + 16
    stream = data.index(b"strh") + 8 + 32
    mended = bytearray(data)
    mended[place : place + 4] = mended[stream : stream + 4] = struct.pack("<I", frames)
    return bytes(mended)


def test_c45_a_header_that_claims_more_frames_is_found_out_and_not_believed() -> None:
    data = claims(clip(ext="avi", codec="mpeg4", b_frames=0), 43)
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].frames == 43

    assert reason_of(data, check_end=True) is Reason.VIDEO_FRAME_COUNT
    assert reason_of(data, check_end=True, check_frames=True) is Reason.VIDEO_FRAME_COUNT
    # Who does not want that checked gets the frames that are there.
    assert video.probe(data)["frames"] == 30
    assert frames_of(data, [0, 29]) == [0, 29]


@pytest.mark.parametrize(("ext", "codec"), FILES)
@pytest.mark.parametrize("share", [0.6, 0.95])
def test_c45_a_file_that_was_cut_is_found_out(ext: str, codec: str, share: float) -> None:
    whole = clip(ext=ext, codec=codec)
    data = whole[: int(len(whole) * share)]

    # Without the index that a mov has at its end, nothing can be opened.
    assert reason_of(data, check_end=True) is Reason.VIDEO_TRUNCATED
    assert reason_of(data, check_end=True, check_frames=True) is Reason.VIDEO_TRUNCATED


def test_c45_of_a_cut_file_that_is_taken_unchecked_the_frames_that_are_there_count() -> None:
    whole = clip(key_every=1)
    data = whole[: packets_of(whole)[18][0] + 5]

    assert video.probe(data)["frames"] == 18
    assert reason_of(data, check_end=True) is Reason.VIDEO_TRUNCATED
    assert frames_of(data, [0, 17]) == [0, 17]


def test_c45_frames_beyond_the_last_are_a_bad_sample_and_no_loop() -> None:
    for sequential in (False, True):
        with pytest.raises(BadSample, match="frame 40 is wanted") as bad:
            list(video.decode_frames(clip(), [3, 40], sequential=sequential))
        assert bad.value.reason is Reason.VIDEO_TRUNCATED


@pytest.mark.parametrize("cover", [False, True])
def test_c45_sound_alone_is_no_video(cover: bool) -> None:
    assert reason_of(sound_alone(cover=cover)) is Reason.VIDEO_NO_STREAM


def test_c46_a_file_without_a_frame_is_no_video() -> None:
    assert reason_of(b"") is Reason.VIDEO_EMPTY
    assert reason_of(clip(frames=0, ext="avi", codec="mpeg4")) is Reason.VIDEO_NO_FRAMES


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.parametrize("filler", [b"\0", b"\xff"])
def test_broken_frames_are_found_by_decoding_them(codec: str, filler: bytes) -> None:
    whole = clip(codec=codec, b_frames=0, key_every=30)
    spoiled = bytearray(whole)
    start, size = packets_of(whole)[20]
    spoiled[start : start + size] = filler * size

    assert video.probe(bytes(spoiled), check_end=True)["frames"] == 30
    assert reason_of(bytes(spoiled), check_frames=True) is Reason.VIDEO_TRUNCATED
    assert frames_of(bytes(spoiled), [3, 19]) == [3, 19]
    with pytest.raises(BadSample, match="Invalid data"):
        frames_of(bytes(spoiled), [25])


@pytest.mark.parametrize(
    "data",
    [
        b"video",
        b"<html><body>Not found</body></html>",
        b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/a.ts\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"\0\0\0\x20ftypisom" + bytes(40),
        b"\x1aE\xdf\xa3" + bytes(60),
        b"RIFF\x40\0\0\0AVI " + bytes(60),
    ],
)
def test_what_is_no_video_is_unreadable(data: bytes) -> None:
    assert reason_of(data) in (Reason.VIDEO_UNREADABLE, Reason.VIDEO_NO_STREAM)


@settings(max_examples=150, deadline=None)
@given(
    ext_codec=st.sampled_from([("mp4", "libx264"), ("mkv", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx")]),
    seed=st.integers(0, 2**32 - 1),
    flips=st.integers(1, 30),
    full=st.booleans(),
)
def test_a_spoiled_file_is_a_clip_or_a_bad_sample(
    ext_codec: tuple[str, str], seed: int, flips: int, full: bool
) -> None:
    ext, codec = ext_codec
    data = bytearray(clip(ext=ext, codec=codec))
    draws = np.random.default_rng(seed)
    for place in draws.integers(0, len(data), flips):
        data[place] ^= 1 << int(draws.integers(8))
    try:
        told = video.probe(bytes(data), check_end=full, check_frames=full)
        chosen = sorted({0, told["frames"] // 2, told["frames"] - 1})
        for number, pixels in video.decode_frames(bytes(data), chosen, sequential=told["sequential"]):
            assert number in chosen
            assert pixels.dtype == np.uint8
    except BadSample as bad:
        assert str(bad.reason).startswith("video_")  # noqa: PT017


# Containers


@pytest.mark.parametrize("ext", ["mp4", "mov", "mkv", "avi", "webm"])
def test_containers_are_known_by_their_bytes(ext: str, tmp_path: Path) -> None:
    data = clip(ext=ext, codec="libvpx" if ext == "webm" else "libx264")

    assert find_container(data) == ext
    assert has_end(data, ext)
    assert has_end(data + b"\0" * 3, ext)
    assert not any(has_end(data[: int(len(data) * share)], ext) for share in (0.3, 0.5, 0.9, 0.99))
    assert find_container(b"") is None


def test_lengths_of_ebml_literally() -> None:
    head = b"\x1aE\xdf\xa3"
    segment = b"\x18S\x80g"

    # A header of 2 bytes; a segment of 3, of 300 (in two bytes), and one whose length is not known.
    assert has_end(head + b"\x82ab" + segment + b"\x83abc", "mkv")
    assert not has_end(head + b"\x82ab" + segment + b"\x83ab", "mkv")
    assert has_end(head + b"\x82ab" + segment + b"\x41\x2c" + bytes(300), "mkv")
    assert not has_end(head + b"\x82ab" + segment + b"\x41\x2c" + bytes(299), "mkv")
    assert has_end(head + b"\x82ab" + segment + b"\x01\xff\xff\xff\xff\xff\xff\xff", "mkv")
