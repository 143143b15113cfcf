"""A worker takes its shared memory again when both processes have let go of it, and never before."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds import shared_blocks
from bagel_wds.buffers import Buffers
from bagel_wds.materialize import PackMemory
from bagel_wds.shared_blocks import FREE, LENT, SharedBlocks

if TYPE_CHECKING:
    from bagel_wds.shared_blocks import Block

SHAPE = (3, 1000)


def sent(blocks: SharedBlocks, tensor: torch.Tensor) -> Block:
    """The block of a tensor, which was sent."""
    block = blocks.send(tensor)
    assert block is not None
    return block


def let_go(block: Block) -> None:
    """As the other process says it."""
    block.content[-1] = FREE


def test_a_tensor_has_the_shape_and_type_asked_for_and_lies_in_shared_memory() -> None:
    blocks = SharedBlocks()

    for dtype in (torch.uint8, torch.bool, torch.float32, torch.int64):
        tensor = blocks.empty(SHAPE, dtype, str(dtype))
        assert (tuple(tensor.shape), tensor.dtype) == (SHAPE, dtype)
        block = sent(blocks, tensor)
        assert block.whole.is_shared()  # type: ignore[no-untyped-call]
        assert block.whole.data_ptr() == tensor.data_ptr()
        assert block.room >= tensor.nbytes


def test_a_tensor_without_elements_takes_no_block() -> None:
    blocks = SharedBlocks()

    empty = blocks.empty((0, 3), torch.float32)

    assert (tuple(empty.shape), empty.dtype) == ((0, 3), torch.float32)
    assert blocks.send(empty) is None


def test_what_was_never_sent_is_taken_again_once_the_tensor_is_gone() -> None:
    blocks = SharedBlocks()
    first = blocks.empty(SHAPE, torch.float32)
    where = first.data_ptr()
    second = blocks.empty(SHAPE, torch.float32)
    assert second.data_ptr() != where

    del first

    assert blocks.empty((1, 2900), torch.float32).data_ptr() == where


@pytest.mark.parametrize("first_to_let_go", ["this process", "the other"])
def test_what_was_sent_is_taken_again_once_both_have_let_go(first_to_let_go: str) -> None:
    blocks = SharedBlocks()
    tensor = blocks.empty(SHAPE, torch.float32)
    where = tensor.data_ptr()
    block = sent(blocks, tensor)
    assert block.content[-1] == LENT

    if first_to_let_go == "this process":
        del tensor
    else:
        let_go(block)
    assert blocks.empty(SHAPE, torch.float32).data_ptr() != where

    if first_to_let_go == "this process":
        let_go(block)
    else:
        del tensor
    taken = {blocks.empty(SHAPE, torch.float32).data_ptr(), blocks.empty(SHAPE, torch.float32).data_ptr()}
    assert where in taken


@pytest.mark.parametrize(
    "refer",
    [
        lambda tensor: tensor[1:],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.view(torch.uint8)[0].numpy()[3:],
    ],
    ids=["a view", "an array", "an array of a view"],
)
def test_memory_that_anything_here_refers_to_is_not_taken(refer: Any) -> None:
    blocks = SharedBlocks()
    tensor = blocks.empty(SHAPE, torch.float32)
    where, kept = tensor.data_ptr(), refer(tensor)
    let_go(sent(blocks, tensor))

    del tensor
    assert blocks.empty(SHAPE, torch.float32).data_ptr() != where

    del kept
    assert where in {one.data_ptr() for one in [blocks.empty(SHAPE, torch.float32) for _ in range(2)]}


def test_a_block_is_sent_with_all_of_its_tensor_alone_and_once() -> None:
    blocks = SharedBlocks()
    tensor = blocks.empty(SHAPE, torch.float32)

    assert blocks.send(tensor[1:]) is None
    assert blocks.send(tensor[:2]) is None
    assert blocks.send(tensor.t()) is None
    assert blocks.send(torch.empty(SHAPE)) is None
    assert sent(blocks, tensor.view(-1).view(torch.uint8)).whole.data_ptr() == tensor.data_ptr()
    # A second batch with the same tensor has to have a copy.
    assert blocks.send(tensor) is None


def test_what_a_block_is_lent_for_leaves_its_last_byte_alone() -> None:
    blocks = SharedBlocks()
    # Sizes around powers of two, which is what blocks are.
    for size in (1, 63, 64, 4095, 4096, 4097, 8191, 8192):
        tensor = blocks.empty((size,), torch.uint8, str(size))
        block = sent(blocks, tensor)
        tensor.fill_(255)
        assert block.content[-1] == LENT
        let_go(block)
        assert (tensor == 255).all()


def test_a_block_that_a_tensor_would_fill_to_its_last_byte_does_not_fit() -> None:
    blocks = SharedBlocks()
    whole = sent(blocks, blocks.empty((4000,), torch.uint8)).whole
    let_go(sent(blocks, blocks.empty((3000,), torch.uint8)))

    tensor = blocks.empty((whole.nbytes,), torch.uint8)

    assert sent(blocks, tensor).whole.nbytes > tensor.nbytes


def test_memory_is_left_for_others_of_its_kind() -> None:
    blocks = SharedBlocks()
    large = blocks.empty((100_000,), torch.uint8, "large")
    where = large.data_ptr()
    del large

    assert blocks.empty((100,), torch.uint8, "small").data_ptr() != where
    assert blocks.empty((100,), torch.uint8, "large").data_ptr() == where


def test_the_smallest_block_that_fits_is_taken() -> None:
    blocks = SharedBlocks()
    small = blocks.empty((1000,), torch.uint8)
    large = blocks.empty((100_000,), torch.uint8)
    where = small.data_ptr()
    del small, large

    assert blocks.empty((900,), torch.uint8).data_ptr() == where


def test_what_too_many_kept_for_a_while_is_given_back_to_the_system() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count(f"torch_{os.getpid()}_")

    gc.collect()
    before = mapped()
    blocks = SharedBlocks()
    held = [blocks.empty(SHAPE, torch.float32) for _ in range(20)]
    of_them = [sent(blocks, tensor) for tensor in held]
    assert mapped() - before == 20

    for block in of_them:
        let_go(block)
    del held, of_them, block
    last = blocks.empty(SHAPE, torch.float32)

    # One is taken, a few are kept for what comes.
    assert 1 <= mapped() - before <= 5
    del last


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5), st.booleans()), max_size=30))
def test_what_is_held_keeps_its_values(steps: list[tuple[int, int, bool]]) -> None:
    blocks = SharedBlocks()
    # By place: what the block was filled with, this process's tensor, and what the other one sees.
    here: dict[int, tuple[int, torch.Tensor]] = {}
    there: dict[int, tuple[int, torch.Tensor, Block]] = {}
    for number, (size, place, is_sent) in enumerate(steps):
        here.pop(place, None)
        if place in there:
            let_go(there.pop(place)[2])
        tensor = blocks.empty((size,), torch.int32)
        here[place] = number, tensor.fill_(number)
        block = blocks.send(tensor) if is_sent else None
        assert (block is None) == (not is_sent or not size)
        if block is not None:
            there[place] = number, block.whole[: tensor.nbytes].view(torch.int32), block
            del here[place]
        del tensor
        assert all(bool((one == value).all()) for value, one in here.values())
        assert all(bool((one == value).all()) for value, one, _ in there.values())


@given(st.lists(st.integers(1 << 10, 1 << 16), min_size=1, max_size=40))
def test_tensors_of_a_kind_soon_find_all_that_they_need(sizes: list[int]) -> None:
    blocks, places = SharedBlocks(), set()
    kept: list[torch.Tensor] = []
    before: Block | None = None
    for size in sizes:
        tensor = blocks.empty((size,), torch.uint8)
        block = sent(blocks, tensor)
        if block.whole.data_ptr() not in places:
            # Kept, so that no other block can come to lie at its address.
            kept.append(block.whole)
        places.add(block.whole.data_ptr())
        del tensor
        if before is not None:
            let_go(before)
        before = block

    # Two are there at a time; as a size is outgrown at most six times, so is each of them.
    assert len(places) <= 2 * 7


def test_blocks_are_a_workers_that_began_with_them_alone() -> None:
    # In this process, nobody did.
    assert shared_blocks.blocks() is None
    assert type(PackMemory.here().batch) is Buffers
