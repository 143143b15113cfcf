"""Draws from the process-wide generators, as upstream's classes make them; and these generators lent for one call."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bagel_wds.rng import CallOrderDraws

if TYPE_CHECKING:
    from collections.abc import Iterator


class ProcessDraws(CallOrderDraws):
    """Draws in the order of the calls from the process-wide `random` and `numpy.random`, which it never seeds.

    For upstream's classes called by themselves, whose callers seed these two. Nothing else in this package uses it.
    """

    def __init__(self) -> None:
        # Each module has the methods of a generator, and they are those of its process-wide one.
        modules: tuple[Any, Any] = random, np.random
        self.python, self.numpy = modules


@dataclass
class OwnGenerators:
    """A state for each of the three process-wide generators, for code that knows no others.

    Attributes:
        draws: the generators of Python and NumPy; others may draw from them too.
        torch_state: of torch's generator on the CPU.
    """

    draws: CallOrderDraws
    torch_state: torch.Tensor

    @classmethod
    def seeded(cls, draws: CallOrderDraws, seed: int) -> OwnGenerators:
        """With torch's generator as a seed leaves it."""
        return cls(draws, torch.Generator().manual_seed(seed).get_state())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """For what is called inside, the process-wide generators are these; afterwards they are as before.

        Other threads that draw meanwhile draw from these, too.
        """
        with _LENDING:
            before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
            random.setstate(self.draws.python.getstate())
            np.random.set_state(self.draws.numpy.get_state())  # noqa: NPY002
            torch.set_rng_state(self.torch_state)
            try:
                yield
            finally:
                self.draws.python.setstate(random.getstate())
                self.draws.numpy.set_state(np.random.get_state())  # noqa: NPY002
                self.torch_state = torch.get_rng_state()
                python, numpy, torch_state = before
                random.setstate(python)
                np.random.set_state(numpy)  # noqa: NPY002
                torch.set_rng_state(torch_state)


_LENDING = threading.RLock()
"""The one room where the process-wide generators are touched: for one call, under this lock, and restored."""
