"""Resize of uint8 pictures: by torch's kernel where it keeps to Pillow's values, else by Pillow.

Both filter one axis after the other, round to 8 bits in between, and differ in how finely they write down the weights:
a value that lies next to a half falls to one side or the other. At most pairs of edges that is 1 value in 500. At
simple ratios, such as 3:4, whole rows and columns lie on halves, and up to 1 in 25 falls apart.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
import torch

from bagel_wds.config import Pixels
from bagel_wds.images import resize_levels

if TYPE_CHECKING:
    from bagel_wds.images import Levels


def resize(pixels: Levels, size_hw: tuple[int, int], path: Pixels) -> Levels:
    """Bicubic with antialiasing, of uint8 (H, W, 3); the very same array where the size is the same.

    Not on the exact path, the result is within 3 levels of Pillow's, on under 1 % of the values of a picture.
    """
    if pixels.shape[:2] == size_hw:
        return pixels
    resized = np.empty((*size_hw, 3), np.uint8)
    resize_into(pixels, resized, path)
    return resized


def resize_into(pixels: Levels, place: Levels, path: Pixels) -> None:
    """`resize` to the size of a place, which has no gaps, and into it."""
    size_hw = (place.shape[0], place.shape[1])
    if pixels.shape[:2] == size_hw:
        place[:] = pixels
    elif path is Pixels.EXACT:
        place[:] = resize_levels(pixels, size_hw)
    else:
        for step in _steps((pixels.shape[0], pixels.shape[1]), size_hw):
            pixels = _step(pixels, step, place if step == size_hw else None)


def _steps(size_hw: tuple[int, int], to_hw: tuple[int, int]) -> list[tuple[int, int]]:
    """The sizes on the way: one where both filters can be left to the same, else an axis after the other, as Pillow."""
    by_kernel = [kernel_keeps(edge, to_edge) for edge, to_edge in zip(size_hw, to_hw, strict=True)]
    starts_down = _pillow_starts_down(size_hw, to_hw)
    if not any(by_kernel) or (all(by_kernel) and not starts_down):
        return [to_hw]
    between = (to_hw[0], size_hw[1]) if starts_down else (size_hw[0], to_hw[1])
    return [size for size in dict.fromkeys((between, to_hw)) if size != size_hw]


def _step(pixels: Levels, size_hw: tuple[int, int], place: Levels | None) -> Levels:
    height, width = pixels.shape[:2]
    if kernel_keeps(height, size_hw[0]) and kernel_keeps(width, size_hw[1]):
        return _kernel(pixels, np.empty((*size_hw, 3), np.uint8) if place is None else place)
    resized = resize_levels(pixels, size_hw)
    if place is None:
        return resized.copy()
    place[:] = resized
    return place


def kernel_keeps(edge: int, to_edge: int) -> bool:
    """Whether the kernel keeps to Pillow along an axis.

    3:4 has 3 ways in which a new pixel lies over the old ones, 245:256 has 245, whose errors even out. Measured on
    photographs and noise (tests/test_resample.py): 40 are enough to scale down, 80 to scale up, and 1 or 2, whose weights
    are round numbers, are too.
    """
    ways = to_edge // gcd(edge, to_edge)
    return edge == to_edge or ways <= 2 or ways > (40 if to_edge < edge else 80)


def _kernel(pixels: Levels, place: Levels) -> Levels:
    """Rows first, then columns; gives the place."""
    # What `torch.nn.functional.interpolate` calls, which cannot be told where to write.
    torch.ops.aten._upsample_bicubic2d_aa.out(  # noqa: SLF001 - see above
        _as_tensor(pixels), list(place.shape[:2]), align_corners=False, out=_as_tensor(place)
    )
    return place


def _as_tensor(pixels: Levels) -> torch.Tensor:
    # An array of (1, H, W, 3) is a tensor of (1, 3, H, W), channels last, without a copy. The new axis comes first: added
    # last, it hides from torch how the others lie, which costs half of the speed.
    return torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)


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
