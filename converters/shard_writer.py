"""Samples to shards: plain tars whose bytes depend on the samples alone, each with its index."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from bagel_wds import storage
from bagel_wds.manifest import INDEX_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bagel_wds.sources.encode import EncodedSample

    from .claim import Claim
    from .settings import ShardSettings

_END_BYTES = 2 * tarfile.BLOCKSIZE

INDEX_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        (
            "media",
            pa.list_(
                pa.struct(
                    [
                        ("ext", pa.string()),
                        ("width", pa.int32()),
                        ("height", pa.int32()),
                        ("frames", pa.int32()),
                        ("bytes", pa.int64()),
                    ]
                )
            ),
        ),
    ]
)
"""Of `NAME.idx.parquet`, a row a sample in the order of the tar.

`offset` is that of the sample's first header, `length` goes to the end of its last member's padding, in bytes.
"""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard that was written.

    Attributes:
        name: of the tar in its folder.
        samples: how many it holds.
        bytes: size of the tar.
        checksum: of the tar, `xxh3_128:` and 32 hexadecimal digits.
    """

    name: str
    samples: int
    bytes: int
    checksum: str

    @property
    def index(self) -> str:
        """Name of its index."""
        return self.name.removesuffix(".tar") + INDEX_SUFFIX


_BLANK = tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)
"""The header of an empty member without a name: its name ends at 100, its size is 124:135, its checksum 148:156."""

_BLANK_SUM = sum(_BLANK[:124]) + sum(_BLANK[135:148]) + sum(b" " * 8) + sum(_BLANK[156:])
_MAX_PLAIN_SIZE = 8**11 - 1


def member_header(name: str, size: int) -> bytes:
    """What `TarInfo.tobuf` gives for a member, byte for byte, in a tenth of the time."""
    if not name.isascii() or len(name) > tarfile.LENGTH_NAME or size > _MAX_PLAIN_SIZE:
        # None of ours; tarfile knows what can still be done, or refuses.
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.USTAR_FORMAT)
    letters, digits = name.encode(), b"%011o" % size
    checksum = b"%06o\0 " % (_BLANK_SUM + sum(letters) + sum(digits))
    return letters.ljust(100, b"\0") + _BLANK[100:124] + digits + _BLANK[135:148] + checksum + _BLANK[156:]


class _Tar:
    """A tar being written, with its size and checksum so far.

    Headers are plain ustar with the time 0, the owner 0 without a name, and the mode 0644.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    def add(self, name: str, data: bytes) -> None:
        """Append one member."""
        self._put(member_header(name, len(data)))
        self._put(data)
        self._put(bytes(-len(data) % tarfile.BLOCKSIZE))

    def end(self) -> None:
        """Append the end-of-archive marker, and fill the last record."""
        self._put(bytes(_END_BYTES))
        self._put(bytes(-self.num_bytes % tarfile.RECORDSIZE))

    def full_size(self, more: int) -> int:
        """Bytes that the whole tar has if it ends after `more` bytes of members."""
        size = self.num_bytes + more + _END_BYTES
        return size + -size % tarfile.RECORDSIZE

    @property
    def checksum(self) -> str:
        """Of what was written so far."""
        return f"xxh3_128:{self._digest.hexdigest()}"


def write_shards(
    samples: Iterator[EncodedSample],
    out: str,
    stem: str,
    settings: ShardSettings,
    *,
    ordinal: int = 0,
    claim: Claim | None = None,
) -> Iterator[ShardRecord]:
    """Write samples to `STEM-000.tar`, `STEM-001.tar`, ... in a folder, each with `STEM-000.idx.parquet` beside it.

    A shard appears under its name when it is whole, and is yielded when its index is too; an exception out of `samples`
    leaves nothing of the one that it interrupts. No samples make no shard.

    Args:
        samples: in order.
        out: the folder.
        stem: start of the shards' names.
        settings: when a shard is closed.
        ordinal: of the first shard.
        claim: that must stand when a shard gets its name.

    Raises:
        ConfigError: if it does not.
    """
    first = next(samples, None)
    for number in count(ordinal):
        if first is None:
            return
        record, first = _write_shard(first, samples, out, f"{stem}-{number:03d}", settings, claim)
        yield record


def _write_shard(
    first: EncodedSample,
    others: Iterator[EncodedSample],
    out: str,
    name: str,
    settings: ShardSettings,
    claim: Claim | None,
) -> tuple[ShardRecord, EncodedSample | None]:
    """One shard, and the sample that did not fit into it any more."""
    rows: list[dict[str, Any]] = []
    sample: EncodedSample | None = first
    with storage.open_write(storage.join(out, f"{name}.tar")) as file:
        tar = _Tar(file)
        while sample is not None and (not rows or _fits(sample, tar, len(rows), settings)):
            offset = tar.num_bytes
            for member, data in sample.members:
                tar.add(member, data)
            rows.append(
                {
                    "key": sample.key,
                    "offset": offset,
                    "length": tar.num_bytes - offset,
                    "media": list(sample.media),
                }
            )
            sample = next(others, None)
        tar.end()
        if claim is not None:
            claim.confirm()
    record = ShardRecord(f"{name}.tar", len(rows), tar.num_bytes, tar.checksum)
    _write_index(storage.join(out, record.index), rows)
    return record, sample


def _fits(sample: EncodedSample, tar: _Tar, num_samples: int, settings: ShardSettings) -> bool:
    return num_samples < settings.shard_samples and tar.full_size(sample.num_bytes) <= settings.shard_bytes


def _write_index(url: str, rows: list[dict[str, Any]]) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), buffer, compression="zstd")
    storage.write_bytes(url, buffer.getvalue())
