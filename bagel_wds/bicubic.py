"""Pillow's bicubic resize of uint8 pictures, bit for bit, in a fraction of its time.

Pillow filters along one axis, rounds to 8 bits, then filters along the other. A new value is the sum of old ones by weights
in fixed point, of 22 bits behind the point (Pillow's `Resample.c`; the filter is Keys' with a = -0.5, made wider where it
scales down). The sums here are the same integers, of many values at once, as Numba compiles them for the processor at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bagel_wds.jit import compiled
from bagel_wds.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]
    Integers = NDArray[np.int32]


_POINT = 22
"""Bits of a weight behind the point."""

_TAPS = 3
"""Old values that are weighed at once: a number known to the compiler, which unrolls the loop over them.

Where there are 4 or 5 in all, as at scales of 0.8 and above, they are weighed at once, too.
"""

_BLOCK = 1024
"""Values of a row that are filtered at once; their sums stay in the nearest cache."""

_ROWS = 64
"""Rows that are filtered at once along their length; `_turn` and `_turn_back` are written for just so many."""


def resize_into(
    pixels: Levels, place: Levels, *, columns_first: bool = False, scratch: Scratch | None = None
) -> None:
    """Write a picture, resized, into a place that has no gaps.

    Args:
        pixels: uint8 (H, W, 3).
        place: uint8 (H', W', 3).
        columns_first: filter along the columns before the rows, instead of after.
        scratch: memory for what lies between, the same for picture after picture; None takes fresh one.

    Raises:
        ValueError: if the place has gaps.
    """
    if not place.flags.c_contiguous:
        raise ValueError(
            f"the place of shape {place.shape} has gaps (strides {place.strides}); give one without"
        )
    scratch = scratch or Scratch()
    height, width = pixels.shape[:2]
    to_height, to_width = place.shape[:2]
    # What may not be written to would be another type to Numba, and compiled again.
    source = np.require(pixels, requirements=["C", "W"]).reshape(height, width * 3)
    target = place.reshape(to_height, to_width * 3)
    if to_width == width:
        _along_columns(source, target)
    elif to_height == height:
        _along_rows(source, target, scratch)
    elif columns_first:
        between = scratch.empty("between", to_height * width * 3).reshape(to_height, -1)
        _along_columns(source, between)
        _along_rows(between, target, scratch)
    else:
        between = scratch.empty("between", height * to_width * 3).reshape(height, -1)
        _along_rows(source, between, scratch)
        _along_columns(between, target)


@compiled
def _keys(distance: float) -> float:
    x = abs(distance)
    if x < 1.0:
        return ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1.0
    if x < 2.0:
        return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return 0.0


@compiled
def _weigh(edge: int, to_edge: int) -> tuple[Integers, Integers]:
    """Of each new value: the first old one that it is made of, and the weights of that one and those behind it.

    All have as many, 4, 5 or a multiple of `_TAPS`: at the far end they start earlier, with weights of 0. An edge that is
    shorter than they are has to be made longer.
    """
    scale = edge / to_edge
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    narrow = 1.0 / stretch
    starts = np.empty(to_edge, np.int32)
    most = 0
    for new in range(to_edge):
        center = (new + 0.5) * scale
        starts[new] = max(int(center - support + 0.5), 0)
        most = max(most, min(int(center + support + 0.5), edge) - starts[new])
    taps = most if most in (4, 5) else (most + _TAPS - 1) // _TAPS * _TAPS
    weights = np.zeros((to_edge, taps), np.int32)
    exact = np.empty(taps, np.float64)
    for new in range(to_edge):
        center = (new + 0.5) * scale
        first = starts[new]
        count = min(int(center + support + 0.5), edge) - first
        total = 0.0
        for n in range(count):
            exact[n] = _keys((n + first - center + 0.5) * narrow)
            total += exact[n]
        starts[new] = max(min(first, edge - taps), 0)
        for n in range(count):
            weight = exact[n] / total if total != 0.0 else exact[n]
            weights[new, first - starts[new] + n] = int(
                weight * (1 << _POINT) + (-0.5 if weight < 0 else 0.5)
            )
    return starts, weights


def _weighing(taps: int) -> Callable[[Levels, Integers, Levels], None]:
    """A function that makes a row of so many."""

    @compiled
    def weigh(lines: Levels, weights: Integers, place: Levels) -> None:
        for n in range(len(place)):
            value = np.int32(1 << (_POINT - 1))
            for k in range(taps):
                # Numba would go on in 64 bits, were it not told otherwise.
                value = np.int32(value + np.int32(np.int32(lines[k, n]) * weights[k]))
            value >>= np.int32(_POINT)
            place[n] = np.uint8(min(max(value, np.int32(0)), np.int32(255)))

    return weigh


_weigh_4, _weigh_5 = _weighing(4), _weighing(5)


@compiled
def _add(lines: Levels, weights: Integers, sums: Integers) -> None:
    for n in range(len(sums)):
        value = sums[n]
        for k in range(_TAPS):
            value = np.int32(value + np.int32(np.int32(lines[k, n]) * weights[k]))
        sums[n] = value


@compiled
def _round(sums: Integers, place: Levels) -> None:
    for n in range(len(sums)):
        value = sums[n] >> np.int32(_POINT)
        place[n] = np.uint8(min(max(value, np.int32(0)), np.int32(255)))


@compiled
def _filter(lines: Levels, starts: Integers, weights: Integers, place: Levels) -> None:
    """Make lines (n, length) into others (n', length)."""
    taps = weights.shape[1]
    length = lines.shape[1]
    memory = np.empty(_BLOCK, np.int32)
    for left in range(0, length, _BLOCK):
        right = min(left + _BLOCK, length)
        sums = memory[: right - left]
        for new in range(place.shape[0]):
            own = lines[starts[new] : starts[new] + taps, left:right]
            target = place[new, left:right]
            if taps == 4:
                _weigh_4(own, weights[new], target)
            elif taps == 5:
                _weigh_5(own, weights[new], target)
            else:
                sums[:] = 1 << (_POINT - 1)
                for n in range(0, taps, _TAPS):
                    _add(own[n : n + _TAPS], weights[new, n : n + _TAPS], sums)
                _round(sums, target)


def _along_columns(pixels: Levels, place: Levels) -> None:
    """(H, length) to (H', length)."""
    starts, weights = _weigh(len(pixels), len(place))
    missing = weights.shape[1] - len(pixels)
    if missing > 0:
        # What is added has no weight.
        pixels = np.concatenate([pixels, np.zeros((missing, pixels.shape[1]), np.uint8)])
    _filter(pixels, starts, weights, place)


def _along_rows(pixels: Levels, place: Levels, scratch: Scratch) -> None:
    """(n, W * 3) to (n, W' * 3)."""
    rows, length, to_length = len(pixels), pixels.shape[1], place.shape[1]
    if rows < _ROWS:
        columns = np.ascontiguousarray(pixels.reshape(rows, -1, 3).swapaxes(0, 1)).reshape(-1, rows * 3)
        new = np.empty((to_length // 3, rows * 3), np.uint8)
        _along_columns(columns, new)
        place.reshape(rows, -1, 3)[:] = new.reshape(-1, rows, 3).swapaxes(0, 1)
        return
    starts, weights = _weigh(length // 3, to_length // 3)
    size = max(length, to_length, 3 * weights.shape[1]) * _ROWS
    here, there = scratch.empty("here", size), scratch.empty("there", size)
    _filter_turned(pixels, starts, weights, place, here, there)


@compiled
def _filter_turned(
    pixels: Levels, starts: Integers, weights: Integers, place: Levels, here: Levels, there: Levels
) -> None:
    """Filter rows along their length, so many at once: they are turned into columns, filtered, and turned back."""
    height, length = pixels.shape
    to_length = place.shape[1]
    size = max(length, 3 * weights.shape[1]) * _ROWS
    to_size = to_length * _ROWS
    for start in range(0, height, _ROWS):
        # The last ones overlap with those before them.
        top = min(start, height - _ROWS)
        _turn(pixels[top : top + _ROWS], there[: length * _ROWS], here[: length * _ROWS])
        lines, new_lines = here[:size].reshape(-1, 3 * _ROWS), there[:to_size].reshape(-1, 3 * _ROWS)
        _filter(lines, starts, weights, new_lines)
        _turn_back(there[:to_size], here[:to_size], place[top : top + _ROWS])


@compiled
def _weave(lines: Levels, place: Levels) -> None:
    for n in range(lines.shape[1]):
        place[4 * n] = lines[0, n]
        place[4 * n + 1] = lines[1, n]
        place[4 * n + 2] = lines[2, n]
        place[4 * n + 3] = lines[3, n]


@compiled
def _unweave(line: Levels, place: Levels) -> None:
    for n in range(place.shape[1]):
        place[0, n] = line[4 * n]
        place[1, n] = line[4 * n + 1]
        place[2, n] = line[4 * n + 2]
        place[3, n] = line[4 * n + 3]


@compiled
def _turn(rows: Levels, other: Levels, place: Levels) -> None:
    """Transpose 64 rows, three times woven by fours, which vectors can: 64 lines, 16, 4, 1."""
    length = rows.shape[1]
    for n in range(16):
        _weave(rows[n::16], place[n * 4 * length : (n + 1) * 4 * length])
    lines = place.reshape(16, 4 * length)
    for n in range(4):
        _weave(lines[n::4], other[n * 16 * length : (n + 1) * 16 * length])
    _weave(other.reshape(4, 16 * length), place)


@compiled
def _turn_back(line: Levels, other: Levels, place: Levels) -> None:
    """Undo `_turn`; the line is overwritten."""
    length = place.shape[1]
    _unweave(line, other.reshape(4, 16 * length))
    lines = line.reshape(16, 4 * length)
    for n in range(4):
        _unweave(other[n * 16 * length : (n + 1) * 16 * length], lines[n::4])
    for n in range(16):
        _unweave(line[n * 4 * length : (n + 1) * 4 * length], place[n::16])
