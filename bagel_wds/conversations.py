"""Conversations: their turns, the tags in them that stand for media, and the media that a row names.

A converter checks and mends rows with these before it writes them, the recipe reads them, and `show` counts with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds.errors import BadSample, Reason, name_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Tag(Enum):
    """Where a conversation shows a medium."""

    IMAGE = "<image>"
    """An image."""
    VIDEO = "<video>"
    """The frames of a clip."""


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        speaker: human, gpt or system.
        pieces: texts and tags in order; no text is empty, and no two stand side by side.
    """

    speaker: str
    pieces: tuple[str | Tag, ...]

    @property
    def text(self) -> str:
        """The turn as one string, with its tags written out."""
        return "".join(piece.value if isinstance(piece, Tag) else piece for piece in self.pieces)

    @property
    def tags(self) -> list[Tag]:
        """Its tags in order."""
        return [piece for piece in self.pieces if isinstance(piece, Tag)]


@dataclass(frozen=True)
class NamedMedium:
    """What a row says of one of its media.

    Attributes:
        tag: that stands for it.
        value: a path, the bytes themselves, or an object with either; None in a typed part that says nothing.
        place: of the value in the fields: names of fields and numbers of entries.
    """

    tag: Tag
    value: object
    place: tuple[str | int, ...]

    def __str__(self) -> str:
        steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.place)
        return f"`{''.join(steps).removeprefix('.')}`"


_CONVERSATION_FIELDS = ("conversations", "messages")
_SPEAKERS = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt", "system": "system"}
_WHO = ("from", "role")
_WHAT = ("value", "content")
_MEDIA_PARTS = {"image": Tag.IMAGE, "image_url": Tag.IMAGE, "video": Tag.VIDEO, "video_url": Tag.VIDEO}
_WRITTEN_TAGS = re.compile("(<image>|<video>)")

MEDIA_FIELDS = {"image": Tag.IMAGE, "images": Tag.IMAGE, "video": Tag.VIDEO, "videos": Tag.VIDEO}
"""The fields that name media, and the tag that stands for each of theirs."""

NULL_LIKE = ("", "None", "none", "null")
"""Strings that stand for null where a field, or a typed part, may name a medium. In a list, they are entries."""

DATA_KEYS = ("bytes", "base64")
"""Under which an object has the bytes of a medium."""

PATH_KEYS = ("path", "url")
"""Under which an object has the path of a medium, if it has no bytes."""


def read_turns(fields: Mapping[str, object], *, upstream: bool = False) -> list[Turn]:
    """The turns of a conversation: `conversations` or `messages`, a list of turns or its JSON text.

    A turn says who speaks, in `from` or `role`: human or user, gpt or assistant, system. It says what, in `value` or
    `content`: a string, or a list of typed parts. `<image>` and `<video>` in the string of a human turn are tags; any
    other string is text, and so is a part of type `text`. Parts of type `image`, `image_url`, `video` and `video_url`
    are tags too; only a human turn may have them.

    Args:
        fields: of the row.
        upstream: as upstream: speakers in `from` keep their names, whatever these are, and `messages` has no say where
            there is `conversations`.

    Raises:
        BadSample: `conversations_invalid` for anything else, and for a conversation without turns.
    """
    _, turns = _find_turns(fields, upstream=upstream)
    return [_read_turn(turn, f"turn {number}", upstream=upstream) for number, turn in enumerate(turns)]


def _find_turns(fields: Mapping[str, object], *, upstream: bool = False) -> tuple[str, list[Any]]:
    """The field that holds the turns, and these as they are."""
    names = [name for name in _CONVERSATION_FIELDS if fields.get(name) is not None]
    if not names:
        there = ", ".join(map(repr, fields)) or "none"
        raise _bad_turns(f"nothing in `conversations` or `messages`; the fields are {there}")
    if len(names) > 1 and not upstream:
        raise _bad_turns(
            "both `conversations` and `messages` hold something; keep the one to train on, and leave the other out"
        )
    turns = fields[names[0]]
    if isinstance(turns, str | bytes):
        try:
            turns = orjson.loads(turns)
        except orjson.JSONDecodeError as error:
            raise _bad_turns(f"`{names[0]}` is no JSON: {error}") from error
    if not isinstance(turns, list) or not turns:
        raise _bad_turns(
            f"`{names[0]}` is {'an empty list' if turns == [] else name_type(turns)}, not a list of turns"
        )
    return names[0], turns


