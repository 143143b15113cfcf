"""Interleaved rows: a list of texts, images and videos that says itself what each is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.conversations import Tag
from bagel_wds.errors import BadSample, Reason
from bagel_wds.items import MediumItem, TextItem, check_frames, check_media, read_items, row_media
from bagel_wds.planners.build import PlanBuilder, PlanTools, choose_frames
from bagel_wds.records import Kind, RawSample, SamplePlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bagel_wds.rng import Draws

    Places = Mapping[tuple[Tag, int], int]
    """Number of the medium in the sample, of each image and each video of the row."""


def plan_interleaved(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """The items in order. An image or video that is several things at once is noised, then clean, then for the ViT.

    The pictures that the ViT sees share the `max_pixels` of its transform, as in a conversation; each of the VAE's has
    its own. Frames of a video that items leave to the group's rule are chosen once, so items show the same ones.

    Raises:
        BadSample: as `read_items`, `check_media` and `check_frames`; `image_missing` or `video_missing` where the sample
            has not the media that its row names.
    """
    items = read_items(sample.fields)
    places = _places(sample)
    check_media(items, *(sum(tag is wanted for tag, _ in places) for wanted in (Tag.IMAGE, Tag.VIDEO)))
    frames = _frames(items, places, sample, tools, draws)
    num_shown = sum(len(shown) for item, shown in zip(items, frames, strict=True) if _for_vit(item))
    plan = PlanBuilder(sample, tools)
    for item, shown in zip(items, frames, strict=True):
        if isinstance(item, TextItem):
            plan.text(item.text, loss=item.loss, cfg=item.cfg)
        else:
            _add_medium(plan, item, places[item.tag, item.number], shown, num_shown)
    return plan.build()


def _places(sample: RawSample) -> Places:
    """Where each image and each video of the row is among the sample's media."""
    named = row_media(sample.fields)
    numbers = {
        Tag.IMAGE: [medium for medium, is_clip in enumerate(sample.is_clip) if not is_clip],
        Tag.VIDEO: [medium for medium, is_clip in enumerate(sample.is_clip) if is_clip],
    }
    for tag, reason in ((Tag.IMAGE, Reason.IMAGE_MISSING), (Tag.VIDEO, Reason.VIDEO_MISSING)):
        told = sum(medium.tag is tag for medium in named)
        if named and told != len(numbers[tag]):
            what = f"{tag.name.lower()}s"
            raise BadSample(reason, f"the row names {told} {what}, the sample has {len(numbers[tag])}")
    return {(tag, number): medium for tag, media in numbers.items() for number, medium in enumerate(media)}


def _frames(
    items: Sequence[TextItem | MediumItem], places: Places, sample: RawSample, tools: PlanTools, draws: Draws
) -> list[Sequence[int]]:
    """For each item the frames that it shows: of an image its only one, of a text none."""
    videos = [item for item in items if isinstance(item, MediumItem) and item.tag is Tag.VIDEO]
    left_open = sorted({item.number for item in videos if item.frames is None})
    chosen = {number: choose_frames(sample, places[Tag.VIDEO, number], tools, draws) for number in left_open}
    for item in videos:
        check_frames(item, len(sample.media[places[Tag.VIDEO, item.number]]))
    return [
        ()
        if isinstance(item, TextItem)
        else (0,)
        if item.tag is Tag.IMAGE
        else item.frames or chosen[item.number]
        for item in items
    ]


def _for_vit(item: TextItem | MediumItem) -> bool:
    return isinstance(item, MediumItem) and item.vit


def _add_medium(
    plan: PlanBuilder, item: MediumItem, medium: int, frames: Sequence[int], num_shown: int
) -> None:
    if item.tag is Tag.VIDEO:
        plan.clip(medium, frames, loss=item.loss, condition=item.vae, cfg=item.cfg)
    else:
        if item.loss:
            plan.image(Kind.VAE_IMAGE, medium, loss=True)
        if item.vae:
            plan.image(Kind.VAE_IMAGE, medium, cfg=item.cfg)
    if item.vit:
        plan.frames(medium, frames, cfg=item.cfg, img_num=num_shown)
