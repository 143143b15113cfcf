"""How a batch goes from a worker to the process that asked for it: in blocks that both keep, see `shared_blocks`."""

from __future__ import annotations

import os
import weakref
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

from bagel_wds import shared_blocks
from bagel_wds.batch import SimpleCustomBatch
from bagel_wds.shared_blocks import FREE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bagel_wds.shared_blocks import Block, SharedBlocks

    Bytes = NDArray[np.uint8]
    Sent = tuple[str, torch.Tensor | None, int]
    """A block's name, the block itself where the receiver has not met it, and the bytes in use."""

_ALIGN = 64
"""Bytes; where a tensor begins in a block that holds many."""

_SMALL = 1 << 22
"""Bytes up to which a tensor from elsewhere is copied into a block; larger ones go torch's way."""

_numbers = count()
_receivers: dict[int, Receiver] = {}
"""Those of the iterations that are under way, by their numbers: a batch is put together where nothing else tells whose it is."""


class Receiver:
    """The blocks that a process has met while it iterates over a loader; the batches of its workers find it by its number.

    It is there until `end` is called, whatever refers to it: so long may a thread put batches together.

    Attributes:
        number: of its own in this process.
        blocks: by their names. One is unmapped when this receiver has ended, and every tensor in it is gone.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.blocks: dict[str, torch.Tensor] = {}
        _receivers[self.number] = self

    def end(self) -> None:
        """No batch comes any more."""
        _receivers.pop(self.number, None)


def begin(receiver: int) -> None:
    """Send the batches of this process, a worker of `PackedLoader`, in blocks from now on, to the receiver of this number."""
    ForkingPickler.register(SimpleCustomBatch, partial(_reduce, shared_blocks.begin(), receiver))


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: in which of the blocks that come along, and from which byte on."""

    block: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Parcel:
    """The blocks that a batch lies in.

    Attributes:
        receiver: number of the one who gets it.
        blocks: those that the tensors' places count.
        gone: names of those that it may forget.
    """

    receiver: int
    blocks: list[Sent]
    gone: list[str]


def _reduce(shared: SharedBlocks, receiver: int, batch: SimpleCustomBatch) -> tuple[Any, ...]:
    """How a batch is pickled for the other process."""
    try:
        values, blocks = _place(shared, batch)
        return _rebuild, (values, _Parcel(receiver, blocks, shared.take_gone()))
    except Exception as error:  # noqa: BLE001 - in the queue's thread nobody would hear of it, and the other process wait
        return _fail, (f"{type(error).__name__}: {error}",)


def _fail(why: str) -> None:
    raise RuntimeError(f"a worker could not hand over its batch: {why}")


def _place(shared: SharedBlocks, batch: SimpleCustomBatch) -> tuple[dict[str, Any], list[Sent]]:
    """The values of a batch, with places in the stead of tensors, and the blocks where these lie."""
    sent: list[Sent] = []
    small: list[tuple[int, torch.Tensor]] = []
    end = 0

    def place(tensor: torch.Tensor) -> _Place | torch.Tensor:
        nonlocal end
        if not _is_plain(tensor):
            return tensor
        block = shared.send(tensor)
        if block is not None:
            sent.append(_introduce(block, tensor.nbytes))
            return _Place(len(sent) - 1, 0, tuple(tensor.shape), tensor.dtype)
        if not 0 < tensor.nbytes <= _SMALL:
            return tensor
        start = -(-end // _ALIGN) * _ALIGN
        end = start + tensor.nbytes
        small.append((start, tensor))
        return _Place(-1, start, tuple(tensor.shape), tensor.dtype)

    placed = copy(batch).map_values(torch.Tensor, place)
    if small:
        memory = shared.empty((end,), torch.uint8, "small")
        for start, tensor in small:
            memory[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        block = shared.send(memory)
        assert block is not None  # noqa: S101 - it was just given
        sent.append(_introduce(block, memory.nbytes))
    return vars(placed), sent


def _introduce(block: Block, size: int) -> Sent:
    whole = None if block.is_met else block.whole
    block.is_met = True
    return block.name, whole, size


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its values, its shape and its dtype, and nothing more."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _rebuild(values: dict[str, Any], parcel: _Parcel) -> SimpleCustomBatch:
    receiver = _receivers.get(parcel.receiver)
    known = {} if receiver is None else receiver.blocks
    for name in parcel.gone:
        known.pop(name, None)
    contents = []
    for name, new, size in parcel.blocks:
        whole = known.get(name) if new is None else new
        if whole is None:
            raise RuntimeError(
                "a batch of a PackedLoader's worker came to a process, or after the end of an iteration, that does not know the "
                "shared memory it lies in; take batches from the iterator alone"
            )
        known[name] = whole
        content = whole.numpy()
        # The tensors of the block, and whatever is a view of them, keep this array, and nobody else does.
        lent = content[:size]
        weakref.finalize(lent, _release, content, os.getpid()).atexit = False
        contents.append(lent)

    def take(place: _Place) -> torch.Tensor:
        # Each has a storage of its own, so that to save one saves no other.
        values = torch.frombuffer(
            contents[place.block], dtype=place.dtype, count=prod(place.shape), offset=place.start
        )
        return values.view(place.shape)

    batch = SimpleCustomBatch.__new__(SimpleCustomBatch)
    vars(batch).update(values)
    batch.map_values(_Place, take)
    return batch


def _release(content: Bytes, pid: int) -> None:
    # A child that was forked meanwhile has what refers to the block, too, and has no say.
    if os.getpid() == pid:
        content[-1] = FREE
