"""How far a conversion is: values that it reports, and a bar, or lines in a log, that show them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bagel_wds.console import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

LINE_SECONDS = 30.0
"""Without a terminal, a line is written so often."""


@dataclass(frozen=True)
class Step:
    """How far the conversion of a dataset is.

    Attributes:
        dataset: its name.
        num_rows: rows that there are.
        rows: rows done.
        num_bytes: bytes written.
        quarantined: rows left out.
    """

    dataset: str
    num_rows: int
    rows: int = 0
    num_bytes: int = 0
    quarantined: int = 0

    def after(self, *, rows: int, num_bytes: int, quarantined: int) -> Step:
        """The next step, after so many more."""
        return replace(
            self,
            rows=self.rows + rows,
            num_bytes=self.num_bytes + num_bytes,
            quarantined=self.quarantined + quarantined,
        )


Report = Callable[[Step], None]

Clock = Callable[[], float]
"""Seconds from any moment on; they never run backwards."""


def no_report(step: Step) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Pace:
    """How fast it goes, by what was done since the first step: what a resumed conversion found done does not count.

    Attributes:
        first: step of a dataset that was reported.
        began: when that was.
    """

    first: Step
    began: float

    def is_of(self, step: Step) -> bool:
        """Whether a step is one of the same dataset."""
        return (step.dataset, step.num_rows) == (self.first.dataset, self.first.num_rows)

    def rate(self, step: Step, now: float) -> str:
        """Bytes a second, for people."""
        elapsed = now - self.began
        num_bytes = step.num_bytes - self.first.num_bytes
        return f"{format_size(int(num_bytes / elapsed) if elapsed > 0 else 0)}/s"

    def left(self, step: Step, now: float) -> str:
        """Hours, minutes and seconds to go, if all rows take as long as those that were done."""
        rows, rows_left = step.rows - self.first.rows, step.num_rows - step.rows
        if rows_left and rows <= 0:
            return "--:--:--"
        seconds = round(rows_left * (now - self.began) / rows) if rows_left else 0
        return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def progress(quiet: bool = False, clock: Clock = time.monotonic) -> AbstractContextManager[Report]:
    """Show steps on standard error: on a terminal as a bar a dataset, in a log as a line every 30 seconds.

    Args:
        quiet: show nothing.
        clock: tells the time.
    """
    if quiet:
        return nullcontext(no_report)
    return _bars(clock) if sys.stderr.isatty() else _lines(clock)


@contextmanager
def _lines(clock: Clock) -> Iterator[Report]:
    lines = _Lines(clock)
    try:
        yield lines.report
    finally:
        lines.end()


class _Lines:
    """Steps as lines: one every 30 seconds, and for a dataset that ends one more, if any line was written."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._written_at = clock()
        self._any_written = False
        self._pace: Pace | None = None
        self._unwritten: Step | None = None

    def report(self, step: Step) -> None:
        """Take one more step."""
        now = self._clock()
        if self._pace is None or not self._pace.is_of(step):
            self.end()
            self._pace = Pace(step, now)
        self._unwritten = step
        if now - self._written_at >= LINE_SECONDS:
            self._write(self._pace, step, now)

    def end(self) -> None:
        """No more steps of this dataset will come."""
        if self._pace is not None and self._unwritten is not None and self._any_written:
            self._write(self._pace, self._unwritten, self._clock())

    def _write(self, pace: Pace, step: Step, now: float) -> None:
        percent = 100 * step.rows // step.num_rows if step.num_rows else 100
        sys.stderr.write(
            f"{step.dataset}: {step.rows} of {step.num_rows} rows ({percent} %), {format_size(step.num_bytes)} written, "
            f"{pace.rate(step, now)}, {step.quarantined} quarantined, {pace.left(step, now)} left\n"
        )
        sys.stderr.flush()
        self._written_at, self._any_written, self._unwritten = now, True, None


@contextmanager
def _bars(clock: Clock) -> Iterator[Report]:
    from rich.console import Console  # noqa: PLC0415 - only where there is someone to see it
    from rich.progress import BarColumn, Progress, TaskID, TextColumn  # noqa: PLC0415

    # On a narrow terminal the bar gives way, then the end of the text.
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(
            "{task.fields[rows]} rows, {task.fields[left]} left, {task.fields[written]}, {task.fields[rate]}, "
            "{task.fields[quarantined]} quarantined"
        ),
    )
    tasks: dict[tuple[str, int], tuple[TaskID, Pace]] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def report(step: Step) -> None:
            now = clock()
            place = (step.dataset, step.num_rows)
            if place not in tasks:
                task = bars.add_task(step.dataset, total=step.num_rows, visible=False)
                tasks[place] = (task, Pace(step, now))
            task, pace = tasks[place]
            bars.update(
                task,
                visible=True,
                completed=step.rows,
                rows=f"{step.rows}/{step.num_rows}",
                written=format_size(step.num_bytes),
                rate=pace.rate(step, now),
                quarantined=step.quarantined,
                left=pace.left(step, now),
            )

        yield report
