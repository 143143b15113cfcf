"""Every draw of a run comes from here: randomness is a function of an address, not a state.

`KeyedDraws` gives the draw named by (seed, ..., purpose): asking twice gives the same value, and adding a draw
moves no other. `CallOrderDraws` reads two shared generators in the order of the calls, as upstream BAGEL does
with the process-wide ones; it is the twin that `fidelity="upstream"` uses, and the purpose is then ignored.

The process-wide generators of `random`, `numpy.random` and `torch` are neither read nor reseeded.
"""

from __future__ import annotations

import random
from statistics import NormalDist
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

_STANDARD_NORMAL = NormalDist()


class Draws(Protocol):
    """What a recipe or the packer may draw; `purpose` names the draw within its sample or step."""

    def random(self, purpose: str) -> float:
        """A float, uniform in [0, 1)."""

    def choice(self, n: int, purpose: str) -> int:
        """An index, uniform in 0..n-1. Raises IndexError if n is 0."""

    def randint(self, low: int, high: int, purpose: str) -> int:
        """An integer, uniform in low..high-1. Raises ValueError if that is empty."""

    def normal(self, purpose: str) -> float:
        """A float from the standard normal distribution."""

    def permutation(self, n: int, purpose: str) -> Sequence[int]:
        """0..n-1 in a random order."""


class KeyedDraws:
    """Draws addressed by the values given here and a purpose: XXH3-64 of the address.

    Args:
        address: integers and strings, for example seed, group, dataset, epoch, key. Integers and strings of
            the same letters differ, and no two addresses run into each other.
    """

    __slots__ = ("_prefix",)

    def __init__(self, *address: int | str) -> None:
        # A word is written as its kind, its length and itself, so that ("ab", "c") is not ("a", "bc").
        self._prefix = b"".join(_word(part) for part in address)

    def _bits(self, purpose: str) -> int:
        """The 64 bits of the draw with this purpose."""
        return xxhash.xxh3_64_intdigest(self._prefix + _word(purpose))

    def random(self, purpose: str) -> float:
        """A float, uniform in [0, 1): the upper 53 bits."""
        return (self._bits(purpose) >> 11) * 2.0**-53

    def choice(self, n: int, purpose: str) -> int:
        """An index in 0..n-1: the digest scaled by n, so its bias is under n / 2**64."""
        if n <= 0:
            raise IndexError(f"nothing to choose from (n={n}) for {purpose!r}")
        return (self._bits(purpose) * n) >> 64

    def randint(self, low: int, high: int, purpose: str) -> int:
        """An integer in low..high-1."""
        if high <= low:
            raise ValueError(f"no integer in {low}..{high - 1} for {purpose!r}")
        return low + self.choice(high - low, purpose)

    def normal(self, purpose: str) -> float:
        """A standard normal float: the inverse distribution function of a uniform one in (0, 1).

        52 bits and a half: with 53, the largest would be rounded up to 1.
        """
        return _STANDARD_NORMAL.inv_cdf(((self._bits(purpose) >> 12) + 0.5) * 2.0**-52)

    def permutation(self, n: int, purpose: str) -> Sequence[int]:
        """0..n-1, sorted by each number's own 64 bits."""
        prefix = self._prefix + _word(purpose)
        return sorted(range(n), key=lambda i: xxhash.xxh3_64_intdigest(prefix + b"#%d" % i))


def _word(part: int | str) -> bytes:
    kind = "i" if isinstance(part, int) else "s"
    text = str(part)
    # A key out of a tar whose names are no UTF-8 holds surrogates.
    return f"{kind}{len(text)}:{text}".encode("utf-8", "surrogatepass")


class CallOrderDraws:
    """Draws in the order of the calls from one `random.Random` and one `numpy.random.RandomState`.

    The kinds of draw fall on the two generators as upstream's do: `random`, `choice` on Python's; `randint`,
    `normal`, `permutation` on NumPy's. A choice over one element still consumes the generator; a choice over
    none raises IndexError and does not.

    Args:
        seed: of both generators, in 0..2**32-1.
    """

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)  # noqa: S311 - not for secrets
        self.numpy = np.random.RandomState(seed)

    def random(self, purpose: str) -> float:  # noqa: ARG002
        """The next float of Python's generator."""
        return self.python.random()

    def choice(self, n: int, purpose: str) -> int:  # noqa: ARG002
        """The next choice of Python's generator."""
        return self.python.choice(range(n))

    def randint(self, low: int, high: int, purpose: str) -> int:  # noqa: ARG002
        """The next integer of NumPy's generator."""
        return int(self.numpy.randint(low, high))

    def normal(self, purpose: str) -> float:  # noqa: ARG002
        """The next normal float of NumPy's generator."""
        return float(self.numpy.randn())

    def permutation(self, n: int, purpose: str) -> Sequence[int]:  # noqa: ARG002
        """The next permutation of NumPy's generator."""
        return [int(i) for i in self.numpy.permutation(n)]


def upstream_iter_seed(
    global_seed: int | None,
    data_seed: int | None,
    *,
    rank: int,
    world_size: int,
    worker_id: int,
    num_workers: int,
) -> int:
    """The seed that upstream sets in a worker when iteration starts; a `global_seed` of 0 counts as unset."""
    base = global_seed or data_seed or 0
    return ((base * max(1, world_size) + rank) * max(1, num_workers) + worker_id) & 0xFFFFFFFF
