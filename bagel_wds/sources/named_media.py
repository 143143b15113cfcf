"""What rows that name their media have in common: conversations and interleaved rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.conversations import replace_values
from bagel_wds.errors import BadSample, Reason
from bagel_wds.sources.columns import is_image, is_list_of, is_text_or_null
from bagel_wds.sources.layout import ColumnRule, our_names
from bagel_wds.sources.media import read_medium

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from bagel_wds.conversations import NamedMedium
    from bagel_wds.sources.media import MediaRoot
    from bagel_wds.sources.rows import Medium, Source


def with_our_names(row: Mapping[str, Any], given: Mapping[str, str]) -> Mapping[str, Any]:
    """A row of JSON with the names that this package has for its fields.

    Raises:
        BadSample: if two fields then have one name.
    """
    if not given:
        return row
    fields = dict(zip(our_names(list(row), given), row.values(), strict=True))
    if len(fields) < len(row):
        raise BadSample(
            Reason.ROW_INVALID,
            f"two fields have one name where columns are given for {', '.join(given)}; the row has {', '.join(row)}",
        )
    return fields


def take_media(
    fields: Mapping[str, Any], named: Sequence[NamedMedium], source: Source, root: MediaRoot
) -> tuple[Mapping[str, Any], tuple[Medium, ...]]:
    """The media that a row names, and its fields without their bytes.

    Raises:
        BadSample: as `read_medium`.
    """
    read = [read_medium(medium, source, root) for medium in named]
    left = {medium.place: rest for medium, (_, rest) in zip(named, read, strict=True) if rest != medium.value}
    return replace_values(fields, left) if left else fields, tuple(medium for medium, _ in read)


def _accepts_media(kind: pa.DataType) -> bool:
    return is_list_of(kind, _accepts_medium) or _accepts_medium(kind)


def _accepts_medium(kind: pa.DataType) -> bool:
    return is_text_or_null(kind) or is_image(kind)


MEDIA_RULE = ColumnRule(
    _accepts_media,
    "a string (a path), binary, or struct<bytes: binary, path: string>, or a list of these",
    is_media=True,
)
"""A parquet column that names media."""
