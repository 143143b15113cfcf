"""Files by path or URL, behind small functions: open, ranged read, list, write.

A plain path or a `file://` URL is on the disk; `s3://`, `gs://` and `az://` are object stores, `http(s)://` is read only.
Everything that reads or writes data goes through here. What cannot be reached is an OSError that names it, on the disk
and in a store alike. `options` say how a store is reached, and mean nothing to the disk.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlsplit

from bagel_wds import objects
from bagel_wds.ahead import look_ahead
from bagel_wds.cache import cache_of, key_of
from bagel_wds.errors import ConfigError
from bagel_wds.object_file import FIRST_WINDOW, ObjectFile
from bagel_wds.object_writer import open_put
from bagel_wds.storage_options import StorageOptions
from bagel_wds.urls import WEB, base_name, is_local, is_signed, join, parent, scheme_of, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "AT_A_TIME",
    "WEB",
    "StorageOptions",
    "base_name",
    "create",
    "exists",
    "find_near",
    "is_file",
    "is_folder",
    "is_local",
    "is_signed",
    "join",
    "list_files",
    "list_folder",
    "list_sizes",
    "local_path",
    "open_read",
    "open_write",
    "parent",
    "read_bytes",
    "read_range",
    "remove",
    "remove_files",
    "remove_folder",
    "scheme_of",
    "size",
    "which_are_files",
    "write_bytes",
]

AT_A_TIME = 16
"""Requests that are made together where many small ones are due."""


def local_path(url: str | os.PathLike[str]) -> Path:
    """The path on disk that a path or `file://` URL names.

    Raises:
        ConfigError: for a URL that is not on the disk.
    """
    scheme = scheme_of(url)
    if not scheme:
        return Path(url)
    if scheme == "file":
        return Path(unquote(urlsplit(os.fspath(url)).path))
    raise ConfigError(
        f"{os.fspath(url)!r}: a path on the disk belongs here, not {scheme}://; copy it to a disk first"
    )


def open_read(url: str | os.PathLike[str], options: StorageOptions | None = None) -> BinaryIO:
    """Open a file for reading bytes. That an object is not there is found by the first read, or seek from its end."""
    if is_local(url):
        return local_path(url).open("rb")
    return io.BufferedReader(ObjectFile(split(url), options), FIRST_WINDOW)


def read_range(
    url: str | os.PathLike[str], offset: int, length: int, options: StorageOptions | None = None
) -> bytes:
    """The bytes from `offset`, `length` of them, or fewer where the file ends."""
    if not is_local(url):
        place = split(url)
        kept = None
        if (cache := cache_of(options)) is not None:
            key = key_of(place, options)
            kept = cache.read_range(key, offset, length, lambda: objects.head(place, options))
        return objects.read(place, options, offset, offset + length) if kept is None else kept
    with open_read(url) as file:
        file.seek(offset)
        return file.read(length)


def read_bytes(url: str | os.PathLike[str], options: StorageOptions | None = None) -> bytes:
    """The whole file."""
    if not is_local(url):
        return objects.read(split(url), options, 0, objects.WHOLE)
    return local_path(url).read_bytes()


def exists(url: str | os.PathLike[str], options: StorageOptions | None = None) -> bool:
    """Whether there is a file or folder of this name."""
    if not is_local(url):
        return is_file(url, options) or is_folder(url, options)
    return local_path(url).exists()


def is_folder(url: str | os.PathLike[str], options: StorageOptions | None = None) -> bool:
    """Whether there is a folder of this name; in a store, whether anything lies under it."""
    if not is_local(url):
        return objects.is_prefix(split(url), options)
    return local_path(url).is_dir()


def is_file(url: str | os.PathLike[str], options: StorageOptions | None = None) -> bool:
    """Whether there is a file of this name, and not a folder, pipe or device."""
    if not is_local(url):
        return objects.is_object(split(url), options)
    return local_path(url).is_file()


def which_are_files(urls: Iterable[str], options: StorageOptions | None = None) -> set[str]:
    """Those of the URLs that name something other than a folder, with few requests: many in one folder are listed."""
    urls = list(urls)
    found = {url for url in urls if is_local(url) and _is_no_folder(url)}
    remote = [url for url in urls if not is_local(url)]
    folders: dict[str, list[str]] = {}
    for url in remote:
        listed = scheme_of(url) not in WEB and len(remote) > AT_A_TIME
        folders.setdefault(parent(url) if listed else "", []).append(url)
    for folder, inside in folders.items():
        if folder:
            names = set(list_folder(folder, options))
            found |= {url for url in inside if base_name(url) in names}
        else:
            there = look_ahead(lambda url: is_file(url, options), inside, AT_A_TIME)
            found |= {url for url, is_there in zip(inside, there, strict=True) if is_there}
    return found


def _is_no_folder(url: str) -> bool:
    """Whether a local name is there and is no folder; in one look, since a manifest may have 100 000 of them."""
    try:
        mode = os.stat(local_path(url) if scheme_of(url) else url).st_mode  # noqa: PTH116 - a Path costs more than the look
    except (OSError, ValueError):
        return False
    return not stat.S_ISDIR(mode)


def size(url: str | os.PathLike[str], options: StorageOptions | None = None) -> int:
    """Bytes of a file."""
    if not is_local(url):
        return objects.head(split(url), options)[0]
    return local_path(url).stat().st_size


def version(
    url: str | os.PathLike[str], options: StorageOptions | None = None
) -> tuple[int, int | str | None]:
    """(bytes, when it was changed in nanoseconds) of a file, of an object its entity tag or what stands in for one."""
    if not is_local(url):
        return objects.head(split(url), options)
    found = local_path(url).stat()
    return found.st_size, found.st_mtime_ns


def list_files(folder: str | os.PathLike[str], options: StorageOptions | None = None) -> list[str]:
    """Every file under a folder, its path relative to it with forward slashes, in the order of their code points."""
    if not is_local(folder):
        return list(objects.list_sizes(split(folder), options))
    return sorted(_walk_files(local_path(folder), "", ()))


def list_sizes(folder: str | os.PathLike[str], options: StorageOptions | None = None) -> dict[str, int]:
    """What `list_files` lists, and the bytes of each: in a store the same requests tell both."""
    if not is_local(folder):
        return objects.list_sizes(split(folder), options)
    return {name: size(join(folder, name)) for name in list_files(folder)}


def list_folder(folder: str | os.PathLike[str], options: StorageOptions | None = None) -> list[str]:
    """The names right in a folder, those of folders with a slash behind them, in the order of their code points."""
    if not is_local(folder):
        return objects.list_names(split(folder), options)
    return sorted(f"{path.name}/" if path.is_dir() else path.name for path in local_path(folder).iterdir())


def _walk_files(folder: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[str]:
    """Files under a folder, through links to folders too, but not round a ring of them."""
    real = folder.resolve()
    if real in above:
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk_files(path, f"{prefix}{path.name}/", (*above, real))
        elif path.is_file():
            yield prefix + path.name


_WRITE_BACK_BYTES = 8 << 20


class _EagerFile(io.FileIO):
    """A new file whose bytes set out for the disk while it is being written.

    Left alone they wait for the flush at the end, and the writer then waits as long as the disk takes for all of them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._begun = 0

    def write(self, data: Any, /) -> int:
        written = super().write(data) or 0
        end = self.tell()
        if end - self._begun >= _WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
            # Linux begins to write what it is told will not be needed. It is a hint: nothing depends on it.
            os.posix_fadvise(self.fileno(), self._begun, end - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = end
        return written


def find_near(path: str, folder: str, options: StorageOptions | None = None) -> str:
    """A path of a file that lies in `folder`: from the current folder if it is there, else from that one."""
    beside = join(folder, path)
    return beside if beside != path and not exists(path, options) and exists(beside, options) else path


@contextmanager
def open_write(url: str | os.PathLike[str], options: StorageOptions | None = None) -> Iterator[BinaryIO]:
    """Write a file that appears under its name only when it is whole.

    On the disk the bytes go to a hidden name beside it, are flushed and renamed when the block ends without an exception;
    in a store they go out in parts, which become an object then. Otherwise nothing is left behind.
    """
    if not is_local(url):
        with open_put(split(url), options) as file:
            yield file
        return
    path = local_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    try:
        with io.BufferedWriter(_EagerFile(partial)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """A hidden name beside a file to write it under; no other has it, on this host or on one that shares the disk."""
    return path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")


def write_bytes(url: str | os.PathLike[str], data: bytes, options: StorageOptions | None = None) -> None:
    """Write a whole file, atomically."""
    if not is_local(url):
        objects.put(split(url), options, data)
        return
    with open_write(url) as file:
        file.write(data)


def create(url: str | os.PathLike[str], data: bytes, options: StorageOptions | None = None) -> bool:
    """Write a whole file unless there is one of this name, in one step: a claim that one of several can make.

    Args:
        url: of the file.
        data: who claims it; a store that was asked twice, since its first answer was lost, knows its own claim by it.
        options: how a store is reached.

    Returns:
        Whether the file is ours now.
    """
    if not is_local(url):
        return objects.put_new(split(url), options, data)
    path = local_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(partial)
    except FileExistsError:
        return False
    finally:
        partial.unlink(missing_ok=True)
    return True


def remove_folder(folder: str | os.PathLike[str], options: StorageOptions | None = None) -> None:
    """Remove a folder and all that is in it, if it is there."""
    if not is_local(folder):
        remove_files(folder, list_files(folder, options), options)
        return
    path = local_path(folder)
    if path.exists():
        shutil.rmtree(path)


def remove_files(
    folder: str | os.PathLike[str], names: Sequence[str], options: StorageOptions | None = None
) -> None:
    """Remove files of a folder, those of them that are there; in a store many with one request."""
    if not is_local(folder):
        if names:
            objects.delete(split(folder), options, names)
        return
    for name in names:
        remove(join(folder, name))


def remove(url: str | os.PathLike[str], options: StorageOptions | None = None) -> None:
    """Remove a file, if it is there."""
    if not is_local(url):
        objects.delete(split(url), options)
        return
    local_path(url).unlink(missing_ok=True)
