"""Work that has to be waited for, begun before it is asked for."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

Item = TypeVar("Item")
Result = TypeVar("Result")


def look_ahead(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    at_once: int,
    *,
    weigh: Callable[[Item], int] = lambda _: 0,
    most: int = 1,
) -> Iterator[Result]:
    """What some work gives for each item, in the order of the items; several are worked on in threads.

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
    coming: deque[tuple[Future[Result], int]] = deque()
    held = 0
    threads = ThreadPoolExecutor(at_once)
    try:
        for item in items:
            weight = weigh(item)
            while coming and (len(coming) >= at_once or held + weight > most):
                future, gone = coming.popleft()
                held -= gone
                yield future.result()
            coming.append((threads.submit(work, item), weight))
            held += weight
        while coming:
            yield coming.popleft()[0].result()
    finally:
        threads.shutdown(cancel_futures=True)
