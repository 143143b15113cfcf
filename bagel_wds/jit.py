"""Loops over pixels, compiled by Numba for the processor at hand.

What is compiled is kept in `__pycache__` beside the module, or in the user's cache folder, for later processes. The first
process on a machine waits some seconds for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """A function of arrays and numbers, compiled when it is first called; it runs without Python's lock."""
    try:
        fast: Any = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        # Neither folder may be written to.
        fast = njit(nogil=True, error_model="numpy")(function)
    same: F = fast
    return same
