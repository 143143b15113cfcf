"""The resize is Pillow's, bit for bit, on every path."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from bagel_wds import bicubic, resample
from bagel_wds.config import Pixels
from bagel_wds.geometry import ResizeRule
from bagel_wds.resample import resize, resize_into, resizes_agree
from bagel_wds.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]
    Size = tuple[int, int]

REAL = Path(__file__).parent / "data" / "real"


def by_pillow(pixels: Levels, size_hw: Size, how: Image.Resampling = Image.Resampling.BICUBIC) -> Levels:
    return np.asarray(Image.fromarray(pixels).resize((size_hw[1], size_hw[0]), how))


def apart(pixels: Levels, size_hw: Size) -> int:
    """The largest difference of a value to Pillow."""
    fast = resize(pixels, size_hw, Pixels.FAST)
    return int(np.abs(fast.astype(int) - by_pillow(pixels, size_hw)).max())


@cache
def photographs() -> list[Levels]:
    """Real photographs, large and small."""
    encoded = pq.read_table(REAL / "t2i/chunk_0.parquet")["image"].to_pylist()
    encoded += pq.read_table(REAL / "editing/seed/chunk_0.parquet")["image_list"].to_pylist()[0]
    encoded += [path.read_bytes() for path in sorted((REAL / "vlm/images").glob("*.[jp]*g"))]
    return [np.array(Image.open(io.BytesIO(data)).convert("RGB")) for data in encoded]


def noise(height: int, width: int, seed: int = 0) -> Levels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


SCALES = [0.1, 0.25, 0.37, 0.5, 0.62, 0.71, 0.75, 0.83, 0.92, 0.97, 0.99, 1.01, 1.06, 1.23, 1.5, 2.0, 2.6]


@pytest.mark.parametrize("scale", SCALES)
def test_photographs_have_pillows_values_at_every_scale(scale: float) -> None:
    found = []
    for photograph in photographs():
        # Enlarged ones start as a part, so that this takes no minutes.
        part = photograph if scale <= 1 else np.ascontiguousarray(photograph[:401, :463])
        size = (round(part.shape[0] * scale), round(part.shape[1] * scale))
        found.append(apart(part, size))

    assert len(found) >= 10
    assert found == [0] * len(found)


@pytest.mark.parametrize(
    ("stride", "longest", "least"), [(16, 1024, 512), (14, 980, 378)], ids=["as the VAE's", "as the ViT's"]
)
def test_photographs_have_pillows_values_at_the_sizes_of_training(
    stride: int, longest: int, least: int
) -> None:
    rule = ResizeRule(max_size=longest, min_size=least, stride=stride)
    found = [
        apart(photograph, rule.size((photograph.shape[0], photograph.shape[1])))
        for photograph in photographs()
    ]

    assert found == [0] * len(found)


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.integers(0, 3),
)
@example((300, 4), (3, 300), 0)
@example((1, 1), (97, 89), 0)
@example((300, 300), (299, 301), 1)
@example((299, 300), (283, 300), 1)
@example((300, 60), (97, 61), 2)
@example((2, 3), (12, 7), 0)
@example((5, 1), (3, 12), 0)
def test_noise_of_any_shape_has_pillows_values(size: Size, to: Size, seed: int) -> None:
    assert apart(noise(*size, seed=seed), to) == 0


# The compiled loops take 64 rows at once.
@pytest.mark.parametrize("height", [63, 64, 65, 127, 129])
def test_pictures_of_about_64_rows_have_pillows_values(height: int) -> None:
    sizes = [(to_height, to_width) for to_height in (1, 63, 64, 65, 131) for to_width in (20, 50, 77)]

    assert [apart(noise(height, 50), to) for to in sizes] == [0] * len(sizes)


@pytest.mark.parametrize(
    ("size", "to"),
    [
        ((1, 1), (1, 2)),
        ((1, 2), (2, 1)),
        ((1, 5000), (1, 63)),
        ((5000, 1), (63, 1)),
        ((1, 5000), (65, 4999)),
        ((5000, 1), (4999, 65)),
        ((2, 3000), (700, 30)),
        ((3000, 2), (30, 700)),
        ((64, 2000), (47, 1500)),
        ((2000, 50), (1009, 49)),
        ((3000, 2900), (30, 29)),
        ((2003, 70), (20, 70)),
        ((70, 2003), (70, 20)),
        ((30, 40), (600, 800)),
        ((31, 37), (620, 37)),
        ((31, 37), (31, 740)),
        ((900, 1203), (689, 1021)),
        ((750, 750), (749, 751)),
        ((601, 799), (903, 1201)),
    ],
    ids=lambda size: "x".join(map(str, size)),
)
def test_pictures_of_extreme_sides_and_scales_have_pillows_values(size: Size, to: Size) -> None:
    assert apart(noise(*size), to) == 0


@pytest.mark.parametrize(
    ("edge", "to_edge"),
    [
        (400, 300),
        (300, 400),
        (400, 320),
        (320, 400),
        (400, 200),
        (200, 400),
        (360, 252),
        (288, 256),
        (320, 352),
    ],
)
def test_simple_ratios_have_pillows_values_along_either_axis_and_both(edge: int, to_edge: int) -> None:
    photograph = photographs()[0]
    tall, wide = photograph[:edge, :200], photograph[:200, :edge]
    whole = np.ascontiguousarray(np.resize(photograph, (edge, edge, 3)))

    assert apart(tall, (to_edge, 200)) == 0
    assert apart(wide, (200, to_edge)) == 0
    assert apart(tall, (to_edge, 150)) == 0
    assert apart(whole, (to_edge, to_edge)) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.integers(40, 150),
    st.integers(10, 150),
    st.integers(-40, 40).filter(bool),
    st.integers(-3, 3),
)
def test_axes_are_filtered_in_pillows_order_on_both_sides_of_where_it_turns(
    height: int, width: int, lost: int, beside: int
) -> None:
    # From version 13 on Pillow starts with the columns where the height loses over twice as much as the width.
    to = (max(1, height - 2 * lost + beside), max(1, width - lost))

    assert apart(noise(height, width), to) == 0


def test_which_axis_comes_first_shows_in_the_values() -> None:
    pixels = noise(90, 100)
    rows_first = by_pillow(by_pillow(pixels, (90, 61)), (47, 61))
    columns_first = by_pillow(by_pillow(pixels, (47, 100)), (47, 61))

    assert (rows_first != columns_first).mean() > 0.05


@pytest.mark.parametrize("path", Pixels)
def test_every_path_has_pillows_values_and_the_same_size_is_the_same_array(path: Pixels) -> None:
    photograph = photographs()[0]

    for size in ((689, 1021), (96, 64), (800, 1200)):
        assert np.array_equal(resize(photograph, size, path), by_pillow(photograph, size))
    own: Any = photograph.shape[:2]
    assert resize(photograph, own, path) is photograph


@pytest.mark.parametrize("path", Pixels)
@pytest.mark.parametrize("size", [(60, 77), (60, 50), (40, 77), (40, 50)])
def test_a_resize_writes_into_its_place_alone(size: Size, path: Pixels) -> None:
    around = np.full((3, 40, 50, 3), 7, np.uint8)
    resize_into(noise(*size), around[1], path)

    assert np.array_equal(around[1], by_pillow(noise(*size), (40, 50)))
    assert (around[[0, 2]] == 7).all()


def test_one_memory_serves_picture_after_picture() -> None:
    scratch = Scratch()
    sizes = [((300, 200), (150, 260)), ((7, 9), (64, 65)), ((100, 301), (99, 77)), ((300, 200), (20, 30))]

    for seed, (size, to) in enumerate(sizes * 2):
        place = np.empty((*to, 3), np.uint8)
        resize_into(noise(*size, seed=seed), place, Pixels.FAST, scratch)
        assert np.array_equal(place, by_pillow(noise(*size, seed=seed), to))


# Another Pillow


def test_pillow_here_resizes_as_we_do() -> None:
    assert resizes_agree()


def with_one_level_off(pixels: Levels, size_hw: Size) -> Levels:
    resized = by_pillow(pixels, size_hw).copy()
    resized[-1, -1, -1] ^= 1
    return resized


def always_the_columns_first(pixels: Levels, size_hw: Size) -> Levels:
    return by_pillow(by_pillow(pixels, (size_hw[0], pixels.shape[1])), size_hw)


def always_the_rows_first(pixels: Levels, size_hw: Size) -> Levels:
    return by_pillow(by_pillow(pixels, (pixels.shape[0], size_hw[1])), size_hw)


def rounded_once(pixels: Levels, size_hw: Size) -> Levels:
    bands = [
        np.asarray(band.convert("F").resize((size_hw[1], size_hw[0]), Image.Resampling.BICUBIC))
        for band in Image.fromarray(pixels).split()
    ]
    rounded: Levels = np.clip(np.rint(np.stack(bands, axis=2)), 0, 255).astype(np.uint8)
    return rounded


OTHER_PILLOWS: dict[str, Callable[[Levels, Size], Levels]] = {
    "another filter": lambda pixels, size_hw: by_pillow(pixels, size_hw, Image.Resampling.LANCZOS),
    "one level off": with_one_level_off,
    "rounded once": rounded_once,
    "always the columns first": always_the_columns_first,
}


def ask_again(monkeypatch: pytest.MonkeyPatch, resize_levels: Callable[[Levels, Size], Levels]) -> bool:
    """`resizes_agree`, were this Pillow's resize; what is asked once a process is asked again."""
    monkeypatch.setattr(resample, "resize_levels", resize_levels)
    monkeypatch.setattr(resample, "_pillow_can_start_down", resample._pillow_can_start_down.__wrapped__)
    return resizes_agree.__wrapped__()


