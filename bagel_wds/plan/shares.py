"""How an epoch of a group is divided among all streams at once: the figures of `walk_epochs` without walking.

Stream s walks run (s + epoch) mod G of an epoch; a run is a stretch of the samples in the order of that epoch's shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Shares:
    """The runs of one epoch.

    Attributes:
        shards: how many shards each run reads from, int64 (G,).
        samples: how many samples each run has, int64 (G,); None where a shard does not tell.
        sharing: how many runs read from a shard that another one reads from, too.
        inside: how many runs begin inside a shard, and so need its index.
    """

    shards: Counts
    samples: Counts | None
    sharing: int
    inside: int

    @property
    def openings(self) -> int:
        """How often a shard is opened in an epoch, over all streams."""
        return int(self.shards.sum())


def divide(samples: Sequence[int | None], order: Sequence[int], parts: int) -> Shares:
    """Divide an epoch into runs as `walk_epochs` does.

    Args:
        samples: of each shard of the group's table; None where no sidecar tells.
        order: of the shards in the epoch.
        parts: G.
    """
    known = np.array([held for held in samples if held is not None], dtype=np.int64)
    if len(known) < len(samples):
        return _divide_unknown(len(samples), parts)
    held = known[np.asarray(order, dtype=np.int64)]
    ends = np.cumsum(held[held > 0])
    total = int(ends[-1]) if len(ends) else 0
    # Python's integers: samples times streams may need more than 64 bits.
    cuts = np.array([total * part // parts for part in range(parts + 1)], dtype=np.int64)
    runs = np.diff(cuts)
    first = np.searchsorted(ends, cuts[:-1], side="right")
    last = np.searchsorted(ends, cuts[1:] - 1, side="right")
    full = runs > 0
    first, last = first[full], last[full]
    # How many runs read from each shard: up by one where a run begins, down behind its last.
    steps = np.bincount(first, minlength=len(ends) + 1) - np.bincount(last + 1, minlength=len(ends) + 1)
    readers = np.cumsum(steps)
    shards = np.zeros(parts, dtype=np.int64)
    shards[full] = last - first + 1
    sharing = (readers[first] > 1) | (readers[last] > 1)
    inside = cuts[:-1][full] > np.concatenate([[0], ends])[first]
    return Shares(shards, runs, int(sharing.sum()), int(inside.sum()))


def _divide_unknown(num_shards: int, parts: int) -> Shares:
    """Whole shards where there are enough; else each run has every G-th sample of each."""
    if num_shards < parts:
        return Shares(np.full(parts, num_shards, dtype=np.int64), None, sharing=parts, inside=0)
    return Shares((num_shards - np.arange(parts) + parts - 1) // parts, None, sharing=0, inside=0)
