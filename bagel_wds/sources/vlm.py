"""Conversations about images: rows with turns, and media by a path under a media root or inside the row.

| our name | holds |
| --- | --- |
| `conversations` or `messages` | the turns, as `bagel_wds.texts.read_turns` takes them |
| `image` or `images`, `video` or `videos` | a medium, or a list of them; absent, null, "", "None", "none", "null": none |

Or typed parts name their media themselves, every one of them, in the order in which they come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyarrow import types

from bagel_wds.conversations import (
    MEDIA_FIELDS,
    check_answers,
    check_placeholders,
    media_parts,
    named_media,
    read_turns,
    repair_placeholders,
)
from bagel_wds.errors import BadSample, Reason
from bagel_wds.sources.columns import is_list_of, is_text
from bagel_wds.sources.layout import ColumnRule, ParquetLayout
from bagel_wds.sources.media import find_media_root
from bagel_wds.sources.named_media import MEDIA_RULE, take_media, with_our_names
from bagel_wds.sources.rows import ParsedRow, Placeholders

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from bagel_wds.conversations import NamedMedium, Turn
    from bagel_wds.sources.media import MediaRoot
    from bagel_wds.sources.rows import Source


def parse_row(row: Mapping[str, Any], source: Source, media_root: MediaRoot) -> ParsedRow:
    """The media that a row names, in order; the fields are the row, without what became media.

    Bytes in the row are taken out of it: of a data URI its head is left, of an object what is not the bytes.

    Args:
        row: the JSON object.
        source: that it belongs to.
        media_root: what its paths are relative to.

    Raises:
        BadSample: for a conversation that cannot be trained on, a medium that cannot be used, or tags that do not
            match the media under the source's policy.
    """
    fields = with_our_names(row, source.columns)
    turns = read_turns(fields)
    if source.check_texts:
        check_answers(turns)
    named = _choose_media(fields)
    fields, media = take_media(fields, named, source, media_root)
    fields, repaired = _match_tags(fields, turns, [medium.is_clip for medium in media], source.placeholders)
    return ParsedRow(fields, media, repaired)


def _choose_media(fields: Mapping[str, Any]) -> list[NamedMedium]:
    """The media of a row, which names them in one place alone."""
    parts = media_parts(fields)
    by_parts = [part for part in parts if part.value is not None]
    by_field = named_media(fields)
    if by_parts and (len(by_parts) < len(parts) or by_field):
        bare = next((part for part in parts if part.value is None), None)
        other = f"{bare} names none" if bare else f"`{next(iter(by_field))}` names some too"
        raise BadSample(
            Reason.ROW_INVALID,
            f"{by_parts[0]} names a medium, and {other}; let all parts name theirs, or none",
        )
    if len(by_field) > 1:
        first, second = list(by_field)[:2]
        raise BadSample(
            Reason.ROW_INVALID, f"both `{first}` and `{second}` name media; keep one, or split the row"
        )
    return by_parts or next(iter(by_field.values()), [])


def _match_tags(
    fields: Mapping[str, Any], turns: Sequence[Turn], is_clip: Sequence[bool], policy: Placeholders
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The fields under a policy for tags that do not match the media, and what was repaired."""
    if policy is Placeholders.UPSTREAM:
        return fields, ()
    if policy is Placeholders.REPAIR and is_clip and not any(turn.tags for turn in turns):
        return repair_placeholders(fields, is_clip), ("placeholders",)
    check_placeholders(turns, is_clip)
    return fields, ()


def _parse_parquet_row(row: Mapping[str, Any], source: Source) -> ParsedRow:
    return parse_row(row, source, find_media_root(source))


def _accepts_turns(kind: pa.DataType) -> bool:
    return is_text(kind) or is_list_of(kind, types.is_struct)


_TURNS = ColumnRule(_accepts_turns, "a string of JSON, or a list of structs: the turns")

LAYOUT = ParquetLayout(
    columns={"conversations": _TURNS, "messages": _TURNS, **dict.fromkeys(MEDIA_FIELDS, MEDIA_RULE)},
    required=(("conversations", "messages"),),
    parse=_parse_parquet_row,
)
