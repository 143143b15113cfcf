"""Sizes of images after the resize: within their bounds, whole patches, for every picture there is."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagel_wds.geometry import ResizeRule, divisible, patch_grid

edges = st.one_of(st.integers(1, 3000), st.sampled_from([1, 2, 60_000, 65_535]))


@settings(max_examples=500, deadline=None)
@given(
    height=edges,
    width=edges,
    max_size=st.integers(1, 2000),
    min_size=st.integers(1, 2000),
    stride=st.sampled_from([1, 14, 16, 32]),
    max_pixels=st.sampled_from([1, 10_000, 14 * 14 * 9 * 1024]),
    images=st.integers(1, 20),
)
@example(
    height=60_000, width=1, max_size=1024, min_size=512, stride=16, max_pixels=14 * 14 * 9 * 1024, images=1
)
@example(height=1, width=1, max_size=1003, min_size=1003, stride=16, max_pixels=14 * 14 * 9 * 1024, images=1)
def test_c49_every_edge_is_a_multiple_of_the_stride_and_none_is_above_the_largest(
    height: int, width: int, max_size: int, min_size: int, stride: int, max_pixels: int, images: int
) -> None:
    rule = ResizeRule(max_size=max_size, min_size=min_size, stride=stride, max_pixels=max_pixels)
    size = rule.size((height, width), images)

    assert all(edge % stride == 0 and edge >= stride for edge in size)
    assert max(size) <= rule.largest_edge()
    rows, columns = patch_grid(size, stride)
    assert (rows * stride, columns * stride) == size


@pytest.mark.parametrize(
    ("size_hw", "expected"),
    [
        ((40, 4000), (16, 1024)),
        ((4000, 40), (1024, 16)),
        ((1024, 1024), (1024, 1024)),
        ((1, 1025), (16, 1024)),
    ],
)
def test_c49_odd_pictures_literally(size_hw: tuple[int, int], expected: tuple[int, int]) -> None:
    assert ResizeRule(max_size=1024, min_size=512, stride=16).size(size_hw) == expected


def test_height_comes_first() -> None:
    rule = ResizeRule(max_size=1024, min_size=512, stride=16)

    assert rule.size((512, 1024)) == (512, 1024)
    assert rule.size((1024, 512)) == (1024, 512)
    assert patch_grid((512, 1024), 16) == (32, 64)


def test_an_edge_becomes_the_nearest_multiple_and_at_least_one() -> None:
    assert [divisible(edge, 16) for edge in (1, 7, 8, 23, 24, 25, 40, 1000)] == [
        16,
        16,
        16,
        16,
        32,
        32,
        32,
        992,
    ]
