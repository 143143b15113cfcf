"""Text to image: parquet with one encoded image and its captions a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.sources.columns import is_image, is_text
from bagel_wds.sources.parquet import ParquetLayout
from bagel_wds.sources.rows import Medium, ParsedRow, read_source_image
from bagel_wds.texts import read_captions

if TYPE_CHECKING:
    from collections.abc import Mapping


def parse_row(row: Mapping[str, Any]) -> ParsedRow:
    """The image of a row, and its other columns as fields; `captions` stays the JSON text that it is.

    Raises:
        BadSample: for an image without a sound header, or captions that are no object of strings.
    """
    fields = LAYOUT.fields(row)
    read_captions(fields)
    return fields, (Medium((read_source_image(row["image"], "image"),)),)


LAYOUT = ParquetLayout(
    columns={
        "image": (is_image, "binary: the encoded image"),
        "captions": (is_text, "string: a JSON object of captions"),
    },
    media_columns=("image",),
    parse=parse_row,
)
