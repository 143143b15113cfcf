"""The recipes plan upstream's samples with upstream's draws, row by row and in streams, and load upstream's pixels."""

from __future__ import annotations

from typing import Any

import pytest
from golden_data import LoggedDraws, draws_made, load_json, sha256
from golden_rows import plan_tools, rows_of, transforms_of, view_loader

from bagel_wds.decode import decode_sample
from bagel_wds.errors import BadSample
from bagel_wds.pixels import Shown, allot, write_pixels
from bagel_wds.planners import PLANNERS
from bagel_wds.records import Kind, SamplePlan

FAMILIES = {family: load_json(f"samples/{family}/cases.json") for family in ("t2i", "edit", "vlm")}
ROWS = {family: rows_of(family) for family in FAMILIES}
TOOLS = {
    family: plan_tools(family, transforms_of(family, cases), cases.get("frame_sampler"))
    for family, cases in FAMILIES.items()
}


def plan_row(family: str, row: int, draws: LoggedDraws) -> SamplePlan:
    return PLANNERS[family](decode_sample(ROWS[family][row], upright=False), TOOLS[family], draws)


def as_upstream(family: str, plan: SamplePlan) -> dict[str, Any]:
    """A plan in the terms of the golden files."""
    load = view_loader(family, FAMILIES[family])
    entries = [
        {
            "type": str(segment.kind),
            "enable_cfg": int(segment.enable_cfg),
            "loss": int(segment.loss),
            "special_token_loss": int(segment.special_token_loss),
            "special_token_label": segment.special_token_label,
        }
        for segment in plan.segments
    ]
    views = list(dict.fromkeys(plan.views))
    _, places = allot([view.size_hw for view in views])
    assert load.fill([plan], [{view: [place] for view, place in zip(views, places, strict=True)}]) == [None]
    tensors = {
        view: write_pixels([Shown(place, load.table(plan.group, view.kind))], [], 14)["padded_images"][0]
        for view, place in zip(views, places, strict=True)
    }
    return {
        "num_tokens": plan.estimate - 2 * len(plan.segments),
        "sequence_plan": entries,
        "text_ids_list": [list(segment.token_ids) for segment in plan.segments if segment.kind is Kind.TEXT],
        "images": [[list(tensors[view].shape), sha256(tensors[view])] for view in plan.views],
    }


def expected(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "images": [[image["shape"], image["sha256"]] for image in sample["images"]]}


RUNS = [(family, run) for family, cases in FAMILIES.items() for run in cases["runs"]]


@pytest.mark.parametrize(
    ("family", "run"), RUNS, ids=lambda value: value if isinstance(value, str) else str(value["row"])
)
def test_row_on_its_own(family: str, run: dict[str, Any]) -> None:
    draws = LoggedDraws(run["seed"])
    if run["result"] != "sample":
        # "raises" is a row at which upstream's reader dies; ours drops it.
        with pytest.raises(BadSample):
            plan_row(family, run["row"], draws)
        return

    plan = plan_row(family, run["row"], draws)

    assert as_upstream(family, plan) == expected(run["sample"])
    assert draws.log == draws_made(run["draws"])


STREAMS = [(family, stream) for family, cases in FAMILIES.items() for stream in cases["streams"]]


@pytest.mark.parametrize(
    ("family", "stream"), STREAMS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_stream_of_rows(family: str, stream: dict[str, Any]) -> None:
    draws = LoggedDraws(stream["seed"])
    order, place = stream["row_order"], 0
    for sample in stream["samples"]:
        plan = None
        while plan is None:
            row = order[place % len(order)]
            place += 1
            try:
                plan = plan_row(family, row, draws)
            except BadSample:
                continue
        assert row == sample["row"]
        assert draws.take_log() == draws_made(sample["draws"])
        assert as_upstream(family, plan) == expected(sample["sample"])
    assert draws.peek().items() <= stream["rng_after"].items()
