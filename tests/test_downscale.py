"""Pictures are scaled down by a stated rule, to what Pillow alone makes of them, and others are left as they are."""

from __future__ import annotations

import io
import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms
from source_factory import captions, encode_image, write_t2i

from bagel_wds.converters import ShardSettings, convert_source
from bagel_wds.converters.downscale import (
    MAX_SIDE,
    Encoder,
    check_max_side,
    downscale,
    scaled_hw,
)
from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.images import ImageHeader, decode_rgb, read_header
from bagel_wds.sources import Source, SourceImage

PHOTOGRAPHS = sorted((Path(__file__).parent / "data/real/vlm/images").glob("*.[jp][pn]g"))
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
GREY_PROFILE = SRGB[:16] + b"GRAY" + SRGB[20:]
LANCZOS = Image.Resampling.LANCZOS
ORIENTATION = 0x0112


def encode(picture: Image.Image, fmt: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, fmt, **options)
    return out.getvalue()


def source(data: bytes) -> SourceImage:
    return SourceImage(data, read_header(data))


def scale(data: bytes, max_side: int, encoder: Encoder = Encoder.PNG) -> SourceImage:
    """A picture that is over the limit, scaled down."""
    small: SourceImage | None = downscale(source(data), max_side, encoder)
    assert small is not None
    return small


def opened(image: SourceImage) -> Image.Image:
    """What Pillow makes of the new bytes."""
    picture = Image.open(io.BytesIO(image.data))
    picture.load()
    return picture


