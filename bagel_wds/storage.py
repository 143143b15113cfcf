"""Files by path or URL, behind four small functions: open, ranged read, list, write.

So far the local disk: a plain path or a `file://` URL. Everything that reads or writes data goes through here.
"""

from __future__ import annotations

import io
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, unquote, urlsplit

from bagel_wds.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def local_path(url: str | os.PathLike[str]) -> Path:
    """The path on disk that a path or `file://` URL names.

    Raises:
        ConfigError: for any other scheme (`pipe:` runs a shell and is refused; object storage is not read yet).
    """
    text = os.fspath(url)
    scheme = text.partition(":")[0] if "://" in text or text.startswith("pipe:") else ""
    if not scheme:
        return Path(text)
    if scheme == "file":
        return Path(unquote(urlsplit(text).path))
    if scheme == "pipe":
        raise ConfigError(
            f"{text!r}: pipe: URLs run a shell command and are refused; give the path of the data"
        )
    raise ConfigError(
        f"{text!r}: {scheme}:// is not read by this version; copy the shards to a disk and give their path"
    )


def open_read(url: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading bytes."""
    return local_path(url).open("rb")


def read_range(url: str | os.PathLike[str], offset: int, length: int) -> bytes:
    """The bytes from `offset`, `length` of them, or fewer where the file ends."""
    with open_read(url) as file:
        file.seek(offset)
        return file.read(length)


def read_bytes(url: str | os.PathLike[str]) -> bytes:
    """The whole file."""
    return local_path(url).read_bytes()


def exists(url: str | os.PathLike[str]) -> bool:
    """Whether there is a file or folder of this name."""
    return local_path(url).exists()


def is_folder(url: str | os.PathLike[str]) -> bool:
    """Whether there is a folder of this name."""
    return local_path(url).is_dir()


def is_file(url: str | os.PathLike[str]) -> bool:
    """Whether there is a file of this name, and not a folder, pipe or device."""
    return local_path(url).is_file()


def size(url: str | os.PathLike[str]) -> int:
    """Bytes of a file."""
    return local_path(url).stat().st_size


def list_files(folder: str | os.PathLike[str]) -> list[str]:
    """Every file under a folder, its path relative to it with forward slashes, in the order of their code points."""
    return sorted(_walk_files(local_path(folder), "", ()))


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


def join(folder: str | os.PathLike[str], name: str) -> str:
    """A name under a folder; a name that is a path from the root, or a URL, stays as it is."""
    if "://" in name or os.path.isabs(name):  # noqa: PTH117 - a Path would collapse the slashes of a URL
        return name
    root = os.fspath(folder)
    return f"{root.rstrip('/')}/{quote(name) if root.startswith('file://') else name}"


def parent(url: str | os.PathLike[str]) -> str:
    """The folder that a file lies in."""
    folder, slash, _ = os.fspath(url).rpartition("/")
    return folder or slash or "."


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


def find_near(path: str, folder: str) -> str:
    """A path of a file that lies in `folder`: from the current folder if it is there, else from that one."""
    beside = join(folder, path)
    return beside if not exists(path) and exists(beside) else path


@contextmanager
def open_write(url: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Write a file that appears under its name only when it is whole.

    The bytes go to a hidden name beside it, are flushed to the disk and renamed when the block ends without an
    exception; otherwise nothing is left behind.
    """
    path = local_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with io.BufferedWriter(_EagerFile(partial)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(url: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file, atomically."""
    with open_write(url) as file:
        file.write(data)


def remove_folder(folder: str | os.PathLike[str]) -> None:
    """Remove a folder and all that is in it, if it is there."""
    path = local_path(folder)
    if path.exists():
        shutil.rmtree(path)


def remove(url: str | os.PathLike[str]) -> None:
    """Remove a file, if it is there."""
    local_path(url).unlink(missing_ok=True)
