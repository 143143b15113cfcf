"""Samples lost with a shard that cannot be read, where the settings say to go on without them: counted, never many."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagel_wds.errors import Reason, ShardError
from bagel_wds.redact import redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bagel_wds.errors import Tally
    from bagel_wds.records import Lost
    from bagel_wds.state import StreamState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SkipLimit:
    """How much of a group may be skipped.

    Attributes:
        share: of the group's samples, an epoch: 0.01 is one of a hundred.
        group_size: samples in the group.
        num_streams: that share them. No stream loses all of its part of an epoch, whatever the share.
    """

    share: float
    group_size: int
    num_streams: int = 1

    def check(self, group: str, lost: Iterable[Lost], why: str) -> None:
        """Refuse to go on once too much is lost.

        Args:
            group: name of the group.
            lost: in one or more streams.
            why: what was lost last.

        Raises:
            ShardError: naming the figures.
        """
        by_epoch: dict[int, int] = {}
        for run in lost:
            by_epoch[run.epoch] = by_epoch.get(run.epoch, 0) + run.count
        for epoch, count in by_epoch.items():
            if count > self.share * self.group_size:
                raise ShardError(
                    f"group {group!r}: {count} of its {self.group_size} samples were skipped in epoch {epoch}, "
                    f"{count / self.group_size:.2%}, and max_skipped={self.share} allows {self.share:.2%}; mend the shards, or "
                    f"raise max_skipped. The last: {why}"
                )


class Skips:
    """What one stream has skipped of a group.

    Args:
        group: name of the group.
        tally: where the samples are counted, as read and dropped.
        limit: how many there may be.
        lost: what was skipped before, from a state.
    """

    def __init__(self, group: str, tally: Tally, limit: SkipLimit, lost: Iterable[Lost] = ()) -> None:
        self._group = group
        self._tally = tally
        self._limit = limit
        self._lost = list(lost)

    @property
    def lost(self) -> tuple[Lost, ...]:
        """What was skipped in the newest epoch that lost anything, and in the one before, as a state keeps it."""
        newest = max((run.epoch for run in self._lost), default=0)
        return tuple(run for run in self._lost if run.epoch >= newest - 1)

    def skip(self, url: str, lost: Iterable[Lost], error: Exception, *, were_read: bool = False) -> None:
        """Go on without samples of one shard.

        Args:
            url: of the shard.
            lost: the samples; those of one call are told of together.
            error: why they cannot be had.
            were_read: they were read and counted once, and cannot be read again.

        Raises:
            ShardError: if that is more than is allowed.
        """
        runs = list(lost)
        count = sum(run.count for run in runs)
        if count == 0:
            return
        if not were_read:
            self._tally[self._group, "read"] += count
        self._tally.drop(self._group, Reason.SHARD_UNREADABLE, count)
        self._lost += runs
        self._lost = list(self.lost)
        logger.warning(
            "group %r: skipped %d samples of %s in epoch %d: %s",
            self._group,
            count,
            redact(url),
            runs[0].epoch,
            error,
        )
        self._limit.check(self._group, self._lost, str(error))
        # A store that is down would let a stream with a small part walk through epoch after epoch and give nothing.
        epoch = runs[-1].epoch
        part = max(1, self._limit.group_size // self._limit.num_streams)
        if sum(run.count for run in self._lost if run.epoch == epoch) >= part:
            raise ShardError(
                f"group {self._group!r}: a stream skipped all of its {part} samples of epoch {epoch}; is the store there? The "
                f"last: {error}"
            )


def check_together(limits: Mapping[str, SkipLimit], streams: Iterable[StreamState]) -> None:
    """Refuse to go on once the streams of a process have together skipped too much of a group.

    Args:
        limits: of each group.
        streams: where each is.

    Raises:
        ShardError: naming the figures.
    """
    listed = list(streams)
    for group, limit in limits.items():
        lost = [run for state in listed if group in state.groups for run in state.groups[group].skipped]
        limit.check(group, lost, "see the log")
