"""Image editing: a chain of images, and instructions that lead from each to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, Reason
from bagel_wds.planners.build import PlanBuilder, PlanTools
from bagel_wds.records import Kind, RawSample, SamplePlan
from bagel_wds.texts import check_phrasing, find_phrasings, find_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.rng import Draws

LONGEST_STEP = 2
"""A sample spans so many edits of a chain at most."""


@dataclass(frozen=True)
class Shown:
    """An image of the chain, at its place in the sample.

    Attributes:
        image: its number.
        target: with flow matching loss.
        condition: clean and understood, behind the target where it is both.
    """

    image: int
    target: bool = False
    condition: bool = False


def plan_edit(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
    """One or two consecutive edits out of a chain of images, as `walk_edits` chooses them.

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
    plan = PlanBuilder(sample, tools)
    for item in walk_edits(num_images, instructions, draws, upstream=tools.upstream):
        if isinstance(item, str):
            plan.text(item, cfg=True)
            continue
        if item.target:
            plan.image(Kind.VAE_IMAGE, item.image, loss=True)
        if item.condition:
            _condition(plan, item.image)
    return plan.build()


def walk_edits(
    num_images: int, instructions: Sequence[object], draws: Draws, *, upstream: bool = False
) -> Iterator[str | Shown]:
    """Instructions and images of a sample in order, each drawn when it is asked for.

    The first image is a condition (VAE and ViT, may be dropped out). Then comes either each instruction with the
    image that it leads to (an image in between is target and condition), or, for two edits, now and then
    both instructions as one text with the last image alone. As upstream does, a joined sample that would end on the
    last image of the chain ends one earlier: models have been trained on that.

    Args:
        num_images: two or more.
        instructions: the phrasings of each edit.
        draws: of the sample.
        upstream: take an edit whose phrasings are a plain string as a list of letters.

    Raises:
        BadSample: where an edit has no instruction.
    """
    start = draws.choice(num_images - 1, "start")
    end = start + 1 + draws.choice(min(start + 1 + LONGEST_STEP, num_images) - start - 1, "end")
    yield Shown(start, condition=True)
    if end - start > 1 and draws.random("join") < 0.5:
        if end == num_images - 1:
            end -= 1
        steps = range(start, end)
        yield "".join(f"{_instruction(instructions, step, draws, upstream)}. " for step in steps).rstrip()
        yield Shown(end, target=True)
        return
    for image in range(start + 1, end + 1):
        yield _instruction(instructions, image - 1, draws, upstream)
        yield Shown(image, target=True, condition=image != end)


def _condition(plan: PlanBuilder, image: int) -> None:
    plan.image(Kind.VAE_IMAGE, image, cfg=True)
    plan.image(Kind.VIT_IMAGE, image, cfg=True)


def _instruction(instructions: Sequence[object], step: int, draws: Draws, upstream: bool) -> str:
    """One phrasing of the edit that leads from image `step` to the next."""
    if step >= len(instructions):
        raise BadSample(Reason.INSTRUCTION_MISSING, f"no instruction for edit {step}")
    told = instructions[step]
    phrasings = find_phrasings(list(told) if upstream and isinstance(told, str) else told, step)
    phrasing = phrasings[draws.choice(len(phrasings), f"instruction:{step}")]
    return check_phrasing(phrasing, step)
