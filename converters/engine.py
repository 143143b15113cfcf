"""Where slices of work run: one after another here, or side by side in a pool of processes."""

from __future__ import annotations

import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeVar

from bagel_wds.errors import ConfigError, ShardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bagel_wds.sources import Slice

Result = TypeVar("Result")


def run_slices(work: Callable[[Slice], Result], slices: Sequence[Slice], processes: int) -> Iterator[Result]:
    """Do some work for each slice; results come as they are ready.

    Args:
        work: what to do; it and its results are pickled.
        slices: each is worked on once.
        processes: how many at a time; 1 works in this process.

    Raises:
        ConfigError: as raised by the work, which names the file.
        ShardError: for any other failure, naming the slice. Slices that have begun are then finished, no more begin.
    """
    if processes == 1 or len(slices) <= 1:
        for part in slices:
            yield _named(part, partial(work, part))
        return
    count = min(processes, len(slices))
    pool = ProcessPoolExecutor(
        count, mp_context=get_context("forkserver"), initializer=_leave_interrupts_to_parent
    )
    try:
        yield from _run_in_pool(pool, work, slices, at_once=count + 1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_in_pool(
    pool: ProcessPoolExecutor, work: Callable[[Slice], Result], slices: Sequence[Slice], at_once: int
) -> Iterator[Result]:
    waiting = iter(slices)
    running: dict[Future[Result], Slice] = {}
    while True:
        for part in islice(waiting, at_once - len(running)):
            running[pool.submit(_interruptible, work, part)] = part
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield _named(running.pop(future), future.result)


def _named(part: Slice, get_result: Callable[[], Result]) -> Result:
    """A result, or an error that says which slice it came from."""
    try:
        return get_result()
    except ConfigError:
        raise
    except BrokenProcessPool as error:
        raise ShardError(
            f"{part}: a worker process was killed, perhaps for want of memory; try fewer processes"
        ) from error
    except Exception as error:
        raise ShardError(f"{part}: {type(error).__name__}: {error}") from error


def _leave_interrupts_to_parent() -> None:
    """In a worker: Ctrl-C, which reaches every process of the terminal, does not end one that waits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interruptible(work: Callable[[Slice], Result], part: Slice) -> Result:
    """In a worker: Ctrl-C stops work that is under way, which then removes its unfinished shard."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return work(part)
    finally:
        _leave_interrupts_to_parent()
