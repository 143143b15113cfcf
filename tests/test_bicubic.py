"""The compiled resize has Pillow's weights and Pillow's values, whatever memory it works in."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from bagel_wds import bicubic
from bagel_wds.bicubic import _ROWS, _TAPS, _turn, _turn_back, _weigh, resize_into
from bagel_wds.scratch import Scratch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]
    Size = tuple[int, int]

ONE = 1 << 22


def noise(height: int, width: int, seed: int = 0) -> Levels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def by_pillow(pixels: Levels, size_hw: Size) -> Levels:
    image = Image.fromarray(pixels).resize((size_hw[1], size_hw[0]), Image.Resampling.BICUBIC)
    return np.asarray(image)


def in_order(pixels: Levels, size_hw: Size, *, columns_first: bool) -> Levels:
    """By Pillow, an axis after the other."""
    between = (size_hw[0], pixels.shape[1]) if columns_first else (pixels.shape[0], size_hw[1])
    return by_pillow(by_pillow(pixels, between), size_hw)


def resized(
    pixels: Levels, size_hw: Size, *, columns_first: bool = False, scratch: Scratch | None = None
) -> Levels:
    place = np.full((*size_hw, 3), 99, np.uint8)
    resize_into(pixels, place, columns_first=columns_first, scratch=scratch)
    return place


# The weights


def keys(x: float) -> float:
    """Keys' cubic with a = -0.5, as Pillow's `bicubic_filter` writes it down."""
    a = -0.5
    x = -x if x < 0.0 else x
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0


def pillows_weights(edge: int, to_edge: int) -> list[tuple[int, list[int]]]:
    """Of each new value its first old one and the weights: `precompute_coeffs` and `normalize_coeffs_8bpc` of Pillow."""
    scale = edge / to_edge
    filterscale = max(scale, 1.0)
    support = 2.0 * filterscale
    found = []
    for xx in range(to_edge):
        center = (xx + 0.5) * scale
        ss = 1.0 / filterscale
        xmin = max(math.trunc(center - support + 0.5), 0)
        xmax = min(math.trunc(center + support + 0.5), edge) - xmin
        k = [keys((x + xmin - center + 0.5) * ss) for x in range(xmax)]
        ww = 0.0
        for w in k:
            ww += w
        if ww != 0.0:
            k = [w / ww for w in k]
        found.append((xmin, [math.trunc((-0.5 if w < 0 else 0.5) + w * ONE) for w in k]))
    return found


def spread(edge: int, to_edge: int) -> NDArray[np.int64]:
    """Pillow's weight of each old value (column) in each new one (row)."""
    weights = np.zeros((to_edge, edge), np.int64)
    for new, (first, own) in enumerate(pillows_weights(edge, to_edge)):
        weights[new, first : first + len(own)] = own
    return weights


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400))
@example(1, 1)
@example(1, 400)
@example(400, 1)
@example(2, 3)
@example(4, 3)
@example(1024, 980)
@example(1024, 768)
@example(4000, 7)
def test_weights_are_pillows_and_start_within_the_edge(edge: int, to_edge: int) -> None:
    starts, weights = _weigh(edge, to_edge)
    taps = weights.shape[1]
    # An edge that is shorter than the weights is made longer, by what has none.
    length = max(edge, taps)

    assert starts.dtype == weights.dtype == np.int32
    assert len(starts) == len(weights) == to_edge
    assert taps in (4, 5) or taps % _TAPS == 0
    assert starts.min() >= 0
    assert (starts + taps).max() <= length
    ours = np.zeros((to_edge, length), np.int64)
    for new, start in enumerate(starts):
        ours[new, start : start + taps] = weights[new]
    assert np.array_equal(ours[:, :edge], spread(edge, to_edge))
    assert not ours[:, edge:].any()
    # Each is rounded by half a unit at the most.
    assert np.abs(weights.sum(axis=1, dtype=np.int64) - ONE).max() <= taps / 2
    # No sum of 255 times each leaves 32 bits.
    assert np.abs(weights.astype(np.int64)).sum(axis=1).max() * 255 + ONE // 2 < 1 << 31


