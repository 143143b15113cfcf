"""Image editing: parquet with a chain of encoded images a row, and the instructions that lead from each to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.errors import BadSample, Reason
from bagel_wds.sources.columns import is_images, is_list_of, is_text
from bagel_wds.sources.embedded import read_embedded_image
from bagel_wds.sources.layout import ColumnRule, ParquetLayout
from bagel_wds.sources.rows import Medium, ParsedRow
from bagel_wds.texts import read_instructions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from bagel_wds.sources.rows import Source

MIN_IMAGES = 2


def parse_row(row: Mapping[str, Any], source: Source) -> ParsedRow:
    """The images of a row in order, and its other columns as fields.

    Raises:
        BadSample: for fewer than two images, one that cannot be used, or instructions that do not match the edits.
    """
    fields = LAYOUT.fields(row)
    images = row["image_list"]
    if not images:
        raise BadSample(Reason.IMAGE_MISSING, f"image_list is {'null' if images is None else 'empty'}")
    if source.check_texts:
        if len(images) < MIN_IMAGES:
            raise BadSample(
                Reason.TOO_FEW_IMAGES, f"an edit needs {MIN_IMAGES} images, the row has {len(images)}"
            )
        read_instructions(fields, len(images) - 1)
    return ParsedRow(
        fields,
        tuple(
            Medium((read_embedded_image(image, f"image {number}", source),))
            for number, image in enumerate(images)
        ),
    )


def _accepts_instructions(kind: pa.DataType) -> bool:
    return is_text(kind) or is_list_of(kind, lambda step: is_text(step) or is_list_of(step, is_text))


LAYOUT = ParquetLayout(
    columns={
        "image_list": ColumnRule(
            is_images,
            "list<binary>, or list<struct<bytes: binary, path: string>>: the encoded images",
            is_media=True,
        ),
        "instruction_list": ColumnRule(
            _accepts_instructions,
            "list<list<string>>: for each step its phrasings; or list<string>, or for a single step a string",
        ),
    },
    required=(("image_list",), ("instruction_list",)),
    parse=parse_row,
)
