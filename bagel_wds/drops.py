"""Samples that are left out of a run: counted, told of, and never all of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from bagel_wds.errors import BadSample, NoUsableSampleError, Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagel_wds.records import SampleRef

logger = logging.getLogger(__name__)

LEAST_IN_A_ROW = 1000
"""A shuffle buffer holds a small group many times over, so that one bad sample may come a few times in a row."""


def check_some_packed(stats: Mapping[str, Any]) -> None:
    """Refuse a finite pass that is over and gave nothing, since all that was read was dropped.

    Args:
        stats: of the whole pass, see `stats_of`.

    Raises:
        NoUsableSampleError: naming groups and reasons.
    """
    groups = {name: group["dropped"] for name, group in stats["groups"].items() if group["dropped"]}
    if groups and not any(group["packed"] for group in stats["groups"].values()):
        told = "; ".join(
            f"group {name!r}: " + ", ".join(f"{reason} {count}" for reason, count in dropped.items())
            for name, dropped in groups.items()
        )
        raise NoUsableSampleError(
            f"no usable sample in the whole pass; dropped were, of {told}; the log names some of them"
        )


class Drops:
    """Counts dropped samples of a group, tells of them, and stops a run that drops everything.

    Args:
        group: name of the group.
        tally: where they are counted.
        group_size: so many drops in a row, and never fewer than `LEAST_IN_A_ROW`, are a whole epoch without a usable
            sample. None if it is not known: then they have to reach over two epochs.
    """

    def __init__(self, group: str, tally: Tally | None, group_size: int | None = None) -> None:
        self._group = group
        self._tally = Tally() if tally is None else tally
        self._group_size = group_size
        self._in_a_row = 0
        self._since_epoch: int | None = None

    def good(self) -> None:
        """A sample was usable."""
        self._in_a_row, self._since_epoch = 0, None

    def drop(self, key: str, bad: BadSample, ref: SampleRef | None = None) -> None:
        """Count a sample that was not.

        Raises:
            NoUsableSampleError: if that was the last of a whole epoch's worth.
        """
        times = self._tally.drop(self._group, bad.reason)
        if times in (1, 10, 100) or times % 1000 == 0:
            logger.warning(
                "group %r: %d dropped as %s; now %s: %s", self._group, times, bad.reason, key, bad.detail
            )
        self._in_a_row += 1
        epoch = ref.epoch if ref else 0
        self._since_epoch = epoch if self._since_epoch is None else self._since_epoch
        over_an_epoch = (
            self._in_a_row >= self._group_size
            if self._group_size is not None
            else epoch >= self._since_epoch + 2
        )
        whole_epoch = over_an_epoch and self._in_a_row >= LEAST_IN_A_ROW
        if whole_epoch:
            reasons = ", ".join(
                f"{reason} {count}" for reason, count in self._tally.drops(self._group).items()
            )
            raise NoUsableSampleError(
                f"group {self._group!r}: no usable sample in a whole epoch, nor in the last {self._in_a_row} that were "
                f"read; dropped so far: {reasons}; the last was "
                f"{key}: {bad.detail}"
            )
