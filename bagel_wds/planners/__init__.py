"""Recipes: how one sample of a group becomes a plan.

A planner is a function `(sample, tools, draws) -> SamplePlan`. It reads the sample's JSON, the sizes of its
pictures and some draws; it needs neither torch nor Pillow and never sees a pixel. `PLANNERS` holds those that the
mixture file can name, and `register_planner` adds one of your own, see docs/own-group.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.planners.build import PlanBuilder, PlanTools, choose_frames
from bagel_wds.planners.dropout import DropoutRates, settle
from bagel_wds.planners.edit import plan_edit
from bagel_wds.planners.interleaved import plan_interleaved
from bagel_wds.planners.registry import PLANNERS, OwnPlanner, find_planner, register_planner
from bagel_wds.planners.t2i import plan_t2i
from bagel_wds.planners.vlm import plan_vlm

if TYPE_CHECKING:
    from bagel_wds.planners.registry import Planner as Planner

__all__ = [
    "PLANNERS",
    "DropoutRates",
    "OwnPlanner",
    "PlanBuilder",
    "PlanTools",
    "choose_frames",
    "find_planner",
    "plan_edit",
    "plan_interleaved",
    "plan_t2i",
    "plan_vlm",
    "register_planner",
    "settle",
]
