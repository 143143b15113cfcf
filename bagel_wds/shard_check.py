"""One shard, checked again: its size, its checksum, its tar, its samples, and its index beside them.

It is read once, from front to end. Whatever is wrong with it is a finding, not an exception.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from bagel_wds import storage
from bagel_wds.errors import BadSample, ShardError
from bagel_wds.findings import FindingLog, ShardFindings, What
from bagel_wds.reader import walk_members
from bagel_wds.shard_samples import TarSample, describe_sample, group_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bagel_wds.manifest import ManifestShard
    from bagel_wds.reader import Member

_INDEX_COLUMNS = ["key", "offset", "length", "media"]
_READ_BYTES = 1 << 20


def verify_shard(shard: ManifestShard, folder: str) -> ShardFindings:
    """Read one shard from front to end, and its index with it."""
    return _ShardCheck(shard, folder).run()


class _ShardCheck:
    """One shard being checked."""

    def __init__(self, shard: ManifestShard, folder: str) -> None:
        self._shard = shard
        self._url = storage.join(folder, shard.url)
        self._log = FindingLog(shard.url)
        self._index = _IndexCheck(storage.join(folder, shard.index) if shard.index else None, self._log)
        self._key_digests = array("Q")
        self._kinds: set[str] = set()
        self._num_bytes = 0

    def run(self) -> ShardFindings:
        """Read the shard."""
        try:
            with storage.open_read(self._url) as opened:
                self._read(_WatchedFile(opened))
        except FileNotFoundError:
            self._log.add(
                What.MISSING, "the file is not there; copy it again, or convert anew with --overwrite"
            )
        except OSError as error:
            self._log.add(What.UNREADABLE, f"{type(error).__name__}: {error}")
        return ShardFindings(
            shard=self._shard.url,
            findings=self._log.findings(),
            num_samples=len(self._key_digests),
            num_bytes=self._num_bytes,
            kinds=frozenset(self._kinds),
            key_digests=self._key_digests.tobytes(),
        )

    def _read(self, file: _WatchedFile) -> None:
        try:
            for sample in group_samples(self._walk(file)):
                self._take(sample)
        except ShardError as error:
            # What is behind the break is only hashed: how many samples it holds, and where, cannot be known.
            self._log.add(What.TAR, str(error).removeprefix(f"{self._url}: "))
            file.read_rest()
        else:
            file.read_rest()
            self._end(file)
        self._num_bytes = file.num_bytes
        if file.num_bytes != self._shard.bytes:
            self._log.add(What.SIZE, f"{file.num_bytes} bytes, the manifest says {self._shard.bytes}")
        if file.checksum != self._shard.checksum:
            self._log.add(What.CHECKSUM, f"{file.checksum}, the manifest says {self._shard.checksum}")

    def _walk(self, file: _WatchedFile) -> Iterator[Member]:
        """The members; `only_zeros` then speaks of what lies behind the last one."""
        for member in walk_members(cast("BinaryIO", file), self._url):
            yield member
            file.only_zeros = True

    def _take(self, sample: TarSample) -> None:
        number = len(self._key_digests)
        self._key_digests.append(sample.key_digest)
        media = None
        try:
            kind, media = describe_sample(sample)
        except BadSample as bad:
            self._log.add(What.SAMPLE, f"sample {number}, {sample.key!r}: {bad.detail}")
        else:
            self._kinds.add(kind)
        self._index.compare(
            {"key": sample.key, "offset": sample.offset, "length": sample.length, "media": media}
        )

    def _end(self, file: _WatchedFile) -> None:
        """The whole tar was walked."""
        if not file.only_zeros:
            self._log.add(What.TAR, "something lies behind the last sample, where only zeros belong")
        num_samples = len(self._key_digests)
        if num_samples != self._shard.samples:
            self._log.add(What.SAMPLES, f"{num_samples} samples, the manifest says {self._shard.samples}")
        self._index.end()


class _WatchedFile:
    """A file whose bytes are hashed as they are read.

    Attributes:
        num_bytes: read so far.
        only_zeros: whether nothing but zeros was read since this was last set.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0
        self.only_zeros = True

    def read(self, size: int) -> bytes:
        """The next bytes, fewer at the end."""
        data = self._file.read(size)
        self._digest.update(data)
        self.num_bytes += len(data)
        self.only_zeros = self.only_zeros and data.count(0) == len(data)
        return data

    def read_rest(self) -> None:
        """Go on to the end."""
        while self.read(_READ_BYTES):
            pass

    @property
    def checksum(self) -> str:
        """Of what was read, as the manifest writes it."""
        return f"xxh3_128:{self._digest.hexdigest()}"


class _IndexCheck:
    """The index of a shard, gone through row by row beside the tar."""

    def __init__(self, url: str | None, log: FindingLog) -> None:
        self._rows = _read_rows(url)
        self._log = log
        self._number = 0
        self._broken = False

    def compare(self, expected: Mapping[str, Any]) -> None:
        """Compare the next row with what it should be; `media` None is not known."""
        number, row = self._number, self._next()
        self._number += 1
        if row is None:
            return
        if not row:
            self._log.add(What.INDEX, f"row {number} is not there, for sample {expected['key']!r}")
            return
        for column, value in expected.items():
            if value is not None and row.get(column) != value:
                self._log.add(
                    What.INDEX, f"row {number}: {column} is {row.get(column)!r}, in the tar it is {value!r}"
                )
                return

    def end(self) -> None:
        """Behind the tar's last sample, no row may follow."""
        if row := self._next():
            self._log.add(
                What.INDEX,
                f"row {self._number}, {row.get('key')!r}, and what follows it have no sample in the tar",
            )

    def _next(self) -> Mapping[str, Any] | None:
        """The next row; empty behind the last one, None where the index has turned out to be broken."""
        if self._broken:
            return None
        try:
            return next(self._rows, {})
        except (OSError, ValueError, LookupError, pa.ArrowException) as error:
            self._log.add(What.INDEX, f"it cannot be read: {type(error).__name__}: {error}")
            self._broken = True
            return None


def _read_rows(url: str | None) -> Iterator[Mapping[str, Any]]:
    if url is None:
        raise FileNotFoundError("the manifest names none")
    with storage.open_read(url) as file:
        for batch in pq.ParquetFile(file).iter_batches(1024, columns=_INDEX_COLUMNS):
            yield from batch.to_pylist()
