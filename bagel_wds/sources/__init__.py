"""Datasets in upstream's raw layouts, read row by row, with nothing decoded.

`plan_slices` cuts a source into slices of work, `read_slice` gives the rows of one: each a `SourceSample`, or a
`RejectedRow` that says why it cannot be used. Fields are the row's own, unchanged; media are the original bytes.

| kind | layout | media |
| --- | --- | --- |
| t2i | parquet: `image`, `captions` | one image |
| edit | parquet: `image_list`, `instruction_list` | two images or more |
| vlm | JSON lines: `conversations`, `image` or `video` | any number of images, or clips as folders of frames |
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from bagel_wds import storage
from bagel_wds.sources import edit, t2i, vlm
from bagel_wds.sources.jsonl import plan_lines, read_lines
from bagel_wds.sources.parquet import ParquetLayout, plan_row_groups, read_row_groups
from bagel_wds.sources.rows import (
    Lines,
    Medium,
    Place,
    RejectedRow,
    RowGroups,
    Slice,
    Source,
    SourceImage,
    SourceSample,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PARQUET_LAYOUTS: dict[str, ParquetLayout] = {"t2i": t2i.LAYOUT, "edit": edit.LAYOUT}
"""The kinds that are parquet; vlm is JSON lines."""

__all__ = [
    "Lines",
    "Medium",
    "Place",
    "RejectedRow",
    "RowGroups",
    "Slice",
    "Source",
    "SourceImage",
    "SourceSample",
    "plan_slices",
    "read_slice",
]


def plan_slices(source: Source, *, slice_bytes: int, slice_rows: int) -> list[Slice]:
    """Cut a source into slices of work: a pure function of its files and these settings.

    Args:
        source: to be cut.
        slice_bytes: of a parquet slice, uncompressed; no row group is divided.
        slice_rows: lines of a JSONL slice.

    Raises:
        ConfigError: if there is no file, or one that cannot be read as what it should be.
    """
    if source.kind == "vlm":
        return plan_lines(source, slice_rows)
    return plan_row_groups(source, PARQUET_LAYOUTS[source.kind], slice_bytes)


def read_slice(source: Source, part: Slice) -> Iterator[SourceSample | RejectedRow]:
    """The rows of one slice, in the order of the source.

    Raises:
        ConfigError: if a file cannot be read any more.
    """
    if source.kind == "vlm":
        media_root = storage.local_path(source.media_folder).resolve()
        parse = partial(vlm.parse_row, media_root=media_root)
        return read_lines(source, cast("tuple[Lines, ...]", part.pieces), parse)
    pieces = cast("tuple[RowGroups, ...]", part.pieces)
    return read_row_groups(source, pieces, PARQUET_LAYOUTS[source.kind])
