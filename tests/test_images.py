"""Images of every kind become upright RGB, or a `BadSample` that says why not; nothing else ever comes out."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import GifImagePlugin, Image, ImageFile, PngImagePlugin
from strategies import damaged

from bagel_wds import images
from bagel_wds.errors import BadSample, Reason
from bagel_wds.images import (
    DecodedImage,
    EncodedImage,
    ImageHeader,
    decode_own_mode,
    decode_rgb,
    decode_rgb_as_upstream,
    encode_jpeg,
    encode_png,
    read_header,
    shrink,
    verify_end,
    verify_pixels,
)
from bagel_wds.pixels import to_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

WHITE, RED, BLACK = (255, 255, 255), (255, 0, 0), (0, 0, 0)


def encode(image: Image.Image, fmt: str, **options: Any) -> bytes:
    """The bytes of a file in a format of Pillow's."""
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def noise(mode: str = "RGB", size: tuple[int, int] = (48, 64), seed: int = 0) -> Image.Image:
    """A picture that compresses badly, so that a cut at any place takes pixels."""
    width, height = size
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    size: tuple[int, int],
    depth: int,
    colour: int,
    rows: bytes,
    before: tuple[bytes, ...] = (),
    after: tuple[bytes, ...] = (),
) -> bytes:
    """A PNG written by hand: colour 0 is grey, 2 RGB, 3 palette, 4 grey with alpha, 6 RGBA; rows have a filter byte."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows)) if rows else b""
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before) + pixels + b"".join(after) + chunk(b"IEND", b"")


def tiff(pixels: np.ndarray[Any, Any], order: str, sample_format: int = 1) -> bytes:
    """A grey TIFF written by hand in byte order II or MM; format 1 is unsigned, 2 signed, 3 float."""
    end = "<" if order == "II" else ">"
    data = pixels.astype(pixels.dtype.newbyteorder(end)).tobytes()
    height, width = pixels.shape
    entries = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, pixels.dtype.itemsize * 8),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 8),
        (277, 3, 1),
        (278, 4, height),
        (279, 4, len(data)),
        (339, 3, sample_format),
    ]
    out = (
        order.encode()
        + struct.pack(end + "HI", 42, 8 + len(data))
        + data
        + struct.pack(end + "H", len(entries))
    )
    for tag, kind, value in entries:
        packed = struct.pack(end + "HH", value, 0) if kind == 3 else struct.pack(end + "I", value)
        out += struct.pack(end + "HHI", tag, kind, 1) + packed
    return out + struct.pack(end + "I", 0)


def with_pixels_last(data: bytes) -> bytes:
    """A TIFF of one strip, its strip copied behind everything else and found there."""
    (directory,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, directory)
    entries = [directory + 2 + 12 * number for number in range(count)]
    place = {struct.unpack_from("<H", data, entry)[0]: entry + 8 for entry in entries}
    start, size = (struct.unpack_from("<I", data, place[tag])[0] for tag in (273, 279))
    moved = struct.pack("<I", len(data))
    return data[: place[273]] + moved + data[place[273] + 4 :] + data[start : start + size]


def reason_of(call: Callable[[], object]) -> Reason:
    """Why a sample was refused."""
    with pytest.raises(BadSample) as bad:
        call()
    return bad.value.reason


# Orientation: case C38


def picture_with_red_corner() -> Image.Image:
    """40 wide, 20 high, white, with its top left corner red."""
    picture = Image.new("RGB", (40, 20), WHITE)
    picture.paste(RED, (0, 0, 10, 10))
    return picture


def red_corner(picture: Image.Image) -> str:
    """Which corner is red."""
    pixels = np.asarray(picture)
    corners = {"top left": (2, 2), "top right": (2, -3), "bottom left": (-3, 2), "bottom right": (-3, -3)}
    [found] = [name for name, place in corners.items() if pixels[place][0] > 200 and pixels[place][1] < 60]
    return found


def oriented(fmt: str, orientation: int) -> bytes:
    """The same picture, with a tag that asks for it to be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 95, "subsampling": 0},
        "WEBP": {"lossless": True},
    }
    return encode(picture_with_red_corner(), fmt, exif=exif.tobytes(), **options.get(fmt, {}))


