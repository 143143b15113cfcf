"""Position ids of image patches, in the model's square table of positions."""

from __future__ import annotations

from functools import lru_cache

import torch

from bagel_wds.geometry import patch_grid


def get_flattened_position_ids_extrapolate(
    img_h: int, img_w: int, patch_size: int, max_num_patches_per_side: int
) -> torch.Tensor:
    """Position ids of an image's patches by grid: row * side + column, int64 (rows * columns,), in raster order."""
    rows, columns = patch_grid((img_h, img_w), patch_size)
    return (torch.arange(rows)[:, None] * max_num_patches_per_side + torch.arange(columns)).flatten()


def get_flattened_position_ids_interpolate(
    img_h: int, img_w: int, patch_size: int, max_num_patches_per_side: int
) -> torch.Tensor:
    """Position ids of an image's patches, its grid stretched over the whole table: int64 (rows * columns,)."""
    rows, columns = patch_grid((img_h, img_w), patch_size)
    side = max_num_patches_per_side
    return (_stretched(rows, side)[:, None] * side + _stretched(columns, side)).flatten()


@lru_cache(maxsize=1024)
def _stretched(count: int, side: int) -> torch.Tensor:
    """Which of `side` equal buckets each of `count` patches falls into, int64 (count,).

    Both grids are float32, as upstream's are: its rounding decides at the borders of buckets.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), borders, right=True)
