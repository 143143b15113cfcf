"""A shuffle of n things as a function: which of them comes at a place, without a table of all."""

from __future__ import annotations

from typing import Any

import numpy as np

_ROUNDS = 6


def permute(places: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The number of the thing that comes at each place, in a pseudo-random order of 0..n-1.

    A Feistel network over the smallest even number of bits that holds n, whose round function is SplitMix64's mixer;
    what it gives above n is put through it again (cycle walking, Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). Every place below n gives another number below n.

    Args:
        places: int64, any shape, each in 0..n-1.
        n: how many things there are, at most 2**62.
        seed: of the order.

    Returns:
        int64, the same shape.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    numbers = places.astype(np.uint64)
    outside = np.ones(numbers.shape, bool)
    while outside.any():
        numbers[outside] = _network(numbers[outside], half, seed)
        outside = numbers >= n
    return numbers.astype(np.int64)


def _network(numbers: np.ndarray, half: int, seed: int) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = numbers >> np.uint64(half), numbers & mask
    for number in range(_ROUNDS):
        salt = np.uint64((seed * _ROUNDS + number + 1) * 0x9E3779B97F4A7C15 % 2**64)
        left, right = right, left ^ (_mix(right + salt) & mask)
    return (left << np.uint64(half)) | right


def _mix(numbers: np.ndarray) -> Any:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014), on uint64 that wraps around."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
