"""Tars to samples: members in order, grouped by key as webdataset does, with the place of each sample.

Nothing is extracted to disk and nothing is guessed: a tar that ends without its end-of-archive marker, a key that
comes back after another one, or a field that comes twice is an error that names the shard and the place.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow.parquet as pq

from bagel_wds import storage
from bagel_wds.errors import ShardError
from bagel_wds.schema import split_member

if TYPE_CHECKING:
    from collections.abc import Iterator

Sample = dict[str, Any]

BLOCK = tarfile.BLOCKSIZE
MAX_MEMBER_BYTES = 4 << 30
"""A member above this is refused."""
MAX_MEMBERS = 100_000
"""A sample of more members is refused."""

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


def walk_members(file: BinaryIO, url: str, offset: int = 0) -> Iterator[Member]:
    """The regular files of a tar, from a header at `offset` to the end-of-archive marker.

    Raises:
        ShardError: if the tar is compressed, broken, or ends early.
    """
    file.seek(offset)
    start, long_name = offset, None
    while True:
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise ShardError(_cut(url, offset, "the end-of-archive marker"))
        if not any(block):
            return
        header = _parse_header(block, url, offset)
        if header.size > MAX_MEMBER_BYTES:
            raise ShardError(
                f"{url}: member {header.name!r} at byte {offset} claims {header.size} bytes; the most is {MAX_MEMBER_BYTES}"
            )
        data = file.read(header.size)
        padding = -header.size % BLOCK
        if len(data) < header.size or len(file.read(padding)) < padding:
            raise ShardError(_cut(url, offset, f"member {header.name!r}"))
        offset += BLOCK + header.size + padding
        if header.type == tarfile.GNUTYPE_LONGNAME:
            long_name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            long_name = _pax_path(data, url, start) or long_name
        else:
            if header.isreg():
                yield Member(long_name or header.name, start, offset, data)
            start, long_name = offset, None


def _cut(url: str, offset: int, what: str) -> str:
    return f"{url}: the file ends at or after byte {offset}, before {what} is complete; it was cut short, copy it again"


def _parse_header(block: bytes, url: str, offset: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        for magic, name in _COMPRESSED.items():
            if offset == 0 and block.startswith(magic):
                raise ShardError(
                    f"{url} is compressed with {name}: samples have no offsets in it; decompress it first"
                ) from error
        raise ShardError(f"{url}: no tar header at byte {offset}: {error}") from error


def _pax_path(data: bytes, url: str, offset: int) -> str | None:
    """The path in a pax extended header: records `LENGTH KEY=VALUE`, each with a line end."""
    while data.rstrip(b"\0"):
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            raise ShardError(f"{url}: broken extended header at byte {offset}")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"path":
            return value.decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    return None


def walk_shard(url: str, offset: int = 0) -> Iterator[Sample]:
    """The samples of a shard from a sample's offset on: webdataset dicts of bytes, `__ref__` is (offset, length).

    Raises:
        ShardError: as `walk_members`, and for members of one sample that lie apart or double.
    """
    with storage.open_read(url) as file:
        yield from _group(walk_members(file, url, offset), url)


def _group(members: Iterator[Member], url: str) -> Iterator[Sample]:
    seen: set[str] = set()
    sample: Sample = {}
    offset = end = 0
    for member in members:
        key, field = split_member(member.name)
        if not field:
            # Not of any sample: webdataset, too, passes names without an extension over.
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


def read_offsets(index_url: str) -> list[int]:
    """Where each sample of a shard starts, in bytes, from its index.

    Raises:
        ShardError: if the index cannot be read.
    """
    try:
        with storage.open_read(index_url) as file:
            offsets: list[int] = pq.read_table(file, columns=["offset"])["offset"].to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise ShardError(f"{index_url}: the index cannot be read: {error}") from error
    return offsets


def walk_slice(
    url: str, start: int = 0, stop: int | None = None, step: int = 1, index_url: str | None = None
) -> Iterator[Sample]:
    """Samples `start`, `start + step`, ... before `stop` of a shard, counted from 0.

    With an index the reader goes straight to the first; without, it reads past what comes before.
    """
    offset, ordinal = 0, 0
    if index_url is not None and start > 0:
        offset, ordinal = read_offsets(index_url)[start], start
    samples = walk_shard(url, offset)
    while stop is None or ordinal < stop:
        sample = next(samples, None)
        if sample is None:
            return
        if ordinal >= start and (ordinal - start) % step == 0:
            yield {**sample, "__ordinal__": ordinal}
        ordinal += 1