@pytest.mark.parametrize(("edge", "to_edge"), [(97, 41), (41, 97), (64, 48), (5, 3), (3, 5), (300, 7)])
def test_weights_are_those_of_the_cubic_in_exact_arithmetic(edge: int, to_edge: int) -> None:
    scale = Fraction(edge, to_edge)
    stretch = max(scale, Fraction(1))
    for new, own in enumerate(spread(edge, to_edge)):
        exact = []
        for old in range(edge):
            x = abs(old + Fraction(1, 2) - (new + Fraction(1, 2)) * scale) / stretch
            near, far = (3 * x**3 - 5 * x**2 + 2) / 2, (-(x**3) + 5 * x**2 - 8 * x + 4) / 2
            exact.append(near if x < 1 else far if x < 2 else Fraction(0))
        assert max(abs(a * ONE / sum(exact) - int(b)) for a, b in zip(exact, own, strict=True)) < 0.501


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(1, 80), st.integers(1, 30)), st.tuples(st.integers(1, 80), st.integers(1, 30)))
def test_values_are_the_sums_of_what_is_weighed_rounded_once_an_axis(size: Size, to: Size) -> None:
    pixels = noise(*size)

    def along(axis: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
        if size[axis] == to[axis]:
            return values
        sums = np.tensordot(spread(size[axis], to[axis]), values, axes=(1, axis))
        return np.clip((np.moveaxis(sums, 0, axis) + ONE // 2) // ONE, 0, 255)

    levels = pixels.astype(np.int64)
    assert np.array_equal(resized(pixels, to), along(0, along(1, levels)))
    assert np.array_equal(resized(pixels, to, columns_first=True), along(1, along(0, levels)))


# The loops over rows and columns


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
    st.booleans(),
)
@example((63, 40), (63, 31), False)
@example((63, 40), (65, 31), True)
@example((64, 40), (64, 31), False)
@example((64, 40), (63, 31), True)
@example((65, 40), (65, 31), False)
@example((65, 40), (64, 31), True)
@example((128, 40), (129, 31), False)
@example((2, 2), (63, 64), False)
@example((1, 1), (1, 65), True)
@example((100, 2), (1, 129), True)
def test_either_axis_may_come_first(size: Size, to: Size, columns_first: bool) -> None:
    pixels = noise(*size)

    ours = resized(pixels, to, columns_first=columns_first)

    assert np.array_equal(ours, in_order(pixels, to, columns_first=columns_first))


@pytest.mark.parametrize("level", [0, 1, 128, 254, 255])
def test_one_colour_stays_as_it_is(level: int) -> None:
    pixels = np.full((70, 81, 3), level, np.uint8)

    for to in ((33, 200), (200, 33), (7, 5), (71, 81), (70, 80)):
        assert (resized(pixels, to) == level).all()


def test_values_beyond_black_and_white_are_cut_off() -> None:
    steps = np.zeros((40, 40, 3), np.uint8)
    steps[10:30, 10:30] = 255
    weights = spread(40, 61)

    # The cubic swings over both.
    assert (weights @ steps[:, 20, 0].astype(np.int64)).max() > 255 * ONE
    assert (weights @ steps[:, 20, 0].astype(np.int64)).min() < -ONE
    assert np.array_equal(resized(steps, (61, 61)), by_pillow(steps, (61, 61)))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
def test_rows_that_were_turned_are_columns_and_turned_back_the_same_rows(length: int) -> None:
    rows = np.random.default_rng(length).integers(0, 256, (_ROWS, length), dtype=np.uint8)
    line, other, back = (np.empty(rows.size, np.uint8) for _ in range(3))

    _turn(rows, other, line)
    assert np.array_equal(line.reshape(length, _ROWS), rows.T)
    _turn_back(line, other, back.reshape(rows.shape))
    assert np.array_equal(back.reshape(rows.shape), rows)


AS_PLAIN_PYTHON = """
import itertools, json
import numpy as np
from bagel_wds import bicubic
from test_bicubic import in_order, noise, resized

wrong = []
edges = [((1, 1), (1, 2)), ((1, 3), (4, 1)), ((2, 5), (1, 2)), ((5, 2), (13, 1)), ((9, 2), (2, 9)), ((3, 8), (1, 1)), ((65, 2), (3, 1)), ((10, 5), (8, 4))]
for (size, to), first in itertools.product(edges, (False, True)):
    pixels = noise(*size)
    if not np.array_equal(resized(pixels, to, columns_first=first), in_order(pixels, to, columns_first=first)):
        wrong.append([size, to, first])
print(json.dumps({"compiled": hasattr(bicubic._filter, "py_func"), "wrong": wrong}))
"""


def test_the_loops_stay_within_their_arrays() -> None:
    # Compiled they do not look; run as they are written, NumPy raises an error.
    done = subprocess.run(
        [sys.executable, "-c", AS_PLAIN_PYTHON],
        cwd=Path(__file__).parent,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"compiled": False, "wrong": []}


# What it reads from, and what it writes to


SIZES: list[tuple[Size, Size]] = [
    ((70, 90), (41, 53)),
    ((70, 90), (70, 53)),
    ((70, 90), (41, 90)),
    ((30, 40), (51, 77)),
    ((3, 200), (1, 100)),
]


@pytest.mark.parametrize(("size", "to"), SIZES)
def test_pictures_that_may_not_be_written_to_or_have_gaps_are_read_and_left_as_they_are(
    size: Size, to: Size
) -> None:
    pixels = noise(*size)
    height, width = size
    fixed = pixels.copy()
    fixed.setflags(write=False)
    wide = noise(height + 4, width + 6, seed=1)
    wide[2:-2, 3:-3] = pixels
    apart = np.zeros((2 * height, 3 * width, 3), np.uint8)
    apart[::2, ::3] = pixels
    four = np.zeros((height, width, 4), np.uint8)
    four[..., :3] = pixels
    views = {
        "fixed": fixed,
        "a part": wide[2:-2, 3:-3],
        "every other": apart[::2, ::3],
        "of four": four[..., :3],
        "turned": np.ascontiguousarray(pixels.swapaxes(0, 1)).swapaxes(0, 1),
        "upside down": np.ascontiguousarray(pixels[::-1])[::-1],
    }

    for name, view in views.items():
        for first in (False, True):
            place = np.zeros((*to, 3), np.uint8)
            resize_into(view, place, columns_first=first)
            assert np.array_equal(view, pixels), name
            assert np.array_equal(place, in_order(pixels, to, columns_first=first)), name


def test_what_may_not_be_written_to_is_not_compiled_again() -> None:
    fixed = noise(70, 90)
    fixed.setflags(write=False)
    resized(fixed, (41, 53))
    resized(fixed, (41, 53), columns_first=True)

    loops: Any = (bicubic._filter, bicubic._filter_turned)
    arrays = [kind for loop in loops for signature in loop.signatures for kind in signature]
    assert len(arrays) == 4 + 6
    assert all(kind.mutable for kind in arrays)


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize(("size", "to"), SIZES)
def test_a_place_in_the_midst_of_memory_is_written_whole_and_alone(
    size: Size, to: Size, *, columns_first: bool
) -> None:
    pixels = noise(*size)
    count = to[0] * to[1] * 3
    for filled in (7, 200):
        memory = np.full(count + 2000, filled, np.uint8)
        # At an odd byte too.
        place = memory[999 : 999 + count].reshape(*to, 3)
        resize_into(pixels, place, columns_first=columns_first)

        assert np.array_equal(place, in_order(pixels, to, columns_first=columns_first))
        assert (memory[:999] == filled).all()
        assert (memory[999 + count :] == filled).all()


def test_a_place_with_gaps_is_refused_and_left_as_it_is() -> None:
    memory = np.full((40, 50, 3), 7, np.uint8)
    four = np.full((20, 30, 4), 7, np.uint8)
    for place in (
        memory[:, :20],
        memory[::2],
        memory[:, ::2],
        memory.swapaxes(0, 1),
        memory[::-1],
        four[..., :3],
    ):
        with pytest.raises(ValueError, match=r"gaps"):
            resize_into(noise(70, 90), place)

    assert (memory == 7).all()
    assert (four == 7).all()


# Memory that is taken again, and how much


@pytest.mark.parametrize("size", [(1, 2_000_000), (3, 400_000)])
def test_pictures_of_few_and_long_rows_take_memory_as_they_have_bytes(size: Size) -> None:
    pixels, to = noise(*size), (16, 1024)
    # What is compiled is loaded before.
    resized(noise(3, 400), to)

    tracemalloc.start()
    try:
        ours = resized(pixels, to)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert np.array_equal(ours, by_pillow(pixels, to))
    assert pixels.nbytes < peak < 8 * pixels.nbytes


PICTURES = st.lists(
    st.tuples(
        st.tuples(st.integers(1, 140), st.integers(1, 140)),
        st.tuples(st.integers(1, 140), st.integers(1, 140)),
        st.booleans(),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(PICTURES)
@example([((139, 139), (139, 70), False), ((1, 2), (2, 1), False), ((64, 2), (64, 3), True)])
def test_what_is_left_in_memory_of_other_pictures_changes_nothing(
    pictures: list[tuple[Size, Size, bool]],
) -> None:
    scratch = Scratch()
    for name in ("between", "here", "there"):
        scratch.empty(name, 1000)[:] = 255

    for seed, (size, to, columns_first) in enumerate(pictures):
        pixels = noise(*size, seed=seed)
        again = resized(pixels, to, columns_first=columns_first, scratch=scratch)

        assert np.array_equal(again, resized(pixels, to, columns_first=columns_first))


def test_threads_with_memory_of_their_own_do_not_disturb_one_another() -> None:
    threads = 8
    work = [
        (noise(50 + 13 * n % 90, 140 - 11 * n % 90, seed=n), (20 + 7 * n % 80, 100 - 9 * n % 80))
        for n in range(40)
    ]
    expected = [in_order(pixels, to, columns_first=False) for pixels, to in work]
    begin = Barrier(threads)

    def run(thread: int) -> list[int]:
        """The pictures that came out otherwise."""
        scratch = Scratch()
        begin.wait(timeout=60)
        turned = [(thread * 5 + n) % len(work) for n in range(3 * len(work))]
        return [n for n in turned if not np.array_equal(resized(*work[n], scratch=scratch), expected[n])]

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(run, range(threads))) == [[]] * threads
