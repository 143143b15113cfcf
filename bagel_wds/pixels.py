"""Pixels as the floats that the model takes, and as the levels that they are made of.

The float of a level is `(level / 255 - mean) / std`, of which a channel has 256: they are computed once, and looked up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bagel_wds.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from PIL import Image

    from bagel_wds.shared_blocks import SharedBlocks

    Levels = NDArray[np.uint8]
    Floats = NDArray[np.float32]


def to_tensor(image: Image.Image | Levels, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """The normalized pixels of an RGB image: (value / 255 - mean) / std, float32 of shape (3, H, W)."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)
    return pixels.sub_(torch.tensor(mean).view(3, 1, 1)).div_(torch.tensor(std).view(3, 1, 1))


def patchify(image: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cut an image (C, H, W) into patches (H/p * W/p, p*p*C): raster order; inside, row, column, channel.

    Raises:
        AssertionError: if `patch_size` does not divide both edges (upstream's error).
    """
    channels, height, width = image.shape
    _check_divides(patch_size, (height, width))
    grid = image.reshape(channels, height // patch_size, patch_size, width // patch_size, patch_size)
    # (C, rows, p, columns, p) -> (rows, columns, p, p, C)
    return grid.permute(1, 3, 2, 4, 0).reshape(-1, patch_size * patch_size * channels)


def _check_divides(patch_size: int, size_hw: tuple[int, int]) -> None:
    height, width = size_hw
    if height % patch_size or width % patch_size:
        raise AssertionError(f"patch_size={patch_size} does not divide an image of {height}x{width}")


@cache
def float_table(mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """What each level becomes, float32 (3, 256), a row a channel: the bits of `to_tensor`."""
    every_level = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(3, axis=2)
    return to_tensor(every_level, mean, std)[:, 0]


@dataclass(frozen=True)
class Shown:
    """One picture of a pack.

    Attributes:
        levels: uint8 (H, W, 3).
        table: what they become, see `float_table`.
    """

    levels: Levels
    table: torch.Tensor

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width, in pixels."""
        return self.levels.shape[0], self.levels.shape[1]


@dataclass(frozen=True)
class PackedPixels:
    """The pixels of a pack as levels, and what is needed to make upstream's floats of them, on any device.

    Attributes:
        levels: uint8 (values,): the VAE's pictures, then the ViT's, each row, column, channel.
        tables: float32 (tables, 3, 256).
        vae_sizes, vit_sizes: height and width of each picture, in pixels.
        vae_tables, vit_tables: which table each picture has.
        vit_patch: pixels a ViT patch, along each edge.
    """

    levels: torch.Tensor
    tables: torch.Tensor
    vae_sizes: tuple[tuple[int, int], ...]
    vit_sizes: tuple[tuple[int, int], ...]
    vae_tables: tuple[int, ...]
    vit_tables: tuple[int, ...]
    vit_patch: int

    def map_values(self, kind: type[Any], change: Callable[[Any], Any]) -> PackedPixels:
        """The same with its tensors changed, if they are of this kind: moved to a device, or to pinned memory."""
        changed = {
            name: change(value)
            for name in ("levels", "tables")
            if isinstance(value := getattr(self, name), kind)
        }
        return replace(self, **changed)

    def finish(self) -> dict[str, torch.Tensor]:
        """`padded_images` and `packed_vit_tokens`, those that there are, where the levels are; see `write_pixels`."""
        pictures = list(self._pictures())
        vae, vit = pictures[: len(self.vae_sizes)], pictures[len(self.vae_sizes) :]
        if self.levels.device.type == "cpu":
            return write_pixels(_on_cpu(vae), _on_cpu(vit), self.vit_patch)
        return gather_pixels(vae, vit, self.vit_patch)

    def _pictures(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for (height, width), number in zip(
            self.vae_sizes + self.vit_sizes, self.vae_tables + self.vit_tables, strict=True
        ):
            end = start + height * width * 3
            yield self.levels[start:end].view(height, width, 3), self.tables[number]
            start = end


@dataclass(frozen=True, eq=False)
class ReadyImage:
    """A picture of a sample that came with its floats, as a dataset class of upstream's kind makes them.

    Attributes:
        tensor: float32 (3, H, W), normalized.
    """

    tensor: torch.Tensor

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width, in pixels."""
        return self.tensor.shape[1], self.tensor.shape[2]

    @property
    def num_bytes(self) -> int:
        """Size of the floats, in bytes."""
        return self.tensor.nbytes

    def floats(self) -> Floats:
        """The floats (3, H, W), as NumPy's."""
        floats: Floats = self.tensor.detach().to(torch.float32).numpy()
        return floats


def allot(
    sizes: Sequence[tuple[int, int]], buffers: Buffers | SharedBlocks | None = None
) -> tuple[torch.Tensor, list[Levels]]:
    """Memory for pictures of these heights and widths, one after another: all of it flat, and the place of each."""
    ends = list(accumulate(height * width * 3 for height, width in sizes))
    levels = (buffers or Buffers()).empty((ends[-1] if ends else 0,), torch.uint8)
    flat = levels.numpy()
    starts = [0, *ends]
    return levels, [
        flat[start:end].reshape(*size, 3) for start, end, size in zip(starts, ends, sizes, strict=False)
    ]


def joined(pictures: Sequence[Shown]) -> torch.Tensor:
    """The levels of pictures, flat, one after another."""
    return torch.from_numpy(np.concatenate([picture.levels.reshape(-1) for picture in pictures]))


def pack_pixels(
    levels: torch.Tensor, vae: Sequence[Shown], vit: Sequence[Shown], vit_patch: int
) -> PackedPixels:
    """The pictures of a pack, whose levels are those given, as they travel."""
    tables = list({id(picture.table): picture.table for picture in (*vae, *vit)}.values())
    number_of = {id(table): number for number, table in enumerate(tables)}
    return PackedPixels(
        levels=levels,
        tables=torch.stack(tables),
        vae_sizes=tuple(picture.size_hw for picture in vae),
        vit_sizes=tuple(picture.size_hw for picture in vit),
        vae_tables=tuple(number_of[id(picture.table)] for picture in vae),
        vit_tables=tuple(number_of[id(picture.table)] for picture in vit),
        vit_patch=vit_patch,
    )


def write_pixels(
    vae: Sequence[Shown | ReadyImage],
    vit: Sequence[Shown | ReadyImage],
    vit_patch: int,
    buffers: Buffers | SharedBlocks | None = None,
) -> dict[str, torch.Tensor]:
    """The floats of a pack's pictures, in memory of these buffers, else in fresh one.

    Returns:
        `padded_images`: float32 (count, 3, largest H, largest W), 0 outside of each picture, where there is a VAE picture;
        `packed_vit_tokens`: float32 (patches, p*p*3), as `patchify` gives them, where there is a ViT picture.

    Raises:
        AssertionError: as `patchify`.
    """
    buffers = buffers or Buffers()
    batch = {}
    if vae:
        batch["padded_images"] = _padded(vae, buffers)
    if vit:
        batch["packed_vit_tokens"] = _patches(vit, vit_patch, buffers)
    return batch


def _on_cpu(pictures: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Shown]:
    return [Shown(levels.numpy(), table) for levels, table in pictures]


def _padded(pictures: Sequence[Shown | ReadyImage], buffers: Buffers | SharedBlocks) -> torch.Tensor:
    from bagel_wds import lookup  # noqa: PLC0415 - Numba takes 0.2 s, and is not needed to build a dataset

    height = max(picture.size_hw[0] for picture in pictures)
    width = max(picture.size_hw[1] for picture in pictures)
    padded = buffers.empty((len(pictures), 3, height, width), torch.float32, "vae")
    for place, picture in zip(padded.numpy(), pictures, strict=True):
        rows, columns = picture.size_hw
        if isinstance(picture, ReadyImage):
            place[:, :rows, :columns] = picture.floats()
        else:
            lookup.write_channels(picture.levels, picture.table.numpy(), place[:, :rows, :columns])
        place[:, rows:] = 0
        place[:, :rows, columns:] = 0
    return padded


def _patches(
    pictures: Sequence[Shown | ReadyImage], patch: int, buffers: Buffers | SharedBlocks
) -> torch.Tensor:
    from bagel_wds import lookup  # noqa: PLC0415 - as above

    for picture in pictures:
        _check_divides(patch, picture.size_hw)
    counts = [(picture.size_hw[0] // patch) * (picture.size_hw[1] // patch) for picture in pictures]
    patches = buffers.empty((sum(counts), patch * patch * 3), torch.float32, "vit")
    places: Floats = patches.numpy()
    start = 0
    for picture, count in zip(pictures, counts, strict=True):
        place = places[start : start + count]
        if isinstance(picture, ReadyImage):
            place[:] = patchify(torch.from_numpy(picture.floats()), patch).numpy()
        else:
            lookup.write_patches(picture.levels, picture.table.numpy(), patch, place)
        start += count
    return patches


def gather_pixels(
    vae: Sequence[tuple[torch.Tensor, torch.Tensor]],
    vit: Sequence[tuple[torch.Tensor, torch.Tensor]],
    vit_patch: int,
) -> dict[str, torch.Tensor]:
    """What `write_pixels` gives, by operations that every device has."""
    batch = {}
    if vae:
        height = max(levels.shape[0] for levels, _ in vae)
        width = max(levels.shape[1] for levels, _ in vae)
        padded = torch.zeros((len(vae), 3, height, width), device=vae[0][0].device)
        for place, (levels, table) in zip(padded, vae, strict=True):
            place[:, : levels.shape[0], : levels.shape[1]] = _gather(levels, table)
        batch["padded_images"] = padded
    if vit:
        batch["packed_vit_tokens"] = torch.cat(
            [patchify(_gather(levels, table), vit_patch) for levels, table in vit]
        )
    return batch


def _gather(levels: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Levels (H, W, 3) looked up: (3, H, W)."""
    shift = torch.tensor([0, 256, 512], dtype=torch.int32, device=levels.device)
    index = levels.to(torch.int32) + shift
    return table.reshape(-1).index_select(0, index.view(-1)).view(levels.shape).permute(2, 0, 1)
