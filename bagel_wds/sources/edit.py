"""Image editing: parquet with a chain of encoded images a row, and the instructions that lead from each to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.errors import BadSample, Reason
from bagel_wds.images import read_header
from bagel_wds.sources.columns import is_image, is_list_of, is_text
from bagel_wds.sources.rows import Medium, ParsedRow, SourceImage
from bagel_wds.texts import read_instructions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from bagel_wds.sources.columns import ColumnRule

MIN_IMAGES = 2
MEDIA_COLUMNS = ("image_list",)


def _is_images(kind: pa.DataType) -> bool:
    return is_list_of(kind, is_image)


def _is_instructions(kind: pa.DataType) -> bool:
    return is_list_of(kind, lambda step: is_text(step) or is_list_of(step, is_text))


COLUMNS: dict[str, ColumnRule] = {
    "image_list": (_is_images, "list<binary>: the encoded images"),
    "instruction_list": (_is_instructions, "list<list<string>>: for each step its phrasings"),
}


def parse_row(row: Mapping[str, Any]) -> ParsedRow:
    """The images of a row in order, and its other columns as fields.

    Raises:
        BadSample: for fewer than two images, one without a sound header, or a step without instruction.
    """
    fields = {name: value for name, value in row.items() if name not in MEDIA_COLUMNS}
    images = row["image_list"] or []
    if len(images) < MIN_IMAGES:
        raise BadSample(
            Reason.TOO_FEW_IMAGES, f"an edit needs {MIN_IMAGES} images, the row has {len(images)}"
        )
    media = tuple(Medium((_image(data, number),)) for number, data in enumerate(images))
    read_instructions(fields, len(images) - 1)
    return fields, media


def _image(data: bytes | None, number: int) -> SourceImage:
    data = data or b""
    try:
        return SourceImage(data, read_header(data))
    except BadSample as bad:
        raise BadSample(bad.reason, f"image {number}: {bad.detail}") from bad
