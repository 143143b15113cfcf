"""A buffer shuffle, bounded by samples and by bytes; what its worker has no memory for is there by its place alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from bagel_wds.errors import ConfigError, ShardError
from bagel_wds.records import SampleRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from bagel_wds.rng import Draws

    Sample = dict[str, Any]
    Fetch = Callable[[Sequence[SampleRef]], Sequence[Sample]]
    Lose = Callable[[Sequence[SampleRef], ShardError], None]

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
        lose: told of samples that cannot be fetched, which are then gone. Without, that is an error.
        stretches: so many of them are fetched together: several, where asking takes longer than reading.

    Attributes:
        samples: in that order.
        taken: how many draws there were.
        num_bytes: that the samples take.
    """

    def __init__(
        self,
        samples: Iterable[Sample] = (),
        taken: int = 0,
        fetch: Fetch | None = None,
        memory: Memory | None = None,
        lose: Lose | None = None,
        stretches: int = 1,
    ) -> None:
        self.samples: list[Sample] = []
        self.taken = taken
        self.num_bytes = 0
        self._fetch = fetch
        self._lose = lose
        self._stretches = stretches
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
        self.num_bytes += num_bytes(sample)
        if not isinstance(ref, SampleRef):
            self._all_placed = False
            return
        if place == len(self._refs):
            self._refs = np.concatenate([self._refs, np.zeros_like(self._refs)])
        self._refs[place] = (ref.shard, ref.offset, ref.length, ref.epoch)

    def take(self, draws: Draws) -> Sample | None:
        """Let a random sample out, whole; the last takes its place. None if it is lost."""
        last = len(self.samples) - 1
        place = draws.choice(last + 1, f"shuffle:{self.taken}")
        self.taken += 1
        if self._all_placed:
            self._refs[place] = self._refs[last]
        self.samples[place], self.samples[last] = self.samples[last], self.samples[place]
        sample = self.samples.pop()
        self.num_bytes -= num_bytes(sample)
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

    def whole(self, sample: Sample) -> Sample | None:
        """The sample with all that belongs to it; if it has to be fetched, so are others close by in its shard.

        None if it is lost: then those behind it in its shard, of which nothing but their places is there, are lost too.

        Raises:
            ShardError: if it cannot be fetched, and there is no `lose`.
        """
        if self._fetch is None or not is_reference(sample):
            return sample
        ref = sample["__ref__"]
        near = self._near(ref)
        try:
            found = self._fetch([ref, *(self.samples[place]["__ref__"] for place in near)])
        except ShardError as error:
            for place in near:
                self._memory.give_back(self.samples[place]["__ref__"].length)
            if self._lose is None:
                raise
            why = error
        else:
            for place, other in zip(near, found[1:], strict=True):
                self.samples[place] = other
            return found[0]
        if near:
            # It may have been one of the others.
            try:
                return self._fetch([ref])[0]
            except ShardError as error:
                why = error
        self._lose([ref, *self._drop_behind(ref)], why)
        return None

    def _drop_behind(self, ref: SampleRef) -> list[SampleRef]:
        """Take the references out that lie behind one in its shard and epoch."""

        def is_behind(sample: Sample) -> bool:
            own = sample["__ref__"]
            return (own.shard, own.epoch) == (ref.shard, ref.epoch) and own.offset > ref.offset

        gone = [is_reference(sample) and is_behind(sample) for sample in self.samples]
        behind = [sample["__ref__"] for sample, out in zip(self.samples, gone, strict=True) if out]
        self._refs[: len(gone) - len(behind)] = self._refs[: len(gone)][~np.array(gone, dtype=bool)]
        self.samples = [sample for sample, out in zip(self.samples, gone, strict=True) if not out]
        self.num_bytes -= sum(own.length for own in behind)
        return behind

    def _near(self, ref: SampleRef) -> list[int]:
        """Places in the buffer of references to fetch with this one, for which there is memory, and is taken now."""
        held = self._refs[: len(self.samples)]
        wanted = {(ref.shard, ref.offset // STRETCH)}
        if self._stretches > 1:
            for sample in filter(is_reference, self.samples):
                if len(wanted) >= self._stretches:
                    break
                wanted.add((sample["__ref__"].shard, sample["__ref__"].offset // STRETCH))
        close = np.zeros(len(held), dtype=bool)
        for shard, stretch in wanted:
            close |= (held[:, 0] == shard) & (held[:, 1] // STRETCH == stretch)
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
        return Room(max_samples - len(self.samples), max_bytes - self.num_bytes)

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


class Unshuffled(ShuffleBuffer):
    """No buffer: samples come as they are read."""

    def room(self, max_samples: int, max_bytes: int) -> Room:  # noqa: ARG002
        """None."""
        return Room()


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
    while True:
        # A buffer that comes from a bookmark may still have some to let out before a new one is read.
        while len(buffer.samples) > max_samples or buffer.num_bytes > max_bytes:
            if (taken := buffer.take(draws)) is not None:
                yield taken
        sample = next(source, None)
        if sample is None:
            break
        if num_bytes(sample) > max_bytes:
            if (whole := buffer.whole(sample)) is not None:
                yield whole
            continue
        buffer.append(sample)
    while buffer.samples:
        if (taken := buffer.take(draws)) is not None:
            yield taken


def num_bytes(sample: Sample) -> int:
    """The bytes that a sample takes: in its tar, where its place is known, else those of its values."""
    ref = sample.get("__ref__")
    if isinstance(ref, SampleRef):
        return ref.length
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))
