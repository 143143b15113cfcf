"""Text to image: parquet with one encoded image and its captions a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.images import read_header
from bagel_wds.sources.columns import is_image, is_text
from bagel_wds.sources.rows import Medium, ParsedRow, SourceImage
from bagel_wds.texts import read_captions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagel_wds.sources.columns import ColumnRule

MEDIA_COLUMNS = ("image",)
COLUMNS: dict[str, ColumnRule] = {
    "image": (is_image, "binary: the encoded image"),
    "captions": (is_text, "string: a JSON object of captions"),
}


def parse_row(row: Mapping[str, Any]) -> ParsedRow:
    """The image of a row, and its other columns as fields; `captions` stays the JSON text that it is.

    Raises:
        BadSample: for an image without a sound header, or captions that are no object of strings.
    """
    fields = {name: value for name, value in row.items() if name not in MEDIA_COLUMNS}
    data = row["image"] or b""
    image = SourceImage(data, read_header(data))
    read_captions(fields)
    return fields, (Medium((image,)),)
