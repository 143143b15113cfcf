"""Pixels of an image as the float tensor that the model takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import Image


def to_tensor(image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """The normalized pixels of an RGB image: (value / 255 - mean) / std, float32 of shape (3, H, W)."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)
    return pixels.sub_(torch.tensor(mean).view(3, 1, 1)).div_(torch.tensor(std).view(3, 1, 1))


def patchify(image: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cut an image (C, H, W) into patches (H/p * W/p, p*p*C): raster order; inside, row, column, channel.

    Raises:
        AssertionError: if `patch_size` does not divide both edges (upstream's error).
    """
    channels, height, width = image.shape
    if height % patch_size or width % patch_size:
        raise AssertionError(f"patch_size={patch_size} does not divide an image of {height}x{width}")
    grid = image.reshape(channels, height // patch_size, patch_size, width // patch_size, patch_size)
    # (C, rows, p, columns, p) -> (rows, columns, p, p, C)
    return grid.permute(1, 3, 2, 4, 0).reshape(-1, patch_size * patch_size * channels)
