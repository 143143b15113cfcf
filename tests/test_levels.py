"""The fast decoder gives Pillow's pixels and Pillow's verdicts; the draft says how far it is from them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from PIL import Image
from strategies import damaged

from bagel_wds import images, jpeg
from bagel_wds.config import Pixels
from bagel_wds.errors import BadSample, Reason
from bagel_wds.images import DecodedImage, EncodedImage, decode_rgb, decoders_agree, read_header
from bagel_wds.resample import resize
from bagel_wds.scratch import Scratch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]

REAL = Path(__file__).parent / "data" / "real"


def encode(image: Image.Image, fmt: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def smooth(mode: str = "RGB", size: tuple[int, int] = (83, 61), seed: int = 0) -> Image.Image:
    """Colours that flow into one another, so that each way to write chroma shows."""
    rough = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC).convert(mode)


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(smooth(), exif=exif.tobytes(), quality=90)


JPEGS = {
    "4:4:4": encode(smooth(), subsampling=0),
    "4:2:2": encode(smooth(), subsampling=1),
    "4:2:0": encode(smooth(), subsampling=2),
    "quality 100": encode(smooth(), quality=100),
    "quality 5": encode(smooth(), quality=5),
    "progressive": encode(smooth(), progressive=True),
    "optimized": encode(smooth(), optimize=True),
    "restarts": encode(smooth(), restart_marker_blocks=3),
    "grey": encode(smooth("L")),
    "four colours": encode(smooth("CMYK")),
    "RGB as it is": encode(smooth(), keep_rgb=True),
    "one pixel": encode(smooth(size=(1, 1))),
    "a line": encode(smooth(size=(300, 1))),
    "a column": encode(smooth(size=(1, 300))),
    "bytes behind": encode(smooth()) + b"\0" * 99,
    "two pictures": encode(smooth(), "MPO", save_all=True, append_images=[smooth(seed=1)]),
    **{f"orientation {number}": oriented(number) for number in range(1, 9)},
}
OTHERS = {
    "PNG": encode(smooth(), "PNG"),
    "PNG with alpha": encode(smooth("RGBA"), "PNG"),
    "WebP": encode(smooth(), "WEBP"),
    "GIF": encode(smooth("P"), "GIF"),
    "16-bit grey": encode(
        Image.fromarray(np.arange(0, 65536, 64, dtype=np.uint32).astype(np.uint16).reshape(32, 32)), "PNG"
    ),
}
BOTH = {**JPEGS, **OTHERS}


@pytest.mark.parametrize("path", [Pixels.FAST, Pixels.EXACT])
@pytest.mark.parametrize("data", BOTH.values(), ids=BOTH)
def test_levels_are_pillows(data: bytes, path: Pixels) -> None:
    levels = EncodedImage(data).levels(path, (1, 1))

    assert np.array_equal(levels, np.asarray(decode_rgb(data)))
    assert levels.dtype == np.uint8
    assert levels.flags.c_contiguous
    assert levels.flags.writeable
    assert levels.shape[:2] == EncodedImage(data).size_hw


def test_levels_of_photographs_are_pillows() -> None:
    encoded = [
        *pq.read_table(REAL / "t2i/chunk_0.parquet")["image"].to_pylist(),
        *(path.read_bytes() for path in sorted((REAL / "vlm/images").glob("*.jpg"))),
    ]

    assert len(encoded) >= 9
    for data in encoded:
        assert np.array_equal(EncodedImage(data).levels(Pixels.FAST, (1, 1)), np.asarray(decode_rgb(data)))
        assert np.array_equal(EncodedImage(data).levels(Pixels.EXACT, (1, 1)), np.asarray(decode_rgb(data)))


def test_the_decoders_of_this_machine_agree() -> None:
    assert decoders_agree()


def test_where_they_do_not_exact_levels_are_decoded_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    monkeypatch.setattr(images, "decoders_agree", lambda: False)
    monkeypatch.setattr(jpeg, "decode", lambda data, size_hw, memory: decoded.append(size_hw))
    levels = EncodedImage(JPEGS["4:2:0"]).levels(Pixels.EXACT, (1, 1))

    assert not decoded
    assert np.array_equal(levels, np.asarray(decode_rgb(JPEGS["4:2:0"])))
    # So that the check above can fail.
    EncodedImage(JPEGS["4:2:0"]).levels(Pixels.FAST, (1, 1))
    assert decoded == [(61, 83)]


@pytest.mark.parametrize("path", Pixels)
def test_one_memory_serves_picture_after_picture(path: Pixels) -> None:
    scratch = Scratch()
    # Small ones after large ones, and turned ones in between.
    for data in [*BOTH.values(), *reversed(BOTH.values()), encode(smooth(size=(700, 500)))]:
        wanted = EncodedImage(data).size_hw
        levels = EncodedImage(data).levels(path, wanted, scratch)
        assert np.array_equal(levels, np.asarray(decode_rgb(data)))
        assert levels.flags.c_contiguous


def test_levels_of_a_jpeg_lie_in_the_memory_given_until_the_next_picture() -> None:
    scratch, data = Scratch(), JPEGS["4:4:4"]
    first = EncodedImage(data).levels(Pixels.FAST, (1, 1), scratch)
    again = EncodedImage(data).levels(Pixels.FAST, (1, 1), scratch)
    alone = EncodedImage(data).levels(Pixels.FAST, (1, 1))

    assert np.shares_memory(first, again)
    assert not np.shares_memory(alone, EncodedImage(data).levels(Pixels.FAST, (1, 1)))
    assert np.array_equal(first, alone)


def test_a_cut_jpeg_leaves_memory_that_serves_the_next_picture() -> None:
    scratch, whole = Scratch(), JPEGS["4:2:0"]
    for share in (0.3, 0.9):
        with pytest.raises(BadSample):
            EncodedImage(whole[: int(len(whole) * share)]).levels(Pixels.FAST, (1, 1), scratch)

        levels = EncodedImage(whole).levels(Pixels.FAST, (1, 1), scratch)
        assert np.array_equal(levels, np.asarray(decode_rgb(whole)))


def test_a_picture_as_upstream_has_it_is_left_to_pillow() -> None:
    picture = EncodedImage(oriented(6), upright=False)
    cut = EncodedImage(JPEGS["4:2:0"][:-200], upright=False)

    for path in Pixels:
        assert np.array_equal(picture.levels(path, (1, 1)), np.asarray(picture.rgb()))
        assert cut.levels(path, (1, 1)).shape == (61, 83, 3)


def verdict(picture: EncodedImage, path: Pixels | None) -> tuple[Reason, str] | bytes:
    """The pixels on a path, or why there are none; None asks Pillow alone."""
    try:
        return picture.rgb().tobytes() if path is None else picture.levels(path, (1, 1)).tobytes()
    except BadSample as bad:
        return bad.reason, bad.detail


@pytest.mark.parametrize("name", ["4:2:0", "progressive", "restarts", "grey", "orientation 6"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
def test_c41_a_cut_jpeg_is_refused_as_pillow_refuses_it(name: str, share: float) -> None:
    data = JPEGS[name]
    picture = EncodedImage(data[: int(len(data) * share)])

    for path in Pixels:
        assert verdict(picture, path) == verdict(picture, None)
    if share < 0.99:
        assert verdict(picture, Pixels.FAST)[0] in (Reason.IMAGE_TRUNCATED, Reason.IMAGE_UNREADABLE)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300, deadline=None)
@given(damaged(list(JPEGS.values())))
def test_a_damaged_jpeg_has_pillows_pixels_or_pillows_verdict(data: bytes) -> None:
    picture = EncodedImage(data)

    assert verdict(picture, Pixels.FAST) == verdict(picture, Pixels.EXACT) == verdict(picture, None)


@pytest.mark.parametrize("path", Pixels)
def test_pixels_of_another_size_than_planned_are_refused(path: Pixels) -> None:
    header = read_header(JPEGS["a line"])
    lying = EncodedImage(JPEGS["4:2:0"], header=header)

    with pytest.raises(BadSample) as bad:
        lying.levels(path, (1, 1))
    assert bad.value.reason == Reason.IMAGE_UNREADABLE
    assert "planned as" in bad.value.detail


def test_an_image_that_was_decoded_early_has_its_levels() -> None:
    picture = DecodedImage(smooth())

    for path in Pixels:
        assert np.array_equal(picture.levels(path, (1, 1)), np.asarray(smooth()))


# The draft


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((61, 83), (61, 83)),
        ((32, 42), (61, 83)),
        ((31, 42), (31, 42)),
        ((16, 42), (31, 42)),
        ((16, 21), (16, 21)),
        ((8, 11), (8, 11)),
        ((1, 1), (8, 11)),
    ],
)
def test_a_draft_is_the_smallest_that_has_the_wanted_edges(
    wanted: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert EncodedImage(JPEGS["4:2:0"]).levels(Pixels.DRAFT, wanted).shape[:2] == expected


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_draft_is_turned_upright(orientation: int) -> None:
    data = oriented(orientation)
    wanted = (31, 42) if orientation <= 4 else (42, 31)
    draft = EncodedImage(data).levels(Pixels.DRAFT, wanted)
    small = decode_rgb(data).resize((wanted[1], wanted[0]), Image.Resampling.BOX)

    assert draft.shape[:2] == wanted
    assert np.abs(draft.astype(int) - np.asarray(small)).mean() < 12


def test_a_draft_of_what_is_no_jpeg_is_the_whole_picture() -> None:
    for data in OTHERS.values():
        assert np.array_equal(EncodedImage(data).levels(Pixels.DRAFT, (4, 4)), np.asarray(decode_rgb(data)))


def psnr(one: Levels, other: Levels) -> float:
    error = np.mean((one.astype(float) - other.astype(float)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.mark.parametrize(("times", "least", "median"), [(2, 27, 39), (4, 28, 35), (8, 22, 29)])
def test_psnr_of_the_draft_of_photographs(times: int, least: float, median: float) -> None:
    encoded = [
        *pq.read_table(REAL / "t2i/chunk_0.parquet")["image"].to_pylist(),
        *pq.read_table(REAL / "t2i/chunk_1.parquet")["image"].to_pylist(),
        *(path.read_bytes() for path in sorted((REAL / "vlm/images").glob("*.jpg"))),
    ]
    found = []
    for data in encoded:
        picture = EncodedImage(data)
        if read_header(data).ext != "jpg":
            continue
        wanted = (picture.size_hw[0] // times, picture.size_hw[1] // times)
        exact, draft = (
            resize(picture.levels(path, wanted), wanted, path) for path in (Pixels.EXACT, Pixels.DRAFT)
        )
        found.append(psnr(draft, exact))

    assert len(found) == 12
    assert min(found) > least
    assert np.median(found) > median
