"""Image editing: a chain of images, and instructions that lead from each to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, Reason
from bagel_wds.planners.build import PlanBuilder, PlanTools
from bagel_wds.records import Kind, RawSample, SamplePlan
from bagel_wds.texts import check_phrasing, find_phrasings, find_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bagel_wds.rng import Draws

LONGEST_STEP = 2
"""A sample spans so many edits of a chain at most."""


def plan_edit(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """One or two consecutive edits out of a chain of images.

    The first image is a condition (VAE and ViT, may be dropped out). Then comes either each instruction with the
    image that it leads to (an image in between is target and condition), or, for two edits, now and then
    both instructions as one text with the last image alone. As upstream does, a joined sample that would end on the
    last image of the chain ends one earlier: models have been trained on that.

    Raises:
        BadSample: with fewer than two images, or where a step that it shows has no instruction. Steps that the row has
            no edit for do not matter here, and a blank phrasing is an empty text.
    """
    num_images = len(sample.media)
    if num_images < 2:
        raise BadSample(Reason.TOO_FEW_IMAGES, f"an edit needs two images, the row has {num_images}")
    instructions: Sequence[object] = find_steps(sample.fields)
    if tools.upstream and isinstance(sample.fields["instruction_list"], str):
        # BAGEL: takes a plain string, here or as a step, as a list of its letters.
        instructions = sample.fields["instruction_list"]
    start = draws.choice(num_images - 1, "start")
    end = start + 1 + draws.choice(min(start + 1 + LONGEST_STEP, num_images) - start - 1, "end")
    plan = PlanBuilder(sample, tools)
    _condition(plan, start)
    if end - start > 1 and draws.random("join") < 0.5:
        if end == num_images - 1:
            end -= 1
        joined = "".join(f"{_instruction(instructions, step, tools, draws)}. " for step in range(start, end))
        plan.text(joined.rstrip(), cfg=True)
        plan.image(Kind.VAE_IMAGE, end, loss=True)
        return plan.build()
    for image in range(start + 1, end + 1):
        plan.text(_instruction(instructions, image - 1, tools, draws), cfg=True)
        plan.image(Kind.VAE_IMAGE, image, loss=True)
        if image != end:
            _condition(plan, image)
    return plan.build()


def _condition(plan: PlanBuilder, image: int) -> None:
    plan.image(Kind.VAE_IMAGE, image, cfg=True)
    plan.image(Kind.VIT_IMAGE, image, cfg=True)


def _instruction(instructions: Sequence[object], step: int, tools: PlanTools, draws: Draws) -> str:
    """One phrasing of the edit that leads from image `step` to the next."""
    if step >= len(instructions):
        raise BadSample(Reason.INSTRUCTION_MISSING, f"no instruction for edit {step}")
    told = instructions[step]
    phrasings = find_phrasings(list(told) if tools.upstream and isinstance(told, str) else told, step)
    phrasing = phrasings[draws.choice(len(phrasings), f"instruction:{step}")]
    return check_phrasing(phrasing, step)
