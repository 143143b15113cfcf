"""Planners of a user's own, in a module that an import path can name."""

from __future__ import annotations

from dataclasses import dataclass, replace
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


def plan_lies(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """Gives the picture for the ViT out as one for the VAE."""
    plan = plan_boxes(sample, tools, draws)
    return plan.with_segments((replace(plan.segments[0], kind=Kind.VAE_IMAGE, loss=True), *plan.segments[1:]))


def plan_silent(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """A page that nothing is asked of."""
    plan = PlanBuilder(sample, tools)
    plan.image(Kind.VIT_IMAGE, 0)
    return plan.build()


def plan_without_code(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """Refuses each sample for a reason of its own."""
    raise BadSample("blurred", "a page that cannot be read")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Asking:
    """A planner with a setting."""

    most: int

    def __call__(self, sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
        return plan_boxes(sample, tools, draws)


class Nameless:
    """A planner of which two are never equal."""

    def __call__(self, sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
        return plan_boxes(sample, tools, draws)
