"""Memory that is taken again for the next picture: what is written to for the first time has to be cleared by the system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MOST_KEPT = 1 << 26
"""Bytes: a picture of 22 megapixels. What a larger one needs is given back, so that a single one does not stay for ever."""


class Scratch:
    """Memory of one thread for what it needs for a moment: the same again whenever it is asked for under a name."""

    def __init__(self) -> None:
        self._blocks: dict[str, NDArray[np.uint8]] = {}

    def empty(self, name: str, size: int) -> NDArray[np.uint8]:
        """Bytes of any values, until the next call with this name."""
        if size > _MOST_KEPT:
            return np.empty(size, np.uint8)
        block = self._blocks.get(name)
        if block is None or len(block) < size:
            block = self._blocks[name] = np.empty(round_up(size), np.uint8)
        return block[:size]


def round_up(size: int) -> int:
    """To a power of two: what comes later often fits, and what is not written to takes no place."""
    return 1 << (size - 1).bit_length()
