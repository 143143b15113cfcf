"""The engine of one machine: slices one after another in this process, or side by side in a pool of processes."""

from __future__ import annotations

import signal
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from bagel_wds.errors import ShardError
from bagel_wds.orphans import end_with_parent

from .engine import GO_ON, TICK_SECONDS, Engine, Part, Result, Tell, Work, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def pool_engine(processes: int) -> Engine:
    """An engine that works on so many slices at a time; 1 works in this process.

    When a slice fails, those that have begun are finished.
    """

    def run(work: Work[Part, Result], slices: Sequence[Part], watch: Tell, /) -> Iterator[Result]:
        if processes == 1 or len(slices) <= 1:
            return _run_here(work, slices, watch)
        return _run_in_pool(min(processes, len(slices)), work, slices, watch)

    return run


def _run_here(work: Work[Part, Result], slices: Sequence[Part], watch: Tell) -> Iterator[Result]:
    sums = _Sums(watch)
    for part in slices:
        yield _named(part, partial(work, part, sums.add))


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
        if time.monotonic() - self._told >= TICK_SECONDS:
            self._told = time.monotonic()
            self._watch(*self._sums)


def _run_in_pool(
    processes: int, work: Work[Part, Result], slices: Sequence[Part], watch: Tell
) -> Iterator[Result]:
    context = get_context("forkserver")
    totals = context.Array("q", 3)
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(totals,))
    waiting = iter(slices)
    running: dict[Future[Result], Part] = {}
    try:
        while True:
            for part in islice(waiting, processes + 1 - len(running)):
                running[pool.submit(_interruptible, work, part)] = part
            if not running:
                return
            done = wait(running, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED).done
            watch(*totals.get_obj())
            for future in done:
                yield _named(running.pop(future), future.result)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _named(part: object, get_result: Callable[[], Result]) -> Result:
    """A result, or an error that says which slice it came from."""
    try:
        return get_result()
    except BrokenProcessPool as error:
        raise ShardError(
            f"{part}: a worker process was killed, perhaps for want of memory; {GO_ON}, with fewer processes"
        ) from error
    except Exception as error:
        named = explain(part, error)
        if named is error:
            raise
        raise named from error


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
