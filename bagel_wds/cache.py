"""Shards from a bucket kept on the local disk, for all processes of a machine that name the same folder.

    CACHE_DIR/
        .bagel-wds-cache.lock         held for the moment in which room is made, or a whole object gets its name
        bagel-wds-cache/
            CACHEDIR.TAG              it is ours; without it nothing in the folder is touched
            KEY-VERSION.shard         a whole object
            KEY-VERSION.shard.partial one that somebody is writing, as large as it will be

KEY is of the URL, VERSION of size and entity tag, so an object that was replaced has another name. A reader holds a shared lock
on the file that it reads, a writer an exclusive one on what it writes; locks die with their process. Nobody waits for
anybody: whoever does not get a lock reads from the store. The folder may be removed at any time.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import re
import shutil
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from filelock import FileLock, Timeout

from bagel_wds.urls import is_signed
from bagel_wds.user_folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bagel_wds.storage_options import StorageOptions
    from bagel_wds.urls import Place

logger = logging.getLogger(__name__)

FOLDER = "bagel-wds-cache"
"""What is kept lies in a folder of this name in the folder that the settings name."""
MARKER = "CACHEDIR.TAG"
MARK = "Signature: 8a477f597d28d172789f06886806bc55\n# Shards that bagel-wds keeps; they may be removed at any time.\n"
PARTIAL = ".partial"
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.shard(\.partial)?")
LOCK_SECONDS = 1.0
"""Whoever does not get the folder's lock for so long does without."""
NAME_SECONDS = 15.0
"""But with the bytes of an object on the disk, in a thread beside the reading, one is more patient."""
_PASSING = {errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ESTALE}
"""What may be otherwise the next time: the folder was just removed, or too many files are open."""


def cache_of(options: StorageOptions | None) -> ShardCache | None:
    """The cache that the settings name, one a process; None where they name none."""
    if options is None or not options.cache_bytes:
        return None
    folder = Path(options.cache_dir).expanduser() if options.cache_dir else cache_folder()
    return _open_cache(str(folder), options.cache_bytes)


@lru_cache(maxsize=16)
def _open_cache(folder: str, max_bytes: int) -> ShardCache:
    return ShardCache(Path(folder) / FOLDER, max_bytes)


def key_of(place: Place, options: StorageOptions | None) -> str:
    """What an object is known by in the cache. A signature is no part of it, but another query of a web page is."""
    query = "" if is_signed(f"https://x/?{place.query}") else place.query
    endpoint = (options and options.endpoint) or ""
    return _digest(endpoint, place.scheme, place.bucket, place.key, query)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


