"""Work that has to be waited for, done by threads that nobody has to wait for."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Have a thread of its own do some work; neither Ctrl-C nor the end of the program waits for it."""
    return _start(work)[0]


def _start(work: Callable[[], Result]) -> tuple[Future[Result], Thread]:
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    thread = Thread(target=_do, args=(work, future), daemon=True)
    thread.start()
    return future, thread


def _do(work: Callable[[], Result], future: Future[Result]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
        future.set_exception(error)
    else:
        future.set_result(result)


def look_ahead(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    at_once: int,
    *,
    weigh: Callable[[Item], int] = lambda _: 0,
    most: int = 1,
) -> Iterator[Result]:
    """What some work gives for each item, in the order of the items; several are worked on in threads.

    At the end, and when it is given up, it waits for what is under way; not at a Ctrl-C that meets it waiting for a result.

    Args:
        work: done once for each item; what it raises is raised in its turn.
        items: taken as there is room for them.
        at_once: so many are under way, or wait for their turn; 1 works without threads.
        weigh: bytes that an item's result has.
        most: so many bytes are under way at most, or else one item alone.
    """
    if at_once == 1:
        yield from map(work, items)
        return
    coming: deque[tuple[Future[Result], Thread, int]] = deque()
    held = 0
    try:
        for item in items:
            weight = weigh(item)
            while coming and (len(coming) >= at_once or held + weight > most):
                future, _, gone = coming.popleft()
                held -= gone
                yield future.result()
            coming.append((*_start(partial(work, item)), weight))
            held += weight
        while coming:
            yield coming.popleft()[0].result()
    except KeyboardInterrupt:
        coming.clear()
        raise
    finally:
        for _, thread, _ in coming:
            thread.join()
