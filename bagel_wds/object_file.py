"""An object as a file to read from, in windows that grow while reading goes on."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from bagel_wds.object_calls import name_of
from bagel_wds.objects import WHOLE, head, steady
from bagel_wds.store_errors import PastEndError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bagel_wds.storage_options import StorageOptions
    from bagel_wds.urls import Place

FIRST_WINDOW = 256 << 10
"""So much is asked for at first, or after a seek; twice as much each time that reading goes on."""
LAST_WINDOW = 8 << 20
"""But never more than this in one request."""


class ObjectFile(io.RawIOBase):
    """An object as a file to read from: nothing is asked for before the first read, and a seek costs nothing by itself.

    It reads in windows, each one ranged GET, which grow while reading goes on; so a reader that takes its time holds no
    connection for longer than a window, and one that stops early has asked for little too much.

    Args:
        place: of the object.
        options: how its store is reached.
    """

    def __init__(self, place: Place, options: StorageOptions | None) -> None:
        super().__init__()
        self._place = place
        self._options = options
        self._object = steady(place, options)
        self._pieces: Iterator[bytes] = iter(())
        self._piece = memoryview(b"")
        self._offset = 0
        self._window = FIRST_WINDOW
        self._window_end = -1

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The byte that is read next."""
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a byte; from the end costs a request if nothing was read yet."""
        base = 0 if whence == io.SEEK_SET else self._offset if whence == io.SEEK_CUR else self._size()
        if base + offset < 0:
            raise ValueError(f"{name_of(self._place)}: cannot go to byte {base + offset}")
        if base + offset != self._offset:
            self._offset = base + offset
            self._drop()
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer with what is there, or with the next piece that comes; 0 at the end."""
        target = memoryview(buffer).cast("B")
        while not self._piece and len(target):
            piece = self._next_piece()
            if piece is not None:
                self._piece = memoryview(piece)
            elif not self._open_window(len(target)):
                return 0
        count = min(len(target), len(self._piece))
        target[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        self._offset += count
        return count

    def readall(self) -> bytes:
        """All that is left, in one request."""
        try:
            data = self._object.read(self._offset, WHOLE)
        except PastEndError:
            data = b""
        self._offset += len(data)
        self._drop()
        return data

    def close(self) -> None:
        """Let go of the answer that is being read, if any."""
        self._drop()
        super().close()

    def _size(self) -> int:
        if self._object.size is None:
            self._object.size, self._object.tag = head(self._place, self._options)
        return self._object.size

    def _open_window(self, wanted: int) -> bool:
        """Ask for the next stretch; False at the end."""
        if self._object.size is not None and self._offset >= self._object.size:
            return False
        if self._offset == self._window_end:
            self._window = min(2 * self._window, LAST_WINDOW)
        end = self._offset + max(self._window, min(wanted, LAST_WINDOW))
        self._pieces = self._object.pieces(self._offset, end)
        self._window_end = end
        return True

    def _next_piece(self) -> bytes | None:
        try:
            return next(self._pieces, None)
        except PastEndError:
            # An object that was never read from may be empty, or end before this byte.
            if self._object.size is not None or self._offset < self._size():
                raise
            self._drop()
            return None

    def _drop(self) -> None:
        self._pieces, self._piece = iter(()), memoryview(b"")
        self._window, self._window_end = FIRST_WINDOW, -1
