"""What a file of JSON rows holds, plain or in gzip or zstd, and what tells the file from what it was."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import xxhash

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.sources.rows import SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import WriteableBuffer

    from bagel_wds.storage import StorageOptions

MAX_LINE_BYTES = 256 << 20
"""A longer line, or element of an array, is refused; images inside it count."""

BLOCK_BYTES = 1 << 20
"""Content is gone through so many bytes at a time."""

BUFFER_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_GZIP = b"\x1f\x8b"
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
"""How a zstd file starts: with a frame of data, or one to be skipped."""


@contextmanager
def open_content(
    path: str, offset: int, options: StorageOptions | None = None
) -> Iterator[io.BufferedReader]:
    """What a file holds, from a place on, in bytes; in what is decompressed, of a compressed file.

    Raises:
        ConfigError: if it cannot be read; while it is being read, too.
    """
    with _open(path, options) as file:
        content = _decompress(file, path)
        _pass_over(content, offset)
        yield content


def open_digested(root: str, name: str, options: StorageOptions | None = None) -> DigestedFile:
    """A file of a source, to be read from its start.

    Raises:
        ConfigError: if it cannot be opened.
    """
    path = storage.join(root, name)
    try:
        # Before it is read, so that what is written to it meanwhile shows.
        version = storage.version(path, options)
    except OSError as error:
        raise _unreadable(path, error) from error
    return DigestedFile(_open(path, options), path, name, version)


def _open(path: str, options: StorageOptions | None) -> io.BufferedReader:
    try:
        file = cast("io.BufferedReader", storage.open_read(path, options))
    except OSError as error:
        raise _unreadable(path, error) from error
    return file if storage.is_local(path) else io.BufferedReader(_RemoteFile(file), BUFFER_BYTES)


def _unreadable(path: str, error: OSError) -> ConfigError:
    # A store's own error names the object, and what to do.
    told = f"{path}: cannot be read: {error.strerror}" if storage.is_local(path) else str(error)
    return ConfigError(told)


class _RemoteFile(io.RawIOBase):
    """A file of a store, whose faults are those of the source: whatever reads it, a decompressor too, passes them on.

    Args:
        file: that is read, and closed with this.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The byte that is read next."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a byte."""
        with _as_source_fault():
            return self._file.seek(offset, whence)

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read some bytes.

        Raises:
            ConfigError: if the store does not give them.
        """
        with _as_source_fault():
            return self._file.readinto(buffer)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextmanager
def _as_source_fault() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # The text names the object, and what to do.
        raise ConfigError(str(error)) from error


class DigestedFile(io.RawIOBase):
    """A file that is read once from its start, and digested as it lies on the disk.

    Args:
        file: that is read, and closed with this.
        path: of it.
        name: relative to the source's root.
        version: of it, see `storage.version`.
    """

    def __init__(
        self, file: io.BufferedReader, path: str, name: str, version: tuple[int, int | str | None]
    ) -> None:
        self._file = file
        self._path = path
        self._name = name
        self._version = version
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read some bytes."""
        view = memoryview(buffer)
        count = self._file.readinto(view)
        self._digest.update(view[:count])
        self._num_bytes += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def content(self) -> io.BufferedReader:
        """What it holds, from its start; to be asked for once."""
        return _decompress(io.BufferedReader(self, BUFFER_BYTES), self._path)

    def describe(self) -> SourceFile:
        """The whole file, whatever was read of it."""
        while self.read(BUFFER_BYTES):
            pass
        digest = f"xxh3_128:{self._digest.hexdigest()}"
        return SourceFile(self._name, self._num_bytes, digest, self._version)


def _decompress(file: io.BufferedReader, path: str) -> io.BufferedReader:
    """The content of a file, from its start, whatever its name."""
    head = file.peek(4)
    if head.startswith(_GZIP):
        return io.BufferedReader(_Decompressed(gzip.GzipFile(fileobj=file), path), BUFFER_BYTES)
    if _ZSTD.match(head):
        return io.BufferedReader(_Decompressed(pa.CompressedInputStream(file, "zstd"), path), BUFFER_BYTES)
    return file


class _Decompressed(io.RawIOBase):
    """A decompressing stream whose faults name the file.

    Args:
        stream: that gives the content.
        path: of the file.
    """

    def __init__(self, stream: Any, path: str) -> None:
        self._stream = stream
        self._path = path

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read some bytes.

        Raises:
            ConfigError: if the file is cut or corrupt.
        """
        view = memoryview(buffer)
        try:
            data = self._stream.read(len(view))
        except (EOFError, OSError, zlib.error, pa.ArrowException) as error:
            raise ConfigError(
                f"{self._path}: cannot be decompressed to its end: {error}; copy it anew from where it came from"
            ) from error
        view[: len(data)] = data
        return len(data)


def _pass_over(content: io.BufferedReader, num_bytes: int) -> None:
    """Go on from a place further down."""
    if content.seekable():
        content.seek(num_bytes)
        return
    while num_bytes and (data := content.read(min(num_bytes, BLOCK_BYTES))):
        num_bytes -= len(data)
