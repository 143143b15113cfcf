"""Reads of a remote object that finish: tried again, continued from the byte reached, counted against the length.

A store's client is asked for a range; what comes is checked here. An object is read in one version: once its entity tag
is known it is asked for by it, so that bytes of an object that was replaced meanwhile are never joined to the old ones.
Where there is no tag, the time of the last change stands in for it (`version_of`).
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a request is tried, and how long is waited in between.

    Attributes:
        tries: so many in a row that bring nothing, of a read no byte, are enough.
        first_wait, longest_wait: seconds before the second try, and before any; each wait is up to twice the one before.
    """

    tries: int = 10
    first_wait: float = 0.1
    longest_wait: float = 15.0

    def pause(self, failures: int, jitter: random.Random) -> float:
        """Seconds to wait: a random part of a time that doubles, so that clients do not come back all at once."""
        doubled: float = self.first_wait * 2 ** (failures - 1)
        return min(self.longest_wait, doubled) * jitter.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a store answers to a ranged read.

    Attributes:
        size: of the whole object, in bytes.
        tag: its entity tag, or what stands in for one; see `version_of`.
        pieces: the bytes from the first that was asked for, as they come.
    """

    size: int
    tag: str | None
    pieces: Iterable[bytes]


if TYPE_CHECKING:
    Ask = Callable[[int, int, str | None], Answer]
    """(start, end, tag) to an answer. `end` is behind the last byte; a tag is what the object must have.

    It raises `TransientError` for what may pass, and another OSError for what will not.
    """


class TransientError(OSError):
    """A failure that may pass: the connection, a time-out, a store that is busy."""


def version_of(tag: str | None, modified: datetime) -> str:
    """What a version of an object is known by: its entity tag, or else when it was changed, as a weak tag.

    Args:
        tag: that the store gives.
        modified: when the object was changed.
    """
    return tag if tag is not None else f'W/"{modified.isoformat()}"'


class SteadyObject:
    """One remote object, read by ranges; each read gives all its bytes or raises.

    Args:
        name: for messages, without credentials.
        ask: asks the store for a range.
        patience: how often, and how long.
        wait: waits so many seconds.

    Attributes:
        size: of the object in bytes; None until the first answer.
        tag: its entity tag, or what stands in for one; None until the first answer.
    """

    def __init__(
        self,
        name: str,
        ask: Ask,
        patience: Patience = Patience(),
        *,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.size: int | None = None
        self.tag: str | None = None
        self._name = name
        self._ask = ask
        self._patience = patience
        self._wait = wait
        # Of its own: a run's draws do not depend on how often a store was busy.
        self._jitter = random.Random()  # noqa: S311 - spreads waits, hides nothing

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`, or to the object's end if that comes first.

        Raises:
            OSError: as `pieces`.
        """
        return b"".join(self.pieces(start, end))

    def pieces(self, start: int, end: int) -> Iterator[bytes]:
        """The same, piece by piece as it comes.

        Raises:
            FileNotFoundError: if there is no such object.
            PermissionError: if the store refuses access.
            OSError: if the object changed since the first read, and, with the number of tries, the byte reached and the
                last cause, if no try brings a byte more.
        """
        offset, failures = start, 0
        while offset < (end if self.size is None else min(end, self.size)):
            try:
                for piece in self._open(offset, end):
                    offset += len(piece)
                    failures = 0
                    yield piece
                    # Never more than was asked for, whatever the store sends.
                    if offset >= end:
                        break
            except TransientError as error:
                failures += 1
                if failures >= self._patience.tries:
                    raise OSError(
                        f"{self._name}: reading stopped at byte {offset}; {failures} tries brought no more, the last: {error}"
                    ) from error
                self._wait(self._patience.pause(failures, self._jitter))

    def _open(self, start: int, end: int) -> Iterator[bytes]:
        # A weak tag ("W/...") matches nothing, so the store is not asked for it; it is compared here.
        tag = None if self.tag is None or self.tag.startswith("W/") else self.tag
        answer = self._ask(start, end if self.size is None else min(end, self.size), tag)
        if self.size is None:
            self.size, self.tag = answer.size, answer.tag
        elif answer.size != self.size or answer.tag != self.tag:
            raise OSError(replaced(self._name))
        left = max(0, min(end, self.size) - start)
        for piece in answer.pieces:
            yield piece[:left]
            left -= len(piece[:left])
            if left == 0:
                return
        if left:
            raise TransientError(f"the answer ended {left} bytes early")


def replaced(name: str) -> str:
    """What to say of an object that is no longer the one whose first bytes were read."""
    return f"{name}: the object was replaced while it was being read; read it again once nothing writes to it any more"


_PAGE = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_XML = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:\?xml|error)\b", re.IGNORECASE)


def name_page(data: bytes) -> str | None:
    """`"an HTML page"` or `"an XML document"`, if bytes begin like one: what stands in for an object that was refused."""
    return "an HTML page" if _PAGE.match(data) else "an XML document" if _XML.match(data) else None
