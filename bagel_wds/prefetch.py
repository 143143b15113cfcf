"""Shards of a bucket fetched before they are wanted: ranges, several at a time, and the next shard's before this one ends.

    lane (a stream's shards of one group)   read here v   being fetched by threads
        a.tar  [done][done][done][held........][coming..][coming..][coming..]
        b.tar                                                        [coming]
    read ahead (all lanes of a worker's group): the bytes of all ranges that are held or coming, and the threads

A range counts from when it is asked for until it has been read. A lane takes an even share of the bytes; one that holds
nothing is always given one small range, so that it gets on. What is read is the same with any bound.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from bagel_wds.cache import cache_of, key_of
from bagel_wds.object_file import FIRST_WINDOW, LAST_WINDOW
from bagel_wds.objects import WHOLE, head, steady
from bagel_wds.store_errors import PastEndError
from bagel_wds.urls import is_local, split

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagel_wds.cache import NewEntry
    from bagel_wds.storage_options import StorageOptions
    from bagel_wds.urls import Place

T = TypeVar("T")

AT_ONCE = 8
"""Ranges of a worker's group that are fetched at the same time."""
RANGES = 4
"""A lane's share is cut in so many ranges, so that some are on their way while one is read."""


def last_window(share: int) -> int:
    """The longest range of a lane that may hold so many bytes; the first is `FIRST_WINDOW`, each next one twice as long."""
    return min(max(share // RANGES, FIRST_WINDOW), LAST_WINDOW)


class ReadAhead:
    """What the lanes of one worker hold together, and the threads that fetch for them.

    The threads are there while there are lanes.

    Args:
        num_bytes: that all ranges may have; and `FIRST_WINDOW` for each lane that holds nothing else. 0 reads nothing ahead.

    Attributes:
        held: bytes of the ranges that are there or on their way.
        most: as many as there ever were.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.held = 0
        self.most = 0
        self._lanes = 0
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ReadAhead], tuple[int]]:
        # Another process holds nothing yet.
        return (ReadAhead, (self.num_bytes,))

    @property
    def share(self) -> int:
        """Bytes of each lane."""
        return self.num_bytes // max(1, self._lanes)

    def enter(self) -> None:
        """One lane more."""
        with self._lock:
            self._lanes += 1
            self._threads = self._threads or ThreadPoolExecutor(AT_ONCE, "bagel-read-ahead")

    def leave(self) -> None:
        """One lane less; with the last the threads end, once they are done with what they were given."""
        with self._lock:
            self._lanes -= 1
            threads = None
            if not self._lanes:
                threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread do it."""
        if self._threads is None:
            raise ValueError("no lane is open")
        return self._threads.submit(work)

    def is_ending(self) -> bool:
        """Whether the threads are to end: the last lane is closed, or the interpreter ends."""
        threads = self._threads
        if threads is None:
            return True
        try:
            # The interpreter waits for the threads before it tells anyone that it ends, but takes no work any more.
            threads.submit(int)
        except RuntimeError:
            return True
        return False

    def take(self, count: int, *, anyway: bool = False) -> bool:
        """Hold so many bytes more, if there is room for them; whether there is."""
        with self._lock:
            if self.held + count > self.num_bytes and not anyway:
                return False
            self.held += count
            self.most = max(self.most, self.held)
            return True

    def give_back(self, count: int) -> None:
        """Hold so many bytes less."""
        with self._lock:
            self.held -= count


class Lane:
    """The shards of one stream and group, one after another, each read from a byte on to its end or less.

    A context manager. Left by an exception, such as the end of a generator that was given up, it breaks off what is under
    way: that takes no longer than the requests that threads are waiting for.

    Args:
        ahead: that it shares with the other lanes of its worker.
        options: how stores are reached.
    """

    def __init__(self, ahead: ReadAhead, options: StorageOptions | None) -> None:
        self._ahead = ahead
        self._options = options
        self._is_open = False
        self._now: _Source | None = None
        self._next: _Source | None = None
        self._next_url: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        if not self._is_open:
            return
        try:
            if error is None and self._now is not None:
                self._now.keep_rest()
        finally:
            for source in (self._now, self._next):
                if source is not None:
                    source.close()
            self._now = self._next = None
            self._is_open = False
            self._ahead.leave()

    def open(self, url: str, offset: int, end: int | None = None, next_url: str | None = None) -> BinaryIO:
        """An object to be read from a byte on.

        Args:
            url: of an object that is not local.
            offset: of the first byte.
            end: behind the last that is wanted, as far as is known; None is the object's.
            next_url: of what is likely to be opened next, from its start.

        Raises:
            OSError: as the reads, if a copy is on the disk and the store is asked whether it is still good.
        """
        if not self._is_open:
            self._is_open = True
            self._ahead.enter()
        before, coming = self._now, self._next
        self._now = self._next = None
        if before is not None:
            before.keep_rest()
            before.close()
        place = split(url)
        if coming is not None and (coming.place, coming.first) == (place, offset):
            self._now = coming
        else:
            if coming is not None:
                coming.close()
            self._now = _Source(place, self._options, self._ahead, offset)
        self._now.end = end
        self._next_url = next_url if next_url is not None and not is_local(next_url) else None
        kept = self._now.kept()
        self._top_up()
        if kept is not None:
            kept.seek(offset)
            return kept
        return io.BufferedReader(_LaneFile(self, self._now), FIRST_WINDOW)

    def take(self, source: _Source) -> memoryview:
        """The bytes that come next; empty at the end."""
        if source is not self._now:
            raise ValueError("the lane has gone on to another shard")
        source.forget_front()
        source.check()
        self._top_up()
        if not source.ranges and not source.ask(0, anyway=True):
            return memoryview(b"")
        data = source.wait_front()
        self._top_up()
        return data

    def _top_up(self) -> None:
        """Ask for what there is room for."""
        now = self._now
        if now is None or not self._ask_all(now):
            return
        if self._next is None and self._next_url is not None:
            self._next = _Source(split(self._next_url), self._options, self._ahead, 0)
            self._next_url = None
        if self._next is not None:
            self._ask_all(self._next)

    def _ask_all(self, source: _Source) -> bool:
        """Ask for what there is room for of one object; whether that is all of it."""
        while not source.is_asked():
            others = sum(other.held for other in (self._now, self._next) if other is not None)
            if not source.ask(others):
                return False
        return True


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What a thread brings: how many bytes of a range there are, and of which object.

    Attributes:
        count: bytes.
        size, tag: of the object; the tag or what stands in for it.
        entry: a place in the cache for it.
        failure: why no more came, where some did.
    """

    count: int
    size: int | None
    tag: str | None
    entry: NewEntry | None = None
    failure: OSError | None = None


@dataclass(frozen=True, slots=True)
class _Range:
    start: int
    end: int
    data: bytearray
    coming: Future[_Fetched]


class _Source:
    """One object, from a byte on: the ranges of it that are there or on their way.

    Attributes:
        place: of the object.
        first: byte.
        end: behind the last byte that is wanted, as far as is known.
        ranges: one after another; the first is the one that is read now.
    """

    def __init__(self, place: Place, options: StorageOptions | None, ahead: ReadAhead, first: int) -> None:
        self.place = place
        self.first = first
        self.end: int | None = None
        self.ranges: deque[_Range] = deque()
        self._options = options
        self._ahead = ahead
        self._stop = threading.Event()
        self._wait = partial(_pause, ahead, self._stop)
        self._size: int | None = None
        self._tag: str | None = None
        self._next = first
        self._window = FIRST_WINDOW
        self._is_front_read = False
        self._is_given = False
        self._entry: NewEntry | None = None
        self._failure: OSError | None = None
        cache = cache_of(options)
        self._look: Future[BinaryIO | None] | None = None
        if cache is not None and cache.has(key_of(place, options)):
            self._look = ahead.submit(partial(_find_kept, place, options, self._wait))

    @property
    def held(self) -> int:
        """Bytes of its ranges."""
        return sum(it.end - it.start for it in self.ranges)

    def kept(self) -> BinaryIO | None:
        """The object from the cache, if it is there; the caller closes it."""
        if self._look is None:
            return None
        file = self._look.result()
        self._look, self._is_given = None, file is not None
        return file

    def is_asked(self) -> bool:
        """Whether all that is likely to be wanted has been asked for."""
        self._learn()
        if self._look is not None and self._look.done():
            # The disk has it, or its turn will tell what is wrong.
            if self._look.exception() is not None or self._look.result() is not None:
                return True
            self._look = None
        return self._is_given or self._next >= min(
            it for it in (self._size, self.end, WHOLE) if it is not None
        )

    def ask(self, held: int, *, anyway: bool = False) -> bool:
        """Ask for the next range, if there is room for it; whether it was asked for.

        Args:
            held: bytes that its lane holds.
            anyway: a small one always has room.
        """
        self._learn()
        # Whether the cache has it is being looked at; how long it is, and which version, the first range tells.
        if self._look is not None or self._is_given or (self._size is None and self.ranges):
            return False
        share = self._ahead.share
        limits = (
            self._next + min(self._window, last_window(share)),
            self._size,
            None if anyway else self.end,
        )
        end = min(it for it in limits if it is not None)
        count = end - self._next
        if count <= 0:
            return False
        if held + count > share or not self._ahead.take(count):
            if not anyway:
                return False
            count = min(count, FIRST_WINDOW)
            self._ahead.take(count, anyway=True)
        data = bytearray(count)
        fetch = partial(
            _fetch, self.place, self._options, self._wait, self._stop,
            self._next, data, self._size, self._tag, keeps=self._next == 0,
        )  # fmt: skip
        self.ranges.append(_Range(self._next, self._next + count, data, self._ahead.submit(fetch)))
        self._next += count
        self._window = min(2 * self._window, LAST_WINDOW)
        return True

    def _learn(self) -> None:
        """What the first range tells of the object, once it is there."""
        first = self.ranges[0].coming if self.ranges else None
        if self._size is None and first is not None and first.done() and first.exception() is None:
            fetched = first.result()
            self._size, self._tag, self._entry = fetched.size, fetched.tag, fetched.entry

    def wait_front(self) -> memoryview:
        """The bytes of the first range, once they are there; empty at the object's end.

        Where it broke off they are those that came, and `check` says the rest.

        Raises:
            OSError: as `SteadyObject.pieces`.
        """
        self.check()
        front = self.ranges[0]
        try:
            fetched = front.coming.result()
            count, self._failure = fetched.count, fetched.failure
        except PastEndError:
            # Behind the end of an object of which nothing else is known yet.
            if self._size is not None:
                raise
            self._size, self._tag = head(self.place, self._options)
            if front.start < self._size:
                raise
            count = 0
        self._learn()
        self._is_front_read = True
        data = memoryview(front.data)[:count]
        if self._entry is not None:
            self._entry.write(data)
        return data

    def check(self) -> None:
        """Raise what broke off the range that was read."""
        if self._failure is not None:
            raise self._failure

    def forget_front(self) -> None:
        """The first range has been read."""
        if self._is_front_read:
            self._is_front_read = False
            front = self.ranges.popleft()
            self._ahead.give_back(front.end - front.start)

    def keep_rest(self) -> None:
        """Nothing more is read; but if all of the object, or all but its padding, is there, the cache is to have it."""
        self._learn()
        entry = self._entry
        with suppress(OSError):
            while entry is not None and entry.written < entry.size:
                self.forget_front()
                nearly = entry.size - self._next <= FIRST_WINDOW
                if not nearly or not (self.ranges or self.ask(0, anyway=True)):
                    break
                self.wait_front()
        if entry is not None and entry.written == entry.size:
            self._entry = None
            self._ahead.submit(entry.finish)

    def close(self) -> None:
        """Break off what is under way, and give back what is held."""
        self._stop.set()
        for it in self.ranges:
            it.coming.cancel()
            # The memory is in use until the thread lets go of it.
            it.coming.add_done_callback(
                partial(_let_go, self._ahead, it.end - it.start, drops=self._size is None)
            )
        self.ranges.clear()
        if self._look is not None:
            self._look.cancel()
            self._look.add_done_callback(_close_kept)
        if self._entry is not None:
            self._entry.drop()


def _let_go(ahead: ReadAhead, count: int, coming: Future[_Fetched], *, drops: bool) -> None:
    """A range is not wanted any more; nor is, if nobody took it over, the place in the cache that came with it."""
    ahead.give_back(count)
    if drops and not coming.cancelled() and coming.exception() is None:
        entry = coming.result().entry
        if entry is not None:
            entry.drop()


def _close_kept(look: Future[BinaryIO | None]) -> None:
    if not look.cancelled() and look.exception() is None and (file := look.result()) is not None:
        file.close()


class _LaneFile(io.RawIOBase):
    """An object of a lane as a file that is read once, from its first byte on."""

    def __init__(self, lane: Lane, source: _Source) -> None:
        super().__init__()
        self._lane = lane
        self._source = source
        self._offset = source.first
        self._data = memoryview(b"")

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        if not self._data:
            self._data = memoryview(b"")
            self._data = self._lane.take(self._source)
        count = min(len(target), len(self._data))
        target[:count] = self._data[:count]
        self._data = self._data[count:]
        self._offset += count
        return count

    def close(self) -> None:
        self._data = memoryview(b"")
        super().close()


class _BrokenOffError(Exception):
    """Nobody waits for it any more."""


def _fetch(
    place: Place,
    options: StorageOptions | None,
    pause: Callable[[float], None],
    stop: threading.Event,
    start: int,
    data: bytearray,
    size: int | None,
    tag: str | None,
    *,
    keeps: bool,
) -> _Fetched:
    """Fill a range with the bytes from `start` on; with the start of an object, take a place in the cache for it."""
    wanted = steady(place, options, pause)
    wanted.size, wanted.tag = size, tag
    count = 0
    try:
        for piece in wanted.pieces(start, start + len(data)):
            if stop.is_set():
                raise _BrokenOffError
            data[count : count + len(piece)] = piece
            count += len(piece)
    except OSError as error:
        if count == 0:
            raise
        return _Fetched(count, wanted.size, wanted.tag, failure=error)
    cache = cache_of(options)
    entry = None
    if keeps and cache is not None and wanted.size is not None:
        entry = cache.begin(key_of(place, options), wanted.size, wanted.tag)
    return _Fetched(count, wanted.size, wanted.tag, entry)


def _pause(ahead: ReadAhead, stop: threading.Event, seconds: float) -> None:
    """Wait, unless nobody waits for what comes after."""
    while seconds > 0 and not stop.wait(min(seconds, PAUSE)) and not ahead.is_ending():
        seconds -= PAUSE
    if seconds > 0:
        raise _BrokenOffError


PAUSE = 0.1
"""Seconds after which a wait looks whether it is wanted any more."""


def _find_kept(
    place: Place, options: StorageOptions | None, pause: Callable[[float], None]
) -> BinaryIO | None:
    cache = cache_of(options)
    return None if cache is None else cache.find(key_of(place, options), *head(place, options, pause))
