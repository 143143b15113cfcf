"""JSON rows as elements of an array, which is one JSON text; a file of it is read a window at a time."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from bagel_wds.errors import ConfigError
from bagel_wds.sources.content import BLOCK_BYTES, BYTE_ORDER_MARK, MAX_LINE_BYTES

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

    from numpy.typing import NDArray

_NOT_WHITE = re.compile(r"[^ \t\n\r]")
# Only where a value ends is asked of it, so numbers need not be made, and what stands in strings is the row's matter.
_DECODER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
_TOO_LONG = f", in an element of more than {MAX_LINE_BYTES} bytes"


def scan(content: io.BufferedReader, path: str) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Numbers and offsets of the elements, some at a time, from the start of the file.

    Raises:
        ConfigError: with the offset of what breaks the array.
    """
    walked = (offset for offset, _ in _walk(content, path))
    number = 0
    while offsets := list(islice(walked, 1000)):
        yield np.arange(number, number + len(offsets)), np.array(offsets)
        number += len(offsets)


def read(content: io.BufferedReader, path: str, offset: int) -> Iterator[bytes]:
    """The text of each element from the one at this offset on, where the content stands.

    Raises:
        ConfigError: as `scan`.
    """
    return (text.encode("latin-1") for _, text in _walk(content, path, offset))


def _walk(content: io.BufferedReader, path: str, offset: int = 0) -> Iterator[tuple[int, str]]:
    """Offset and text of each element of an array, from the start of the file or from an element on.

    Raises:
        ConfigError: with the offset of what breaks the array.
    """
    window = _Window(content, path, offset)
    may_be_empty = offset == 0
    if may_be_empty:
        window.skip_mark()
        window.expect("[")
    while not (may_be_empty and window.next() == "]"):
        may_be_empty = False
        yield window.take_value()
        if window.next() == "]":
            break
        window.expect(",")
        if window.next() == "]":
            raise window.broken(window.place, "a comma with no element after it")
    window.expect("]")
    window.expect("")


class _Window:
    """A stretch of a JSON text that moves on as it is read.

    The text is that of the bytes as Latin-1, in which each byte is one character: JSON's own characters are the same
    as in UTF-8, no byte of another is one of them, and a place in the text is a place in the file.

    Args:
        content: that is read.
        path: of the file.
        offset: at which the content stands.
    """

    def __init__(self, content: io.BufferedReader, path: str, offset: int) -> None:
        self._content = content
        self._path = path
        self._offset = offset
        self._text = ""
        self._at = 0

    @property
    def place(self) -> int:
        """Offset of the next character in the file, in bytes."""
        return self._offset + self._at

    def _grow(self) -> bool:
        """Read on; twice as much as is held, so that a long value is not begun again too often."""
        held = len(self._text) - self._at
        data = self._content.read(max(held, BLOCK_BYTES)) if held <= MAX_LINE_BYTES else b""
        self._text = self._text[self._at :] + data.decode("latin-1")
        self._offset, self._at = self._offset + self._at, 0
        return bool(data)

    def skip_mark(self) -> None:
        """Pass over a byte order mark."""
        mark = BYTE_ORDER_MARK.decode("latin-1")
        while len(self._text) < len(mark) and self._grow():
            pass
        self._at = len(mark) if self._text.startswith(mark) else 0

    def next(self) -> str:
        """The next character that is not white, where we then are; nothing at the end of the file."""
        while True:
            found = _NOT_WHITE.search(self._text, self._at)
            self._at = found.start() if found else len(self._text)
            if found or not self._grow():
                return found.group() if found else ""

    def expect(self, character: str) -> None:
        """Pass over a character, or see that the file ends.

        Raises:
            ConfigError: if the next is another.
        """
        found = self.next()
        if found != character:
            wanted = f"{character!r}" if character else "the end of the file"
            raise self.broken(
                self.place, f"{wanted} should stand here, not {found!r}" if found else "the file ends"
            )
        self._at += len(character)

    def take_value(self) -> tuple[int, str]:
        """Pass over a value; its offset and its text.

        Raises:
            ConfigError: if there is none, or one that is too long.
        """
        self.next()
        end = self._find_end()
        place, text = self.place, self._text[self._at : end]
        self._at = end
        return place, text

    def _find_end(self) -> int:
        """Where the value that begins here ends, in a window that then holds all of it."""
        while True:
            try:
                end = _DECODER.raw_decode(self._text, self._at)[1]
            except json.JSONDecodeError as error:
                is_too_long = len(self._text) - self._at > MAX_LINE_BYTES
                broken = self.broken(self._offset + error.pos, error.msg + _TOO_LONG * is_too_long)
                if not self._grow():
                    raise broken from error
            except RecursionError as error:
                raise self.broken(self.place, "an element is nested too deeply") from error
            else:
                # What ends where the window ends may go on: a number does.
                if end < len(self._text) or not self._grow():
                    return end

    def broken(self, place: int, what: str) -> ConfigError:
        """What to raise where the array is broken."""
        return ConfigError(
            f"{self._path}: a broken JSON array, at byte {place}: {what}; mend it, or write one object a line"
        )
