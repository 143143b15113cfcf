"""A buffer shuffle, bounded by samples and by bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bagel_wds.rng import Draws


def shuffle(
    samples: Iterable[dict[str, Any]], draws: Draws, *, max_samples: int, max_bytes: int
) -> Iterator[dict[str, Any]]:
    """The same samples in another order.

    The buffer is filled to one of its bounds; then each new sample lets a random one out. At the end it is emptied
    in random order.

    Args:
        samples: webdataset dicts.
        draws: draw n has the purpose `shuffle:n`.
        max_samples: in the buffer.
        max_bytes: in the buffer; a larger sample passes alone, and the buffer stays.
    """
    buffer: list[tuple[dict[str, Any], int]] = []
    held = taken = 0

    def take() -> dict[str, Any]:
        nonlocal held, taken
        place = draws.choice(len(buffer), f"shuffle:{taken}")
        taken += 1
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        sample, size = buffer.pop()
        held -= size
        return sample

    for sample in samples:
        size = num_bytes(sample)
        if size > max_bytes:
            yield sample
            continue
        buffer.append((sample, size))
        held += size
        while buffer and (len(buffer) > max_samples or held > max_bytes):
            yield take()
    while buffer:
        yield take()


def num_bytes(sample: dict[str, Any]) -> int:
    """The encoded bytes that a sample holds."""
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))
