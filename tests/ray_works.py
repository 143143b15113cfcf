"""Work for slices that does what a test of an engine needs; nodes of a cluster import it from here."""

from __future__ import annotations

import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagel_wds.converters.engine import Tell


@dataclass(frozen=True)
class Piece:
    """A slice that is only a number."""

    number: int

    def __str__(self) -> str:
        return f"slice {self.number}"


@dataclass(frozen=True)
class Noted:
    """Work that leaves a file for each time that a slice began, and one for each time that it ended.

    Attributes:
        folder: of the files.
        rows: told, one by one.
        seconds: that a slice takes at least.
    """

    folder: str
    rows: int = 5
    seconds: float = 0.0

    def __call__(self, part: Piece, tell: Tell) -> int:
        """Give ten times the number of the slice."""
        self.note(f"{part.number}-begun")
        self.work(part)
        for _ in range(self.rows):
            tell(1, 100, 0)
            time.sleep(self.seconds / self.rows)
        self.note(f"{part.number}-ended")
        return 10 * part.number

    def work(self, part: Piece) -> None:
        """What else is done."""

    def note(self, what: str) -> None:
        """Leave a file, named by the time in nanoseconds and what happened."""
        Path(self.folder, f"{time.time_ns()}-{what}-{secrets.token_hex(4)}").touch()


@dataclass(frozen=True)
class Raising(Noted):
    """Work that raises an error at slice 1."""

    error: Exception | None = None

    def work(self, part: Piece) -> None:
        """Raise."""
        if part.number == 1 and self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Dying(Noted):
    """Work whose process is killed at slice 1, the first times."""

    times: int = 1

    def work(self, part: Piece) -> None:
        """Die."""
        if part.number == 1 and len(list(Path(self.folder).glob("*-1-begun-*"))) <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Meeting(Noted):
    """Work of which each slice goes on only once another is at work too."""

    def work(self, part: Piece) -> None:
        """Wait for the other."""
        deadline = time.monotonic() + 60
        while len(list(Path(self.folder).glob("*-begun-*"))) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError("no other slice began")
            time.sleep(0.01)
