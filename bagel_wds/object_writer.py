"""An object that is written while its bytes come: in one request if it is small, else in parts."""

from __future__ import annotations

import io
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from bagel_wds.ahead import in_thread
from bagel_wds.object_calls import asked
from bagel_wds.object_clients import open_client
from bagel_wds.objects import head, put, refuse_web

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bagel_wds.storage_options import StorageOptions
    from bagel_wds.urls import Place

WRITE_BYTES = 1 << 20
"""What is written is handed on in stretches of this size."""
PART_BYTES = 8 << 20
"""An object goes out in parts of this size, four at a time."""
DROP_SECONDS = 5.0
"""So long may it take to drop the parts of an object that is given up."""


@contextmanager
def open_put(place: Place, options: StorageOptions | None) -> Iterator[BinaryIO]:
    """An object to write to, part by part; it appears when the block ends without an exception, and else never does.

    Raises:
        ConfigError: for a web server.
        OSError: if the store refuses.
    """
    refuse_web(place, "written to; give a path or an s3://, gs:// or az:// URL")
    upload = _Upload(place, options)
    try:
        file = io.BufferedWriter(cast("io.RawIOBase", upload), WRITE_BYTES)
        yield file
        file.flush()
        upload.finish()
    except BaseException as error:
        upload.drop(error)
        raise


class _Upload(io.RawIOBase):
    """A raw file that knows where it stands. What goes before the first part is held: its request may have to be made again."""

    def __init__(self, place: Place, options: StorageOptions | None) -> None:
        super().__init__()
        self._place = place
        self._options = options
        self._held = bytearray()
        self._writer: Any = None
        self._offset = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def write(self, data: Any, /) -> int:
        if self.closed:
            raise ValueError("the object is finished, or was given up")
        count = memoryview(data).nbytes
        if self._writer is not None:
            self._ask(partial(self._writer.write, bytes(data)))
        else:
            self._held += data
            if len(self._held) > PART_BYTES:
                self._writer = asked(self._place, self._options, self._begin)
                self._held = bytearray()
        self._offset += count
        return count

    def _begin(self) -> Any:
        """A new upload with what is held."""
        import obstore  # noqa: PLC0415 - 15 MB that local use does without

        store = open_client(self._place, self._options, tries_again=True)
        writer = obstore.open_writer(store, self._place.key, buffer_size=PART_BYTES, max_concurrency=4)
        writer.write(bytes(self._held))
        return writer

    def _ask(self, work: Any) -> None:
        """Parts are sent by the client, which makes requests that failed again by itself."""
        asked(self._place, self._options, work, tries_again=False)

    def finish(self) -> None:
        """Make the object of what was written."""
        if self._writer is None:
            put(self._place, self._options, bytes(self._held))
            self.close()
            return
        before = self._look()
        try:
            self._ask(self._writer.close)
        except OSError:
            # The answer alone may have been lost; asked again, the store knows the upload no more.
            after = self._look()
            if before is None or after is None or after == before or after[0] != self._offset:
                raise
        self.close()

    def _look(self) -> tuple[int, str | None] | None:
        """(size, version) of the object that is there, of none (-1, None); None where that cannot be told."""
        try:
            return head(self._place, self._options)
        except FileNotFoundError:
            return -1, None
        except OSError:
            return None

    def drop(self, error: BaseException) -> None:
        """Drop the parts that are already there, unless that takes too long."""
        self.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(Exception):
                # Given an exception, the client drops them.
                in_thread(partial(writer.__exit__, type(error), error, None)).result(DROP_SECONDS)
