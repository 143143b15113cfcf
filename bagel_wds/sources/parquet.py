"""Rows of parquet files, in batches that stay small whatever the size of a row group."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from bagel_wds import storage
from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.sources.columns import check_schema, json_type, json_value
from bagel_wds.sources.rows import (
    ParsedRow,
    Place,
    RejectedRow,
    RowGroups,
    Slice,
    Source,
    SourceSample,
    list_source_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bagel_wds.sources.columns import ColumnRule

BATCH_ROWS = 16
"""Rows that are in memory at a time. A whole row group may be gigabytes, and as nested lists cannot be read at once."""

READ_BYTES = 1 << 20
"""Column chunks are read by so many bytes, not whole."""


@dataclass(frozen=True)
class ParquetLayout:
    """What the rows of a kind look like in parquet.

    Attributes:
        columns: those that each file must have, and of which type.
        media_columns: those that hold encoded media; every other one is a field.
        parse: fields and media of a row, or BadSample.
    """

    columns: Mapping[str, ColumnRule]
    media_columns: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], ParsedRow]

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a row: its columns that hold no media."""
        return {name: value for name, value in row.items() if name not in self.media_columns}


def plan_row_groups(source: Source, layout: ParquetLayout, slice_bytes: int) -> list[Slice]:
    """Cut a source into slices of consecutive row groups, over the borders of files, and check every file's schema.

    Args:
        source: whose files are cut up; `max_units` counts files.
        layout: of the files.
        slice_bytes: a slice has row groups of so many bytes in all, uncompressed; one row group may have more.

    Raises:
        ConfigError: for a source without files, a file that is no parquet, or columns that will not do.
    """
    slices: list[Slice] = []
    pieces: list[RowGroups] = []
    held = 0
    for file in list_source_files(source, ".parquet")[: source.max_units]:
        for group, (num_rows, num_bytes) in enumerate(_read_sizes(storage.join(source.root, file), layout)):
            if pieces and held + num_bytes > slice_bytes:
                slices.append(Slice(len(slices), tuple(pieces)))
                pieces, held = [], 0
            if pieces and pieces[-1].file == file:
                pieces[-1] = RowGroups(file, pieces[-1].first, group + 1, pieces[-1].num_rows + num_rows)
            else:
                pieces.append(RowGroups(file, group, group + 1, num_rows))
            held += num_bytes
    if pieces:
        slices.append(Slice(len(slices), tuple(pieces)))
    return slices


def _read_sizes(path: str, layout: ParquetLayout) -> list[tuple[int, int]]:
    """Rows and uncompressed bytes of each row group of a file whose schema will do."""
    with _naming(path), _open(path) as file, pq.ParquetFile(file) as parquet:
        check_schema(parquet.schema_arrow, path, layout.columns)
        groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def read_row_groups(
    source: Source, pieces: Sequence[RowGroups], layout: ParquetLayout
) -> Iterator[SourceSample | RejectedRow]:
    """The rows of some row groups, in order.

    Args:
        source: that they belong to.
        pieces: the row groups.
        layout: of the files.

    Raises:
        ConfigError: if a file cannot be read.
    """
    for piece in pieces:
        for group, first, columns in _read_columns(storage.join(source.root, piece.file), piece, layout):
            for number in range(len(next(iter(columns.values())))):
                place = Place(piece.file, first + number, group)
                try:
                    fields, media = layout.parse(_row(columns, number, layout))
                except BadSample as bad:
                    yield RejectedRow(place, bad.reason, bad.detail)
                else:
                    yield SourceSample(place.key, fields, media, place)


def _read_columns(
    path: str, piece: RowGroups, layout: ParquetLayout
) -> Iterator[tuple[int, int, dict[str, pa.Array]]]:
    """The columns of a few rows at a time: (row group, number of the first row in it, columns by name)."""
    with (
        _naming(path),
        _open(path) as file,
        pq.ParquetFile(file, buffer_size=READ_BYTES) as parquet,
    ):
        for group in range(piece.first, piece.stop):
            first = 0
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], use_threads=False):
                columns = {
                    name: column if name in layout.media_columns else column.cast(json_type(column.type))
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                yield group, first, columns
                first += batch.num_rows


def _row(columns: Mapping[str, pa.Array], number: int, layout: ParquetLayout) -> dict[str, Any]:
    row = {}
    for name, column in columns.items():
        try:
            value = column[number].as_py()
        except UnicodeDecodeError as error:
            raise BadSample(Reason.ROW_INVALID, f"column {name!r} is no UTF-8: {error}") from error
        row[name] = value if name in layout.media_columns else json_value(value)
    return row


def _open(path: str) -> pa.NativeFile:
    """A file as Arrow reads it itself: through a Python file it takes more than twice as long."""
    return pa.OSFile(os.fspath(storage.local_path(path)))


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Say which file it was when Arrow cannot read one."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as parquet: {error}") from error
