"""A buffer shuffle, bounded by samples and by bytes; what its worker has no memory for is there by its place alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from bagel_wds.errors import ConfigError
from bagel_wds.records import SampleRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from bagel_wds.rng import Draws

    Sample = dict[str, Any]
    Fetch = Callable[[Sequence[SampleRef]], Sequence[Sample]]

STRETCH = 1 << 20
"""Samples that start in the same stretch of a shard, of so many bytes, are fetched together."""


class Memory:
    """Encoded bytes that one worker may keep for later, in all its buffers together.

    Args:
        limit: so many.

    Attributes:
        held: how many are kept now.
    """

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = limit
        self.held = 0

    def __reduce__(self) -> tuple[type[Memory], tuple[int]]:
        # Another process keeps nothing yet.
        return (Memory, (self.limit,))

    def take(self, count: int) -> bool:
        """Keep so many bytes, if there is room for them; tells whether there is."""
        fits = self.held + count <= self.limit
        self.held += count * fits
        return fits

    def give_back(self, count: int) -> None:
        """Keep so many bytes no longer."""
        self.held -= count


class Room:
    """How many samples, and how many bytes of them, a buffer still has place for. True while there is some.

    Args:
        samples: so many.
        num_bytes: likewise.
    """

    def __init__(self, samples: int = 0, num_bytes: int = 0) -> None:
        self._samples = samples
        self._bytes = num_bytes

    def __bool__(self) -> bool:
        return self._samples > 0 and self._bytes > 0

    def take(self, count: int) -> bool:
        """Take the place of one sample of so many bytes; tells whether there was one. The last may be over the bytes."""
        there = bool(self)
        self._samples -= there
        self._bytes -= count * there
        return there


def reference(ref: SampleRef) -> Sample:
    """A sample of which nothing but its place is in memory."""
    return {"__ref__": ref}


def is_reference(sample: Sample) -> bool:
    """Whether nothing but its place is there of a sample."""
    return len(sample) == 1 and "__ref__" in sample


class ShuffleBuffer:
    """What a shuffle holds between two samples: all of its state.

    Args:
        samples: to start with, in the order that the draws speak of; whole, or as `reference` gives them.
        taken: how many draws there were.
        fetch: gives whole samples by their references. Without, each sample is kept whole.
        memory: of the worker.

    Attributes:
        samples: in that order.
        taken: how many draws there were.
    """

    def __init__(
        self,
        samples: Iterable[Sample] = (),
        taken: int = 0,
        fetch: Fetch | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.samples: list[Sample] = []
        self.taken = taken
        self._fetch = fetch
        self._memory = memory or Memory()
        # The references of the samples, row by row, so that a bookmark is one copy: shard, offset, length, epoch.
        self._refs = np.zeros((64, 4), dtype=np.int64)
        self._all_placed = True
        for sample in samples:
            self.append(sample)

    def append(self, sample: Sample) -> None:
        """Put a sample in at the end."""
        place = len(self.samples)
        ref = sample.get("__ref__")
        if isinstance(ref, SampleRef) and self._is_counted(sample) and not self._memory.take(ref.length):
            sample = reference(ref)
        self.samples.append(sample)
        if not isinstance(ref, SampleRef):
            self._all_placed = False
            return
        if place == len(self._refs):
            self._refs = np.concatenate([self._refs, np.zeros_like(self._refs)])
        self._refs[place] = (ref.shard, ref.offset, ref.length, ref.epoch)

    def take(self, draws: Draws) -> Sample:
        """Let a random sample out, whole; the last takes its place."""
        last = len(self.samples) - 1
        place = draws.choice(last + 1, f"shuffle:{self.taken}")
        self.taken += 1
        if self._all_placed:
            self._refs[place] = self._refs[last]
        self.samples[place], self.samples[last] = self.samples[last], self.samples[place]
        sample = self.samples.pop()
        if self._is_counted(sample):
            self._memory.give_back(sample["__ref__"].length)
        return self.whole(sample)

    def _is_counted(self, sample: Sample) -> bool:
        """Whether a sample is in memory and could be fetched again."""
        return (
            self._fetch is not None
            and not is_reference(sample)
            and isinstance(sample.get("__ref__"), SampleRef)
        )

    def whole(self, sample: Sample) -> Sample:
        """The sample with all that belongs to it; if it has to be fetched, so are others close by in its shard."""
        if self._fetch is None or not is_reference(sample):
            return sample
        near = self._near(sample["__ref__"])
        found = self._fetch([sample["__ref__"], *(self.samples[place]["__ref__"] for place in near)])
        for place, other in zip(near, found[1:], strict=True):
            self.samples[place] = other
        return found[0]

    def _near(self, ref: SampleRef) -> list[int]:
        """Places in the buffer of references close to this one, for which there is memory, and is taken now."""
        held = self._refs[: len(self.samples)]
        close = (held[:, 0] == ref.shard) & (held[:, 1] // STRETCH == ref.offset // STRETCH)
        return [
            place
            for place in np.flatnonzero(close).tolist()
            if is_reference(self.samples[place]) and self._memory.take(int(held[place, 2]))
        ]

    def forget(self) -> None:
        """Keep no more than the places of samples that can be fetched again."""
        for place, sample in enumerate(self.samples):
            if self._is_counted(sample):
                self._memory.give_back(sample["__ref__"].length)
                self.samples[place] = reference(sample["__ref__"])

    def room(self, max_samples: int, max_bytes: int) -> Room:
        """What is left of these bounds."""
        return Room(max_samples - len(self.samples), max_bytes - sum(map(num_bytes, self.samples)))

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
    source = iter(samples)
    try:
        yield from _shuffled(source, draws, max_samples, max_bytes, buffer)
    finally:
        # Whoever gave up the iteration may still hold on to the buffer.
        buffer.forget()


def _shuffled(
    source: Iterator[Sample], draws: Draws, max_samples: int, max_bytes: int, buffer: ShuffleBuffer
) -> Iterator[Sample]:
    held = sum(map(num_bytes, buffer.samples))
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
            yield buffer.whole(sample)
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
