"""What a planner of a user's own gave, looked over before it is packed: a plan that lies would spoil batches in silence."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

from bagel_wds.geometry import patch_grid
from bagel_wds.records import Kind, SamplePlan, Segment, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bagel_wds.planners.build import PlanTools
    from bagel_wds.records import RawSample


class PlanFaultError(ValueError):
    """Why a plan cannot be."""


def has_loss(plan: SamplePlan) -> bool:
    """Whether anything is to be learnt from a plan."""
    return any(
        segment.loss or (segment.special_token_loss and segment.special_token_label is not None)
        for segment in plan.segments
    )


def check_plan(plan: SamplePlan, sample: RawSample, tools: PlanTools) -> None:
    """Refuse a plan that cannot be that of a sample.

    Args:
        plan: that a planner gave.
        sample: which it was given.
        tools: likewise.

    Raises:
        PlanFaultError: with the number of the segment.
    """
    if plan.group != tools.group:
        raise PlanFaultError(f"its group is {plan.group!r}, not {tools.group!r}")
    if plan.ref != sample.ref or not _are_same(plan.media, sample.media):
        what = "media are" if plan.ref == sample.ref else "ref is"
        raise PlanFaultError(
            f"its {what} not the sample's, which a resumed run fetches; leave media and ref as they are"
        )
    is_open = False
    for number, segment in enumerate(plan.segments):
        if not isinstance(segment, Segment):
            raise PlanFaultError(f"segment {number} is {type(segment).__name__}, not a Segment")
        where = f"segment {number} ({segment.kind!s})"
        _check_segment(segment, where, plan, tools)
        if segment.split_start == is_open:
            how = "starts a split inside another" if is_open else "is of a split that no segment starts"
            raise PlanFaultError(f"{where} {how}")
        is_open = not segment.split_end
    if is_open:
        raise PlanFaultError("the last segment ends no split")


def _are_same(media: Sequence[object], own: Sequence[object]) -> bool:
    return media is own or (len(media) == len(own) and all(a is b for a, b in zip(media, own, strict=True)))


def _check_segment(segment: Segment, where: str, plan: SamplePlan, tools: PlanTools) -> None:
    if not isinstance(segment.kind, Kind):
        raise PlanFaultError(
            f"{where}: its kind is {type(segment.kind).__name__}; take one of bagel_wds.records.Kind"
        )
    if segment.kind is Kind.TEXT:
        _check_ids(segment.token_ids, where, tools)
        inner = len(segment.token_ids)
    else:
        _check_place(segment.view, len(plan.views), f"{where} shows view", "the plan has")
        inner = _count_patches(segment, plan.views[segment.view], where, plan, tools)
    if segment.num_tokens != inner + 2:
        what = "token ids" if segment.kind is Kind.TEXT else "patches"
        raise PlanFaultError(
            f"{where}: num_tokens={segment.num_tokens}; {inner} {what} and the two around them are {inner + 2}"
        )


def _check_ids(ids: Sequence[int], where: str, tools: PlanTools) -> None:
    for kind in set(map(type, ids)):
        if not issubclass(kind, Integral):
            raise PlanFaultError(f"{where}: a token id is {kind.__name__}, not an integer")
    if ids and min(ids) < 0:
        raise PlanFaultError(f"{where}: the token id {min(ids)} is below 0")
    # What lies between is in the model's table too, if not in the tokenizer.
    if ids and tools.has_id is not None and not tools.has_id(max(ids)):
        raise PlanFaultError(f"{where}: the tokenizer has no token id {max(ids)}")


def _count_patches(segment: Segment, view: View, where: str, plan: SamplePlan, tools: PlanTools) -> int:
    """Patches of the view that a segment shows."""
    if view.kind is not segment.kind:
        raise PlanFaultError(f"{where} shows view {segment.view}, which is a {view.kind!s}")
    if view.kind not in tools.resize:
        raise PlanFaultError(f"{where}: group {tools.group!r} has no transform for its picture")
    _check_place(view.medium, len(plan.media), f"{where} shows medium", "the sample has")
    pictures = len(plan.media[view.medium])
    _check_place(view.frame, pictures, f"{where} shows, of medium {view.medium}, frame", "there are")
    patch = tools.patch[view.kind]
    if any(edge < patch or edge % patch for edge in view.size_hw):
        height, width = view.size_hw
        raise PlanFaultError(f"{where}: {height} x {width} pixels are no whole number of patches of {patch}")
    rows, columns = patch_grid(view.size_hw, patch)
    return rows * columns


def _check_place(number: Any, count: int, what: str, whose: str) -> None:
    if not isinstance(number, Integral) or not 0 <= int(number) < count:
        raise PlanFaultError(f"{what} {number!r}; {whose} {count}, counted from 0")
