"""Images inside a parquet row: their bytes, or Hugging Face's struct of bytes and path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.errors import BadSample, Reason
from bagel_wds.sources.media import find_media_root, read_image
from bagel_wds.sources.rows import read_source_image

if TYPE_CHECKING:
    from bagel_wds.sources.rows import Source, SourceImage


def read_embedded_image(value: Any, name: str, source: Source) -> SourceImage:
    """An image of a parquet column.

    Args:
        value: the encoded bytes, or an object with `bytes` and maybe `path`. Null bytes with a path are a file under
            the media root.
        name: of the image in its row, for the verdict.
        source: how its images are read.

    Raises:
        BadSample: as `read_source_image`, or `image_missing` for null bytes with a path and no media root.
    """
    if not isinstance(value, dict):
        return read_source_image(value, name, source.verify)
    path = value.get("path")
    if value["bytes"] is not None or not path:
        return read_source_image(value["bytes"], name, source.verify)
    if source.media_root is None:
        raise BadSample(
            Reason.IMAGE_MISSING,
            f"{name}: its bytes are null, and it names {path}; to read such files convert the dataset by itself, with their "
            "folder as --media-root",
        )
    return read_image(path, source, find_media_root(source))
