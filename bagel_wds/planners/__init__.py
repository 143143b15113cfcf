"""Recipes: how one sample of a group becomes a plan.

A planner is a function `(sample, tools, draws) -> SamplePlan`. It reads the sample's JSON, the sizes of its
pictures and some draws; it needs neither torch nor Pillow and never sees a pixel. `PLANNERS` holds those that the
mixture file can name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.planners.build import PlanTools
from bagel_wds.planners.dropout import DropoutRates, settle
from bagel_wds.planners.edit import plan_edit
from bagel_wds.planners.t2i import plan_t2i
from bagel_wds.planners.vlm import plan_vlm

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagel_wds.records import RawSample, SamplePlan
    from bagel_wds.rng import Draws

    Planner = Callable[[RawSample, PlanTools, Draws], SamplePlan]

PLANNERS: dict[str, Planner] = {"t2i": plan_t2i, "vlm": plan_vlm, "edit": plan_edit}

__all__ = ["PLANNERS", "DropoutRates", "PlanTools", "plan_edit", "plan_t2i", "plan_vlm", "settle"]
