"""Tars to samples: members in order, grouped by key as webdataset does, with the place of each sample.

Nothing is extracted to disk and nothing is guessed: a tar that ends without its end-of-archive marker, a key that
comes back after another one, or a field that comes twice is an error that names the shard and the place.
"""

from __future__ import annotations

import os
import re
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from bagel_wds import storage
from bagel_wds.ahead import look_ahead
from bagel_wds.errors import ShardError
from bagel_wds.schema import split_member
from bagel_wds.steady import name_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.prefetch import Lane
    from bagel_wds.storage import StorageOptions

Sample = dict[str, Any]

BLOCK = tarfile.BLOCKSIZE
MAX_MEMBER_BYTES = 4 << 30
"""A member above this is refused."""
MAX_GAP = 256 << 10
"""Samples no further apart are fetched in one read."""
MAX_READ = 32 << 20
"""A read of several samples starts its last one no further on."""
RUNS_AT_ONCE = 8
"""Reads of samples by their places that are made together, where the shards are not local."""
MAX_MEMBERS = 100_000
"""A sample of more members is refused."""

_NO_DATA = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
"""No data follows these, whatever size they claim."""
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSIONS = (*_PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
"""Headers that only say something of the next one."""
_PLAIN_NUMBERS = re.compile(rb"[0-7]{7}\0[0-7]{7}\0[0-7]{7}\0([0-7]{11})\0[0-7]{11}\0([0-7]{6})\0 ")
"""Mode, owner, group, (size), time and (checksum) as tar writers put them; other ways are left to `tarfile`."""
_PLAIN_DEVICES = (bytes(16), b"0000000\0" * 2)
_MAGICS = (b"ustar\00000", b"ustar  \0")
_META = re.compile(r"__[^/]*__($|/)")
"""Names that webdataset keeps for itself."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a tar.

    Attributes:
        name: with its folders.
        offset: of its first header block, extended headers included, in bytes.
        end: behind its last, padded block, in bytes.
        data: its content.
    """

    name: str
    offset: int
    end: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Header:
    """What matters of a tar header.

    Attributes:
        name: with its folders, unless a header before it gave a longer one.
        size: of the data, in bytes, as the header claims it.
        type: one byte.
        is_file: a regular file.
    """

    name: str
    size: int
    type: bytes
    is_file: bool


def walk_members(file: BinaryIO, url: str, offset: int = 0, end: int | None = None) -> Iterator[Member]:
    """The regular files of a tar from where the file stands, at `offset`, to the end-of-archive marker, or to `end`.

    Raises:
        ShardError: if the tar is compressed, broken, ends early or goes on behind its end.
    """
    start, long_name, pax_size = offset, None, None
    while offset != end and (header := _read_header(file, url, offset)) is not None:
        size = 0 if header.type in _NO_DATA else header.size
        if pax_size is not None and header.type not in (*_NO_DATA, *_EXTENSIONS):
            size = pax_size
        data = _read_data(file, url, offset, header.name, size)
        offset += BLOCK + size + -size % BLOCK
        if header.type == tarfile.GNUTYPE_LONGNAME:
            long_name = _text(data.rstrip(b"\0"))
        elif header.type in _PAX:
            records = _pax_records(data, url, start)
            long_name = _text(records[b"path"]) if b"path" in records else long_name
            pax_size = int(records[b"size"]) if records.get(b"size", b"").isdigit() else None
        elif header.type not in _EXTENSIONS:
            if header.is_file:
                yield Member(long_name or header.name, start, offset, data)
            start, long_name, pax_size = offset, None, None


def _read_header(file: BinaryIO, url: str, offset: int) -> _Header | None:
    """The header at this offset, where the file stands; None at the end-of-archive marker."""
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        raise ShardError(
            (offset == 0 and _no_tar(block, url)) or _cut(url, offset, "the end-of-archive marker")
        )
    if not any(block):
        _check_end(file, url, offset)
        return None
    plain = _plain_header(block)
    if plain is not None:
        return plain
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise ShardError(
            (offset == 0 and _no_tar(block, url)) or f"{url}: no tar header at byte {offset}: {error}"
        ) from error
    if header.type == tarfile.GNUTYPE_SPARSE:
        raise ShardError(_sparse(url, offset))
    return _Header(header.name, header.size, header.type, header.isreg())


def _plain_header(block: bytes) -> _Header | None:
    """The header of a regular file as tar writers put it, several times faster than `tarfile` reads it; else None."""
    numbers = _PLAIN_NUMBERS.fullmatch(block, 100, 156)
    is_plain = (
        numbers is not None
        and block[156:157] == tarfile.REGTYPE
        and block[257:265] in _MAGICS
        and block[329:345] in _PLAIN_DEVICES
        # A longer name goes on here.
        and block[345] == 0
        # The checksum counts its own field as eight blanks; the last of them is one.
        and sum(block) - sum(numbers[2]) + 7 * ord(" ") == int(numbers[2], 8)
    )
    if numbers is None or not is_plain:
        return None
    return _Header(_text(block[:100].partition(b"\0")[0]), int(numbers[1], 8), tarfile.REGTYPE, is_file=True)


def _no_tar(block: bytes, url: str) -> str:
    """What to say of a file that starts so, if it is no tar (a member's name, too, may start with `BZh`)."""
    if page := name_page(block):
        return (
            f"{url}: no tar header at byte 0 but {page}, which a server may give in place of a file that it refuses; look into "
            "it, and copy the shard again"
        )
    for magic, name in _COMPRESSED.items():
        if block.startswith(magic):
            return f"{url} is compressed with {name}: samples have no offsets in it; decompress it first"
    return ""


def _read_data(file: BinaryIO, url: str, offset: int, name: str, size: int) -> bytes:
    """The data of the member whose header lies at this offset; the file then stands at the next header."""
    if not 0 <= size <= MAX_MEMBER_BYTES:
        raise ShardError(
            f"{url}: member {name!r} at byte {offset} claims {size} bytes; the most is {MAX_MEMBER_BYTES}"
        )
    data = file.read(size)
    padding = -size % BLOCK
    if len(data) < size or len(file.read(padding)) < padding:
        raise ShardError(_cut(url, offset, f"member {name!r}"))
    return data


def _check_end(file: BinaryIO, url: str, offset: int) -> None:
    """Behind the end-of-archive marker comes padding; a tar put behind another (`cat`) would not be seen by anyone."""
    while block := file.read(BLOCK):
        offset += BLOCK
        if not any(block):
            continue
        try:
            tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return
        raise ShardError(
            f"{url}: more members follow at byte {offset}, behind the end-of-archive marker; join tars with `tar -A`, not "
            "`cat`"
        )


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _cut(url: str, offset: int, what: str) -> str:
    return f"{url}: the file ends at or after byte {offset}, before {what} is complete; it was cut short, copy it again"


def _pax_records(data: bytes, url: str, offset: int) -> dict[bytes, bytes]:
    """What a pax extended header says of the next member: records `LENGTH KEY=VALUE`, each with a line end."""
    records: dict[bytes, bytes] = {}
    while data.rstrip(b"\0"):
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or len(length) > 10 or not len(length) + 1 < int(length) <= len(data):
            raise ShardError(f"{url}: broken extended header at byte {offset}")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key] = value
        data = data[int(length) :]
    if any(key.startswith(b"GNU.sparse.") for key in records):
        raise ShardError(_sparse(url, offset))
    return records