WHERE_THE_CORNER_GOES = {
    1: "top left",
    2: "top right",
    3: "bottom right",
    4: "bottom left",
    5: "top left",
    6: "top right",
    7: "bottom right",
    8: "bottom left",
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_c38_orientation_is_applied_and_the_planned_size_is_the_decoded_one(
    fmt: str, orientation: int
) -> None:
    data = oriented(fmt, orientation)
    planned = EncodedImage(data).size_hw
    decoded = decode_rgb(data)

    assert planned == ((20, 40) if orientation <= 4 else (40, 20))
    assert (decoded.height, decoded.width) == planned
    assert red_corner(decoded) == WHERE_THE_CORNER_GOES[orientation]
    # The header that a conversion writes down plans alike.
    header = read_header(data)
    described = ImageHeader(header.ext, header.size_hw, header.orientation)
    assert EncodedImage(data, header=described).size_hw == planned
    assert np.array_equal(np.asarray(EncodedImage(data, header=described).rgb()), np.asarray(decoded))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_c38_a_picture_that_was_decoded_early_is_turned_alike(orientation: int) -> None:
    data = oriented("PNG", orientation)
    # What wds.decode("pil") does.
    early = Image.open(io.BytesIO(data))
    early.load()
    picture = DecodedImage(early.convert("RGB"))
    rgb = picture.rgb()

    assert picture.size_hw == (rgb.height, rgb.width) == EncodedImage(data).size_hw
    assert rgb.tobytes() == decode_rgb(data).tobytes()
    assert DecodedImage(early, upright=False).size_hw == (20, 40)
    assert red_corner(DecodedImage(early, upright=False).rgb()) == "top left"


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP"])
def test_c38_upstream_fidelity_leaves_pictures_as_they_are_stored(fmt: str) -> None:
    picture = EncodedImage(oriented(fmt, 6), upright=False)

    assert picture.size_hw == (20, 40)
    assert red_corner(picture.rgb()) == "top left"


def broken_exif() -> dict[str, bytes]:
    """EXIF blocks that ask for nothing that can be done."""
    good = Image.Exif()
    good[0x0112] = 6
    block = good.tobytes()
    tiff_header = b"Exif\0\0II*\0\x08\0\0\0\x01\0"
    return {
        "empty": b"Exif\0\0",
        "not TIFF": b"Exif\0\0" + b"\xab" * 60,
        "cut": block[:-9],
        "ring of directories": b"Exif\0\0II*\0\x08\0\0\0\0\0\x08\0\0\0",
        "directory far away": b"Exif\0\0II*\0" + struct.pack("<I", 1 << 30),
        "orientation 0": block.replace(b"\x06", b"\x00"),
        "orientation 9": block.replace(b"\x06", b"\x09"),
        "orientation of text": tiff_header + struct.pack("<HHI", 0x0112, 2, 4) + b"six\0" + bytes(4),
        "fraction by zero": tiff_header + struct.pack("<HHII", 0x0112, 5, 1, 26) + bytes(12),
    }


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Truncated File Read")
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("block", broken_exif().values(), ids=broken_exif())
def test_c38_a_broken_exif_block_counts_as_none(fmt: str, block: bytes) -> None:
    data = encode(picture_with_red_corner(), fmt, exif=block)

    assert read_header(data).orientation == 1
    assert red_corner(decode_rgb(data)) == "top left"


def test_c38_an_exif_chunk_behind_the_pixels_of_a_png_is_ignored_in_plan_and_decode_alike() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    block = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    rows = b"".join(b"\0" + bytes(4) for _ in range(2))
    behind, before = png((4, 2), 8, 0, rows, after=(block,)), png((4, 2), 8, 0, rows, before=(block,))

    assert EncodedImage(behind).size_hw == (2, 4)
    assert decode_rgb(behind).size == (4, 2)
    assert EncodedImage(before).size_hw == (4, 2)
    assert decode_rgb(before).size == (2, 4)


# More than 8 bits: case C39

RAMP = np.arange(0, 65536, 16, dtype=np.uint32).astype(np.uint16).reshape(64, 64)
SCALED = np.rint(RAMP / 257).astype(np.uint8)


def png_rows(*channels: np.ndarray[Any, Any]) -> bytes:
    """16-bit rows of a PNG."""
    pixels = np.stack(channels, axis=-1).astype(">u2")
    return b"".join(b"\0" + row.tobytes() for row in pixels)


SIXTEEN_BIT_GREYS = {
    "PNG": encode(Image.fromarray(RAMP), "PNG"),
    "TIFF, little end first": tiff(RAMP, "II"),
    "TIFF, big end first": tiff(RAMP, "MM"),
    "TIFF of 32 bits": tiff(RAMP.astype(np.int32), "II", 2),
    "TIFF of 32 bits, big end first": tiff(RAMP.astype(np.int32), "MM", 2),
    "PGM": b"P5 64 64 65535\n" + RAMP.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("data", SIXTEEN_BIT_GREYS.values(), ids=SIXTEEN_BIT_GREYS)
def test_c39_a_16_bit_grey_is_divided_by_257_and_rounded(data: bytes) -> None:
    pixels = np.asarray(decode_rgb(data))

    for channel in range(3):
        assert np.array_equal(pixels[..., channel], SCALED)
    assert len(np.unique(pixels)) == 256


@pytest.mark.parametrize("order", ["II", "MM"])
def test_c39_a_float_tiff_within_0_and_1_is_multiplied_by_255(order: str) -> None:
    pixels = np.asarray(decode_rgb(tiff((RAMP / 65535).astype(np.float32), order, 3)))

    assert np.array_equal(pixels[..., 0], SCALED)
    assert len(np.unique(pixels)) == 256


def test_c39_a_16_bit_rgb_png_keeps_its_levels() -> None:
    data = png((64, 64), 16, 2, png_rows(RAMP, RAMP[::-1], RAMP.T))
    pixels = np.asarray(decode_rgb(data)).astype(int)

    assert [len(np.unique(pixels[..., channel])) for channel in range(3)] == [256, 256, 256]
    # Pillow takes the upper byte, which is within one level of a division by 257.
    assert np.abs(pixels[..., 0] - RAMP / 257).max() < 1
    assert np.array_equal(pixels[..., 1], pixels[::-1, :, 0])
    assert np.array_equal(pixels[..., 2], pixels[..., 0].T)


@pytest.mark.parametrize(
    "pixels",
    [
        RAMP.astype(np.float32),
        (RAMP / 65535 - 0.5).astype(np.float32),
        np.where(RAMP == 0, np.nan, 0.5).astype(np.float32),
        np.where(RAMP == 0, np.inf, 0.5).astype(np.float32),
    ],
    ids=["up to 65535", "below 0", "not a number", "infinite"],
)
def test_c39_a_float_tiff_without_a_known_white_is_refused(pixels: np.ndarray[Any, Any]) -> None:
    data = tiff(pixels, "II", 3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reason_of(lambda: decode_rgb(data)) == Reason.IMAGE_UNREADABLE


@pytest.mark.parametrize(
    "data",
    [tiff(RAMP.astype(np.int16), "II", 2), tiff(RAMP.astype(np.uint32) << 16, "II", 1)],
    ids=["signed", "32 bits in full"],
)
def test_c39_an_integer_tiff_without_a_known_white_is_refused(data: bytes) -> None:
    assert reason_of(lambda: decode_rgb(data)) == Reason.IMAGE_UNREADABLE


def test_c39_upstream_fidelity_clips_a_16_bit_grey() -> None:
    pixels = np.asarray(decode_rgb_as_upstream(SIXTEEN_BIT_GREYS["PNG"]))

    assert np.array_equal(pixels[..., 0], np.minimum(RAMP, 255))
    assert (pixels == 255).mean() > 0.99


# Too large: case C40


def claim(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with next to no pixels behind it."""
    return png((width, height), 8, 2, b"\0")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_c40_an_image_at_the_pixel_limit_is_planned_and_one_pixel_more_is_refused() -> None:
    assert images.MAX_PIXELS == 10 * 17_895_697
    assert read_header(claim(10, 17_895_697)).size_hw == (17_895_697, 10)
    assert reason_of(lambda: read_header(claim(1, 178_956_971))) == Reason.IMAGE_TOO_LARGE
    assert reason_of(lambda: EncodedImage(claim(1, 178_956_971)).size_hw) == Reason.IMAGE_TOO_LARGE


@pytest.mark.parametrize("decode", [read_header, decode_rgb, decode_rgb_as_upstream])
def test_c40_a_header_that_claims_400_million_pixels_is_refused_unread(
    decode: Callable[[bytes], object],
) -> None:
    with pytest.raises(BadSample, match="pixels") as bad:
        decode(claim(20_000, 20_000))

    assert bad.value.reason == Reason.IMAGE_TOO_LARGE


def test_c40_a_strip_one_pixel_wide_is_read() -> None:
    data = encode(Image.new("L", (1, 60_000), 9), "PNG")
    picture = EncodedImage(data)

    assert picture.size_hw == (60_000, 1)
    assert picture.rgb().getpixel((0, 59_999)) == (9, 9, 9)


def test_c40_a_png_with_2_mib_of_compressed_text_is_refused_as_too_large() -> None:
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2 << 20)))
    international = chunk(b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(bytes(2 << 20)))
    rows = b"".join(b"\0" + bytes(8) for _ in range(8))

    for bomb in (text, international):
        before, after = png((8, 8), 8, 0, rows, before=(bomb,)), png((8, 8), 8, 0, rows, after=(bomb,))
        assert len(before) < 4096
        assert reason_of(partial(read_header, before)) == Reason.IMAGE_TOO_LARGE
        # What stands behind the pixels is met only when they are decoded.
        assert read_header(after).size_hw == (8, 8)
        assert reason_of(partial(decode_rgb, after)) == Reason.IMAGE_TOO_LARGE


def test_c40_a_png_with_8_mib_of_compressed_profile_is_refused_as_too_large() -> None:
    bomb = chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(8 << 20)))
    rows = b"".join(b"\0" + bytes(8) for _ in range(8))
    data = png((8, 8), 8, 0, rows, before=(bomb,))

    assert len(data) < 16_384
    assert outcome(data) == Reason.IMAGE_TOO_LARGE


def test_c40_a_picture_inside_an_icon_is_held_to_the_limit_too() -> None:
    inside = claim(20_000, 20_000)
    entry = struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, len(inside), 22)
    icon = struct.pack("<HHH", 0, 1, 1) + entry + inside

    assert len(icon) < 200
    assert outcome(icon) == upstream_outcome(icon) == Reason.IMAGE_TOO_LARGE


# Cut files: case C41


CUT = {
    "JPEG": encode(noise(), "JPEG", quality=90),
    "progressive JPEG": encode(noise(), "JPEG", progressive=True),
    "PNG": encode(noise(), "PNG"),
    "lossy WebP": encode(noise(), "WEBP"),
    "lossless WebP": encode(noise(), "WEBP", lossless=True),
    "GIF": encode(noise("P"), "GIF"),
    "BMP": encode(noise(), "BMP"),
    "TIFF": encode(noise(), "TIFF"),
    "PPM": encode(noise(), "PPM"),
}


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0], ids=["30 %", "90 %", "last byte"])
@pytest.mark.parametrize("data", CUT.values(), ids=CUT)
def test_c41_a_cut_file_is_refused(data: bytes, share: float) -> None:
    cut = data[: min(int(len(data) * share), len(data) - 1)]

    assert decode_rgb(data).size == (48, 64)
    assert reason_of(lambda: decode_rgb(cut)) in (Reason.IMAGE_TRUNCATED, Reason.IMAGE_UNREADABLE)
    assert reason_of(lambda: EncodedImage(cut).rgb()) in (Reason.IMAGE_TRUNCATED, Reason.IMAGE_UNREADABLE)


@pytest.mark.parametrize("name", ["JPEG", "PNG"])
def test_c41_a_file_whose_header_is_sound_is_refused_as_truncated(name: str) -> None:
    cut = CUT[name][: len(CUT[name]) * 9 // 10]

    assert read_header(cut).size_hw == (64, 48)
    assert reason_of(lambda: decode_rgb(cut)) == Reason.IMAGE_TRUNCATED


def test_c41_a_gif_cut_in_its_second_frame_is_refused_though_the_first_is_whole() -> None:
    frames = [noise("P", seed=seed) for seed in range(3)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    second = Image.open(io.BytesIO(data))
    cut = data[: len(data) // 2]

    assert second.n_frames == 3  # type: ignore[attr-defined]
    assert decode_rgb_as_upstream(cut).tobytes() == decode_rgb(data).tobytes()
    assert reason_of(lambda: decode_rgb(cut)) == Reason.IMAGE_TRUNCATED


def test_c41_what_follows_the_end_of_a_whole_file_does_no_harm() -> None:
    for name in ("JPEG", "PNG", "GIF"):
        assert decode_rgb(CUT[name] + b"\0\n;trailing") == decode_rgb(CUT[name])


@pytest.mark.parametrize("decode", [read_header, decode_rgb, decode_rgb_as_upstream])
def test_c41_zero_bytes_and_html_are_no_image(decode: Callable[[bytes], object]) -> None:
    html = b"<!DOCTYPE html><html><body>404 Not Found</body></html>"

    assert reason_of(lambda: decode(b"")) == Reason.IMAGE_EMPTY
    assert reason_of(lambda: decode(html)) == Reason.IMAGE_UNREADABLE
    with pytest.raises(BadSample, match="<!DOCTYPE"):
        decode(html)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "lossy WebP", "GIF"])
def test_c41_a_sound_header_with_a_random_body_is_refused(name: str) -> None:
    body = np.random.default_rng(1).bytes(len(CUT[name]))
    header = {"JPEG": 623, "PNG": 41, "lossy WebP": 30, "GIF": 800}[name]
    data = CUT[name][:header] + body[header:]

    assert reason_of(lambda: decode_rgb(data)) in (Reason.IMAGE_TRUNCATED, Reason.IMAGE_UNREADABLE)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF"])
def test_c41_upstream_fidelity_takes_what_there_is_of_a_cut_file(name: str) -> None:
    whole = np.asarray(decode_rgb_as_upstream(CUT[name]))
    part = np.asarray(decode_rgb_as_upstream(CUT[name][: len(CUT[name]) * 9 // 10]))

    assert part.shape == whole.shape == (64, 48, 3)
    assert np.array_equal(part[:40], whole[:40])
    assert not np.array_equal(part, whole)


def test_a_picture_is_refused_when_its_pixels_are_not_of_the_size_that_was_planned() -> None:
    lying = EncodedImage(CUT["PNG"], header=ImageHeader("png", (48, 64)))

    assert lying.size_hw == (48, 64)
    assert reason_of(lying.rgb) == Reason.IMAGE_UNREADABLE


def test_a_format_that_needs_another_program_is_refused_before_it_is_started() -> None:
    eps = encode(noise(), "EPS")

    for decode in (read_header, decode_rgb, decode_rgb_as_upstream):
        with pytest.raises(BadSample, match="EPS needs another program") as bad:
            decode(eps)
        assert bad.value.reason == Reason.IMAGE_UNREADABLE


def test_an_error_of_any_type_out_of_a_parser_is_a_verdict_on_the_bytes() -> None:
    dds = bytearray(encode(noise(), "DDS"))
    dds[80:84] = bytes(4)

    with pytest.raises(NotImplementedError):
        Image.open(io.BytesIO(dds))
    assert outcome(bytes(dds)) == upstream_outcome(bytes(dds)) == Reason.IMAGE_UNREADABLE


# Alpha


def grey_png(value: int, alpha: int) -> bytes:
    """One pixel of grey with alpha."""
    return png((1, 1), 8, 4, bytes([0, value, alpha]))


PALETTE = chunk(b"PLTE", bytes([*BLACK, *RED]))
OVER_WHITE = {
    "grey, clear": (grey_png(0, 0), WHITE),
    "grey, opaque": (grey_png(10, 255), (10, 10, 10)),
    "grey, half": (grey_png(0, 128), (127, 127, 127)),
    "16-bit grey, clear": (png((1, 1), 16, 4, bytes([0, 0, 0, 0, 0])), WHITE),
    "RGBA, clear": (png((1, 1), 8, 6, bytes([0, *RED, 0])), WHITE),
    "RGBA, half": (png((1, 1), 8, 6, bytes([0, *RED, 128])), (255, 127, 127)),
    "16-bit RGBA, clear": (png((1, 1), 16, 6, bytes(9)), WHITE),
    "palette, clear entry": (png((1, 1), 8, 3, b"\0\1", (PALETTE, chunk(b"tRNS", b"\xff\0"))), WHITE),
    "palette, half entry": (
        png((1, 1), 8, 3, b"\0\1", (PALETTE, chunk(b"tRNS", b"\xff\x80"))),
        (255, 127, 127),
    ),
    "palette, opaque entry": (png((1, 1), 8, 3, b"\0\1", (PALETTE, chunk(b"tRNS", b"\0"))), RED),
    "grey, clear value": (png((1, 1), 8, 0, b"\0\7", (chunk(b"tRNS", b"\0\7"),)), WHITE),
    "grey, another clear value": (png((1, 1), 8, 0, b"\0\7", (chunk(b"tRNS", b"\0\x08"),)), (7, 7, 7)),
    "16-bit grey, clear value": (png((1, 1), 16, 0, b"\0\7\7", (chunk(b"tRNS", b"\7\7"),)), WHITE),
    "16-bit grey, another clear value": (
        png((1, 1), 16, 0, b"\0\7\7", (chunk(b"tRNS", b"\7\x08"),)),
        (7, 7, 7),
    ),
    "RGB, clear value": (png((1, 1), 8, 2, bytes([0, *RED]), (chunk(b"tRNS", b"\0\xff\0\0\0\0"),)), WHITE),
    "1 bit, clear black": (png((1, 1), 1, 0, b"\0\0", (chunk(b"tRNS", b"\0\0"),)), WHITE),
    "WebP, clear": (
        encode(Image.new("RGBA", (1, 1), (255, 0, 0, 0)), "WEBP", lossless=True, exact=True),
        WHITE,
    ),
    "GIF, clear": (encode(Image.new("RGBA", (1, 1), (255, 0, 0, 0)), "GIF"), WHITE),
    "TIFF, clear": (encode(Image.new("RGBA", (1, 1), (255, 0, 0, 0)), "TIFF"), WHITE),
    "grey TIFF, clear": (encode(Image.new("LA", (1, 1), (0, 0)), "TIFF"), WHITE),
    "TGA, clear": (encode(Image.new("RGBA", (1, 1), (255, 0, 0, 0)), "TGA"), WHITE),
    "CMYK": (encode(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF"), RED),
    "1 bit": (png((1, 1), 1, 0, b"\0\x80"), WHITE),
}


@pytest.mark.parametrize("name", OVER_WHITE)
def test_alpha_is_composited_over_white_in_every_kind_of_file(name: str) -> None:
    data, expected = OVER_WHITE[name]
    rgb = decode_rgb(data)

    assert rgb.mode == "RGB"
    assert rgb.getpixel((0, 0)) == expected


def in_mode(mode: str) -> Image.Image:
    """A clear black pixel of a mode that no file has, but a program may pass."""
    if mode == "P with alpha in its palette":
        return Image.new("RGBA", (1, 1), (0, 0, 0, 0)).quantize(2)
    if mode == "PA":
        picture = Image.new("PA", (1, 1), (0, 0))
        picture.putpalette([*BLACK, *RED])
        return picture
    return Image.new(mode, (1, 1), 0 if mode != "LA" else (0, 0))


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa", "P with alpha in its palette"])
def test_alpha_is_composited_over_white_in_every_mode_of_a_decoded_picture(mode: str) -> None:
    assert DecodedImage(in_mode(mode)).rgb().getpixel((0, 0)) == WHITE


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "HSV", "I", "F", "I;16", "I;16L", "I;16B"])
def test_black_stays_black_in_every_mode_without_alpha(mode: str) -> None:
    rgb = DecodedImage(in_mode(mode)).rgb()

    assert (rgb.mode, rgb.getpixel((0, 0))) == ("RGB", BLACK)


def test_upstream_fidelity_loses_the_alpha_of_grey_pictures_only() -> None:
    def pixel(name: str) -> object:
        return decode_rgb_as_upstream(OVER_WHITE[name][0]).getpixel((0, 0))

    assert pixel("grey, clear") == BLACK
    assert pixel("grey, half") == BLACK
    assert pixel("RGBA, half") == (255, 127, 127)
    assert pixel("palette, half entry") == (255, 127, 127)
    assert pixel("grey, clear value") == WHITE


# Laws


ORIGINALS = [
    *CUT.values(),
    oriented("JPEG", 6),
    oriented("WEBP", 3),
    oriented("PNG", 8),
    encode(noise(size=(9, 5)), "JPEG"),
    encode(noise("RGBA", (9, 5)), "PNG"),
    encode(noise("P", (9, 5)), "PNG"),
    encode(noise("L", (9, 5)), "GIF", save_all=True, append_images=[noise("L", (9, 5), seed=1)]),
    encode(noise(size=(9, 5)), "DDS"),
    encode(noise(size=(9, 5)), "ICO"),
    encode(noise("P", (9, 5)), "ICNS"),
    encode(noise(size=(9, 5)), "TGA"),
    encode(Image.new("F", (9, 5), 0.5), "SPIDER"),
    OVER_WHITE["palette, half entry"][0],
]
TIFFS = [CUT["TIFF"], oriented("TIFF", 6)]


def outcome(data: bytes) -> Image.Image | Reason:
    """What is made of some bytes; a header that can be read must have told the size of what is decoded."""
    try:
        size_hw = EncodedImage(data).size_hw
        rgb = decode_rgb(data)
    except BadSample as bad:
        return bad.reason
    assert (rgb.height, rgb.width) == size_hw
    assert rgb.mode == "RGB"
    return rgb


def upstream_outcome(data: bytes) -> Image.Image | Reason:
    """What the twin makes of them."""
    try:
        return decode_rgb_as_upstream(data)
    except BadSample as bad:
        return bad.reason


ABOUT_IMAGES = {Reason.IMAGE_UNREADABLE, Reason.IMAGE_TRUNCATED, Reason.IMAGE_TOO_LARGE, Reason.IMAGE_EMPTY}


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300))
@example(b"\xff\xd8\xff")
@example(b"\x89PNG\r\n\x1a\n")
@example(b"GIF89a")
@example(b"RIFF\0\0\0\0WEBP")
@example(b"II*\0")
@example(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
def test_random_bytes_are_a_picture_or_a_bad_sample_and_nothing_else(data: bytes) -> None:
    for result in (outcome(data), upstream_outcome(data)):
        assert isinstance(result, Image.Image) or result in ABOUT_IMAGES


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=500, deadline=None)
@given(damaged([data for data in ORIGINALS if data not in TIFFS]))
def test_damaged_images_are_decoded_or_refused_and_nothing_else(data: bytes) -> None:
    for result in (outcome(data), upstream_outcome(data)):
        assert isinstance(result, Image.Image) or result in ABOUT_IMAGES


def test_the_originals_decode_so_that_damage_to_them_means_something() -> None:
    assert [reason for reason in map(outcome, ORIGINALS) if isinstance(reason, Reason)] == []


def test_nothing_process_wide_changes() -> None:
    def switches() -> tuple[object, ...]:
        return (
            ImageFile.LOAD_TRUNCATED_IMAGES,
            Image.MAX_IMAGE_PIXELS,
            PngImagePlugin.MAX_TEXT_CHUNK,
            PngImagePlugin.MAX_TEXT_MEMORY,
            GifImagePlugin.LOADING_STRATEGY,
            tuple(warnings.filters),
        )

    before = switches()
    for data in [*ORIGINALS, *(original[: len(original) // 2] for original in ORIGINALS), b"", b"<html>"]:
        for decode in (read_header, decode_rgb, decode_rgb_as_upstream):
            try:
                decode(data)
            except BadSample:
                continue

    assert switches() == before
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_the_switch_for_cut_files_is_restored_to_what_the_program_had_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    decode_rgb_as_upstream(CUT["JPEG"])

    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


# Verification: what a conversion looks at before it takes an image


REAL = Path(__file__).parent / "data" / "real"
VERIFY = {"header": verify_end, "full": verify_pixels}


@cache
def photographs() -> dict[str, bytes]:
    """Real pictures as people keep them, and two of them as WebP."""
    found = {path.name: path.read_bytes() for path in sorted((REAL / "vlm/images").glob("*.[jp][pn]g"))}
    for path in sorted(REAL.rglob("*.parquet")):
        table = pq.read_table(path)
        name = "image" if "image" in table.column_names else "image_list"
        for row, value in enumerate(table[name].to_pylist()):
            for number, data in enumerate(value if isinstance(value, list) else [value]):
                found[f"{path.parent.name}/{path.name} {row}.{number}"] = data
    picture = Image.open(io.BytesIO(found["image3.jpg"]))
    return found | {
        f"WebP, {name}": encode(picture, "WEBP", lossless=lossless)
        for name, lossless in (("lossy", False), ("lossless", True))
    }


def cut_at(data: bytes, share: float) -> bytes:
    """The first part of a file; 1.0 lacks the last byte."""
    return data[: min(int(len(data) * share), len(data) - 1)]


@pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY)
def test_c41_every_real_photograph_passes_and_cut_ones_do_not(
    verify: Callable[[bytes], ImageHeader],
) -> None:
    assert len(photographs()) == 29
    for data in photographs().values():
        assert verify(data) == read_header(data)
        for share in (0.3, 0.9, 1.0):
            assert reason_of(partial(verify, cut_at(data, share))) in (
                Reason.IMAGE_TRUNCATED,
                Reason.IMAGE_UNREADABLE,
            )


def test_c41_without_verification_a_cut_photograph_is_taken_if_its_header_is_there() -> None:
    for name, data in photographs().items():
        cut = cut_at(data, 0.9)
        if name.startswith("WebP"):
            # Pillow itself opens none that was cut.
            assert reason_of(partial(read_header, cut)) == Reason.IMAGE_UNREADABLE
        else:
            assert read_header(cut) == read_header(data)


@pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY)
@pytest.mark.parametrize("name", [name for name in CUT if name != "PPM"])
def test_c41_a_cut_file_of_each_format_does_not_pass(
    name: str, verify: Callable[[bytes], ImageHeader]
) -> None:
    data = CUT[name]

    assert verify(data) == read_header(data)
    for share in (0.3, 0.9, 1.0):
        assert reason_of(partial(verify, cut_at(data, share))) in (
            Reason.IMAGE_TRUNCATED,
            Reason.IMAGE_UNREADABLE,
        )


def test_c41_a_format_whose_end_is_not_known_passes_the_header_and_not_the_pixels() -> None:
    cut = cut_at(CUT["PPM"], 0.9)

    assert verify_end(cut).size_hw == (64, 48)
    assert reason_of(lambda: verify_pixels(cut)) == Reason.IMAGE_TRUNCATED


@pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY)
def test_c41_zero_bytes_html_and_a_second_frame_that_was_cut_do_not_pass(
    verify: Callable[[bytes], ImageHeader],
) -> None:
    frames = [noise("P", seed=seed) for seed in range(3)]
    gif = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])

    assert verify(gif).size_hw == (64, 48)
    assert reason_of(lambda: verify(gif[: len(gif) // 2])) == Reason.IMAGE_TRUNCATED
    assert reason_of(lambda: verify(b"")) == Reason.IMAGE_EMPTY
    assert reason_of(lambda: verify(b"<html>")) == Reason.IMAGE_UNREADABLE


def test_c41_a_random_body_passes_the_header_and_not_the_pixels() -> None:
    data = CUT["PNG"]
    body = data[:41] + np.random.default_rng(1).bytes(len(data) - 41 - 12) + data[-12:]

    assert verify_end(body) == read_header(data)
    assert reason_of(lambda: verify_pixels(body)) in (Reason.IMAGE_TRUNCATED, Reason.IMAGE_UNREADABLE)


@pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY)
@pytest.mark.parametrize("name", ["JPEG", "progressive JPEG", "PNG", "GIF", "lossy WebP"])
def test_what_follows_the_end_of_a_file_is_not_looked_at(
    name: str, verify: Callable[[bytes], ImageHeader]
) -> None:
    assert verify(CUT[name] + b"\0\n;trailing") == read_header(CUT[name])


def jpeg_with_thumbnail() -> bytes:
    """A JPEG with another, whole one in its EXIF block."""
    thumbnail = encode(noise(size=(16, 12)), "JPEG")
    block = b"Exif\0\0II*\0\x08\0\0\0\0\0\x0e\0\0\0" + b"\0\0\0\0\0\0" + thumbnail
    return CUT["JPEG"][:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + CUT["JPEG"][2:]


@pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_the_end_of_a_thumbnail_is_not_that_of_the_picture(verify: Callable[[bytes], ImageHeader]) -> None:
    data = jpeg_with_thumbnail()

    assert data.count(b"\xff\xd9") == 2
    assert verify(data).size_hw == (64, 48)
    assert data[:-2].count(b"\xff\xd9") == 1
    assert reason_of(lambda: verify(data[:-2])) == Reason.IMAGE_TRUNCATED


@pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY)
def test_of_a_file_of_two_jpegs_the_first_must_be_whole(verify: Callable[[bytes], ImageHeader]) -> None:
    both = encode(noise(), "MPO", save_all=True, append_images=[noise(seed=1)])
    first = both.index(b"\xff\xd9") + 2

    assert Image.open(io.BytesIO(both)).format == "MPO"
    assert verify(both).size_hw == verify(both[: len(both) - 9]).size_hw == (64, 48)
    assert reason_of(lambda: verify(both[: first - 1])) == Reason.IMAGE_TRUNCATED


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("width", range(1, 10))
def test_a_bmp_passes_to_the_last_byte_of_its_pixels(mode: str, width: int) -> None:
    data = encode(noise(mode, (width, 3)), "BMP")
    bits = {"1": 1, "L": 8, "P": 8, "RGB": 24, "RGBA": 32}[mode]
    padding = -(-width * bits // 8) % -4
    pixels_end = len(data) + padding

    assert verify_end(data[:pixels_end]).size_hw == verify_pixels(data[:pixels_end]).size_hw == (3, width)
    assert reason_of(lambda: verify_end(data[: pixels_end - 1])) == Reason.IMAGE_TRUNCATED
    assert reason_of(lambda: verify_pixels(data[: pixels_end - 1])) == Reason.IMAGE_TRUNCATED


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_deflate", "jpeg"])
def test_a_tiff_whose_pixels_come_last_passes_only_whole(compression: str | None) -> None:
    data = encode(noise(), "TIFF", compression=compression)
    moved = with_pixels_last(data)

    assert decode_rgb(moved).tobytes() == decode_rgb(data).tobytes()
    assert verify_end(moved) == verify_pixels(moved) == read_header(data)
    assert reason_of(lambda: verify_end(moved[:-1])) == Reason.IMAGE_TRUNCATED
    assert reason_of(lambda: verify_pixels(moved[:-1])) in (Reason.IMAGE_TRUNCATED, Reason.IMAGE_UNREADABLE)


def test_a_grey_without_a_known_white_does_not_pass_the_pixels() -> None:
    without_white = [tiff(RAMP.astype(np.float32), "II", 3), tiff(RAMP.astype(np.int16), "II", 2)]

    for data in without_white:
        assert verify_end(data).size_hw == (64, 64)
        assert reason_of(partial(verify_pixels, data)) == Reason.IMAGE_UNREADABLE
    for data in SIXTEEN_BIT_GREYS.values():
        assert verify_pixels(data).size_hw == (64, 64)


def verdict(call: Callable[[], object]) -> Reason | None:
    """Why some bytes were refused; None where they were not."""
    try:
        call()
    except BadSample as bad:
        return bad.reason
    return None


SMALL_JPEGS = [
    encode(noise(mode, size), "JPEG", **options)
    for size in ((1, 1), (7, 30), (17, 16), (33, 40))
    for mode, options in (
        ("RGB", {}),
        ("RGB", {"subsampling": 0}),
        ("RGB", {"progressive": True}),
        ("L", {}),
        ("CMYK", {"restart_marker_rows": 1}),
    )
]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=500, deadline=None)
@given(damaged([data for data in (*ORIGINALS, *SMALL_JPEGS) if data not in TIFFS]))
def test_pixels_pass_just_where_training_decodes_them(data: bytes) -> None:
    assert verdict(partial(verify_pixels, data)) == verdict(lambda: EncodedImage(data).rgb())


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=300), damaged([*ORIGINALS, *SMALL_JPEGS])))
def test_no_end_that_is_looked_for_gives_anything_but_a_verdict(data: bytes) -> None:
    assert verdict(partial(verify_end, data)) in {None, *ABOUT_IMAGES}


@pytest.mark.parametrize("data", [*ORIGINALS, *TIFFS, *SMALL_JPEGS])
def test_whole_files_pass(data: bytes) -> None:
    assert verify_end(data) == verify_pixels(data) == read_header(data)


# Headers and pixels


@pytest.mark.parametrize(
    ("fmt", "ext"),
    [
        ("JPEG", "jpg"),
        ("PNG", "png"),
        ("WEBP", "webp"),
        ("GIF", "gif"),
        ("BMP", "bmp"),
        ("TIFF", "tiff"),
        ("TGA", "img"),
    ],
)
def test_a_header_tells_extension_and_size(fmt: str, ext: str) -> None:
    header = read_header(encode(noise(size=(48, 64)), fmt))

    assert header == ImageHeader(ext=ext, size_hw=(64, 48), orientation=1)


def test_a_resize_to_the_same_size_keeps_the_pixels() -> None:
    picture = noise()

    assert images.resize(picture, (64, 48)) is picture
    assert images.resize(picture, (32, 16)).size == (16, 32)


def test_pixels_become_float32_channels_first_and_normalized() -> None:
    picture = Image.fromarray(np.array([[[0, 51, 255], [255, 0, 102]]], dtype=np.uint8))
    tensor = to_tensor(picture, (0.5, 0.5, 0.0), (0.5, 0.25, 1.0))

    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert tensor.shape == (3, 1, 2)
    assert tensor.flatten().tolist() == pytest.approx([-1.0, 1.0, -1.2, -2.0, 1.0, 0.4], abs=1e-6)


# The picture's own kind


OWN_KIND = {
    "RGB": (encode(noise(), "PNG"), "RGB"),
    "RGBA": (encode(noise("RGBA"), "PNG"), "RGBA"),
    "grey": (encode(noise("L"), "PNG"), "L"),
    "grey with alpha": (encode(noise("LA"), "PNG"), "LA"),
    "1 bit": (encode(noise("1"), "PNG"), "L"),
    "palette": (encode(noise("P"), "PNG"), "RGB"),
    "palette with a clear entry": (OVER_WHITE["palette, clear entry"][0], "RGBA"),
    "RGB with a clear value": (OVER_WHITE["RGB, clear value"][0], "RGBA"),
    "grey with a clear value": (OVER_WHITE["grey, clear value"][0], "LA"),
    "16-bit grey": (SIXTEEN_BIT_GREYS["PNG"], "L"),
    "16-bit grey with a clear value": (OVER_WHITE["16-bit grey, clear value"][0], "LA"),
    "CMYK": (encode(noise("CMYK"), "JPEG"), "RGB"),
    "JPEG in grey": (encode(noise("L"), "JPEG"), "L"),
    "TIFF of floats": (tiff((RAMP / 65535).astype(np.float32), "II", 3), "L"),
}


@pytest.mark.parametrize(("data", "mode"), OWN_KIND.values(), ids=OWN_KIND)
def test_a_picture_keeps_its_kind_and_over_white_it_is_what_training_sees(data: bytes, mode: str) -> None:
    own = decode_own_mode(data)

    assert own.mode == mode
    assert images.to_rgb(own).tobytes() == decode_rgb(data).tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_c38_a_picture_of_its_own_kind_is_turned_upright(orientation: int) -> None:
    data = oriented("PNG", orientation)

    assert decode_own_mode(data).tobytes() == decode_rgb(data).tobytes()


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF"])
def test_c41_a_cut_picture_has_no_kind(name: str) -> None:
    assert reason_of(lambda: decode_own_mode(cut_at(CUT[name], 0.9))) == Reason.IMAGE_TRUNCATED


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_a_png_keeps_every_pixel_and_a_jpeg_nearly(mode: str) -> None:
    picture = noise(mode)

    assert decode_own_mode(encode_png(picture)).tobytes() == picture.tobytes()
    if mode in ("L", "RGB"):
        data = encode_jpeg(picture)
        off = np.abs(np.asarray(decode_own_mode(data)).astype(int) - np.asarray(picture))
        assert off.mean() < 4
        assert Image.open(io.BytesIO(data)).mode == mode


def test_no_colour_comes_out_of_clear_pixels_when_a_picture_shrinks() -> None:
    picture = Image.new("RGBA", (40, 40), (*RED, 0))
    picture.paste((0, 0, 255, 255), (0, 0, 40, 20))
    small = np.asarray(shrink(picture, (9, 9)))

    assert small.shape == (9, 9, 4)
    assert small[..., 0].max() == 0
    assert set(small[..., 3].flat) >= {0, 255}
