"""A buffer shuffle, bounded by samples and by bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bagel_wds.records import SampleRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bagel_wds.rng import Draws

    Sample = dict[str, Any]


@dataclass
class ShuffleBuffer:
    """What a shuffle holds between two samples: all of its state.

    Attributes:
        samples: in the order that the draws speak of.
        taken: how many draws there were.
    """

    samples: list[Sample] = field(default_factory=list)
    taken: int = 0

    def take(self, draws: Draws) -> Sample:
        """Let a random sample out; the last takes its place."""
        place = draws.choice(len(self.samples), f"shuffle:{self.taken}")
        self.taken += 1
        self.samples[place], self.samples[-1] = self.samples[-1], self.samples[place]
        return self.samples.pop()


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
        buffer.samples.append(sample)
        held += num_bytes(sample)
    while buffer.samples:
        yield buffer.take(draws)


def num_bytes(sample: Sample) -> int:
    """The bytes that a sample takes: in its tar, where its place is known, else those of its values."""
    ref = sample.get("__ref__")
    if isinstance(ref, SampleRef):
        return ref.length
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))
