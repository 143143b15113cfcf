"""Memory for the large tensors of batches: taken again where it can be, shared where it has to travel."""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from bagel_wds.scratch import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Buffers:
    """Gives tensors whose memory goes to a later one as soon as nothing refers to the earlier one.

    The system clears each page of fresh memory when it is first written to, which takes as long as the writing itself.

    Args:
        shared: give memory that another process can be handed without a copy, as a DataLoader's worker hands over its
            batches. When that process is done with it is not known here, so it is used once.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._blocks: dict[str, list[tuple[NDArray[np.uint8], weakref.ref[NDArray[np.uint8]]]]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, kind: str = "") -> torch.Tensor:
        """A tensor of any values, in memory that goes to others of its kind alone: those are of about its size."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._shared:
            # As torch's own collate does in a worker.
            storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]  # noqa: SLF001
            return torch.empty(0, dtype=torch.uint8).set_(storage).view(dtype).view(tuple(shape))
        block = self._take(num_bytes, kind)
        # The tensor, and whatever is a view of it, keeps this array, and nobody else does.
        lent = block[:num_bytes]
        self._blocks[kind].append((block, weakref.ref(lent)))
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def _take(self, num_bytes: int, kind: str) -> NDArray[np.uint8]:
        """Memory that nobody has, out of the list."""
        blocks = self._blocks.setdefault(kind, [])
        free = [number for number, (_, lent) in enumerate(blocks) if lent() is None]
        fitting = [number for number in free if len(blocks[number][0]) >= num_bytes]
        if fitting:
            return blocks.pop(min(fitting, key=lambda number: len(blocks[number][0])))[0]
        # What has become too small for its kind is not likely to fit the next.
        self._blocks[kind] = [entry for number, entry in enumerate(blocks) if number not in free]
        # No smaller than the others, so that tensors, which differ in size, soon find all that they need.
        size = max(round_up(num_bytes), *(len(block) for block, _ in blocks), 0)
        # NumPy's memory and not torch's: it asks for large pages, which are there in half the time.
        return np.empty(size, np.uint8)
