"""Datasets in upstream's raw layouts, read row by row, with nothing decoded but to verify it.

`plan_source` cuts a source into slices of work, `read_slice` gives the rows of one: each a `SourceSample`, or a
`RejectedRow` that says why it cannot be used. Fields are the row's own, unchanged; media are the original bytes.
`places` says what a source's path may be.

| kind | layout | media |
| --- | --- | --- |
| t2i | parquet: `image`, `captions` | one image |
| edit | parquet: `image_list`, `instruction_list` | two images or more |
| vlm | JSON rows or parquet: `conversations`, `image` or `video` | any number of images, or clips as files or folders of frames |
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.sources import edit, interleaved, t2i, vlm
from bagel_wds.sources.jsonl import describe_lines_file, plan_chosen_lines, plan_lines, read_lines
from bagel_wds.sources.layout import check_given_columns
from bagel_wds.sources.media import find_media_root, rows_at_once
from bagel_wds.sources.parquet import (
    describe_parquet_file,
    plan_chosen_rows,
    plan_row_groups,
    read_row_groups,
    side_by_side,
)
from bagel_wds.sources.places import PARQUET
from bagel_wds.sources.rows import (
    Lines,
    Medium,
    Place,
    Placeholders,
    RejectedRow,
    RowGroups,
    Slice,
    Source,
    SourceFile,
    SourceImage,
    SourcePlan,
    SourceSample,
    Verify,
    absolute,
    absolute_source,
    list_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.schema import SampleKind
    from bagel_wds.sources.layout import ParquetLayout

PARQUET_LAYOUTS: dict[SampleKind, ParquetLayout] = {
    "t2i": t2i.LAYOUT,
    "edit": edit.LAYOUT,
    "vlm": vlm.LAYOUT,
    "interleaved": interleaved.LAYOUT,
}
"""What each kind looks like in parquet."""

LINE_PARSERS = {"vlm": vlm.parse_row, "interleaved": interleaved.parse_row}
"""What makes fields and media of a JSON object, of the kinds that are read from lines."""

__all__ = [
    "Lines",
    "Medium",
    "Place",
    "Placeholders",
    "RejectedRow",
    "RowGroups",
    "Slice",
    "Source",
    "SourceFile",
    "SourceImage",
    "SourcePlan",
    "SourceSample",
    "Verify",
    "absolute",
    "absolute_source",
    "describe_file",
    "describe_files",
    "list_files",
    "plan_rows",
    "plan_source",
    "read_slice",
]


def plan_source(
    source: Source, *, slice_bytes: int, slice_rows: int, files: Sequence[str] | None = None
) -> SourcePlan:
    """Cut a source into slices of work: a pure function of its files and these settings.

    Args:
        source: to be cut.
        slice_bytes: of a parquet slice, uncompressed; no row group is divided.
        slice_rows: rows of a slice of JSON rows.
        files: of `list_files`, to cut these alone; None cuts all that `max_units` allows.

    Raises:
        ConfigError: if there is no file, or one that cannot be read as what it should be.
    """
    layout = PARQUET_LAYOUTS[source.kind]
    check_given_columns(source, layout)
    taken = _choose_files(source, files)
    if not _is_parquet(taken):
        return plan_lines(source, slice_rows, taken)
    if files is None:
        taken = taken[: source.max_units]
    return plan_row_groups(source, layout, slice_bytes, taken)


def plan_rows(
    source: Source, places: Sequence[Place], *, slice_bytes: int, slice_rows: int
) -> tuple[Slice, ...]:
    """Cut some rows of a source alone into slices of work, in the order of the source.

    Args:
        source: that they belong to.
        places: of the rows.
        slice_bytes: as `plan_source` takes it.
        slice_rows: likewise.

    Raises:
        ConfigError: as `plan_source`, or if a row is not there.
    """
    files = _choose_files(source, [place.file for place in places])
    if not _is_parquet(files):
        return tuple(plan_chosen_lines(source, places, slice_rows))
    return plan_chosen_rows(source, PARQUET_LAYOUTS[source.kind], places, slice_bytes)


def describe_file(source: Source, file: str) -> SourceFile:
    """What tells a file from what it was: its size, and the digest of a parquet file's footer or of a whole other.

    Raises:
        ConfigError: if it cannot be read.
    """
    return (describe_parquet_file if _is_parquet([file]) else describe_lines_file)(source, file)


def describe_files(source: Source, files: Sequence[str]) -> list[SourceFile]:
    """The same of several files, in order; from a bucket several parquet files at a time.

    Raises:
        ConfigError: as `describe_file`.
    """
    if _is_parquet(files):
        return side_by_side(source, partial(describe_parquet_file, source), files)
    return [describe_file(source, file) for file in files]


def read_slice(source: Source, part: Slice, *, skip_rows: int = 0) -> Iterator[SourceSample | RejectedRow]:
    """The rows of one slice, in the order of the source.

    Args:
        source: that was cut.
        part: the slice.
        skip_rows: pass over so many rows at its start: they are not parsed, and none of their images is looked at.

    Raises:
        ConfigError: if a file cannot be read any more.
    """
    row_groups = [piece for piece in part.pieces if isinstance(piece, RowGroups)]
    if row_groups:
        return read_row_groups(
            source, row_groups, PARQUET_LAYOUTS[source.kind], skip_rows, rows_at_once(source)
        )
    lines = [piece for piece in part.pieces if isinstance(piece, Lines)]
    parse = partial(LINE_PARSERS[source.kind], source=source, media_root=find_media_root(source))
    return read_lines(source, lines, parse, skip_rows, rows_at_once(source))


def _choose_files(source: Source, files: Sequence[str] | None) -> list[str]:
    """Those of the source's files that are named, in its order."""
    there = list_files(source)
    if files is None:
        return there
    wanted = set(files)
    for file in sorted(wanted.difference(there)):
        raise ConfigError(
            f"dataset {source.name!r}: {storage.join(source.root, file)} is none of its {len(there)} files"
        )
    return [file for file in there if file in wanted]


def _is_parquet(files: Sequence[str]) -> bool:
    return all(file.endswith(PARQUET) for file in files)