def _read_turn(turn: Any, where: str, *, upstream: bool) -> Turn:
    who, what = _filled(turn, _WHO), _filled(turn, _WHAT)
    if who is None or what is None:
        raise _bad_turns(f"{where} has not both, `from` and `value` (or `role` and `content`)")
    name, content = turn[who], turn[what]
    speaker = name if upstream and who == "from" else _SPEAKERS.get(str(name))
    if not isinstance(speaker, str):
        raise _bad_turns(f"{where}: the speaker is {name!r}, none of {', '.join(_SPEAKERS)}")
    if isinstance(content, list):
        return Turn(speaker, tuple(_read_parts(content, where, may_show=speaker == "human")))
    if not isinstance(content, str):
        raise _bad_turns(f"{where}: `{what}` is {name_type(content)}, neither a string nor a list of parts")
    if speaker != "human":
        return Turn(speaker, (content,) if content else ())
    pieces = _WRITTEN_TAGS.split(content)
    # A split has what it split at in the odd places.
    return Turn(speaker, tuple(Tag(piece) if i % 2 else piece for i, piece in enumerate(pieces) if piece))


def _read_parts(parts: list[Any], where: str, *, may_show: bool) -> Iterator[str | Tag]:
    text = ""
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise _bad_turns(
                    f"{where}, part {number}: `text` is {name_type(part.get('text'))}, not a string"
                )
            text += part["text"]
            continue
        if not isinstance(kind, str) or kind not in _MEDIA_PARTS:
            known = ", ".join(("text", *_MEDIA_PARTS))
            raise _bad_turns(f"{where}, part {number}: the type is {kind!r}, none of {known}")
        if not may_show:
            raise _bad_turns(f"{where}, part {number}: {kind!r} stands in a turn that is not the human's")
        if text:
            yield text
        yield _MEDIA_PARTS[kind]
        text = ""
    if text:
        yield text


def _filled(turn: Any, names: Iterable[str]) -> str | None:
    """The first of some names under which a turn, or a part, has something."""
    if isinstance(turn, dict):
        for name in names:
            if turn.get(name) is not None:
                return name
    return None


def _bad_turns(detail: str) -> BadSample:
    return BadSample(Reason.CONVERSATIONS_INVALID, detail)


def check_answers(turns: Sequence[Turn]) -> None:
    """Refuse a conversation that there is nothing to learn from.

    Raises:
        BadSample: `empty_text` if each answer is blank, or there is none.
    """
    if not any(turn.speaker == "gpt" and turn.text.strip() for turn in turns):
        raise BadSample(Reason.EMPTY_TEXT, "no answer with any text")


def check_placeholders(turns: Sequence[Turn], is_clip: Sequence[bool]) -> None:
    """Refuse a conversation whose tags do not stand for its media: over all turns, the k-th tag for medium k.

    Args:
        turns: of the conversation.
        is_clip: for each medium whether it is a clip, which `<video>` stands for.

    Raises:
        BadSample: `placeholder_mismatch`.
    """
    tags = [tag for turn in turns for tag in turn.tags]
    if len(tags) != len(is_clip):
        raise BadSample(Reason.PLACEHOLDER_MISMATCH, f"{len(tags)} tags for {len(is_clip)} media")
    for number, (tag, clip) in enumerate(zip(tags, is_clip, strict=True), start=1):
        if (tag is Tag.VIDEO) != clip:
            kind = "a clip" if clip else "an image"
            raise BadSample(
                Reason.PLACEHOLDER_MISMATCH, f"tag {number} is {tag.value}, medium {number} is {kind}"
            )


