"""How far a conversion is: lines in a log whose figures can be checked by hand, and a bar on a terminal."""

from __future__ import annotations

import io
import os
import re
import threading
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.converters.progress import Pace, Step, progress


@dataclass
class Watch:
    """A clock that is set by hand."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def written(
    steps: list[tuple[float, Step]], capsys: pytest.CaptureFixture[str], **options: bool
) -> list[str]:
    """The lines that come of steps at these seconds from the start; the last second is that of the end."""
    watch = Watch()
    with progress(clock=watch, **options) as report:
        for seconds, step in steps:
            watch.now = 1000.0 + seconds
            report(step)
    out, err = capsys.readouterr()
    assert not out
    return err.splitlines()


def row_steps(*places: tuple[float, int], num_rows: int = 100) -> list[tuple[float, Step]]:
    """Steps of one dataset: (seconds, rows done)."""
    return [(seconds, Step("d", num_rows, rows, 1_000_000 * rows, rows // 10)) for seconds, rows in places]


def test_a_line_tells_rows_bytes_rate_quarantine_and_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = written(
        [
            (0, Step("t2i", 1_000_000)),
            (100, Step("t2i", 1_000_000, 120_000, 31_200_000_000, 1534)),
        ],
        capsys,
    )

    # 88 % are left, at 12 % in 100 seconds: 733 seconds.
    assert lines == [
        "t2i: 120000 of 1000000 rows (12 %), 31.2 GB written, 312 MB/s, 1534 quarantined, 00:12:13 left"
    ]


def test_what_a_resumed_conversion_found_done_counts_neither_for_rate_nor_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = written(
        [
            (5, Step("t2i", 1000, 900, 90_000_000_000, 7)),
            (45, Step("t2i", 1000, 910, 90_400_000_000, 8)),
        ],
        capsys,
    )

    # 10 rows and 400 MB in 40 seconds.
    assert lines == ["t2i: 910 of 1000 rows (91 %), 90.4 GB written, 10.0 MB/s, 8 quarantined, 00:06:00 left"]


def test_the_time_left_is_not_known_before_a_row_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    lines = written(row_steps((0, 40), (31, 40)), capsys)

    assert lines == ["d: 40 of 100 rows (40 %), 40.0 MB written, 0 B/s, 4 quarantined, --:--:-- left"]


def test_the_time_left_may_be_more_than_a_day() -> None:
    pace = Pace(Step("d", 10_001), 0.0)

    assert pace.left(Step("d", 10_001, 1), 36.61) == "101:41:40"
    assert pace.left(Step("d", 10_001, 10_001), 5.0) == "00:00:00"


def test_a_line_comes_every_30_seconds_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    steps = row_steps(*((float(second), second) for second in range(100)), (100.0, 100))
    lines = written(steps, capsys)

    assert [line.split(" of ")[0] for line in lines] == ["d: 30", "d: 60", "d: 90", "d: 100"]
    assert lines[-1] == "d: 100 of 100 rows (100 %), 100 MB written, 1.0 MB/s, 10 quarantined, 00:00:00 left"


def test_a_step_that_was_written_is_not_written_again_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(written(row_steps((0, 0), (30, 100)), capsys)) == 1


def test_less_than_30_seconds_leave_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert written(row_steps((0, 0), (29.9, 50), (29.99, 100)), capsys) == []


def test_the_30_seconds_run_from_the_start_on_and_over_all_datasets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = [(20.0, Step("a", 5)), (25.0, Step("a", 5, 5)), (26.0, Step("b", 7)), (31.0, Step("b", 7, 1))]
    lines = written([*steps, (32.0, Step("b", 7, 7)), (33.0, Step("c", 2)), (34.0, Step("c", 2, 2))], capsys)

    assert [line.split(" rows")[0] for line in lines] == ["b: 1 of 7", "b: 7 of 7", "c: 2 of 2"]


def test_the_pace_of_one_dataset_is_not_that_of_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [(0.0, Step("a", 5)), (1000.0, Step("a", 5, 5, 5000)), (1001.0, Step("b", 5))]
    lines = written([*steps, (1040.0, Step("b", 5, 1, 3_900_000))], capsys)

    assert lines[-1] == "b: 1 of 5 rows (20 %), 3.9 MB written, 100 KB/s, 0 quarantined, 00:02:36 left"


def test_a_conversion_that_fails_leaves_its_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch()

    def fail() -> None:
        with progress(clock=watch) as report:
            for seconds, step in row_steps((0, 0), (40, 10), (50, 20)):
                watch.now = 1000 + seconds
                report(step)
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()

    assert [line.split(" rows")[0] for line in capsys.readouterr().err.splitlines()] == [
        "d: 10 of 100",
        "d: 20 of 100",
    ]


def test_quiet_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert written(row_steps((0, 0), (40, 10), (80, 100)), capsys, quiet=True) == []


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 30)), max_size=30))
def test_lines_are_as_many_as_the_seconds_allow_and_never_fail(deltas: list[tuple[float, int]]) -> None:
    seconds, rows, steps = 0.0, 0, [(0.0, Step("d", 1000))]
    for more_seconds, more_rows in deltas:
        seconds, rows = seconds + more_seconds, rows + more_rows
        steps.append((seconds, Step("d", 1000, rows, rows * 1000)))
    log, watch = io.StringIO(), Watch()
    with redirect_stderr(log), progress(clock=watch) as report:
        for at, step in steps:
            watch.now = 1000.0 + at
            report(step)
    lines = log.getvalue().splitlines()

    assert len(lines) <= seconds // 30 + 1
    assert bool(lines) == (seconds >= 30)
    pattern = (
        r"d: \d+ of 1000 rows \(\d+ %\), [\d.]+ \w+ written, [\d.]+ \w+/s, 0 quarantined, (\d+|--):..:.. left"
    )
    assert all(re.fullmatch(pattern, line) for line in lines)
    assert not lines or lines[-1].startswith(f"d: {rows} of 1000 rows")


# On a terminal


class Terminal:
    """A terminal, and all that it was shown."""

    def __init__(self) -> None:
        self._screen, keyboard = os.openpty()
        self.stderr = os.fdopen(keyboard, "w", buffering=1)
        self._shown = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        # The system says so when nobody can write any more.
        with suppress(OSError):
            while data := os.read(self._screen, 4096):
                self._shown += data

    def lines(self) -> list[str]:
        """Close it; what it was shown, without colours and movements."""
        self.stderr.close()
        self._reader.join()
        os.close(self._screen)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._shown.decode()).replace("\r", "\n").splitlines()


def test_a_terminal_shows_a_bar_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    terminal, watch = Terminal(), Watch()
    with redirect_stderr(terminal.stderr), progress(clock=watch) as report:
        report(Step("pictures", 200, 100, 50_000_000, 1))
        watch.now += 10
        report(Step("pictures", 200, 150, 55_000_000, 3))
        report(Step("talks", 5))
        watch.now += 1
        report(Step("talks", 5, 5, 2_000_000))
    lines = [" ".join(line.split()) for line in terminal.lines()]

    last = {name: [line for line in lines if line.startswith(name)][-1] for name in ("pictures", "talks")}
    assert "150/200 rows, 00:00:10 left, 55.0 MB, 500 KB/s, 3 quarantined" in last["pictures"]
    assert "5/5 rows, 00:00:00 left, 2.0 MB, 2.0 MB/s, 0 quarantined" in last["talks"]


def test_quiet_shows_nothing_on_a_terminal_either() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal.stderr), progress(quiet=True) as report:
        report(Step("d", 1, 1))

    assert terminal.lines() == []
