"""Upstream's transforms of PIL images, under upstream's names: the same sizes and the same values, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torchvision import transforms as tv_transforms
from torchvision.transforms import functional

from bagel_wds.geometry import ResizeRule, divisible, scaled

T = TypeVar("T", "Image.Image", torch.Tensor)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import Image


class MaxLongEdgeMinShortEdgeResize(torch.nn.Module):
    """Resize so that the longest and shortest edges stay in bounds and both are multiples of a stride.

    Args:
        max_size: longest edge, in pixels; it wins over `min_size`.
        min_size: shortest edge, in pixels.
        stride: both edges become multiples of it.
        max_pixels: area that all images of a sample share, in pixels.
        interpolation: torchvision's; None is bicubic.
        antialias: whether to low-pass before scaling down (PIL images always are).
    """

    def __init__(
        self,
        max_size: int,
        min_size: int,
        stride: int,
        max_pixels: int,
        interpolation: tv_transforms.InterpolationMode | None = None,
        antialias: bool = True,
    ) -> None:
        super().__init__()
        self.max_size = max_size
        self.min_size = min_size
        self.stride = stride
        self.max_pixels = max_pixels
        self.interpolation = interpolation or tv_transforms.InterpolationMode.BICUBIC
        self.antialias = antialias

    def _rule(self) -> ResizeRule:
        return ResizeRule(
            max_size=self.max_size, min_size=self.min_size, stride=self.stride, max_pixels=self.max_pixels
        )

    def _make_divisible(self, value: int, stride: int) -> int:
        return divisible(value, stride)

    def _apply_scale(self, width: int, height: int, scale: float) -> tuple[int, int]:
        new_height, new_width = scaled((height, width), scale, self.stride)
        return new_width, new_height

    def forward(self, img: T, img_num: int = 1) -> T:
        """Resize one of `img_num` images that share `max_pixels`; takes a PIL image or a (..., H, W) tensor."""
        size_hw = (img.shape[-2], img.shape[-1]) if isinstance(img, torch.Tensor) else (img.height, img.width)
        resized: T = functional.resize(
            img, list(self._rule().size(size_hw, img_num)), self.interpolation, antialias=self.antialias
        )
        return resized


class ImageTransform:
    """Upstream's whole transform: resize, to tensor, normalize.

    Args:
        max_image_size, min_image_size: longest and shortest edge, in pixels.
        image_stride: both edges become multiples of it: 14 for the ViT, 16 for the VAE.
        max_pixels: area that the images of a sample share.
        image_mean, image_std: of the normalization, a value a channel.
    """

    def __init__(
        self,
        max_image_size: int,
        min_image_size: int,
        image_stride: int,
        max_pixels: int = 14 * 14 * 9 * 1024,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> None:
        self.stride = image_stride
        self.resize_transform = MaxLongEdgeMinShortEdgeResize(
            max_size=max_image_size, min_size=min_image_size, stride=image_stride, max_pixels=max_pixels
        )
        self.to_tensor_transform = tv_transforms.ToTensor()
        self.normalize_transform = tv_transforms.Normalize(mean=image_mean, std=image_std, inplace=True)

    def __call__(self, img: Image.Image, img_num: int = 1) -> torch.Tensor:
        """Transform one of `img_num` RGB images of a sample; gives float32 (3, H, W)."""
        resized = self.resize_transform(img, img_num=img_num)
        tensor: torch.Tensor = self.normalize_transform(self.to_tensor_transform(resized))
        return tensor
