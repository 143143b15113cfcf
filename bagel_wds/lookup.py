"""Levels looked up in a table of 256 floats a channel, written where the model takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bagel_wds.jit import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]
    Floats = NDArray[np.float32]
    Line = tuple[np.float32, np.float32]


@compiled
def write_channels(levels: Levels, table: Floats, place: Floats) -> None:
    """Levels (H, W, 3) by a table (3, 256) into a place (3, H, W)."""
    for y in range(levels.shape[0]):
        row = levels[y]
        for channel in range(3):
            floats = table[channel]
            target = place[channel, y]
            for x in range(levels.shape[1]):
                target[x] = floats[row[x, channel]]


def write_patches(levels: Levels, table: Floats, patch: int, place: Floats) -> None:
    """Levels (H, W, 3) by a table (3, 256) into a place (H/p * W/p, p*p*3): raster order; inside, row, column, channel."""
    line = find_line(table)
    if line is None:
        _look_up_patches(levels, table, patch, place.reshape(-1, patch, patch, 3))
    else:
        _divide_patches(levels.reshape(len(levels), -1), *line, patch * 3, place)


def find_line(table: Floats) -> Line | None:
    """Divisor and offset with which `level / divisor - offset` is each float of a table, bit for bit, if there are such.

    There are for a mean and a deviation of 0.5, as BAGEL has them. Vectors divide, but have no way to look up: half the time.
    """
    lowest, highest = table[0, 0], table[0, 255]
    if lowest == highest:
        return None
    divisor, offset = np.float32(255 / (float(highest) - float(lowest))), -lowest
    floats = np.arange(256, dtype=np.float32) / divisor - offset
    same_bits = floats.view(np.int32) == table.view(np.int32)
    return (divisor, offset) if same_bits.all() else None


@compiled
def _look_up_patches(levels: Levels, table: Floats, patch: int, place: Floats) -> None:
    red, green, blue = table[0], table[1], table[2]
    columns = levels.shape[1] // patch
    for row in range(levels.shape[0] // patch):
        for column in range(columns):
            source = levels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            target = place[row * columns + column]
            for y in range(patch):
                for x in range(patch):
                    target[y, x, 0] = red[source[y, x, 0]]
                    target[y, x, 1] = green[source[y, x, 1]]
                    target[y, x, 2] = blue[source[y, x, 2]]


@compiled
def _divide_patches(
    levels: Levels, divisor: np.float32, offset: np.float32, stripe: int, place: Floats
) -> None:
    """Levels (H, W * 3); a stripe is a row of a patch."""
    patch = stripe // 3
    columns = levels.shape[1] // stripe
    for row in range(levels.shape[0] // patch):
        for column in range(columns):
            target = place[row * columns + column]
            for y in range(patch):
                source = levels[row * patch + y, column * stripe : (column + 1) * stripe]
                floats = target[y * stripe : (y + 1) * stripe]
                for n in range(stripe):
                    floats[n] = np.float32(source[n]) / divisor - offset
