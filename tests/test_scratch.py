"""Scratch memory is the same again under its name, until it is too small."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.scratch import Scratch, round_up

if TYPE_CHECKING:
    from numpy.typing import NDArray


def address(memory: NDArray[np.uint8]) -> int:
    return int(memory.__array_interface__["data"][0])


def test_memory_of_a_name_is_given_again_until_it_is_too_small() -> None:
    scratch = Scratch()
    first = scratch.empty("rows", 1000)
    assert first.dtype == np.uint8
    first[:] = np.arange(1000) % 251
    other = scratch.empty("columns", 1000)
    other[:] = 2

    smaller, as_large = scratch.empty("rows", 10), scratch.empty("rows", 1024)
    larger = scratch.empty("rows", 1025)
    larger[:] = 9

    assert [len(memory) for memory in (first, smaller, as_large, larger)] == [1000, 10, 1024, 1025]
    assert address(smaller) == address(as_large) == address(first)
    assert not np.shares_memory(larger, first)
    assert not np.shares_memory(other, first)
    # What was given before is left alone; from now on, small ones lie in the larger memory, too.
    np.testing.assert_array_equal(first, np.arange(1000) % 251)
    assert address(scratch.empty("rows", 1000)) == address(larger)


def test_none_of_a_name_has_no_bytes() -> None:
    scratch = Scratch()

    assert scratch.empty("rows", 0).shape == (0,)
    assert len(scratch.empty("rows", 7)) == 7
    assert scratch.empty("rows", 0).shape == (0,)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5000)), min_size=1, max_size=30))
def test_memory_of_different_names_lies_apart(steps: list[tuple[str, int]]) -> None:
    scratch = Scratch()
    last: dict[str, tuple[int, NDArray[np.uint8]]] = {}
    for number, (name, size) in enumerate(steps):
        memory = scratch.empty(name, size)
        assert len(memory) == size
        memory[:] = number
        last[name] = number, memory
        assert all((one == value).all() for value, one in last.values())


def test_sizes_that_grow_a_little_each_time_take_new_memory_a_few_times() -> None:
    scratch = Scratch()
    # Kept, so that no memory can come to lie where another was.
    given_ = [scratch.empty("rows", size) for size in range(1, 5000, 7)]

    assert len({address(memory) for memory in given_}) <= 13


def test_memory_of_over_64_mib_is_not_kept_and_up_to_that_it_is() -> None:
    scratch = Scratch()
    small = scratch.empty("rows", 1000)

    over = scratch.empty("rows", (1 << 26) + 1)
    assert len(over) == (1 << 26) + 1
    assert not np.shares_memory(over, small)
    assert address(scratch.empty("rows", 1000)) == address(small)

    most = scratch.empty("rows", 1 << 26)
    assert len(most) == 1 << 26
    assert address(scratch.empty("rows", 1000)) == address(most)


@given(st.integers(1, 1 << 40))
def test_rounding_up_is_to_the_next_power_of_two(size: int) -> None:
    assert round_up(size) == next(1 << bits for bits in range(42) if 1 << bits >= size)
