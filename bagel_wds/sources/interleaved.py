"""Interleaved rows: a list of texts, images and videos, and the media that these stand for, by path or inside the row.

| our name | holds |
| --- | --- |
| `items` | the list, or its JSON text, as `bagel_wds.items.read_items` takes it |
| `images`, `image` or `image_list` | the images, or the only one |
| `videos` or `video` | the videos, or the only one |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyarrow import types

from bagel_wds.conversations import Tag
from bagel_wds.items import MEDIA_FIELDS, MediumItem, check_frames, check_media, read_items, row_media
from bagel_wds.sources.columns import is_list_of, is_text
from bagel_wds.sources.layout import ColumnRule, ParquetLayout
from bagel_wds.sources.media import find_media_root
from bagel_wds.sources.named_media import MEDIA_RULE, take_media, with_our_names
from bagel_wds.sources.rows import ParsedRow

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from bagel_wds.sources.media import MediaRoot
    from bagel_wds.sources.rows import Medium, Source


def parse_row(row: Mapping[str, Any], source: Source, media_root: MediaRoot) -> ParsedRow:
    """The images of a row, then its videos; the fields are the row, without the bytes that became media.

    Args:
        row: the JSON object.
        source: that it belongs to.
        media_root: what its paths are relative to.

    Raises:
        BadSample: for items that cannot be trained on or do not match the media, and a medium that cannot be used.
    """
    fields = with_our_names(row, source.columns)
    items = read_items(fields)
    named = row_media(fields)
    num_videos = sum(medium.tag is Tag.VIDEO for medium in named)
    check_media(items, len(named) - num_videos, num_videos)
    fields, media = take_media(fields, named, source, media_root)
    videos = [medium for medium in media if medium.is_clip]
    for item in items:
        if isinstance(item, MediumItem) and item.frames:
            check_frames(item, _num_frames(videos[item.number]))
    return ParsedRow(fields, media)


def _num_frames(video: Medium) -> int:
    return len(video.images) if video.clip is None else video.clip.header.frames


def _parse_parquet_row(row: Mapping[str, Any], source: Source) -> ParsedRow:
    return parse_row(row, source, find_media_root(source))


def _accepts_items(kind: pa.DataType) -> bool:
    return is_text(kind) or is_list_of(kind, types.is_struct)


LAYOUT = ParquetLayout(
    columns={
        "items": ColumnRule(_accepts_items, "a string of JSON, or a list of structs: the items"),
        **dict.fromkeys(MEDIA_FIELDS, MEDIA_RULE),
    },
    required=(("items",),),
    parse=_parse_parquet_row,
)
