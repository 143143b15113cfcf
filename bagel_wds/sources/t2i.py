"""Text to image: parquet with one encoded image and its captions a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.errors import BadSample, Reason
from bagel_wds.sources.columns import is_image, is_images, is_list_of, is_text, is_texts_by_name
from bagel_wds.sources.embedded import read_embedded_image
from bagel_wds.sources.layout import ColumnRule, ParquetLayout
from bagel_wds.sources.rows import Medium, ParsedRow
from bagel_wds.texts import read_captions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from bagel_wds.sources.rows import Source


def parse_row(row: Mapping[str, Any], source: Source) -> ParsedRow:
    """The image of a row, and its other columns as fields; captions stay in the form that they have.

    Raises:
        BadSample: for no image or more than one, an image that cannot be used, or captions of another form.
    """
    fields = LAYOUT.fields(row)
    if source.check_texts:
        read_captions(fields)
    return ParsedRow(fields, (Medium((read_embedded_image(_only(row["image"]), "image", source),)),))


def _only(image: Any) -> Any:
    """The image itself, of a column of lists too."""
    if not isinstance(image, list):
        return image
    if not image:
        raise BadSample(Reason.IMAGE_MISSING, "the list of images is empty")
    if len(image) > 1:
        raise BadSample(
            Reason.ROW_INVALID, f"{len(image)} images in a text-to-image row, which has one; split the row"
        )
    return image[0]


def _accepts_image(kind: pa.DataType) -> bool:
    return is_image(kind) or is_images(kind)


def _accepts_captions(kind: pa.DataType) -> bool:
    return is_text(kind) or is_list_of(kind, is_text) or is_texts_by_name(kind)


LAYOUT = ParquetLayout(
    columns={
        "image": ColumnRule(
            _accepts_image, "binary, or struct<bytes: binary, path: string>: the encoded image", is_media=True
        ),
        "captions": ColumnRule(
            _accepts_captions,
            "a string, or a list, struct or map of strings",
            map_is_object=True,
        ),
    },
    required=(("image",), ("captions",)),
    parse=parse_row,
)
