"""What a conversion adds up while it runs: how far it is, and whether it leaves out too much."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from bagel_wds.errors import QuarantineLimitError

from .progress import Step
from .record import Mode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .planning import ConversionPlan
    from .progress import Report
    from .quarantine import Limit
    from .slices import SliceReport


class Watcher:
    """Adds up what slices report, tells how far the conversion is, and stops one that leaves out too much."""

    def __init__(self, plan: ConversionPlan, limit: Limit | None, report: Report) -> None:
        self._plan = plan
        self._limit = limit
        self._report = report
        self._step = Step(plan.source.name, plan.num_rows)
        self._base = self._step
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, Mapping[str, Any]] = {}

    def count(self, result: SliceReport) -> None:
        """One more slice is done."""
        self._step = self._step.after(
            rows=result.read, num_bytes=result.num_bytes, quarantined=sum(result.reasons.values())
        )
        self._reasons.update(result.reasons)
        self._examples = {**result.examples, **self._examples}
        if self._limit is not None and self._left_out > self._limit.of(self._num_rows):
            raise QuarantineLimitError(self._too_many())

    @property
    def _num_rows(self) -> int:
        """Rows of the whole dataset."""
        before = self._plan.manifest.counts if self._plan.manifest else None
        if before is None:
            return self._plan.num_rows
        return before.read + (0 if self._plan.mode is Mode.RETRY else self._plan.num_rows)

    @property
    def _left_out(self) -> int:
        """Rows of the whole dataset that were left out so far; those that are retried count anew."""
        before = self._plan.manifest.counts if self._plan.manifest else None
        old = before.quarantined if before and self._plan.mode is Mode.APPEND else 0
        return old + self._reasons.total()

    def begin(self) -> None:
        """What was done by an earlier run has been counted."""
        self._base = self._step
        self._report(self._step)

    def watch(self, rows: int, num_bytes: int, quarantined: int) -> None:
        """So much was done since the beginning, slices that are under way included."""
        self._report(self._base.after(rows=rows, num_bytes=num_bytes, quarantined=quarantined))

    def end(self) -> None:
        """Every slice is done."""
        self._report(self._step)

    def _too_many(self) -> str:
        reasons = "; ".join(
            f"{reason} {count} (for example {place_of(self._examples[reason])}: {self._examples[reason]['detail']})"
            for reason, count in self._reasons.most_common(3)
        )
        return (
            f"dataset {self._plan.source.name!r}: {self._left_out} of {self._num_rows} rows were left out so far, and "
            f"--max-quarantine allows {self._limit}: {reasons}; add what is missing, or allow more and run it again: what is "
            "finished without such rows is kept, and `bagel-wds check` lists each such row"
        )


def place_of(entry: Mapping[str, Any]) -> str:
    """Where a quarantined row lies, for people."""
    group = f" row group {entry['row_group']}" if "row_group" in entry else ""
    return f"{entry['file']}{group} row {entry['row']}"
