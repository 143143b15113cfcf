"""Upstream's dataset classes give upstream's samples with upstream's draws, bit for bit, over raw files."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from golden_data import draws_made, load_json, sha256
from golden_raw import golden_dataset

from bagel_wds import NoUsableSampleError
from bagel_wds.rng import CallOrderDraws

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = {family: load_json(f"samples/{family}/cases.json") for family in ("t2i", "edit", "vlm")}
RUNS = [(family, run) for family, cases in FAMILIES.items() for run in cases["runs"]]
STREAMS = [(family, stream) for family, cases in FAMILIES.items() for stream in cases["streams"]]


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample in the terms of the golden files."""
    images = [[list(image.shape), sha256(image)] for image in sample["image_tensor_list"]]
    names = ("num_tokens", "sequence_plan", "text_ids_list")
    return {**{name: sample[name] for name in names}, "images": images}


def expected(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "images": [[image["shape"], image["sha256"]] for image in sample["images"]]}


def replayed(seeded: int, log: list[dict[str, Any]]) -> CallOrderDraws:
    """Generators behind the draws of a log."""
    draws = CallOrderDraws(seeded)
    for entry in draws_made(log):
        match entry["fn"]:
            case "random.random":
                assert draws.random("") == entry["value"]
            case "random.choice":
                assert draws.choice(entry["n"], "") == entry["index"]
            case "np.random.randint":
                assert draws.randint(entry["low"], entry["high"], "") == entry["value"]
            case "np.random.permutation":
                assert list(draws.permutation(entry["n"], "")) == entry["value"]
    return draws


@pytest.fixture(autouse=True)
def _generators() -> Any:
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_on_its_own(family: str, tmp_path: Path) -> None:
    runs = [run for of, run in RUNS if of == family]
    for number, run in enumerate(runs):
        dataset = golden_dataset(family, [run["row"]], tmp_path / f"{number}")
        seed(run["seed"])
        if run["result"] != "sample":
            # Upstream looks for a usable row for ever, or dies.
            with pytest.raises(NoUsableSampleError, match="no usable sample in a whole pass"):
                next(iter(dataset))
            continue

        sample = next(iter(dataset))

        assert plain(sample) == expected(run["sample"]), run["row"]
        draws = replayed(run["seed"], run["draws"])
        assert random.getstate() == draws.python.getstate(), run["row"]
        assert np.random.randn() == draws.normal(""), run["row"]
    assert {run["result"] for run in runs} >= {"sample", "skipped"} - (
        {"skipped"} if family == "edit" else set()
    )


@pytest.mark.parametrize(
    ("family", "stream"), STREAMS, ids=[f"{family}-{n}" for n, (family, _) in enumerate(STREAMS)]
)
def test_stream_of_rows(family: str, stream: dict[str, Any], tmp_path: Path) -> None:
    order = stream["row_order"]
    dataset = golden_dataset(family, order, tmp_path)
    seed(stream["seed"])
    samples = iter(dataset)

    for golden in stream["samples"]:
        sample = next(samples)
        assert plain(sample) == expected(golden["sample"])
        origin = sample["data_indexes"]
        position = origin["data_indexes"]
        assert order[position if family == "vlm" else position[-1]] == golden["row"]
        assert (origin["worker_id"], origin["dataset_name"]) == (0, dataset.dataset_name)
        assert family == "vlm" or position[:-1] == {"t2i": [0, 0], "edit": [0]}[family]
        assert dataset.state_dict()["data_status"][0] == position

    assert random.random() == stream["rng_after"]["python_next_random"]
    assert np.random.randn() == stream["rng_after"]["numpy_next_randn"]
