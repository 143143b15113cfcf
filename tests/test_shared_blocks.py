"""A worker takes its shared memory again when both processes have let go of it, and never before."""

from __future__ import annotations

import gc
import os
import re
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
    from random import Random

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
    taken = [blocks.empty(SHAPE, torch.float32) for _ in range(2)]
    assert where in {one.data_ptr() for one in taken}


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


def test_of_the_free_blocks_that_fit_the_last_one_used_is_taken() -> None:
    blocks = SharedBlocks()
    first, second, third = (blocks.empty((size,), torch.uint8) for size in (1000, 1000, 5000))
    places = [tensor.data_ptr() for tensor in (first, second, third)]

    # In which order they become free does not matter.
    del third, second, first
    assert blocks.empty((900,), torch.uint8).data_ptr() == places[2]
    held = [blocks.empty((900,), torch.uint8) for _ in range(2)]
    assert [tensor.data_ptr() for tensor in held] == [places[2], places[1]]

    del held
    # It was used last of all, and is too small.
    assert blocks.empty((4000,), torch.uint8).data_ptr() == places[2]


def of_one_kind(blocks: SharedBlocks) -> set[int]:
    """Which blocks there are; those that are compared with have to be kept."""
    (known,) = blocks._blocks.values()
    return {id(block) for block in known}


@pytest.mark.parametrize("are_sent", [False, True])
def test_bursts_make_no_block_after_the_first_one(are_sent: bool) -> None:
    blocks = SharedBlocks()
    known: list[Block] = []
    for burst in range(10):
        held = [blocks.empty(SHAPE, torch.float32) for _ in range(16)]
        assert len({tensor.data_ptr() for tensor in held}) == 16
        known = known or [block for kind in blocks._blocks.values() for block in kind]
        assert len(known) == 16
        assert of_one_kind(blocks) == {id(block) for block in known}, burst
        if are_sent:
            for block in [sent(blocks, tensor) for tensor in held]:
                let_go(block)
        del held


@given(st.lists(st.integers(3000, 3700), min_size=16, max_size=16), st.randoms(use_true_random=False))
def test_bursts_of_sizes_that_differ_a_little_make_no_block_after_the_first_one(
    sizes: list[int], draws: Random
) -> None:
    blocks = SharedBlocks()
    known: list[Block] = []
    for _ in range(4):
        held = [blocks.empty((size,), torch.uint8) for size in sizes]
        known = known or [block for kind in blocks._blocks.values() for block in kind]
        assert of_one_kind(blocks) == {id(block) for block in known}
        del held
        draws.shuffle(sizes)


def mapped() -> int:
    """Shared memory that this process made, as the system says."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(f"torch_{os.getpid()}_")


def test_what_was_not_used_for_long_is_given_back_to_the_system() -> None:
    gc.collect()
    before = mapped()
    blocks = SharedBlocks()
    held = [blocks.empty(SHAPE, torch.float32) for _ in range(30)]
    of_them = [sent(blocks, tensor) for tensor in held]
    assert mapped() - before == 30

    for block in of_them:
        let_go(block)
    del held, of_them, block
    # For a while, all are kept.
    for _ in range(200):
        blocks.empty(SHAPE, torch.float32)
    assert mapped() - before == 30

    for _ in range(400):
        blocks.empty(SHAPE, torch.float32)
    assert 1 <= mapped() - before <= 3


def test_takes_of_another_kind_make_no_block_old() -> None:
    blocks = SharedBlocks()
    held = [blocks.empty(SHAPE, torch.float32, "rare") for _ in range(4)]
    known = list(blocks._blocks["rare"])
    del held

    for _ in range(600):
        blocks.empty((10,), torch.float32, "often")
    blocks.empty(SHAPE, torch.float32, "rare")

    assert {id(block) for block in blocks._blocks["rare"]} == {id(block) for block in known}


def test_without_room_the_error_says_how_much_is_wanted_and_held_and_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(size: int) -> torch.UntypedStorage:
        raise RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)")

    blocks = SharedBlocks()
    pixels, ids = blocks.empty(SHAPE, torch.float32, "pixels"), blocks.empty((50,), torch.int64, "ids")
    held = sum(sent(blocks, tensor).whole.nbytes for tensor in (pixels, ids))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", no_room)

    with pytest.raises(RuntimeError, match="No space left on device") as failed:
        blocks.empty((100_000,), torch.float32, "pixels")

    says = str(failed.value)
    for word in ("/dev/shm", "--shm-size", "prefetch_factor", 'transport="uint8"'):
        assert word in says
    wanted, has, *_ = (int(figure) for figure in re.findall(r"\d+", says))
    # Somewhat more than the tensor, for those that come after it.
    assert 400_000 < wanted < 600_000
    assert has == held
    # What is there serves on.
    where = pixels.data_ptr()
    let_go(blocks._blocks["pixels"][0])
    del pixels
    assert blocks.empty(SHAPE, torch.float32, "pixels").data_ptr() == where


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
