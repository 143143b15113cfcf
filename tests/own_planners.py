"""Planners of a user's own, in a module that an import path can name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, Reason
from bagel_wds.planners import PlanBuilder
from bagel_wds.records import Kind

if TYPE_CHECKING:
    from bagel_wds.planners import PlanTools
    from bagel_wds.records import RawSample, SamplePlan
    from bagel_wds.rng import Draws


def plan_boxes(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """A page and the words on it: one of its boxes is asked for."""
    boxes = sample.fields["boxes"]
    if not isinstance(boxes, list) or not boxes:
        raise BadSample(Reason.ROW_INVALID, "a page without a box")
    box = boxes[draws.choice(len(boxes), "box")]
    plan = PlanBuilder(sample, tools)
    plan.image(Kind.VIT_IMAGE, 0, cfg=True)
    plan.text(f"What stands at {box['x']}, {box['y']}?")
    plan.text(box["word"], loss=True)
    return plan.build()


def plan_nothing(sample: RawSample, tools: PlanTools, draws: Draws) -> None:
    """Forgets to give a plan."""


LIMIT = 3
