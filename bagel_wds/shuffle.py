"""A buffer shuffle, bounded by samples and by bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bagel_wds.errors import ConfigError
from bagel_wds.records import SampleRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bagel_wds.rng import Draws

    Sample = dict[str, Any]


class ShuffleBuffer:
    """What a shuffle holds between two samples: all of its state.

    Args:
        samples: to start with, in the order that the draws speak of.
        taken: how many draws there were.

    Attributes:
        samples: in that order.
        taken: how many draws there were.
    """

    def __init__(self, samples: Iterable[Sample] = (), taken: int = 0) -> None:
        self.samples: list[Sample] = []
        self.taken = taken
        # The references of the samples, row by row, so that a bookmark is one copy: shard, offset, length, epoch.
        self._refs = np.zeros((64, 4), dtype=np.int64)
        self._all_placed = True
        for sample in samples:
            self.append(sample)

    def append(self, sample: Sample) -> None:
        """Put a sample in at the end."""
        place = len(self.samples)
        self.samples.append(sample)
        ref = sample.get("__ref__")
        if not isinstance(ref, SampleRef):
            self._all_placed = False
            return
        if place == len(self._refs):
            self._refs = np.concatenate([self._refs, np.zeros_like(self._refs)])
        self._refs[place] = (ref.shard, ref.offset, ref.length, ref.epoch)

    def take(self, draws: Draws) -> Sample:
        """Let a random sample out; the last takes its place."""
        last = len(self.samples) - 1
        place = draws.choice(last + 1, f"shuffle:{self.taken}")
        self.taken += 1
        if self._all_placed:
            self._refs[place] = self._refs[last]
        self.samples[place], self.samples[last] = self.samples[last], self.samples[place]
        return self.samples.pop()

    def refs(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """References of the samples, in their order, int64 (n, 4): shard, offset, length, epoch.

        Raises:
            ConfigError: if a sample came without one.
        """
        if not self._all_placed:
            raise ConfigError(
                "a sample has no reference: bookmarks need the stage `read` of this project as the reader"
            )
        return self._refs[: len(self.samples)].copy()


def shuffle(
    samples: Iterable[Sample],
    draws: Draws,
    *,
    max_samples: int,
    max_bytes: int,
    buffer: ShuffleBuffer | None = None,
) -> Iterator[Sample]:
    """The same samples in another order.

    The buffer is filled to one of its bounds; then each new sample lets a random one out. At the end it is emptied
    in random order.

    Args:
        samples: webdataset dicts.
        draws: draw n has the purpose `shuffle:n`.
        max_samples: in the buffer.
        max_bytes: in the buffer; a larger sample passes alone, and the buffer stays.
        buffer: to start with, and to look into from outside.
    """
    buffer = ShuffleBuffer() if buffer is None else buffer
    held = sum(map(num_bytes, buffer.samples))
    source = iter(samples)
    while True:
        # A buffer that comes from a bookmark may still have some to let out before a new one is read.
        while len(buffer.samples) > max_samples or held > max_bytes:
            taken = buffer.take(draws)
            held -= num_bytes(taken)
            yield taken
        sample = next(source, None)
        if sample is None:
            break
        if num_bytes(sample) > max_bytes:
            yield sample
            continue
        buffer.append(sample)
        held += num_bytes(sample)
    while buffer.samples:
        yield buffer.take(draws)


def num_bytes(sample: Sample) -> int:
    """The bytes that a sample takes: in its tar, where its place is known, else those of its values."""
    ref = sample.get("__ref__")
    if isinstance(ref, SampleRef):
        return ref.length
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))
