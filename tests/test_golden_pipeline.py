"""Rows to batches through the public stages: upstream's batches and draws, bit for bit."""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING, Any

import pytest
import webdataset as wds
from golden_batches import assert_batch, config_of
from golden_data import LoggedDraws, draws_made, load_arrays, load_json, tokenizer
from golden_rows import rows_of

from bagel_wds import stages

if TYPE_CHECKING:
    from collections.abc import Iterator


def group_settings(group: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "dataset_names": [group["family"]],
        "image_transform_args": config["vlm_transform" if group["family"] == "vlm" else "transform"],
        "weight": group["weight"],
        "is_mandatory": group["is_mandatory"],
    }
    if group["family"] == "edit":
        settings["vit_image_transform_args"] = config["vit_transform"]
    if group["family"] == "vlm":
        settings["frame_sampler_args"] = config["frame_sampler"]
    return settings


class Rows:
    """The rows of a group in their order, then again from the start; each is read only when it is asked for."""

    def __init__(self, family: str, order: list[int]) -> None:
        self.family = family
        self.order = order

    def __call__(self) -> Iterator[dict[str, Any]]:
        rows = rows_of(self.family)
        before = {"t2i": (0, 0), "edit": (0,), "vlm": ()}[self.family]
        for place in count():
            number = place % len(self.order)
            indexes = (*before, number) if before else number
            yield {**rows[self.order[number]], "__data_indexes__": indexes}


@pytest.mark.parametrize("case", ["train_like", "flex_tight"])
def test_batches(case: str) -> None:
    golden = load_json(f"pipeline/{case}/config.json")
    arrays = load_arrays(f"pipeline/{case}/batches.npz")
    config = config_of(
        golden, grouped_datasets={group["name"]: group_settings(group, golden) for group in golden["groups"]}
    )
    draws = LoggedDraws(golden["iter_seed"])
    text = tokenizer()
    groups = {
        group["name"]: wds.DataPipeline(
            Rows(group["family"], group["row_order"]),
            stages.decode(config, group["name"]),
            stages.plan(config, group["name"], text, draws=draws),
        )
        for group in golden["groups"]
    }
    batches = wds.DataPipeline(
        stages.mix(groups, config, draws=draws),
        stages.pack(config, draws=draws),
        stages.materialize(config, golden["special_tokens"]),
    )
    expected = load_json(f"pipeline/{case}/batches.json")["batches"]
    trace = load_json(f"pipeline/{case}/trace.json")["batches"]

    for number, batch in enumerate(islice(batches, len(expected))):
        assert_batch(batch, expected[number], arrays)
        assert draws.take_log() == draws_made(trace[number]["rng_draws"])
        assert draws.peek().items() <= trace[number]["rng_after"].items()
    assert number == golden["batches"] - 1
