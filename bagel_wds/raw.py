"""Raw parquet and JSON rows in place of shards: the same samples, under the same keys, without a conversion.

A dataset of raw files is cut into units: a row group of a parquet file, or up to `UNIT_ROWS` rows of a JSON file. A unit
stands in a group's table where a shard would, so an epoch's order, its division into streams, shuffles, packs and bookmarks
are those of shards. What is different is told in `docs/raw-sources.md`.

A row becomes the very dict that the reader of a tar gives for it once it is converted. One that a conversion would put into
its quarantine becomes a sample with the verdict alone, under `REJECTED`, which `decode` counts and leaves out.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from bagel_wds import storage
from bagel_wds.errors import BadSample, ConfigError, ShardError
from bagel_wds.schema import REJECTED, split_member
from bagel_wds.sources import RejectedRow, RowGroups, Slice, absolute_source, plan_source, read_slice
from bagel_wds.sources.encode import encode_sample
from bagel_wds.sources.rows import check_max_units

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.sources import Lines, Source, SourceFile, SourceSample

    Sample = dict[str, Any]

logger = logging.getLogger(__name__)

UNIT_ROWS = 256
"""Rows of a unit of JSON; of its first row it is known where it lies in the file, and to reach another it is read up to
there."""


@dataclass(frozen=True)
class RawUnit:
    """Some rows of a raw file, in the place of a shard.

    Attributes:
        source: that they belong to, named from the root of the disk.
        piece: a single row group, or lines.
        url: the file and the place in it, for people.
        path: of the file, from the root of the disk.
        file: what tells the file from what it may become.
    """

    source: Source
    piece: RowGroups | Lines
    url: str
    path: str
    file: SourceFile

    @property
    def identity(self) -> list[Any]:
        """What tells it from other units, and its samples from those that other settings make of the same rows."""
        piece, source = self.piece, self.source
        taken = [sorted(source.columns.items()), str(source.placeholders), source.allow_outside]
        return [piece.file, piece.first, piece.num_rows, piece.chosen, *taken, self.file.digest]

    def walk(self, start: int, stop: int | None = None, step: int = 1) -> Iterator[Sample]:
        """Samples `start`, `start + step`, ... before `stop`, as `reader.walk_slice` gives those of a tar.

        `__ordinal__` counts the rows of the unit from 0; `__ref__` is (row, length): the number of the row in its row group,
        or of its line in the file, and the bytes that the sample would take in a tar.

        Raises:
            ShardError: if the file cannot be read, or is not what it was when the run was built: looked at when it is opened,
                and one on the disk again at the end, since it may be written to meanwhile.
        """
        stop, ordinal = self.piece.num_rows if stop is None else stop, start
        with _naming(self.url):
            self._check_unchanged()
            for row in islice(self._read(self.piece, start), max(0, stop - start)):
                if (ordinal - start) % step == 0:
                    yield {**self._sample(row), "__ordinal__": ordinal}
                ordinal += 1
            self._check_unchanged_since()
        if ordinal < stop:
            raise ShardError(
                f"{self.url}: {self.piece.num_rows} rows were counted when the run was built, and it has {ordinal}; raw files "
                "must not change while they are read"
            )

    def fetch(self, rows: Sequence[int]) -> list[Sample]:
        """Samples by the numbers that `walk` gave of their rows, in that order; the file is gone through once.

        Raises:
            ShardError: as `walk`, or if there is no such row.
        """
        chosen = tuple(sorted(set(rows)))
        with _naming(self.url):
            self._check_unchanged()
            found = {
                row.place.row: self._sample(row)
                for row in self._read(replace(self.piece, num_rows=len(chosen), chosen=chosen))
            }
            self._check_unchanged_since()
        for number in chosen:
            if number not in found:
                raise ShardError(f"{self.url}: there is no row {number} any more; raw files must not change")
        return [dict(found[number]) for number in rows]

    def _check_unchanged(self) -> None:
        """One look at the file, in a bucket one request: where its rows begin is taken on trust after that."""
        found = storage.version(self.path, self.source.options)
        if found != self.file.version:
            was, now = self.file.bytes, found[0]
            how = (
                f"from {was} to {now} bytes"
                if was != now
                else f"it has {now} bytes still, but another date or tag"
            )
            raise ConfigError(
                f"the file has changed since the run was built: {how}; raw files must not change while a run reads them: build "
                "it anew"
            )

    def _check_unchanged_since(self) -> None:
        # An object is read in one version by itself.
        if storage.is_local(self.path):
            self._check_unchanged()

    def _read(self, piece: RowGroups | Lines, skip_rows: int = 0) -> Iterator[SourceSample | RejectedRow]:
        return read_slice(self.source, Slice(0, (piece,)), skip_rows=skip_rows)

    def _sample(self, row: SourceSample | RejectedRow) -> Sample:
        sample: Sample = {"__key__": row.place.key, "__url__": self.url}
        if isinstance(row, RejectedRow):
            verdict = BadSample(row.reason, row.detail)
            return {**sample, REJECTED: verdict, "__ref__": (row.place.row, 0)}
        try:
            encoded = encode_sample(row, self.source.kind)
        except BadSample as bad:
            return {**sample, REJECTED: bad, "__ref__": (row.place.row, 0)}
        sample |= {split_member(name)[1]: data for name, data in encoded.members}
        return {**sample, "__ref__": (row.place.row, encoded.num_bytes)}


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """What goes wrong with a raw file while it is read is told as it is of a shard."""
    try:
        yield
    except (ConfigError, OSError) as error:
        raise ShardError(f"{url}: {error}") from error


def list_units(source: Source) -> list[RawUnit]:
    """The units of a source, in its order: what its dataset has in place of shards.

    The footer of every parquet file is read, and every JSON file once, to find where its rows begin.

    Raises:
        ConfigError: if there is no file, one cannot be read, or the columns of one will not do.
    """
    check_max_units(source)
    # Below 0, no two row groups are put together.
    plan = plan_source(source, slice_bytes=-1, slice_rows=UNIT_ROWS)
    for note in plan.notes:
        logger.warning("dataset %r: %s", source.name, note)
    files = {file.name: file for file in plan.files}
    # The current folder may be another by the time they are read.
    from_root = absolute_source(source)
    return [
        RawUnit(
            from_root, piece, _url(source, piece), storage.join(from_root.root, piece.file), files[piece.file]
        )
        for part in plan.slices
        for piece in part.pieces
    ]


def _url(source: Source, piece: RowGroups | Lines) -> str:
    what = "row_group" if isinstance(piece, RowGroups) else "row"
    return f"{storage.join(source.root, piece.file)}#{what}={piece.first}"
