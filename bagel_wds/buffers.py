"""Memory for the large tensors of batches: taken again where it can be, shared where it has to travel."""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ROOM = 1.25
"""Memory is taken larger by this factor, so that the next batch, which differs a little, fits too. What is not written
to takes no place."""
_MOST = 4
"""Memory that is larger than what is wanted by more than this factor is left for others."""


class Buffers:
    """Gives tensors whose memory goes to a later one as soon as nothing refers to the earlier one.

    The system clears each page of fresh memory when it is first written to, which takes as long as the writing itself.

    Args:
        shared: give memory that another process can be handed without a copy, as a DataLoader's worker hands over its
            batches. When that process is done with it is not known here, so it is used once.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._blocks: list[tuple[NDArray[np.uint8], weakref.ref[NDArray[np.uint8]]]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any values."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._shared:
            # As torch's own collate does in a worker.
            storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]  # noqa: SLF001
            return torch.empty(0, dtype=torch.uint8).set_(storage).view(dtype).view(*shape)
        block = self._take(num_bytes)
        # The tensor, and whatever is a view of it, keeps this array, and nobody else does.
        lent = block[:num_bytes]
        self._blocks.append((block, weakref.ref(lent)))
        return torch.from_numpy(lent).view(dtype).view(*shape)

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory that nobody has, out of the list."""
        free = [number for number, (_, lent) in enumerate(self._blocks) if lent() is None]
        sizes = {number: len(self._blocks[number][0]) for number in free}
        fitting = [number for number in free if num_bytes <= sizes[number] <= _MOST * num_bytes]
        if fitting:
            return self._blocks.pop(min(fitting, key=sizes.__getitem__))[0]
        # What did not fit this time is not likely to fit the next.
        self._blocks = [entry for number, entry in enumerate(self._blocks) if number not in sizes]
        # NumPy's memory and not torch's: it asks for large pages, which are there in half the time.
        return np.empty(int(num_bytes * _ROOM), np.uint8)
