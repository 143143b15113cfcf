"""The items of an interleaved row: texts, images and videos in the order in which the model meets them.

A converter checks rows with these before it writes them, the recipe reads them, and `show` counts with them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds.conversations import NamedMedium, Tag, named_media
from bagel_wds.errors import BadSample, Reason, name_type

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IMAGE_FIELDS = ("images", "image", "image_list")
VIDEO_FIELDS = ("videos", "video")
"""The fields that name media; a row uses one of each at most."""

MEDIA_FIELDS = {
    **dict.fromkeys(IMAGE_FIELDS, Tag.IMAGE),
    **dict.fromkeys(VIDEO_FIELDS, Tag.VIDEO),
}

_KEYS = {
    "text": ("loss", "cfg"),
    "image": ("vit", "vae", "loss", "cfg"),
    "video": ("vit", "vae", "loss", "cfg", "frames"),
}
"""What an item may say beside what it is."""

_TAGS = {"image": Tag.IMAGE, "video": Tag.VIDEO}


@dataclass(frozen=True, slots=True)
class TextItem:
    """A text.

    Attributes:
        text: as it is.
        loss: cross entropy on it.
        cfg: conditioning dropout may leave it out; never with loss.
    """

    text: str
    loss: bool = False
    cfg: bool = False


@dataclass(frozen=True, slots=True)
class MediumItem:
    """A place where an image or a video of the row stands.

    Attributes:
        tag: which of the two.
        number: of the image among the row's images, or of the video among its videos, from 0.
        loss: noised, with flow matching loss.
        vae: clean, as a condition of the VAE.
        vit: understood by the ViT.
        cfg: conditioning dropout may leave `vae` and `vit` out.
        frames: of a video, which ones; None lets the group's rule choose.
    """

    tag: Tag
    number: int
    loss: bool
    vae: bool
    vit: bool
    cfg: bool = False
    frames: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.tag.name.lower()} {self.number}"


Item = TextItem | MediumItem

MAX_ITEMS = 10_000
"""Of a row. With more it is broken or would not fit, and only planning it, for seconds, would tell."""


def read_items(fields: Mapping[str, object]) -> list[Item]:
    """The items of a row: `items`, a list of objects or its JSON text.

    An object is a text, an image or a video by its key `text`, `image` or `video`; a key that is null is not there. An
    image or a video has `vit` where it does not say otherwise, and has no loss.

    Args:
        fields: of the row.

    Raises:
        BadSample: `items_invalid`, with the number of the item; `empty_text` for a text with loss that is blank;
            `no_loss` where no item has loss.
    """
    items = [_read_item(item, f"item {number}") for number, item in enumerate(_find_items(fields))]
    if not any(item.loss for item in items):
        raise BadSample(Reason.NO_LOSS, f"none of the {len(items)} items has loss")
    return items


def _find_items(fields: Mapping[str, object]) -> list[Any]:
    items = fields.get("items")
    if isinstance(items, str | bytes):
        try:
            items = orjson.loads(items)
        except orjson.JSONDecodeError as error:
            raise _invalid(f"`items` is no JSON: {error}") from error
    if items is None:
        raise _invalid(f"nothing in `items`; the fields are {', '.join(map(repr, fields)) or 'none'}")
    if not isinstance(items, list) or not items:
        raise _invalid(
            f"`items` is {'an empty list' if items == [] else name_type(items)}, not a list of items"
        )
    if len(items) > MAX_ITEMS:
        raise _invalid(f"{len(items)} items; the most is {MAX_ITEMS}")
    return items


def _read_item(value: Any, where: str) -> Item:
    if not isinstance(value, dict):
        raise _invalid(f"{where} is {name_type(value)}, not an object")
    # A struct in parquet has every key.
    said = {key: given for key, given in value.items() if given is not None}
    kinds = [kind for kind in _KEYS if kind in said]
    if len(kinds) != 1:
        there = ", ".join(map(repr, said)) or "nothing"
        told = " and ".join(kinds) if kinds else f"none of {', '.join(_KEYS)}: it has {there}"
        raise _invalid(f"{where} is {told}; an item is one of them")
    (kind,) = kinds
    _check_keys(said, kind, where)
    loss, cfg = (_flag(said, name, where, default=False) for name in ("loss", "cfg"))
    if kind == "text":
        return _text(said["text"], where, loss=loss, cfg=cfg)
    vae = _flag(said, "vae", where, default=False)
    item = MediumItem(
        _TAGS[kind],
        _number(said[kind], kind, where),
        loss=loss,
        vae=vae,
        vit=_flag(said, "vit", where, default=not loss),
        cfg=cfg,
        frames=_frames(said["frames"], where) if "frames" in said else None,
    )
    if not (item.loss or item.vae or item.vit):
        raise _invalid(
            f"{where} is nothing: {item} has neither vit, vae nor loss; leave the item out, or set one"
        )
    return item


def _check_keys(said: Mapping[str, object], kind: str, where: str) -> None:
    for key in said:
        if key == kind or key in _KEYS[kind]:
            continue
        close = difflib.get_close_matches(str(key), _KEYS[kind], n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it may have {', '.join(_KEYS[kind])}"
        raise _invalid(f"{where}: {key!r} is no key of {_ARTICLE[kind]} {kind}; {hint}")


_ARTICLE = {"text": "a", "image": "an", "video": "a"}


def _flag(said: Mapping[str, object], name: str, where: str, *, default: bool) -> bool:
    value = said.get(name, default)
    if not isinstance(value, bool):
        raise _invalid(f"{where}: {name} is {value!r}, neither true nor false")
    return value


def _text(text: object, where: str, *, loss: bool, cfg: bool) -> TextItem:
    if not isinstance(text, str):
        raise _invalid(f"{where}: the text is {name_type(text)}, not a string")
    if loss and not text.strip():
        raise BadSample(Reason.EMPTY_TEXT, f"{where} has loss on a blank text")
    return TextItem(text, loss=loss, cfg=cfg and not loss)


def _number(value: object, kind: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        hint = f"; media are named in `{kind}s`, and counted from 0" if isinstance(value, str) else ""
        raise _invalid(f"{where}: {kind} is {value!r}, not the number of one{hint}")
    return value


def _frames(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise _invalid(f"{where}: frames is {value!r}, not a list of numbers")
    frames = tuple(_number(number, "frame", where) for number in value)
    if any(following <= number for number, following in pairwise(frames)):
        raise _invalid(f"{where}: frames {list(frames)} do not rise; name each once, in order")
    return frames


def _invalid(detail: str) -> BadSample:
    return BadSample(Reason.ITEMS_INVALID, detail)


def row_media(fields: Mapping[str, object]) -> list[NamedMedium]:
    """The media that a row names: its images, then its videos.

    Raises:
        BadSample: `row_invalid` if two fields name images, or two videos.
    """
    named = named_media(fields, MEDIA_FIELDS)
    for names in (IMAGE_FIELDS, VIDEO_FIELDS):
        both = [name for name in names if name in named]
        if len(both) > 1:
            raise BadSample(
                Reason.ROW_INVALID,
                f"both `{both[0]}` and `{both[1]}` name media; which is counted first cannot be known",
            )
    return [medium for media in named.values() for medium in media]


def check_media(items: Sequence[Item], num_images: int, num_videos: int) -> None:
    """Refuse items that show what is not there, and media that no item shows.

    Args:
        items: of the row.
        num_images: that the row has.
        num_videos: likewise.

    Raises:
        BadSample: `placeholder_mismatch`.
    """
    unused = {
        (tag, number)
        for tag, count in ((Tag.IMAGE, num_images), (Tag.VIDEO, num_videos))
        for number in range(count)
    }
    for place, item in enumerate(items):
        if not isinstance(item, MediumItem):
            continue
        count = num_videos if item.tag is Tag.VIDEO else num_images
        if item.number >= count:
            what = f"{item.tag.name.lower()}s"
            there = f"the row's {what} are 0 to {count - 1}" if count else f"the row has no {what}"
            raise BadSample(Reason.PLACEHOLDER_MISMATCH, f"item {place} shows {item}; {there}")
        unused.discard((item.tag, item.number))
    if unused:
        tag, number = min(unused, key=lambda medium: (medium[0].name, medium[1]))
        raise BadSample(Reason.PLACEHOLDER_MISMATCH, f"no item shows {tag.name.lower()} {number}")


def check_frames(item: MediumItem, num_frames: int) -> None:
    """Refuse an item that names a frame which its video does not have.

    Raises:
        BadSample: `items_invalid`.
    """
    if item.frames and item.frames[-1] >= num_frames:
        raise _invalid(f"an item names frame {item.frames[-1]} of {item}, which has {num_frames}, from 0 on")
