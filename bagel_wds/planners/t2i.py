"""Text to image: one caption as the condition, the image as the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, Reason
from bagel_wds.planners.build import PlanBuilder, PlanTools
from bagel_wds.records import Kind, RawSample, SamplePlan
from bagel_wds.texts import read_captions

if TYPE_CHECKING:
    from bagel_wds.rng import Draws


def plan_t2i(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """Caption (may be dropped out), then the image with flow matching loss.

    One caption is chosen, and only that one is tokenized. A sample with no caption gets a single space.

    Raises:
        BadSample: without an image, or as `read_captions`.
    """
    if not sample.media:
        raise BadSample(Reason.IMAGE_MISSING, "a text-to-image sample without an image")
    plan = PlanBuilder(sample, tools)
    # The image comes before the caption's draw: upstream skips a broken one without having drawn.
    target = plan.view(Kind.VAE_IMAGE, 0)
    captions = read_captions(sample.fields, upstream=tools.upstream)
    plan.text(captions[draws.choice(len(captions), "caption")] if captions else " ", cfg=True)
    plan.segment(Kind.VAE_IMAGE, target, loss=True)
    return plan.build()
