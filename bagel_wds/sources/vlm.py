"""Conversations about images: JSON lines with `conversations`, and `image` or `video` paths under a media root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.errors import BadSample, Reason
from bagel_wds.sources.media import read_clip, read_image
from bagel_wds.sources.rows import Medium, ParsedRow
from bagel_wds.texts import read_turns

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NULL_LIKE = ("", "None")
"""Words that name no medium, as null does."""


def parse_row(row: Mapping[str, Any], media_root: Path) -> ParsedRow:
    """The media that a row names; the fields are the row as it is.

    `image` is a path or a list of paths; absent, null, `""` or `"None"` it names none. `video` likewise, and counts
    where there is no image.

    Args:
        row: the JSON object.
        media_root: what its paths are relative to, links resolved.

    Raises:
        BadSample: for conversations of another form, or a medium that cannot be used.
    """
    read_turns(row)
    images = _paths(row, "image", Reason.IMAGE_EMPTY)
    clips = _paths(row, "video", Reason.VIDEO_MISSING)
    if images and clips:
        raise BadSample(Reason.ROW_INVALID, "names both an image and a video; split the row")
    media = [Medium((read_image(media_root, path),)) for path in images]
    return row, (*media, *(read_clip(media_root, path) for path in clips))


def _paths(row: Mapping[str, Any], name: str, if_null: Reason) -> list[str]:
    value = row.get(name)
    if value is None or (isinstance(value, str) and value in NULL_LIKE):
        return []
    paths = value if isinstance(value, list) else [value]
    for number, path in enumerate(paths):
        if path is None or (isinstance(path, str) and path in NULL_LIKE):
            raise BadSample(if_null, f"entry {number} of `{name}` is {path!r}")
        if not isinstance(path, str):
            raise BadSample(
                Reason.ROW_INVALID,
                f"entry {number} of `{name}` is {type(path).__name__}, not a path"
                if isinstance(value, list)
                else f"`{name}` is {type(path).__name__}, neither a path nor a list of them",
            )
    return paths
