"""Shared memory that a worker writes its batches into, and takes again once the process that got them has let go of them.

torch makes shared memory for each tensor that it hands over: the system clears every page of it at the first write, and both
processes map it anew. Here both keep the blocks: one travels once, then its name does. The other process says in a block's last
byte that it is done with what is in it.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

FREE, LENT = 0, 1
"""What the last byte of a block says, once it was sent."""

_UNUSED = 256
"""Times that memory of a kind is asked for, after which a free block that was not taken once is given back."""


@dataclass
class Block:
    """Shared memory, and who has it.

    Attributes:
        whole: uint8, all of it; the last byte is `FREE` or `LENT` once it was sent.
        lent: what the tensor in it refers to, in this process.
        is_sent: the other process has what is in it, or had it.
        is_met: the other process knows it by its name.
        name: of its own, whoever made it.
        used: when it was last taken, as a number of takes of its kind.
        content: the whole as an array.
        address: of its first byte.
    """

    whole: torch.Tensor
    lent: weakref.ref[Bytes] | None = None
    is_sent: bool = False
    is_met: bool = False
    name: str = field(default_factory=partial(secrets.token_hex, 8))
    used: int = 0
    content: Bytes = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.content = self.whole.numpy()
        self.address = self.whole.data_ptr()

    @property
    def room(self) -> int:
        """Bytes for a tensor."""
        return len(self.content) - 1

    def is_free(self) -> bool:
        """Whether nobody has it, neither this process nor the other."""
        if self.lent is not None and self.lent() is not None:
            return False
        return not self.is_sent or bool(self.content[-1] == FREE)


class SharedBlocks:
    """A worker's memory for batches; gives tensors as `Buffers` does."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[Block]] = {}
        self._takes: Counter[str] = Counter()
        self._gone: list[str] = []
        # Batches are made in one thread of a worker, and sent by another.
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, kind: str = "") -> torch.Tensor:
        """A tensor of any values, in memory that goes to others of its kind alone: those are of about its size.

        Raises:
            RuntimeError: if the system has no more shared memory.
        """
        size = prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        with self._lock:
            block = self._take(size, kind)
            block.is_sent = False
            lent = block.content[:size]
            block.lent = weakref.ref(lent)
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def _take(self, size: int, kind: str) -> Block:
        self._takes[kind] += 1
        now = self._takes[kind]
        free = [block for block in self._blocks.get(kind, ()) if block.is_free()]
        fitting = [block for block in free if block.room >= size]
        # Of those that fit the last one used, so that what is not needed any more grows old.
        block = max(fitting, key=lambda block: block.used) if fitting else None
        old = [one for one in free if one is not block and now - one.used > _UNUSED]
        if block is None and free:
            # A larger one takes the place of the smallest.
            old.append(min(free, key=lambda block: block.room))
        blocks = [one for one in self._blocks.get(kind, ()) if not any(one is other for other in old)]
        if block is None:
            # A quarter larger, and no smaller than the others, so that batches, which differ in size, soon find all that
            # they need. Not more: the system sets all of it aside.
            known = (len(one.content) for one in self._blocks.get(kind, ()))
            block = self._make(max(size + size // 4 + 1, *known, 0))
            blocks.append(block)
        self._blocks[kind] = blocks
        self._gone += [one.name for one in old if one.is_met]
        block.used = now
        return block

    def _make(self, room: int) -> Block:
        try:
            storage = torch.UntypedStorage._new_shared(room)  # type: ignore[no-untyped-call]  # noqa: SLF001 - as torch's collate
        except RuntimeError as error:
            held = sum(len(block.content) for blocks in self._blocks.values() for block in blocks)
            raise RuntimeError(
                f"a worker needs {room} bytes of shared memory for its batches besides the {held} that it has, and there are no "
                "more: give /dev/shm more room (docker run --shm-size, or --ipc=host), or let less wait and travel "
                f'(prefetch_factor, transport="uint8"): {error}'
            ) from error
        return Block(torch.empty(0, dtype=torch.uint8).set_(storage))

    def take_gone(self) -> list[str]:
        """Names of blocks that the other process has met, and that are no more; each once."""
        with self._lock:
            gone, self._gone = self._gone, []
        return gone

    def send(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor that `empty` gave, from now on the other process's; None of any other tensor."""
        with self._lock:
            for block in (block for blocks in self._blocks.values() for block in blocks):
                lent = None if block.lent is None else block.lent()
                if lent is not None and not block.is_sent and _is_all_of(block, len(lent), tensor):
                    block.is_sent = True
                    block.content[-1] = LENT
                    return block
        return None


def _is_all_of(block: Block, size: int, tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() == block.address and tensor.nbytes == size and tensor.is_contiguous()


_of_this_process: SharedBlocks | None = None


def begin() -> SharedBlocks:
    """From now on, the batches of this process, a worker, lie in shared blocks."""
    global _of_this_process  # noqa: PLW0603 - as torch's `get_worker_info`: it is what this process is
    _of_this_process = SharedBlocks()
    return _of_this_process


def blocks() -> SharedBlocks | None:
    """The blocks of this process, if `begin` was called."""
    return _of_this_process