def _sparse(url: str, offset: int) -> str:
    return f"{url}: the member at byte {offset} is stored sparse; write the shard without `tar --sparse`"


class _ReadAhead:
    """Has the system read a local file before its bytes are asked for, and the next shard before this one ends.

    Nothing is held in this process and nothing has to be ended: the bytes go to the system's cache. A file that is not
    local, or a system without `posix_fadvise`, is read as it comes.

    Args:
        file: that stands at the first sample.
        num_bytes: how far ahead; 0 reads nothing ahead.
        next_url: the shard that comes after this one.
    """

    def __init__(self, file: BinaryIO, num_bytes: int, next_url: str | None) -> None:
        self._num_bytes = num_bytes if hasattr(os, "posix_fadvise") else 0
        self._next_url = next_url
        self._asked = file.tell()
        if self._num_bytes:
            try:
                self._file = file.fileno()
                self._size = os.fstat(self._file).st_size
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            except OSError:
                self._num_bytes = 0

    def reach(self, offset: int) -> None:
        """Told that what comes before this offset has been read."""
        if not self._num_bytes:
            return
        end = offset + self._num_bytes
        # Half a window at a time, so that few calls are made.
        if end - self._asked >= self._num_bytes // 2 and self._asked < self._size:
            with suppress(OSError):
                os.posix_fadvise(self._file, self._asked, end - self._asked, os.POSIX_FADV_WILLNEED)
            self._asked = end
        if end >= self._size and self._next_url is not None:
            url, self._next_url = self._next_url, None
            # Whatever is wrong with the next shard is told when its turn comes.
            with suppress(OSError), storage.open_read(url) as file:
                os.posix_fadvise(file.fileno(), 0, self._num_bytes, os.POSIX_FADV_WILLNEED)


