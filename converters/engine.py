"""Where slices of work run: one after another here, or side by side in a pool of processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeVar

from bagel_wds.errors import ConfigError, ShardError
from bagel_wds.orphans import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Result = TypeVar("Result")
Part = TypeVar("Part")

Tell = Callable[[int, int, int], None]
"""Takes how much was done: rows, bytes written, rows left out. Workers tell what is new, the engine tells the sums."""

Work = Callable[[Part, Tell], Result]
"""What is done with a slice; it and its results are pickled."""

_TICK_SECONDS = 1.0


def run_slices(
    work: Work[Part, Result], slices: Sequence[Part], processes: int, watch: Tell
) -> Iterator[Result]:
    """Do some work for each slice; results come as they are ready.

    Args:
        work: what to do.
        slices: each is worked on once; an error names one by its `str`.
        processes: how many at a time; 1 works in this process.
        watch: told the sums over all slices so far, about once a second.

    Raises:
        ConfigError: as raised by the work, which names the file.
        ShardError: for any other failure, naming the slice. Slices that have begun are then finished, no more begin.
    """
    if processes == 1 or len(slices) <= 1:
        sums = _Sums(watch)
        for part in slices:
            yield _named(part, partial(work, part, sums.add))
        return
    count = min(processes, len(slices))
    context = get_context("forkserver")
    totals = context.Array("q", 3)
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=(totals,))
    try:
        yield from _run_in_pool(pool, work, slices, at_once=count + 1, tick=lambda: watch(*totals.get_obj()))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Sums:
    """What was done so far in this process."""

    def __init__(self, watch: Tell) -> None:
        self._watch = watch
        self._sums = [0, 0, 0]
        self._told = time.monotonic()

    def add(self, rows: int, num_bytes: int, quarantined: int) -> None:
        """Add what is new, and pass the sums on now and then."""
        for place, amount in enumerate((rows, num_bytes, quarantined)):
            self._sums[place] += amount
        if time.monotonic() - self._told >= _TICK_SECONDS:
            self._told = time.monotonic()
            self._watch(*self._sums)


def _run_in_pool(
    pool: ProcessPoolExecutor,
    work: Work[Part, Result],
    slices: Sequence[Part],
    at_once: int,
    tick: Callable[[], None],
) -> Iterator[Result]:
    waiting = iter(slices)
    running: dict[Future[Result], Part] = {}
    while True:
        for part in islice(waiting, at_once - len(running)):
            running[pool.submit(_interruptible, work, part)] = part
        if not running:
            return
        done = wait(running, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED).done
        tick()
        for future in done:
            yield _named(running.pop(future), future.result)


def _named(part: object, get_result: Callable[[], Result]) -> Result:
    """A result, or an error that says which slice it came from."""
    try:
        return get_result()
    except ConfigError:
        raise
    except BrokenProcessPool as error:
        raise ShardError(
            f"{part}: a worker process was killed, perhaps for want of memory; what is finished is kept: run it again "
            "(without --overwrite) to go on, with fewer processes"
        ) from error
    except Exception as error:
        raise ShardError(
            f"{part}: {type(error).__name__}: {error}; what is finished is kept: run it again (without "
            "--overwrite) to go on"
        ) from error


_totals: Any = None
"""In a worker: the sums that all of them share."""


def _start_worker(totals: Any) -> None:
    """In a worker: Ctrl-C, which reaches every process of the terminal, does not end one that waits."""
    global _totals  # noqa: PLW0603 - shared memory reaches a worker of a pool in no other way
    _totals = totals
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _interruptible(work: Work[Part, Result], part: Part) -> Result:
    """In a worker: Ctrl-C stops work that is under way, which then removes its unfinished shard."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return work(part, _add_to_totals)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _add_to_totals(rows: int, num_bytes: int, quarantined: int) -> None:
    with _totals.get_lock():
        for place, amount in enumerate((rows, num_bytes, quarantined)):
            _totals[place] += amount