def smooth(mode: str = "RGB", size: tuple[int, int] = (120, 80)) -> Image.Image:
    """A picture without sharp edges, so that a JPEG can be near to it; clear to the right, if it has alpha."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    channels = [x, y, 255 - x, 255 * (x < 130)]
    picture = Image.fromarray(np.stack(channels, -1).astype(np.uint8), "RGBA")
    return picture if mode == "RGBA" else picture.convert(mode)


def psnr(one: Image.Image, other: Image.Image) -> float:
    """How near two pictures are, in dB."""
    assert one.size == other.size
    assert one.mode == other.mode
    off = np.asarray(one).astype(float) - np.asarray(other)
    return float("inf") if not off.any() else float(10 * np.log10(255**2 / np.mean(off**2)))


# The rule


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_the_longest_edge_becomes_the_limit_and_the_other_keeps_its_share(
    height: int, width: int, max_side: int
) -> None:
    new_height, new_width = scaled_hw((height, width), max_side)

    if max(height, width) <= max_side:
        assert (new_height, new_width) == (height, width)
        return
    assert max(new_height, new_width) == max_side
    short, new_short = min(height, width), min(new_height, new_width)
    exact = short * max_side / max(height, width)
    assert abs(new_short - exact) <= 0.5 or (new_short == 1 and exact < 0.5)
    assert (new_height <= new_width) == (height <= width) or new_height == new_width


def test_the_rule_by_hand() -> None:
    assert scaled_hw((3000, 4000), 1024) == (768, 1024)
    assert scaled_hw((1080, 1920), 1000) == (563, 1000), "562.5 is rounded up"
    assert scaled_hw((1, 60_000), 1024) == (1, 1024)
    assert scaled_hw((500, 500), 501) == (500, 500)


@pytest.mark.parametrize("max_side", [0, -1, MAX_SIDE + 1])
def test_a_limit_that_no_picture_can_have_is_refused(max_side: int) -> None:
    with pytest.raises(ConfigError, match=f"max_side={max_side} must be 1 to {MAX_SIDE}"):
        check_max_side(max_side)


def test_a_limit_that_can_be_kept_is_taken() -> None:
    assert [check_max_side(1), check_max_side(MAX_SIDE)] == [1, MAX_SIDE]


# What is left alone


@pytest.mark.parametrize("size", [(120, 80), (80, 120), (120, 120), (1, 1)])
@pytest.mark.parametrize("encoder", Encoder)
def test_c26_a_picture_that_is_not_over_the_limit_is_left_as_it_is(
    size: tuple[int, int], encoder: Encoder
) -> None:
    assert downscale(source(encode(smooth(size=size), "JPEG")), 120, encoder) is None


def test_a_picture_that_stays_is_not_decoded() -> None:
    cut = encode(smooth(), "JPEG")[:-200]

    assert downscale(source(cut), 120, Encoder.PNG) is None
    with pytest.raises(BadSample) as bad:
        downscale(source(cut), 119, Encoder.PNG)
    assert bad.value.reason == Reason.IMAGE_TRUNCATED


# What is scaled


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.name)
def test_a_photograph_is_what_pillow_makes_of_it(path: Path) -> None:
    data = path.read_bytes()
    direct = Image.open(path).convert("RGB")
    size_hw = scaled_hw((direct.height, direct.width), 400)
    direct = direct.resize((size_hw[1], size_hw[0]), LANCZOS)

    exact, near = scale(data, 400), scale(data, 400, Encoder.JPEG)

    assert psnr(opened(exact), direct) == float("inf")
    assert psnr(opened(near), direct) > 36
    assert max(direct.size) == 400
    for image, ext, fmt in ((exact, "png", "PNG"), (near, "jpg", "JPEG")):
        assert image.header == ImageHeader(ext, size_hw) == read_header(image.data)
        assert opened(image).format == fmt


def test_a_jpeg_is_of_quality_95_with_colour_in_full() -> None:
    picture = opened(scale(encode(smooth(), "PNG"), 60, Encoder.JPEG))
    asked = Image.open(io.BytesIO(encode(smooth(size=(60, 40)), "JPEG", quality=95, subsampling=0)))

    assert picture.quantization == asked.quantization  # type: ignore[attr-defined]
    assert [layer[1:3] for layer in picture.layer] == [(1, 1)] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoder", Encoder)
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_kept_whatever_the_encoder(mode: str, encoder: Encoder) -> None:
    small = scale(encode(smooth(mode), "PNG"), 60, encoder)

    assert small.header.ext == "png"
    assert opened(small).tobytes() == smooth(mode).resize((60, 40), LANCZOS).tobytes()
    assert opened(small).mode == mode
    assert {0, 255} <= set(np.asarray(opened(small).getchannel("A")).flat)


@pytest.mark.parametrize(
    ("encoder", "fmt"), [(Encoder.PNG, "PNG"), (Encoder.JPEG, "JPEG")], ids=["png", "jpeg"]
)
def test_a_grey_picture_stays_grey(encoder: Encoder, fmt: str) -> None:
    picture = opened(scale(encode(smooth("L"), "JPEG", quality=100), 60, encoder))

    assert (picture.mode, picture.format, picture.size) == ("L", fmt, (60, 40))
    assert psnr(picture, smooth("L").resize((60, 40), LANCZOS)) > 40


def test_c39_a_16_bit_grey_is_scaled_by_the_stated_rule() -> None:
    ramp = np.linspace(0, 65535, 120 * 80).reshape(80, 120).astype(np.uint16)
    eight = Image.fromarray(np.rint(ramp / 257).astype(np.uint8))

    picture = opened(scale(encode(Image.fromarray(ramp), "PNG"), 60))

    assert picture.mode == "L"
    assert picture.tobytes() == eight.resize((60, 40), LANCZOS).tobytes()


@pytest.mark.parametrize("encoder", Encoder)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_c38_orientation_is_applied_and_no_longer_asked_for(orientation: int, encoder: Encoder) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encode(smooth(), "JPEG", quality=100, subsampling=0, exif=exif.tobytes())

    small = scale(data, 60, encoder)

    upright = decode_rgb(data)
    assert small.header.upright_hw == small.header.size_hw == ((40, 60) if orientation < 5 else (60, 40))
    assert "exif" not in opened(small).info
    assert psnr(opened(small), upright.resize(opened(small).size, LANCZOS)) > 40
    # An edge that is over the limit only as it is stored counts as well as one that is over it upright.
    assert downscale(source(data), 119, encoder) is not None
    assert downscale(source(data), 120, encoder) is None


@pytest.mark.parametrize("encoder", Encoder)
@pytest.mark.parametrize(("mode", "profile"), [("RGB", SRGB), ("L", GREY_PROFILE)], ids=["RGB", "grey"])
def test_a_profile_is_carried_over_and_nothing_else(mode: str, profile: bytes, encoder: Encoder) -> None:
    exif = Image.Exif()
    exif[0x010E] = "a description"
    data = encode(
        smooth(mode), "JPEG", icc_profile=profile, exif=exif.tobytes(), comment=b"a comment", dpi=(300, 300)
    )

    info = opened(scale(data, 60, encoder)).info

    assert Image.open(io.BytesIO(data)).info["comment"] == b"a comment"
    assert info.pop("icc_profile") == profile
    assert set(info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density"}


@pytest.mark.parametrize("encoder", Encoder)
def test_a_profile_for_other_colours_is_not_carried_over(encoder: Encoder) -> None:
    inks = SRGB[:16] + b"CMYK" + SRGB[20:]
    printed = encode(smooth("CMYK"), "JPEG", icc_profile=inks)
    large = encode(smooth(), "JPEG", icc_profile=SRGB + bytes(1 << 20))

    assert opened(scale(printed, 60, encoder)).mode == "RGB"
    assert "icc_profile" not in opened(scale(printed, 60, encoder)).info
    assert "icc_profile" not in opened(scale(large, 60, encoder)).info


@pytest.mark.parametrize("encoder", Encoder)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA"])
def test_the_same_picture_gives_the_same_bytes(mode: str, encoder: Encoder) -> None:
    make = partial(scale, encode(smooth(mode), "PNG", icc_profile=SRGB), 60, encoder)

    assert make() == make()


def test_a_strip_keeps_one_pixel_of_its_short_edge() -> None:
    small = scale(encode(smooth(size=(3000, 2)), "PNG"), 100)

    assert small.header.size_hw == (1, 100)


# What is recorded


def test_a_conversion_records_what_a_picture_was(tmp_path: Path) -> None:
    large, small = encode_image((40, 100), codec="JPEG"), encode_image((20, 30))
    write_t2i(tmp_path / "a.parquet", [(large, captions(0)), (small, captions(1))])
    settings = ShardSettings(max_side=50, encoder=Encoder.JPEG)

    convert_source(
        Source(kind="t2i", name="x", path=str(tmp_path / "a.parquet")),
        str(tmp_path / "out"),
        settings=settings,
    )

    with tarfile.open(tmp_path / "out" / "x-000000-000.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    media = [json.loads(members[f"a=2Eparquet-0-{row}.json"])["_bagel"]["media"] for row in range(2)]
    original = {"ext": "jpg", "width": 100, "height": 40}
    assert media[0] == [{"ext": "jpg", "width": 50, "height": 20, "original": original}]
    assert media[1] == [{"ext": "png", "width": 30, "height": 20}]
    with Image.open(io.BytesIO(members["a=2Eparquet-0-0.0.jpg"])) as picture:
        assert picture.size == (50, 20)
    assert members["a=2Eparquet-0-1.0.png"] == small
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["settings"]["max_side"], manifest["settings"]["encoder"]) == (50, "jpeg")
    with pq.ParquetFile(tmp_path / "out" / "x-000000-000.idx.parquet") as index:
        assert index.read().to_pylist()[0]["media"][0]["width"] == 50