def repair_placeholders(fields: Mapping[str, object], is_clip: Sequence[bool]) -> dict[str, object]:
    """The fields of a conversation without any tag, with one for each medium at the start of its first human turn.

    In a string it is the tag and a line break, among typed parts a part.

    Args:
        fields: of a row whose turns can be read; they stay as they are.
        is_clip: for each medium whether it is a clip.

    Raises:
        BadSample: `placeholder_mismatch` if there is no human turn.
    """
    field, turns = _find_turns(fields)
    human = next((number for number, turn in enumerate(read_turns(fields)) if turn.speaker == "human"), None)
    if human is None:
        raise BadSample(
            Reason.PLACEHOLDER_MISMATCH, f"no tag for {len(is_clip)} media, and no human turn to put it in"
        )
    tags = [Tag.VIDEO if clip else Tag.IMAGE for clip in is_clip]
    what = _filled(turns[human], _WHAT) or ""
    content = turns[human][what]
    if isinstance(content, list):
        mended: object = [*({"type": tag.name.lower()} for tag in tags), *content]
    else:
        mended = "".join(f"{tag.value}\n" for tag in tags) + content
    return replace_values(fields, {(field, human, what): mended})


def named_media(
    fields: Mapping[str, object], by_field: Mapping[str, Tag] = MEDIA_FIELDS
) -> dict[str, list[NamedMedium]]:
    """The media that each of `image`, `images`, `video` and `videos` names, in this order; without those that name none.

    A list names one medium an entry, whatever that is; null and `NULL_LIKE` name none, anything else names one.

    Args:
        fields: of the row.
        by_field: other fields than these, in their order, and the tag of what each names.
    """
    named = {field: _entries(field, tag, fields.get(field)) for field, tag in by_field.items()}
    return {field: media for field, media in named.items() if media}


def _entries(field: str, tag: Tag, value: object) -> list[NamedMedium]:
    if isinstance(value, list):
        return [NamedMedium(tag, entry, (field, number)) for number, entry in enumerate(value)]
    return [] if is_null_like(value) else [NamedMedium(tag, value, (field,))]


def is_null_like(value: object) -> bool:
    """Whether a value, where it is no entry of a list, names no medium."""
    return value is None or (isinstance(value, str) and value in NULL_LIKE)


def media_parts(fields: Mapping[str, object]) -> list[NamedMedium]:
    """What the typed parts of a conversation that stand for media say of them, over all turns.

    A part has its medium under its type, `{"type": "image", "image": ...}`, or is itself the object that has it,
    `{"type": "image", "path": ...}`.

    Args:
        fields: of a row whose turns can be read.
    """
    field, turns = _find_turns(fields, upstream=True)
    contents = [
        (number, what, turn[what]) for number, turn in enumerate(turns) if (what := _filled(turn, _WHAT))
    ]
    return [
        _name_part(part, (field, number, what, place))
        for number, what, content in contents
        if isinstance(content, list)
        for place, part in enumerate(content)
        if part["type"] in _MEDIA_PARTS
    ]


def _name_part(part: Mapping[str, object], place: tuple[str | int, ...]) -> NamedMedium:
    tag = _MEDIA_PARTS[str(part["type"])]
    for key in (key for key, of in _MEDIA_PARTS.items() if of is tag):
        if not is_null_like(part.get(key)):
            return NamedMedium(tag, part[key], (*place, key))
    is_object = not all(is_null_like(part.get(key)) for key in DATA_KEYS + PATH_KEYS)
    return NamedMedium(tag, part if is_object else None, place)


def replace_values(
    fields: Mapping[str, object], values: Mapping[tuple[str | int, ...], object]
) -> dict[str, object]:
    """The fields with other values in some places: what holds these is copied, or written anew where it is JSON text."""
    replaced: dict[str, object] = _replaced(dict(fields), values)
    return replaced


def _replaced(holder: Any, values: Mapping[tuple[str | int, ...], object]) -> Any:
    if () in values:
        return values[()]
    if isinstance(holder, str | bytes):
        return orjson.dumps(_replaced(orjson.loads(holder), values)).decode()
    copy = holder.copy()
    for key in {place[0] for place in values}:
        inner = {place[1:]: value for place, value in values.items() if place[0] == key}
        copy[key] = _replaced(copy[key], inner)
    return copy