class ShardCache:
    """Whole objects in a folder, together never more than so many bytes.

    Args:
        folder: of its own; made when the first object comes.
        max_bytes: of all files together, those that are being written counted at their full size.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_off = False
        # By key: the version that this process saw last.
        self._known: dict[str, Path] = {}

    def has(self, key: str) -> bool:
        """Whether there is any version of an object."""
        return bool(self._versions(key))

    def _versions(self, key: str) -> list[Path]:
        try:
            with os.scandir(self._folder) as items:
                names = [item.name for item in items if item.name.startswith(key)]
        except OSError:
            return []
        return [self._folder / name for name in names if _NAME.fullmatch(name) and not name.endswith(PARTIAL)]

    def find(self, key: str, size: int, tag: str | None) -> BinaryIO | None:
        """This version of an object, open to read; other versions, which nobody will ask for any more, are removed."""
        path = self._path(key, size, tag)
        if path is None or not self._is_ours():
            return None
        for other in self._versions(key):
            if other != path:
                _remove_unused(other)
        try:
            raw = _KeptFile(path, "rb")
        except OSError:
            self._known.pop(key, None)
            return None
        if not _lock(raw.fileno(), shared=True) or not _is_still(raw.fileno(), path):
            raw.close()
            return None
        if os.fstat(raw.fileno()).st_size != size:
            # Another has damaged it.
            raw.close()
            _remove_unused(path)
            return None
        self._known[key] = path
        return io.BufferedReader(raw)

    def read_range(
        self, key: str, offset: int, length: int, head: Callable[[], tuple[int, str | None]]
    ) -> bytes | None:
        """Bytes of an object that is kept whole, or None.

        Args:
            key: of the object.
            offset: of the first byte.
            length: so many, or fewer where the object ends.
            head: asks the store for its size and entity tag, which is done if this process never saw it.
        """
        if key not in self._known and self.has(key) and (file := self.find(key, *head())) is not None:
            file.close()
        path = self._known.get(key)
        if path is None:
            return None
        try:
            with path.open("rb") as kept:
                kept.seek(offset)
                return kept.read(length)
        except OSError:
            # Its turn to go has come.
            self._known.pop(key, None)
            return None

    def begin(self, key: str, size: int, tag: str | None) -> NewEntry | None:
        """Keep an object; None if there is no room, it is there, or another is at it."""
        path = self._path(key, size, tag)
        if path is None or self._is_off or size > self._max_bytes:
            return None
        if self._known.get(key, path) != path:
            del self._known[key]
        try:
            with self._locked(LOCK_SECONDS) as is_locked:
                if not is_locked or path.exists():
                    return None
                self._make_folder()
                return self._reserve(key, path, size)
        except OSError as error:
            self.give_up(error)
            return None

    def _reserve(self, key: str, path: Path, size: int) -> NewEntry | None:
        partial = path.with_name(path.name + PARTIAL)
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Left by a process that died, or new: ours now. Else somebody is writing it.
        if not _lock(file) or not _is_still(file, partial):
            os.close(file)
            return None
        entry = NewEntry(self, key, path, file, size)
        try:
            if self._make_room(size, partial.name):
                os.ftruncate(file, 0)
                os.ftruncate(file, size)
                return entry
        except OSError:
            entry.drop()
            raise
        entry.drop()
        return None

    def _make_room(self, size: int, own: str) -> bool:
        """Remove what was used longest ago, and what the dead left, until there is room; whether there is."""
        total, finished = 0, []
        with os.scandir(self._folder) as items:
            kept = [item for item in items if _NAME.fullmatch(item.name) and item.name != own]
        for item in kept:
            path = self._folder / item.name
            try:
                stat = path.lstat()
            except FileNotFoundError:
                continue
            if item.name.endswith(PARTIAL) and _remove_unused(path):
                continue
            total += stat.st_size
            if not item.name.endswith(PARTIAL):
                finished.append((stat.st_mtime_ns, stat.st_size, path))
        for _, freed, path in sorted(finished):
            if total + size <= self._max_bytes:
                break
            if _remove_unused(path):
                total -= freed
        return total + size <= self._max_bytes

    def give_up(self, error: OSError) -> None:
        """Keep nothing more in this process, unless it is a passing fault; said once."""
        if not self._is_off and error.errno not in _PASSING:
            self._is_off = True
            logger.warning(
                "the cache %s cannot be written (%s); shards are read from the store from now on; make room, or name another "
                "`cache_dir` under `storage`",
                self._folder,
                error.strerror or error,
            )

    def name(self, key: str, file: int, partial: Path, path: Path) -> bool:
        """Have a whole object under its name, at no moment in which another counts what there is; whether that was so.

        Args:
            key: of the object.
            file: its file, open.
            partial: the name that it has, unless the folder was removed; then it may be another's.
            path: the name that it is to have.
        """
        with self._locked(NAME_SECONDS) as is_locked:
            if not is_locked or not _is_still(file, partial):
                return False
            partial.rename(path)
            self._known[key] = path
            return True

    def _path(self, key: str, size: int, tag: str | None) -> Path | None:
        """None for what cannot be told from another version: without an entity tag, or with a weak one."""
        if not tag or tag.startswith("W/") or size == 0:
            return None
        return self._folder / f"{key}-{_digest(str(size), tag)}.shard"

    def _is_ours(self) -> bool:
        return (self._folder / MARKER).is_file()

    def _make_folder(self) -> None:
        if self._folder.exists():
            if not self._is_ours():
                raise FileExistsError(
                    0, f"there is a folder of this name without {MARKER}, which another made"
                )
            return
        # It comes with its mark, in one step. One that is half made was left by a process that died.
        made = self._folder.with_name(f".{FOLDER}.new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(mode=0o700)
        (made / MARKER).write_text(MARK)
        made.rename(self._folder)

    @contextmanager
    def _locked(self, seconds: float) -> Iterator[bool]:
        """The folder's lock, if it comes free in time; it lies beside the folder, which may be removed."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._folder.with_name(f".{FOLDER}.lock"), timeout=seconds, mode=0o600)
        try:
            lock.acquire(poll_interval=0.01)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


class NewEntry:
    """An object that is being kept; its place in the cache is taken, and its bytes come in order.

    Attributes:
        size: of the object, in bytes.
        written: how many are there.
    """

    def __init__(self, cache: ShardCache, key: str, path: Path, file: int, size: int) -> None:
        self.size = size
        self.written = 0
        self._cache = cache
        self._key = key
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL)
        self._file = file

    def write(self, data: memoryview) -> None:
        """Add bytes; where the disk is full the object is not kept."""
        try:
            while self._file >= 0 and data:
                count = os.write(self._file, data)
                self.written += count
                data = data[count:]
        except OSError as error:
            self.drop()
            self._cache.give_up(error)

    def finish(self) -> None:
        """Have it under its name, once all of its bytes are on the disk."""
        if self._file < 0 or self.written != self.size:
            self.drop()
            return
        try:
            os.fsync(self._file)
            is_named = self._cache.name(self._key, self._file, self._partial, self._path)
        except OSError as error:
            self.drop()
            self._cache.give_up(error)
            return
        if is_named:
            self._close()
        else:
            self.drop()

    def drop(self) -> None:
        """Do not keep it."""
        if self._file >= 0:
            with suppress(OSError):
                if _is_still(self._file, self._partial):
                    self._partial.unlink()
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)


class _KeptFile(io.FileIO):
    """A file that counts as used when it is closed."""

    def close(self) -> None:
        if not self.closed:
            with suppress(OSError):
                os.utime(self.fileno())
        super().close()


def _lock(file: int, *, shared: bool = False) -> bool:
    """Lock an open file, if that can be had at once; not where the file system has no locks."""
    import fcntl  # noqa: PLC0415 - not on every system

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_still(file: int, path: Path) -> bool:
    """Whether an open file is the one of this name, which may have been renamed or removed before it was locked."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _remove_unused(path: Path) -> bool:
    """Remove a file unless somebody reads or writes it; whether it is gone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not _lock(file) or not _is_still(file, path):
            return False
        path.unlink()
    finally:
        os.close(file)
    return True
