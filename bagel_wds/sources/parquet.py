"""Rows of parquet files, in batches of bounded bytes whatever the size of a row group."""

from __future__ import annotations

import os
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pyarrow.types import is_dictionary

from bagel_wds import storage
from bagel_wds.ahead import look_ahead
from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.sources.columns import is_map, json_type, json_value, may_hold_bytes, object_value
from bagel_wds.sources.layout import check_schema, drift_notes, our_names, shape_of
from bagel_wds.sources.rows import (
    Place,
    RejectedRow,
    RowGroups,
    Slice,
    Source,
    SourceFile,
    SourcePlan,
    SourceSample,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from bagel_wds.sources.layout import ColumnRule, ParquetLayout, Shape

T = TypeVar("T")

MAX_BATCH_ROWS = 64
"""Rows that are in memory at a time, at most: more make nothing faster."""

READ_BYTES = 1 << 20
"""Column chunks are read by so many bytes, not whole."""

REMOTE_READ_BYTES = 4 << 20
"""The same where each read is a request, whose answer is waited for."""

_MAGIC = b"PAR1"
_TAIL_BYTES = 8
"""A file ends in the length of its footer, 4 bytes, and the magic."""
_GUESSED_BYTES = 64 << 10
"""Of the end, at first: most footers are not longer."""


# Planning


class _Footer(NamedTuple):
    """What a file says of itself."""

    file: SourceFile
    shape: Shape
    groups: list[tuple[int, int]]
    """(rows, uncompressed bytes) of each row group."""


def plan_row_groups(
    source: Source, layout: ParquetLayout, slice_bytes: int, files: Sequence[str]
) -> SourcePlan:
    """Cut files into slices of consecutive row groups, over their borders, and check every file's schema.

    Args:
        source: that they belong to.
        layout: of the files.
        slice_bytes: a slice has row groups of so many bytes in all, uncompressed; one row group may have more.
        files: relative to the source's root, in order.

    Raises:
        ConfigError: for a file that is no parquet, or columns that will not do.
    """
    footers = side_by_side(source, lambda file: _read_footer(source, layout, file), files)
    pieces = (
        (RowGroups(footer.file.name, group, group + 1, num_rows), num_bytes)
        for footer in footers
        for group, (num_rows, num_bytes) in enumerate(footer.groups)
    )
    return SourcePlan(
        files=tuple(footer.file for footer in footers),
        slices=_cut(pieces, slice_bytes),
        notes=drift_notes({footer.file.name: footer.shape for footer in footers}),
    )


def plan_chosen_rows(
    source: Source, layout: ParquetLayout, places: Iterable[Place], slice_bytes: int
) -> tuple[Slice, ...]:
    """Cut some rows of a source into slices, in the order of the source.

    Raises:
        ConfigError: as `plan_row_groups`, or if a row is not there.
    """
    wanted = sorted({(os.fsencode(place.file), place.row_group or 0, place.row) for place in places})
    return _cut(_chosen_pieces(source, layout, wanted), slice_bytes)


def _chosen_pieces(
    source: Source, layout: ParquetLayout, wanted: Iterable[tuple[bytes, int, int]]
) -> Iterator[tuple[RowGroups, int]]:
    for name, of_file in groupby(wanted, key=lambda place: place[0]):
        file = os.fsdecode(name)
        footer = _read_footer(source, layout, file)
        for group, of_group in groupby(of_file, key=lambda place: place[1]):
            rows = tuple(row for _, _, row in of_group)
            held, num_bytes = footer.groups[group] if group < len(footer.groups) else (0, 0)
            if rows[-1] >= held:
                raise ConfigError(
                    f"{storage.join(source.root, file)}: there is no row {rows[-1]} in row group {group}, which has "
                    f"{held} rows; did the file change?"
                )
            yield RowGroups(file, group, group + 1, len(rows), rows), num_bytes * len(rows) // held


def describe_parquet_file(source: Source, file: str) -> SourceFile:
    """A file by its size and the digest of its footer, which tells where everything lies in it.

    Raises:
        ConfigError: if it is no parquet file.
    """
    path = storage.join(source.root, file)
    with _naming(path):
        return _read_end(source, path, file)[0]


def side_by_side(source: Source, work: Callable[[str], T], files: Sequence[str]) -> list[T]:
    """What some short work gives for each file of a source; several at a time where each has to be waited for."""
    if storage.is_local(source.root):
        return [work(file) for file in files]
    return list(look_ahead(work, files, storage.AT_A_TIME))


def _read_end(source: Source, path: str, file: str) -> tuple[SourceFile, bytes]:
    """What a file is told by, and its end: the footer and what comes behind it, which can be opened as a file of no rows."""
    version = storage.version(path, source.options)
    size = version[0]
    end = _read_last(source, path, size, min(size, _GUESSED_BYTES))
    if not end.endswith(_MAGIC):
        raise ConfigError(
            f"{path}: cannot be read as parquet: it ends in {end[-4:]!r}, not in {_MAGIC!r}; was it cut?"
        )
    length = int.from_bytes(end[-_TAIL_BYTES:-4], "little") + _TAIL_BYTES
    if length > len(end):
        end = _read_last(source, path, size, min(size, length))
    end = end[-length:]
    return SourceFile(file, size, f"xxh3_128:{xxhash.xxh3_128_hexdigest(end)}", version), end


def _read_last(source: Source, path: str, size: int, length: int) -> bytes:
    return storage.read_range(path, size - length, length, source.options)


def _read_footer(source: Source, layout: ParquetLayout, file: str) -> _Footer:
    path = storage.join(source.root, file)
    with _naming(path):
        described, end = _read_end(source, path, file)
        with pq.ParquetFile(pa.BufferReader(end)) as parquet:
            check_schema(parquet.schema_arrow, path, layout, source.columns)
            groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
            return _Footer(
                file=described,
                shape=shape_of(parquet.schema_arrow),
                groups=[(group.num_rows, group.total_byte_size) for group in groups],
            )


def _cut(pieces: Iterable[tuple[RowGroups, int]], slice_bytes: int) -> tuple[Slice, ...]:
    """Slices of row groups, given with their bytes."""
    slices: list[list[RowGroups]] = []
    held = 0
    for piece, num_bytes in pieces:
        if not slices or held + num_bytes > slice_bytes:
            slices.append([])
            held = 0
        held += num_bytes
        last = slices[-1][-1] if slices[-1] else None
        if last and last.file == piece.file and piece.chosen is None:
            slices[-1][-1] = RowGroups(last.file, last.first, piece.stop, last.num_rows + piece.num_rows)
        else:
            slices[-1].append(piece)
    return tuple(Slice(number, tuple(part)) for number, part in enumerate(slices))


# Reading


class _Column(NamedTuple):
    """How the values of a column become those of a row.

    Attributes:
        name: ours.
        cast: the type whose Python values are JSON values, or None where they are so already.
        convert: what else is done to a value, if anything.
    """

    name: str
    cast: pa.DataType | None
    convert: Callable[[Any], Any] | None


class _Batch(NamedTuple):
    """A few rows of a row group: number of the first one, and which of them are wanted, as numbers in the group."""

    group: int
    first: int
    rows: Sequence[int]
    columns: list[tuple[_Column, pa.Array]]


def read_row_groups(
    source: Source,
    pieces: Sequence[RowGroups],
    layout: ParquetLayout,
    skip_rows: int = 0,
    at_once: int = 1,
) -> Iterator[SourceSample | RejectedRow]:
    """The rows of some row groups, in order.

    Args:
        source: that they belong to.
        pieces: the row groups.
        layout: of the files.
        skip_rows: pass over so many rows.
        at_once: parse so many side by side.

    Raises:
        ConfigError: if a file cannot be read.
    """
    # The names of a row are ours by now.
    plain_source = replace(source, columns={}) if source.columns else source
    yield from look_ahead(
        partial(_read_row, plain_source, layout), _walk_rows(source, pieces, layout, skip_rows), at_once
    )


def _walk_rows(
    source: Source, pieces: Sequence[RowGroups], layout: ParquetLayout, skip_rows: int
) -> Iterator[tuple[str, _Batch, int]]:
    for piece in pieces:
        if skip_rows < piece.num_rows:
            for batch in _read_batches(source, piece, layout, skip_rows):
                for row in batch.rows:
                    yield piece.file, batch, row
        skip_rows = max(0, skip_rows - piece.num_rows)


def _read_row(
    source: Source, layout: ParquetLayout, found: tuple[str, _Batch, int]
) -> SourceSample | RejectedRow:
    file, batch, row = found
    place = Place(file, row, batch.group)
    try:
        parsed = layout.parse(_values(batch.columns, row - batch.first), source)
    except BadSample as bad:
        return RejectedRow(place, bad.reason, bad.detail)
    return SourceSample(place.key, parsed.fields, parsed.media, place, parsed.repaired)


def _values(columns: Sequence[tuple[_Column, pa.Array]], number: int) -> dict[str, Any]:
    row = {}
    for column, values in columns:
        try:
            value = values[number].as_py()
        except UnicodeDecodeError as error:
            raise BadSample(Reason.ROW_INVALID, f"column {column.name!r} is no UTF-8: {error}") from error
        row[column.name] = column.convert(value) if column.convert else value
    return row


def _read_batches(
    source: Source, piece: RowGroups, layout: ParquetLayout, skip_rows: int
) -> Iterator[_Batch]:
    """The rows of a piece, but for the first ones, as many at a time as their bytes allow."""
    path = storage.join(source.root, piece.file)
    pace = _Pace(source.batch_bytes)
    with (
        _naming(path),
        _open(path, source) as file,
        pq.ParquetFile(
            file,
            metadata=_known_metadata(path),
            buffer_size=READ_BYTES if storage.is_local(path) else REMOTE_READ_BYTES,
        ) as parquet,
    ):
        # What was planned from may have been replaced.
        check_schema(parquet.schema_arrow, path, layout, source.columns)
        if parquet.metadata.num_row_groups < piece.stop:
            raise ConfigError(
                f"{path}: there is no row group {piece.stop - 1}, it has {parquet.metadata.num_row_groups}; did the file change?"
            )
        columns = _columns(parquet.schema_arrow, source, layout)
        for group in range(piece.first, piece.stop):
            held = parquet.metadata.row_group(group).num_rows
            wanted = (range(held) if piece.chosen is None else piece.chosen)[skip_rows:]
            skip_rows = max(0, skip_rows - held)
            if wanted:
                for first, batch in _walk_group(parquet, group, wanted[-1], pace):
                    rows = wanted[bisect_left(wanted, first) : bisect_left(wanted, first + batch.num_rows)]
                    if rows:
                        yield _Batch(
                            group, first, rows, list(zip(columns, _cast(batch, columns), strict=True))
                        )


def _known_metadata(path: str) -> pq.FileMetaData | None:
    """What the footer of a local file says, kept for the next of its row groups; None of a file that is not local."""
    if not storage.is_local(path):
        return None
    stat = storage.local_path(path).stat()
    return _read_metadata(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _read_metadata(path: str, changed_ns: int, num_bytes: int) -> pq.FileMetaData:  # noqa: ARG001 - of a changed file anew
    with pa.OSFile(os.fsencode(storage.local_path(path))) as file:
        return pq.read_metadata(file)


def _walk_group(
    parquet: pq.ParquetFile, group: int, last: int, pace: _Pace
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of a row group, each with the number of its first row, up to the one with row `last`."""
    first = 0
    pace.enter(parquet.metadata.row_group(group))
    for batch in parquet.iter_batches(pace.rows, row_groups=[group], use_threads=False):
        pace.learn(batch)
        # The batches to come heed it; should a version of Arrow not, they have as many rows as this one.
        parquet.reader.set_batch_size(pace.rows)
        following = first + batch.num_rows
        yield first, batch
        first = following
        if first > last:
            return


class _Pace:
    """How many rows the next batch may have: one at first, twice as many each time, as long as their bytes allow.

    A row group tells how large its rows are on average, but not what they become where a value that comes often is kept
    once; the last batch tells.
    """

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._average = 1.0
        self.rows = 1

    def enter(self, group: pq.RowGroupMetaData) -> None:
        """Take its word for the size of a row group's rows."""
        self._average = max(1.0, group.total_byte_size / max(1, group.num_rows))
        self.rows = self._fitting(self.rows, self._average)

    def learn(self, batch: pa.RecordBatch) -> None:
        """Take the next rows to be like those of a batch, and no smaller than the average."""
        self.rows = self._fitting(2 * self.rows, max(self._average, batch.nbytes / batch.num_rows))

    def _fitting(self, rows: int, row_bytes: float) -> int:
        return max(1, min(rows, MAX_BATCH_ROWS, int(self._batch_bytes / row_bytes)))


def _columns(schema: pa.Schema, source: Source, layout: ParquetLayout) -> list[_Column]:
    return [
        _column(name, field.type, layout.columns.get(name))
        for name, field in zip(our_names(schema.names, source.columns), schema, strict=True)
    ]


def _column(name: str, kind: pa.DataType, rule: ColumnRule | None) -> _Column:
    if rule and rule.is_media:
        return _Column(name, None, None)
    target = json_type(kind)
    if rule and rule.map_is_object and is_map(kind):
        return _Column(name, target, object_value)
    return _Column(name, None if target == kind else target, json_value if may_hold_bytes(target) else None)


def _cast(batch: pa.RecordBatch, columns: Sequence[_Column]) -> list[pa.Array]:
    return [
        values if column.cast is None else _cast_column(values, column.name, column.cast)
        for column, values in zip(columns, batch.columns, strict=True)
    ]


def _cast_column(values: pa.Array, name: str, target: pa.DataType) -> pa.Array:
    try:
        return values.cast(target)
    except pa.ArrowInvalid as error:
        if is_dictionary(values.type):
            # Each row is then judged by itself, as those of a plain column are.
            return values
        raise pa.ArrowInvalid(f"column {name!r}: {error}") from error


def _open(path: str, source: Source) -> pa.NativeFile:
    """A file as Arrow reads it; one on the disk by itself: through a Python file it takes more than twice as long."""
    if storage.is_local(path):
        return pa.OSFile(os.fsencode(storage.local_path(path)))
    return pa.PythonFile(storage.open_read(path, source.options), mode="r")


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Say which file it was when Arrow cannot read one."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        # A store's own error names the object.
        told = str(error)
        raise ConfigError(
            told
            if path in told and not storage.is_local(path)
            else f"{path}: cannot be read as parquet: {told}"
        ) from error
