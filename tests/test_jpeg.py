"""Where a JPEG's EXIF block may stand is seen wherever Pillow finds one, and pixels lie in the memory that is given."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from PIL import Image

from bagel_wds.jpeg import _may_have_exif, decode, plain_size, reduced

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]

START, SCAN = b"\xff\xd8", b"\xff\xda"
APP0, APP1, APP2, COMMENT = 0xE0, 0xE1, 0xE2, 0xFE
WITHOUT_LENGTH = (0x00, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE))
"""Markers behind which Pillow reads on at once: escaped bytes, restarts, start and end of a picture, extensions."""


def pattern(height: int = 20, width: int = 30) -> Levels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(pixels: Levels) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def exif_block(orientation: int = 6) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


JPEG = encode(pattern())
"""Begins with JFIF's own segment, and has no EXIF block."""
EXIF = segment(APP1, exif_block())
XMP = segment(APP1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
THUMBNAIL = segment(APP0, b"JFXX\0\x10" + JPEG[:2] + EXIF + JPEG[2:])


def with_segments(*segments: bytes) -> bytes:
    """The picture with these before its own."""
    return START + b"".join(segments) + JPEG[2:]


def jump_over(marker: int) -> bytes:
    """A JPEG with a marker without length before its EXIF block.

    Whoever takes the block's marker for a length lands on what looks like the pixels.
    """
    landing = 2 + int.from_bytes(EXIF[:2], "big") - 2
    filling = segment(COMMENT, bytes(30_000))
    rest = landing - len(EXIF) - len(filling) - 4
    return with_segments(
        bytes([0xFF, marker]), EXIF, filling, segment(COMMENT, bytes(rest) + SCAN + bytes(9))
    )


def pillow_finds_exif(data: bytes) -> bool:
    """A file that cannot be opened has none."""
    try:
        return "exif" in Image.open(io.BytesIO(data)).info
    except (OSError, SyntaxError):
        return False


@pytest.mark.parametrize(
    "data",
    [
        with_segments(EXIF),
        with_segments(segment(APP0, b"JFIF\0" + bytes(9)), EXIF),
        with_segments(XMP, segment(APP2, b"ICC_PROFILE\0" + bytes(999)), segment(COMMENT, b"hello"), EXIF),
        with_segments(segment(COMMENT, bytes(65_533)), EXIF),
        with_segments(EXIF, EXIF),
        with_segments(b"\xff" * 7 + EXIF),
        with_segments(segment(COMMENT, b""), b"\xff" + EXIF),
        with_segments(THUMBNAIL, EXIF),
        JPEG[: JPEG.index(SCAN)] + EXIF + JPEG[JPEG.index(SCAN) :],
    ],
    ids=[
        "first",
        "behind JFIF",
        "behind XMP, a profile and a comment",
        "behind the longest segment",
        "twice",
        "behind filling bytes",
        "behind an empty comment and a filling byte",
        "behind a thumbnail that has one",
        "right before the pixels",
    ],
)
def test_an_exif_block_before_the_pixels_is_found(data: bytes) -> None:
    assert pillow_finds_exif(data)
    assert _may_have_exif(data)
    assert plain_size(data) is None


@pytest.mark.parametrize(
    "data",
    [
        JPEG,
        with_segments(XMP),
        with_segments(THUMBNAIL),
        with_segments(segment(COMMENT, EXIF)),
        with_segments(segment(APP2, exif_block())),
        with_segments(segment(APP1, b"Exif\0x" + bytes(40))),
        with_segments(segment(APP1, b"\0" + exif_block())),
        with_segments(b"\xff\xff" + segment(COMMENT, b"hello")),
        JPEG + EXIF,
        JPEG[:-2] + EXIF + JPEG[-2:],
    ],
    ids=[
        "no segment",
        "XMP",
        "in the thumbnail",
        "in a comment",
        "in another application's segment",
        "a name cut short",
        "a byte later",
        "filling bytes",
        "behind the picture",
        "behind the pixels",
    ],
)
def test_a_jpeg_whose_exif_block_pillow_does_not_see_is_plain(data: bytes) -> None:
    assert not pillow_finds_exif(data)
    assert not _may_have_exif(data)
    assert plain_size(data) == (20, 30)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("marker", [APP0, APP1, COMMENT])
def test_a_length_that_does_not_count_itself_leaves_the_way_unclear(marker: int, length: int) -> None:
    short = bytes([0xFF, marker, 0, length])

    for data in (with_segments(short), with_segments(short, EXIF), with_segments(short * 50, EXIF)):
        assert _may_have_exif(data)
        assert plain_size(data) is None


@pytest.mark.parametrize("marker", [APP0, APP1, COMMENT])
def test_a_length_beyond_the_end_leaves_the_way_unclear(marker: int) -> None:
    assert len(JPEG) < 0xFFFF
    assert _may_have_exif(with_segments(bytes([0xFF, marker, 0xFF, 0xFF])))


@pytest.mark.parametrize("data", [with_segments(XMP, b"\xff" + EXIF), with_segments(THUMBNAIL)])
def test_a_file_that_ends_before_its_pixels_may_have_had_one_and_behind_that_it_matters_no_more(
    data: bytes,
) -> None:
    place = data.index(SCAN, data.index(b"\xff\xdb", len(data) - len(JPEG)))

    assert all(_may_have_exif(data[:end]) for end in range(2, place + 2))
    assert {_may_have_exif(data[:end]) for end in range(place + 2, len(data))} == {_may_have_exif(data)}


@pytest.mark.parametrize(
    "filling", [b"\xff", b"\xff\xe0\0\0", b"\xff\xfe\0\x02", b"\xff\0", b"\xff\xd0", b"\0"]
)
def test_the_walk_comes_to_an_end_whatever_is_repeated(filling: bytes) -> None:
    assert _may_have_exif(START + filling * 100_000)


def test_a_marker_without_length_does_not_hide_an_exif_block() -> None:
    assert all(pillow_finds_exif(jump_over(marker)) for marker in WITHOUT_LENGTH)
    assert [hex(marker) for marker in WITHOUT_LENGTH if not _may_have_exif(jump_over(marker))] == []


JUNK = st.one_of(
    st.binary(max_size=4),
    st.just(b"\xff"),
    st.sampled_from(WITHOUT_LENGTH).map(lambda marker: bytes([0xFF, marker])),
)
SEGMENTS = st.one_of(
    st.sampled_from([EXIF, XMP, THUMBNAIL, segment(APP1, b"Exif\0"), segment(APP1, b"Exif\0\0")]),
    st.builds(
        segment,
        st.sampled_from([APP0, APP1, APP2, 0xEE, COMMENT, 0xC4, 0xDD]),
        st.binary(max_size=20) | st.integers(21, 65_533).map(bytes),
    ),
    st.builds(
        lambda marker, length, content: bytes([0xFF, marker]) + length.to_bytes(2, "big") + content,
        st.sampled_from([APP0, APP1, COMMENT]),
        st.sampled_from([0, 1, 2, 3, 6, 8, 40, 65_535]),
        st.just(exif_block()) | st.binary(max_size=20),
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.one_of(SEGMENTS, SEGMENTS, JUNK), max_size=6),
    st.integers(0, 400) | st.just(0),
)
def test_whenever_pillow_finds_an_exif_block_it_is_seen(segments: list[bytes], cut: int) -> None:
    data = with_segments(*segments)
    data = data[: len(data) - cut]
    found, seen = pillow_finds_exif(data), _may_have_exif(data)
    event(f"found {found}, seen {seen}")

    assert seen or not found


def test_pixels_lie_in_the_memory_that_is_given() -> None:
    own = decode(JPEG, (20, 30))
    memory = np.zeros(20 * 30 * 3 + 5, np.uint8)
    given_back = decode(JPEG, (20, 30), memory[: 20 * 30 * 3])

    assert own is not None
    assert given_back is not None
    assert np.array_equal(own, np.asarray(Image.open(io.BytesIO(JPEG))))
    assert np.array_equal(given_back, own)
    assert np.shares_memory(given_back, memory)
    assert np.array_equal(memory, [*own.reshape(-1), 0, 0, 0, 0, 0])


def test_memory_that_is_too_small_is_not_written_behind_its_end() -> None:
    memory = np.full(20 * 30 * 3, 7, np.uint8)

    assert decode(JPEG, (20, 30), memory[: 20 * 30 * 3 - 1]) is None
    assert memory[-1] == 7


def test_a_reduced_picture_lies_in_memory_of_its_own_size() -> None:
    size = reduced((20, 30), (9, 14))
    memory = np.zeros(10 * 15 * 3, np.uint8)
    own, pixels = decode(JPEG, size), decode(JPEG, size, memory)

    assert size == (10, 15)
    assert own is not None
    assert pixels is not None
    assert pixels.shape == (10, 15, 3)
    assert np.shares_memory(pixels, memory)
    assert np.array_equal(pixels, own)