def walk_shard(
    url: str,
    offset: int = 0,
    *,
    read_ahead: int = 0,
    next_url: str | None = None,
    options: StorageOptions | None = None,
    lane: Lane | None = None,
    end: int | None = None,
) -> Iterator[Sample]:
    """The samples of a shard from a sample's offset on: webdataset dicts of bytes, `__ref__` is (offset, length).

    Args:
        url: of the shard.
        offset: of the first sample, in bytes.
        read_ahead: how many bytes of a local file are made ready behind those that are asked for.
        next_url: the shard after this one, whose start is made ready likewise.
        options: how its store is reached.
        lane: reads ahead where it is not local; without, it is read as it comes.
        end: where a sample begins that is not wanted any more, nor are those behind it; None reads to the shard's end.

    Raises:
        ShardError: as `walk_members`, for a file that cannot be opened or read, and for members of one sample that lie
            apart or double.
    """
    try:
        if lane is not None and not storage.is_local(url):
            opened = lane.open(url, offset, end, next_url)
        else:
            opened = storage.open_read(url, options)
    except OSError as error:
        raise ShardError(f"{url}: the shard cannot be opened: {error}") from error
    reached = offset
    with opened as file:
        try:
            if file.tell() != offset:
                file.seek(offset)
            ahead = _ReadAhead(file, read_ahead, next_url)
            ahead.reach(offset)
            for sample in _group(walk_members(file, url, offset, end), url):
                reached = sum(sample["__ref__"])
                ahead.reach(reached)
                yield sample
        except OSError as error:
            raise ShardError(f"{url}: the shard cannot be read on from byte {reached}: {error}") from error


def fetch(places: Sequence[tuple[str, int, int]], options: StorageOptions | None = None) -> list[Sample]:
    """Samples by their places, in that order, with few reads: neighbours in a shard are read together.

    Args:
        places: (url, offset, length) of each, as `walk_shard` gave them.
        options: how their store is reached.

    Raises:
        ShardError: as `walk_shard`, and if a shard cannot be read, or there is no whole sample at a place.
    """
    samples: dict[tuple[str, int], Sample] = {}
    runs = list(_runs(places))
    at_once = 1 if all(storage.is_local(url) for url, _ in runs) else min(len(runs), RUNS_AT_ONCE)
    for (url, spans), data in zip(
        runs, look_ahead(partial(_read_run, options), runs, at_once, weigh=_weigh, most=MAX_READ), strict=True
    ):
        file = BytesIO(data)
        for offset, length in spans:
            file.seek(offset - spans[0][0])
            found = list(_group(walk_members(file, url, offset, offset + length), url))
            if [sample["__ref__"] for sample in found] != [(offset, length)]:
                raise ShardError(
                    f"{url}: bytes {offset} to {offset + length} are not one sample, as they were ({len(found)} begin there); was "
                    "the shard replaced?"
                )
            samples[url, offset] = found[0]
    return [dict(samples[url, offset]) for url, offset, _ in places]


def _weigh(run: tuple[str, list[tuple[int, int]]]) -> int:
    return sum(run[1][-1]) - run[1][0][0]


def _read_run(options: StorageOptions | None, run: tuple[str, list[tuple[int, int]]]) -> bytes:
    url, start = run[0], run[1][0][0]
    try:
        return storage.read_range(url, start, _weigh(run), options)
    except OSError as error:
        raise ShardError(f"{url}: the shard cannot be read from byte {start}: {error}") from error