@pytest.mark.parametrize("other", OTHER_PILLOWS.values(), ids=OTHER_PILLOWS)
def test_another_pillow_is_noticed_from_its_values(
    monkeypatch: pytest.MonkeyPatch, other: Callable[[Levels, Size], Levels]
) -> None:
    assert not ask_again(monkeypatch, other)


@pytest.mark.parametrize("known", [by_pillow, always_the_rows_first], ids=["this one", "before 13"])
def test_the_pillows_that_are_known_agree(
    monkeypatch: pytest.MonkeyPatch, known: Callable[[Levels, Size], Levels]
) -> None:
    assert ask_again(monkeypatch, known)
    # Its order of the axes is followed.
    pixels = noise(90, 20)
    assert np.array_equal(resize(pixels, (30, 19), Pixels.EXACT), known(pixels, (30, 19)))


def test_where_the_two_do_not_agree_the_exact_path_is_pillows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def black(pixels: Levels, place: Levels, **_: Any) -> None:
        place[:] = 0

    monkeypatch.setattr(resample, "resizes_agree", lambda: False)
    monkeypatch.setattr(bicubic, "resize_into", black)
    pixels, size = noise(60, 77), (40, 50)

    assert np.array_equal(resize(pixels, size, Pixels.EXACT), by_pillow(pixels, size))
    assert not resize(pixels, size, Pixels.FAST).any()
