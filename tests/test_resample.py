"""The fast resize keeps to Pillow's: within 3 levels, on under 1 % of the values of a picture."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from bagel_wds.config import Pixels
from bagel_wds.geometry import ResizeRule
from bagel_wds.resample import kernel_keeps, resize, resize_into

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]

REAL = Path(__file__).parent / "data" / "real"


def by_pillow(pixels: Levels, size_hw: tuple[int, int]) -> Levels:
    image = Image.fromarray(pixels).resize((size_hw[1], size_hw[0]), Image.Resampling.BICUBIC)
    return np.asarray(image)


def apart(pixels: Levels, size_hw: tuple[int, int]) -> tuple[int, float]:
    """The largest difference of a value between the fast path and Pillow, and the share of values that differ."""
    fast = resize(pixels, size_hw, Pixels.FAST)
    off = np.abs(fast.astype(int) - by_pillow(pixels, size_hw))
    return int(off.max()), float((off > 0).mean())


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
def test_photographs_are_within_2_levels_on_under_1_percent(scale: float) -> None:
    found = []
    for photograph in photographs():
        # Enlarged ones start as a part, so that this takes no minutes.
        part = photograph if scale <= 1 else np.ascontiguousarray(photograph[:401, :463])
        size = (round(part.shape[0] * scale), round(part.shape[1] * scale))
        found.append(apart(part, size))

    assert max(levels for levels, _ in found) <= 2
    assert max(share for _, share in found) < 0.01
    assert sum(share for _, share in found) / len(found) < 0.004


@pytest.mark.parametrize(
    ("stride", "longest", "least"), [(16, 1024, 512), (14, 980, 378)], ids=["as the VAE's", "as the ViT's"]
)
def test_photographs_at_the_sizes_of_training_are_within_2_levels_on_under_1_percent(
    stride: int, longest: int, least: int
) -> None:
    rule = ResizeRule(max_size=longest, min_size=least, stride=stride)
    found = [
        apart(photograph, rule.size((photograph.shape[0], photograph.shape[1])))
        for photograph in photographs()
    ]

    assert max(levels for levels, _ in found) <= 2
    assert max(share for _, share in found) < 0.01


@settings(max_examples=60, deadline=None)
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
def test_noise_of_any_shape_is_within_3_levels_on_under_2_percent(
    size: tuple[int, int], to: tuple[int, int], seed: int
) -> None:
    levels, share = apart(noise(*size, seed=seed), to)

    assert levels <= 3
    # A picture of few values may have a value more; large ones keep under 1 %, as below.
    assert share < 0.02 + 3 / (to[0] * to[1] * 3)


@pytest.mark.parametrize(
    ("size", "to"),
    [
        ((900, 1203), (689, 1021)),
        ((1200, 801), (1031, 700)),
        ((750, 750), (749, 751)),
        ((601, 799), (903, 1201)),
        ((64, 2000), (47, 1500)),
        ((2000, 50), (1009, 49)),
        ((400, 400), (800, 800)),
    ],
)
def test_large_noise_is_within_3_levels_on_under_1_percent(
    size: tuple[int, int], to: tuple[int, int]
) -> None:
    levels, share = apart(noise(*size), to)

    assert levels <= 3
    assert share < 0.01


@settings(max_examples=40, deadline=None)
@given(st.integers(20, 200), st.integers(20, 200), st.integers(81, 200), st.integers(81, 200))
def test_axes_are_filtered_in_pillows_order(height: int, width: int, to_height: int, to_width: int) -> None:
    assume(kernel_keeps(height, to_height) and kernel_keeps(width, to_width))
    pixels = noise(height, width)
    both = by_pillow(pixels, (to_height, to_width))
    rows_first = by_pillow(by_pillow(pixels, (height, to_width)), (to_height, to_width))
    columns_first = by_pillow(by_pillow(pixels, (to_height, width)), (to_height, to_width))

    fast = resize(pixels, (to_height, to_width), Pixels.FAST)

    assert np.array_equal(both, rows_first) or np.array_equal(both, columns_first)
    assert (fast != both).mean() < 0.02
    # Were the order another, it would be seen: the two differ on a tenth of all values.
    other = columns_first if np.array_equal(both, rows_first) else rows_first
    if not np.array_equal(rows_first, columns_first):
        assert (fast != both).sum() <= (fast != other).sum()


@pytest.mark.parametrize(("edge", "to_edge"), [(800, 600), (360, 252), (288, 256), (320, 352)])
def test_simple_ratios_go_to_pillow(edge: int, to_edge: int) -> None:
    photograph = np.ascontiguousarray(np.resize(photographs()[0], (edge, edge, 3)))

    assert not kernel_keeps(edge, to_edge)
    assert apart(photograph, (to_edge, to_edge)) == (0, 0.0)


def test_which_edges_the_kernel_keeps() -> None:
    assert [
        kernel_keeps(*edges) for edges in ((512, 512), (512, 256), (512, 1024), (1024, 980), (801, 768))
    ] == [True] * 5
    assert not any(kernel_keeps(*edges) for edges in ((1024, 768), (1280, 1024), (512, 560), (512, 504 // 3)))


def test_exact_is_pillows_bits_and_the_same_size_the_same_array() -> None:
    photograph = photographs()[0]

    for size in ((689, 1021), (96, 64), (800, 1200)):
        assert np.array_equal(resize(photograph, size, Pixels.EXACT), by_pillow(photograph, size))
    own: Any = photograph.shape[:2]
    assert resize(photograph, own, Pixels.FAST) is photograph


@pytest.mark.parametrize(
    ("size", "to"),
    [((800, 601), (600, 523)), ((601, 800), (523, 600)), ((1200, 61), (300, 97)), ((300, 400), (293, 200))],
    ids=["height 3:4", "width 3:4", "height first", "width 1:2"],
)
def test_an_axis_that_the_kernel_cannot_keep_is_pillows_alone(
    size: tuple[int, int], to: tuple[int, int]
) -> None:
    for pixels in (noise(*size), noise(*size, seed=1)):
        levels, share = apart(pixels, to)
        assert levels <= 2
        assert share < 0.01


def test_a_resize_writes_into_its_place_alone() -> None:
    around = np.full((3, 40, 50, 3), 7, np.uint8)
    for path in Pixels:
        resize_into(noise(60, 77), around[1], path)

        assert np.array_equal(around[1], resize(noise(60, 77), (40, 50), path))
        assert (around[[0, 2]] == 7).all()