def _runs(places: Sequence[tuple[str, int, int]]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """(url, (offset, length) of samples that are read together), by shard and offset."""
    run: list[tuple[int, int]] = []
    run_url = ""
    for url, offset, length in sorted(set(places)):
        near = run and url == run_url and offset <= sum(run[-1]) + MAX_GAP and offset - run[0][0] <= MAX_READ
        if run and not near:
            yield run_url, run
            run = []
        run_url = url
        run.append((offset, length))
    if run:
        yield run_url, run


def _group(members: Iterator[Member], url: str) -> Iterator[Sample]:
    seen: set[str] = set()
    sample: Sample = {}
    offset = end = 0
    for member in members:
        key, field = split_member(member.name)
        if not field or not key or key.endswith("/") or _META.match(member.name):
            # Not of any sample: webdataset, too, passes over names without an extension, hidden files (macOS puts a
            # `._KEY.jpg` beside each `KEY.jpg`) and its own `__...__`.
            continue
        if sample and key != sample["__key__"]:
            yield {**sample, "__ref__": (offset, end - offset)}
            sample = {}
        if not sample:
            if key in seen:
                raise ShardError(
                    f"{url}: key {key!r} comes back at byte {member.offset} after another one; members of a sample must "
                    "follow each other, rewrite the shard sorted by name"
                )
            seen.add(key)
            sample, offset = {"__key__": key, "__url__": url}, member.offset
        if field in sample:
            raise ShardError(f"{url}: member {member.name!r} at byte {member.offset} comes twice")
        if len(sample) > MAX_MEMBERS:
            raise ShardError(f"{url}: sample {key!r} has more than {MAX_MEMBERS} members")
        sample[field] = member.data
        end = member.end
    if sample:
        yield {**sample, "__ref__": (offset, end - offset)}


def read_offsets(index_url: str, options: StorageOptions | None = None) -> list[int]:
    """Where each sample of a shard starts, in bytes, from its index.

    Raises:
        ShardError: if the index cannot be read.
    """
    return _read_index(index_url, options, "offset")[0]


def _read_index(index_url: str, options: StorageOptions | None, *columns: str) -> list[list[int]]:
    try:
        # Of an object the whole is one request; its end and its columns one by one would be several.
        with (
            storage.open_read(index_url)
            if storage.is_local(index_url)
            else BytesIO(storage.read_bytes(index_url, options))
        ) as file:
            table = pq.ParquetFile(file).read(list(columns))
            return [table[column].to_pylist() for column in columns]
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ShardError(f"{index_url}: the index cannot be read: {error}") from error


def walk_places(
    index_url: str,
    start: int = 0,
    stop: int | None = None,
    step: int = 1,
    at: int | None = None,
    options: StorageOptions | None = None,
) -> Iterator[tuple[int, int, int]]:
    """(ordinal, offset, length) of the samples that `walk_slice` gives, from the index alone.

    Args:
        index_url: of the shard's index.
        start: ordinal of the first.
        stop: ordinal before which to stop; None is the shard's end.
        step: from each to the next.
        at: ordinal to go on from instead of the first.
        options: how its store is reached.

    Raises:
        ShardError: if the index cannot be read, and if the index has fewer than `stop` samples.
    """
    offsets, lengths = _read_index(index_url, options, "offset", "length")
    if stop is not None and len(offsets) < stop:
        raise ShardError(_too_few(index_url, len(offsets), stop))
    first = start if at is None else at + (start - at) % step
    for ordinal in range(first, len(offsets) if stop is None else stop, step):
        yield ordinal, offsets[ordinal], lengths[ordinal]


def walk_slice(
    url: str,
    start: int = 0,
    stop: int | None = None,
    step: int = 1,
    index_url: str | None = None,
    at: tuple[int, int] | None = None,
    read_ahead: int = 0,
    next_url: str | None = None,
    options: StorageOptions | None = None,
    lane: Lane | None = None,
) -> Iterator[Sample]:
    """Samples `start`, `start + step`, ... before `stop` of a shard, counted from 0.

    With an index the reader goes straight to the first; without, it reads past what comes before.

    Args:
        url: of the shard.
        start: ordinal of the first.
        stop: ordinal before which to stop; None is the shard's end.
        step: from each to the next.
        index_url: of the shard's index.
        at: (ordinal, offset) to go on from instead of the first.
        read_ahead: as of `walk_shard`.
        next_url: as of `walk_shard`.
        options: as of `walk_shard`.
        lane: as of `walk_shard`.

    Raises:
        ShardError: as `walk_shard`, and if the shard has fewer than `stop` samples: then what counted them is stale.
    """
    (ordinal, offset), end = at or (0, 0), None
    if at is None and index_url is not None and start > 0:
        offsets = read_offsets(index_url, options)
        if start >= len(offsets):
            if stop is not None and start < stop:
                raise ShardError(_too_few(index_url, len(offsets), stop))
            return
        offset, ordinal = offsets[start], start
        end = offsets[stop] if stop is not None and stop < len(offsets) else None
    samples = walk_shard(
        url, offset, read_ahead=read_ahead, next_url=next_url, options=options, lane=lane, end=end
    )
    while stop is None or ordinal < stop:
        sample = next(samples, None)
        if sample is None:
            if stop is not None:
                raise ShardError(_too_few(url, ordinal, stop))
            return
        if ordinal >= start and (ordinal - start) % step == 0:
            yield {**sample, "__ordinal__": ordinal}
        ordinal += 1


def _too_few(url: str, samples: int, stop: int) -> str:
    return (
        f"{url} has {samples} samples, and the manifest or index beside it promises {stop} or more; one of them is not "
        "of this shard, copy or convert again"
    )
