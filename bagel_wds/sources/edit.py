"""Image editing: parquet with a chain of encoded images a row, and the instructions that lead from each to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.errors import BadSample, Reason
from bagel_wds.sources.columns import is_image, is_list_of, is_text
from bagel_wds.sources.parquet import ParquetLayout
from bagel_wds.sources.rows import Medium, ParsedRow, read_source_image
from bagel_wds.texts import read_instructions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

MIN_IMAGES = 2


def parse_row(row: Mapping[str, Any]) -> ParsedRow:
    """The images of a row in order, and its other columns as fields.

    Raises:
        BadSample: for fewer than two images, one without a sound header, or a step without instruction.
    """
    fields = LAYOUT.fields(row)
    images = row["image_list"] or []
    if len(images) < MIN_IMAGES:
        raise BadSample(
            Reason.TOO_FEW_IMAGES, f"an edit needs {MIN_IMAGES} images, the row has {len(images)}"
        )
    read_instructions(fields, len(images) - 1)
    return fields, tuple(
        Medium((read_source_image(data, f"image {number}"),)) for number, data in enumerate(images)
    )


def _is_images(kind: pa.DataType) -> bool:
    return is_list_of(kind, is_image)


def _is_instructions(kind: pa.DataType) -> bool:
    return is_list_of(kind, lambda step: is_text(step) or is_list_of(step, is_text))


LAYOUT = ParquetLayout(
    columns={
        "image_list": (_is_images, "list<binary>: the encoded images"),
        "instruction_list": (_is_instructions, "list<list<string>>: for each step its phrasings"),
    },
    media_columns=("image_list",),
    parse=parse_row,
)
