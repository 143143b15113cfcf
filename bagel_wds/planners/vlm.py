"""Conversations about images: text without loss from the human, with loss from the model, images where the tags are."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, Reason
from bagel_wds.planners.build import PlanBuilder, PlanTools
from bagel_wds.records import Kind, RawSample, SamplePlan
from bagel_wds.texts import Turn, read_turns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagel_wds.rng import Draws

IMAGE_TAG = "<image>"
VIDEO_TAG = "<video>"
_TAGS = re.compile(f"({IMAGE_TAG}|{VIDEO_TAG})")


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
    ignores surplus ones, keeps (and counts) images that no tag shows, and wants `<video>` in the first turn.

    Raises:
        BadSample: for broken conversations, tags that do not match the media, or no text with loss.
    """
    _check_media(sample)
    pictures = [_pictures(sample, medium, tools, draws) for medium in range(len(sample.media))]
    turns = read_turns(sample.fields)
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


def named_media(fields: Mapping[str, object]) -> list[str] | None:
    """The media that a row names, in order: `image` (a path, or a list of them), else `video`. None if it says nothing.

    An empty string, null and "None" name no medium.
    """
    said = [_paths(fields[name]) for name in ("image", "video") if name in fields]
    return next(filter(None, said), []) if said else None


def _paths(value: object) -> list[str]:
    paths = value if isinstance(value, list) else [value]
    return [path for path in paths if isinstance(path, str) and path not in ("", "None")]


def _check_media(sample: RawSample) -> None:
    named = named_media(sample.fields)
    if named is not None and len(named) != len(sample.media):
        reason = Reason.IMAGE_MISSING if sample.fields.get("image") else Reason.VIDEO_MISSING
        raise BadSample(reason, f"the row names {len(named)} media, the sample has {len(sample.media)}")


def _pictures(sample: RawSample, medium: int, tools: PlanTools, draws: Draws) -> list[tuple[int, int]]:
    """(medium, frame) of the pictures that a medium gives: one for an image, the chosen ones for a clip."""
    if not sample.is_clip[medium]:
        return [(medium, 0)]
    try:
        frames = tools.frames.choose(len(sample.media[medium]), draws)
    except ValueError as error:
        raise BadSample(Reason.VIDEO, str(error)) from error
    return [(medium, frame) for frame in frames]


def _items(turns: list[Turn], sample: RawSample, pictures: list[list[tuple[int, int]]]) -> list[Text | Shown]:
    """Texts and pictures in order; the k-th tag of the conversation stands for medium k.

    A human turn without a tag is one text, as it is; around tags, texts are stripped and blank ones left out.
    """
    items: list[Text | Shown] = []
    medium = first = 0
    for turn in turns:
        parts = _TAGS.split(turn.text) if turn.speaker == "human" else [turn.text]
        if turn.speaker == "gpt" or len(parts) == 1:
            items += [Text(turn.text, loss=turn.speaker == "gpt")] if turn.speaker in ("human", "gpt") else []
            continue
        for part in parts:
            if part in (IMAGE_TAG, VIDEO_TAG):
                if medium == len(pictures) or sample.is_clip[medium] != (part == VIDEO_TAG):
                    raise BadSample(
                        Reason.PLACEHOLDER_MISMATCH, f"tag {medium + 1}, {part}, has no such medium"
                    )
                items += [Shown(first + i) for i in range(len(pictures[medium]))]
                first += len(pictures[medium])
                medium += 1
            elif part.strip():
                items.append(Text(part.strip()))
    if medium < len(pictures):
        raise BadSample(Reason.PLACEHOLDER_MISMATCH, f"{medium} tags for {len(pictures)} media")
    return items


def _items_as_upstream(
    turns: list[Turn], sample: RawSample, pictures: list[list[tuple[int, int]]]
) -> list[Text | Shown]:
    """The same as upstream finds them: see `plan_vlm` for how that differs."""
    num_pictures = sum(map(len, pictures))
    if any(sample.is_clip):
        if not turns or VIDEO_TAG not in turns[0].text:
            raise BadSample(Reason.PLACEHOLDER_MISMATCH, "no <video> in the first turn")
        turns = [
            replace(turns[0], text=turns[0].text.replace(VIDEO_TAG, IMAGE_TAG * num_pictures)),
            *turns[1:],
        ]
    items: list[Text | Shown] = []
    number = 0
    for turn in turns:
        parts = turn.text.split(IMAGE_TAG)
        if turn.speaker == "gpt" or (turn.speaker == "human" and len(parts) == 1):
            items.append(Text(turn.text, loss=turn.speaker == "gpt"))
        elif turn.speaker == "human":
            for i, part in enumerate(parts):
                items += [Text(part.strip())] if part.strip() else []
                if i < len(parts) - 1 and i < num_pictures:
                    items.append(Shown(number))
                    number += 1
    return items
