"""Conversations about images: answers with loss, what human and system say without, media where their tags are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagel_wds.conversations import (
    MEDIA_FIELDS,
    NamedMedium,
    Tag,
    Turn,
    check_answers,
    check_placeholders,
    media_parts,
    named_media,
    read_turns,
)
from bagel_wds.errors import BadSample, Reason
from bagel_wds.planners.build import PlanBuilder, PlanTools, choose_frames
from bagel_wds.records import Kind, RawSample, SamplePlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagel_wds.rng import Draws


@dataclass(frozen=True)
class Text:
    """A piece of the conversation."""

    text: str
    loss: bool = False


@dataclass(frozen=True)
class Shown:
    """A place where picture `number` of the sample is shown."""

    number: int


def plan_vlm(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """The turns in order; each tag of a human turn shows the next image, or the chosen frames of the next clip.

    Tags are matched with media over all turns, and each medium has its tag. BAGEL: counts tags in each turn anew,
    ignores surplus ones, keeps (and counts) images that no tag shows, wants `<video>` in the first turn, and leaves
    out what any other than human and gpt says.

    Raises:
        BadSample: for broken conversations, tags that do not match the media, or no text with loss.
    """
    turns = read_turns(sample.fields, upstream=tools.upstream)
    _check_media(sample)
    pictures = [_pictures(sample, medium, tools, draws) for medium in range(len(sample.media))]
    items = _items_as_upstream(turns, sample, pictures) if tools.upstream else _items(turns, sample, pictures)
    plan = PlanBuilder(sample, tools)
    shown = [place for medium in pictures for place in medium]
    for medium, frame in shown:
        plan.view(Kind.VIT_IMAGE, medium, frame, img_num=len(shown))
    has_loss = False
    for item in items:
        if isinstance(item, Shown):
            plan.segment(Kind.VIT_IMAGE, item.number)
        else:
            has_loss |= plan.text(item.text, loss=item.loss, keep_empty=False) and item.loss
    if not has_loss:
        raise BadSample(Reason.EMPTY_TEXT, "no answer with any text")
    return plan.build()


def _check_media(sample: RawSample) -> None:
    """Refuse a sample with more media or fewer than its row names."""
    named = _named(sample.fields)
    if named is not None and len(named) != len(sample.media):
        has_clip = any(medium.tag is Tag.VIDEO for medium in named)
        raise BadSample(
            Reason.VIDEO_MISSING if has_clip else Reason.IMAGE_MISSING,
            f"the row names {len(named)} media, the sample has {len(sample.media)}",
        )


def _named(fields: Mapping[str, object]) -> list[NamedMedium] | None:
    """The media that a row names: in typed parts, else in its fields, `image` before `video`. None if it says nothing.

    Nor does it say anything where some typed parts name a medium and others do not: what had its bytes in the row
    may be left without a name.
    """
    parts = media_parts(fields)
    by_parts = [part for part in parts if part.value is not None]
    by_field = named_media(fields)
    if by_parts:
        return by_parts if len(by_parts) == len(parts) else None
    if by_field:
        return next(iter(by_field.values()))
    return None if parts or not any(field in fields for field in MEDIA_FIELDS) else []


def _pictures(sample: RawSample, medium: int, tools: PlanTools, draws: Draws) -> list[tuple[int, int]]:
    """(medium, frame) of the pictures that a medium gives: one for an image, the chosen ones for a clip."""
    if not sample.is_clip[medium]:
        return [(medium, 0)]
    return [(medium, frame) for frame in choose_frames(sample, medium, tools, draws)]


def _items(turns: list[Turn], sample: RawSample, pictures: list[list[tuple[int, int]]]) -> list[Text | Shown]:
    """Texts and pictures in order.

    A turn without a tag is one text, as it is; around tags, texts are stripped and blank ones left out.
    """
    check_answers(turns)
    check_placeholders(turns, sample.is_clip)
    items: list[Text | Shown] = []
    medium = first = 0
    for turn in turns:
        if not turn.tags:
            items.append(Text(turn.text, loss=turn.speaker == "gpt"))
            continue
        for piece in turn.pieces:
            if isinstance(piece, Tag):
                items += [Shown(first + i) for i in range(len(pictures[medium]))]
                first += len(pictures[medium])
                medium += 1
            elif piece.strip():
                items.append(Text(piece.strip()))
    return items


def _items_as_upstream(
    turns: list[Turn], sample: RawSample, pictures: list[list[tuple[int, int]]]
) -> list[Text | Shown]:
    """The same as upstream finds them: see `plan_vlm` for how that differs."""
    num_pictures = sum(map(len, pictures))
    texts = [turn.text for turn in turns]
    if any(sample.is_clip):
        if Tag.VIDEO.value not in texts[0]:
            raise BadSample(Reason.PLACEHOLDER_MISMATCH, "no <video> in the first turn")
        texts[0] = texts[0].replace(Tag.VIDEO.value, Tag.IMAGE.value * num_pictures)
    items: list[Text | Shown] = []
    number = 0
    for speaker, text in zip((turn.speaker for turn in turns), texts, strict=True):
        parts = text.split(Tag.IMAGE.value)
        if speaker == "gpt" or (speaker == "human" and len(parts) == 1):
            items.append(Text(text, loss=speaker == "gpt"))
        elif speaker == "human":
            for i, part in enumerate(parts):
                items += [Text(part.strip())] if part.strip() else []
                if i < len(parts) - 1 and i < num_pictures:
                    items.append(Shown(number))
                    number += 1
    return items
