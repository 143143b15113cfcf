"""Sizes of images and patch grids: integers in, integers out, height first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ResizeRule:
    """How large an image becomes before it is cut into patches.

    Attributes:
        max_size: the longest edge, in pixels. It wins over `min_size`.
        min_size: the shortest edge, in pixels.
        stride: both edges become multiples of it, in pixels.
        max_pixels: area, in pixels, that all images of a sample share.
    """

    max_size: int
    min_size: int
    stride: int
    max_pixels: int = 14 * 14 * 9 * 1024

    def size(self, size_hw: tuple[int, int], img_num: int = 1) -> tuple[int, int]:
        """Height and width after the resize.

        The rule is upstream's (its proof is `tests/golden/resize`): the long edge is brought down to `max_size`,
        the short edge up to `min_size`; an area over `max_pixels / img_num` is scaled by the ratio of the areas
        (not its root, so the result is smaller than allowed); last, the long edge is brought down again.

        Args:
            size_hw: height and width of the image, in pixels.
            img_num: how many images of the sample share `max_pixels`.
        """
        height, width = size_hw
        scale = min(self.max_size / max(width, height), 1.0)
        scale = max(scale, self.min_size / min(width, height))
        height, width = scaled((height, width), scale, self.stride)
        if width * height > self.max_pixels / img_num:
            height, width = scaled((height, width), self.max_pixels / img_num / (width * height), self.stride)
        if max(height, width) > self.max_size:
            height, width = scaled((height, width), self.max_size / max(width, height), self.stride)
        return height, width

    def largest_edge(self) -> int:
        """The longest edge, in pixels, that `size` can return."""
        return divisible(self.max_size, self.stride)


def scaled(size_hw: tuple[int, int], scale: float, stride: int) -> tuple[int, int]:
    """Both edges times `scale`, rounded half to even, then made divisible by `stride`."""
    height, width = size_hw
    return divisible(round(height * scale), stride), divisible(round(width * scale), stride)


def divisible(edge: int, stride: int) -> int:
    """The multiple of `stride` nearest to an edge, at least one stride."""
    return max(stride, round(edge / stride) * stride)


def patch_grid(size_hw: tuple[int, int], patch: int) -> tuple[int, int]:
    """Rows and columns of patches in an image whose edges `patch` divides."""
    return size_hw[0] // patch, size_hw[1] // patch
