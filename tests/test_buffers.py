"""Memory is taken again, and never while anything still refers to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.buffers import Buffers

SHAPE = (3, 1000)


def test_memory_is_taken_again_once_the_tensor_is_gone() -> None:
    buffers = Buffers()
    first = buffers.empty(SHAPE, torch.float32)
    where = first.data_ptr()
    second = buffers.empty(SHAPE, torch.float32)
    assert second.data_ptr() != where

    del first

    assert buffers.empty((1, 2900), torch.float32).data_ptr() == where


@pytest.mark.parametrize(
    "refer",
    [
        lambda tensor: tensor[1:],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.view(torch.uint8)[0].numpy()[3:],
    ],
    ids=["a view", "an array", "an array of a view"],
)
def test_memory_that_anything_refers_to_is_not_taken(refer: Any) -> None:
    buffers = Buffers()
    tensor = buffers.empty(SHAPE, torch.float32)
    where, kept = tensor.data_ptr(), refer(tensor)

    del tensor
    assert buffers.empty(SHAPE, torch.float32).data_ptr() != where

    del kept
    assert buffers.empty(SHAPE, torch.float32).data_ptr() == where


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5)), max_size=30))
def test_what_is_held_keeps_its_values(steps: list[tuple[int, int]]) -> None:
    buffers = Buffers()
    held: dict[int, tuple[int, torch.Tensor]] = {}
    for number, (size, place) in enumerate(steps):
        held.pop(place, None)
        tensor = buffers.empty((size,), torch.int32)
        assert tensor.shape == (size,)
        assert tensor.dtype is torch.int32
        held[place] = number, tensor.fill_(number)
        assert all(bool((one == value).all()) for value, one in held.values())


def test_memory_is_left_for_others_of_its_kind() -> None:
    buffers = Buffers()
    large = buffers.empty((100_000,), torch.uint8, "large")
    where = large.data_ptr()
    del large

    assert buffers.empty((100,), torch.uint8, "small").data_ptr() != where
    assert buffers.empty((100,), torch.uint8, "large").data_ptr() == where


@given(st.lists(st.integers(1 << 10, 1 << 16), min_size=1, max_size=40))
def test_tensors_of_a_kind_soon_find_all_that_they_need(sizes: list[int]) -> None:
    buffers, places = Buffers(), set()
    before = None
    for size in sizes:
        before = buffers.empty((size,), torch.uint8)
        places.add(before.data_ptr())

    # Two are there at a time; as a size is outgrown at most six times, so is each of them.
    assert len(places) <= 2 * 7


def test_shared_memory_needs_no_copy_on_its_way_to_another_process() -> None:
    shared = Buffers(shared=True).empty(SHAPE, torch.float32)
    assert shared.is_shared()  # type: ignore[no-untyped-call]
    assert (shared.shape, shared.dtype) == (SHAPE, torch.float32)
    assert Buffers(shared=True).empty((0, 3), torch.uint8).shape == (0, 3)
