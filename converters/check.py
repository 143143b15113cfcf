"""A conversion without the writing: which rows would be left out, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bagel_wds.errors import ConfigError
from bagel_wds.sources import plan_source

from .engine_pool import pool_engine
from .progress import Step, no_report
from .settings import ShardSettings
from .slices import SliceRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bagel_wds.sources import Slice, Source

    from .engine import Tell
    from .marks import Outcome
    from .progress import Report

Entry = dict[str, Any]
"""What `quarantine.jsonl` would say of a row."""


@dataclass(frozen=True)
class CheckSummary:
    """What a source holds.

    Attributes:
        name: of the dataset.
        kind: of its rows.
        read: rows.
        num_bytes: that the usable ones would take in shards.
        reasons: rows that would be left out, by reason.
        repaired: rows that would be mended, by what is.
        notes: what a person should know of the source.
    """

    name: str
    kind: str
    read: int
    num_bytes: int
    reasons: Mapping[str, int]
    repaired: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def quarantined(self) -> int:
        """Rows that would be left out."""
        return sum(self.reasons.values())


def check_source(
    source: Source,
    *,
    settings: ShardSettings | None = None,
    processes: int = 1,
    report: Report = no_report,
    tell_row: Callable[[Entry], None] | None = None,
) -> CheckSummary:
    """Read every row of a source as a conversion would, and write nothing.

    Args:
        source: what to check.
        settings: of the conversion.
        processes: how many slices are read at a time.
        report: told how far the check is.
        tell_row: told each row that would be left out, in the order of the source.

    Raises:
        ConfigError: if the source will not do, or has no row.
        ShardError: if reading failed.
    """
    settings = settings or ShardSettings()
    cut = plan_source(source, slice_bytes=settings.slice_bytes, slice_rows=settings.slice_rows)
    total = sum(part.num_rows for part in cut.slices)
    if total == 0:
        raise ConfigError(f"dataset {source.name!r}: the source has no row")
    step = Step(source.name, total)
    report(step)
    reasons: Counter[str] = Counter()
    repaired: Counter[str] = Counter()
    read = num_bytes = awaited = 0
    waiting: dict[int, list[Entry]] = {}
    work = CheckWork(source, settings)
    run = pool_engine(processes)
    for number, outcome, size in run(work, cut.slices, lambda *done: report(_after(step, *done))):
        read += outcome.read
        num_bytes += size
        reasons.update(outcome.reasons)
        repaired.update(outcome.repaired)
        waiting[number] = outcome.quarantine
        # Slices end in any order; rows are told in that of the source.
        while awaited in waiting:
            for entry in waiting.pop(awaited):
                if tell_row is not None:
                    tell_row(entry)
            awaited += 1
    report(_after(step, read, num_bytes, reasons.total()))
    return CheckSummary(
        name=source.name,
        kind=source.kind,
        read=read,
        num_bytes=num_bytes,
        reasons=dict(sorted(reasons.items())),
        repaired=dict(sorted(repaired.items())),
        notes=cut.notes,
    )


def _after(step: Step, rows: int, num_bytes: int, quarantined: int) -> Step:
    return step.after(rows=rows, num_bytes=num_bytes, quarantined=quarantined)


@dataclass(frozen=True)
class CheckWork:
    """Reads slices; a callable, so that it can be sent to another process.

    Attributes:
        source: what is read.
        settings: what is done to the rows.
    """

    source: Source
    settings: ShardSettings

    def __call__(self, part: Slice, tell: Tell) -> tuple[int, Outcome, int]:
        """The number of a slice, what would become of its rows, and the bytes of the usable ones."""
        rows = SliceRows(self.source, part, self.settings, tell)
        sizes = [sample.num_bytes for sample in rows]
        outcome = rows.take(len(sizes))
        outcome.add(rows.take_rest())
        return part.number, outcome, sum(sizes)
