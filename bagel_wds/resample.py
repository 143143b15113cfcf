"""Resize of uint8 pictures, to the values of Pillow."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from bagel_wds.config import Pixels
from bagel_wds.images import resize_levels

if TYPE_CHECKING:
    from bagel_wds.images import Levels
    from bagel_wds.scratch import Scratch


def resize(pixels: Levels, size_hw: tuple[int, int], path: Pixels) -> Levels:
    """Bicubic with antialiasing, of uint8 (H, W, 3); the very same array where the size is the same."""
    if pixels.shape[:2] == size_hw:
        return pixels
    resized = np.empty((*size_hw, 3), np.uint8)
    resize_into(pixels, resized, path)
    return resized


def resize_into(pixels: Levels, place: Levels, path: Pixels, scratch: Scratch | None = None) -> None:
    """`resize` to the size of a place, which has no gaps, and into it.

    On the exact path Pillow resizes itself, should it be another one than this module knows.
    """
    from bagel_wds import bicubic  # noqa: PLC0415 - Numba, which planning does without

    size_hw = (place.shape[0], place.shape[1])
    if pixels.shape[:2] == size_hw:
        place[:] = pixels
    elif path is Pixels.EXACT and not resizes_agree():
        place[:] = resize_levels(pixels, size_hw)
    else:
        columns_first = _pillow_starts_down((pixels.shape[0], pixels.shape[1]), size_hw)
        bicubic.resize_into(pixels, place, columns_first=columns_first, scratch=scratch)


@cache
def resizes_agree() -> bool:
    """Whether Pillow resizes as `bicubic` does, seen from a pattern: smaller, larger, at simple ratios, and in which order."""
    rows, columns = np.indices((96, 120))
    pattern = np.stack([rows * 7 + columns, columns * 5 ^ rows, (rows * columns) % 251], axis=2).astype(
        np.uint8
    )
    sizes = [(72, 90), (61, 120), (96, 77), (131, 143), (48, 240), (7, 9), (60, 102), (59, 102)]
    return all(
        np.array_equal(resize(pattern, size_hw, Pixels.FAST), resize_levels(pattern, size_hw))
        for size_hw in sizes
    )


def _pillow_starts_down(size_hw: tuple[int, int], to_hw: tuple[int, int]) -> bool:
    """Whether Pillow filters columns before rows: from version 13 on, where the height loses far more than the width."""
    (height, width), (to_height, to_width) = size_hw, to_hw
    return (
        to_width != width
        and to_height < height
        and height - to_height > 2 * (width - to_width)
        and _pillow_can_start_down()
    )


@cache
def _pillow_can_start_down() -> bool:
    """Seen from what it does to a pattern."""
    pixels = (np.arange(40 * 16 * 3) ** 2 % 251).astype(np.uint8).reshape(40, 16, 3)
    down_first = resize_levels(resize_levels(pixels, (10, 16)), (10, 15))
    return np.array_equal(resize_levels(pixels, (10, 15)), down_first)
