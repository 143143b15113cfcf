"""How far a conversion is: values that it reports, and a bar that shows them on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bagel_wds.console import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def no_report(step: Step) -> None:
    """Tell nobody."""


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Show steps as a bar a dataset, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield no_report
        return
    from rich.console import Console  # noqa: PLC0415 - only where there is someone to see it
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            "rows, {task.fields[written]}, {task.fields[rate]}, {task.fields[quarantined]} quarantined"
        ),
        TimeRemainingColumn(),
    )
    tasks = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def report(step: Step) -> None:
            place = (step.dataset, step.num_rows)
            if place not in tasks:
                tasks[place] = bar.add_task(
                    step.dataset, total=step.num_rows, written="0 B", rate="0 B/s", quarantined=0
                )
            task = tasks[place]
            elapsed = bar.tasks[task].elapsed
            bar.update(
                task,
                completed=step.rows,
                written=format_size(step.num_bytes),
                rate=f"{format_size(int(step.num_bytes / elapsed) if elapsed else 0)}/s",
                quarantined=step.quarantined,
            )

        yield report
