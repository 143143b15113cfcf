"""`PackedDataset` over raw files and over a user's classes: upstream's batches, bit for bit."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from golden_batches import assert_batch, config_of
from golden_data import load_arrays, load_json, tokenizer
from golden_raw import golden_files, keep_order, write_rows

from bagel_wds import DATASET_REGISTRY, PackedDataset, UnifiedEditIterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = [case["case"] for case in load_json("packing/index.json")["cases"]]


def build(golden: dict[str, Any], **settings: Any) -> PackedDataset:
    """A dataset whose iteration starts with the case's seed, whatever the rank and worker that it was recorded on."""
    return config_of(golden, **settings).build(
        tokenizer(), golden["special_tokens"], 0, 1, 0, golden["iter_seed"]
    )


def group_of(group: dict[str, Any], golden: dict[str, Any]) -> dict[str, Any]:
    entry = {
        "dataset_names": [group["family"]],
        "image_transform_args": golden["vlm_transform" if group["family"] == "vlm" else "transform"],
        "weight": group["weight"],
        "is_mandatory": group["is_mandatory"],
    }
    more = {
        "edit": {"vit_image_transform_args": golden["vit_transform"]},
        "vlm": {"frame_sampler_args": golden["frame_sampler"]},
    }
    return {**entry, **more.get(group["family"], {})}


def raw_info(golden: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The rows of a golden pipeline case as raw files, and where they lie."""
    info: dict[str, Any] = {}
    for group in golden["groups"]:
        place = write_rows(group["family"], group["row_order"], folder / group["family"])
        entry = {"data_dir": str(place)}
        if group["family"] == "vlm":
            entry = {"jsonl_path": str(place), "data_dir": f"{golden_files('vlm')}/"}
        info[group["name"]] = {group["family"]: entry}
    return info


def pipeline_case(case: str, folder: Path) -> PackedDataset:
    golden = load_json(f"pipeline/{case}/config.json")
    info = raw_info(golden, folder)
    groups = {group["name"]: group_of(group, golden) for group in golden["groups"]}
    dataset = build(golden, grouped_datasets=groups, dataset_info=info)
    lines = info["vlm_sft"]["vlm"]
    keep_order(dataset.class_datasets["vlm_sft"], Path(lines["jsonl_path"]), lines["data_dir"])
    return dataset


@pytest.mark.parametrize("case", ["train_like", "flex_tight"])
def test_golden_rows_in_raw_files_give_golden_batches(case: str, tmp_path: Path) -> None:
    dataset = pipeline_case(case, tmp_path)
    expected = load_json(f"pipeline/{case}/batches.json")["batches"]
    arrays = load_arrays(f"pipeline/{case}/batches.npz")

    for number, batch in enumerate(islice(dataset, len(expected))):
        assert_batch(batch, expected[number], arrays)
    assert number == 7


def process_generators() -> Any:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()


class OwnEdits(UnifiedEditIterableDataset):
    """A user's class that does what upstream's does: its pictures are decoded as it goes."""


@pytest.mark.parametrize("case", ["train_like", "flex_tight"])
def test_users_class_beside_ours_gives_golden_batches(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASET_REGISTRY, "unified_edit", OwnEdits)
    before = process_generators()
    dataset = pipeline_case(case, tmp_path)
    expected = load_json(f"pipeline/{case}/batches.json")["batches"]
    arrays = load_arrays(f"pipeline/{case}/batches.npz")

    assert type(dataset.class_datasets["unified_edit"]) is OwnEdits
    for number, batch in enumerate(islice(dataset, len(expected))):
        assert_batch(batch, expected[number], arrays)
    assert process_generators() == before


class Prepared:
    """A user's class that gives the prepared samples of a golden packing case, over and over."""

    def __init__(self, dataset_name: str, case: str, number: int, **_: Any) -> None:
        self.case, self.number = case, number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = load_json(f"packing/{self.case}/samples.json")["samples"]
        own = [sample for sample in samples if sample["group"] == self.number]
        while True:
            for sample in own:
                yield prepared(self.case, sample)


def prepared(case: str, sample: dict[str, Any]) -> dict[str, Any]:
    arrays = load_arrays(f"packing/{case}/samples.npz")
    return {
        "sequence_plan": [dict(entry) for entry in sample["sequence_plan"]],
        "text_ids_list": [list(ids) for ids in sample["text_ids_list"]],
        "image_tensor_list": [
            torch.from_numpy(arrays[image["key"]]) for image in sample["image_tensor_list"]
        ],
        "num_tokens": sample["num_tokens"],
        "data_indexes": sample["data_indexes"],
    }


def packing_dataset(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedDataset:
    golden = load_json(f"packing/{case}/config.json")
    groups, info = {}, {}
    for number, group in enumerate(golden["groups"]):
        monkeypatch.setitem(DATASET_REGISTRY, group["name"], Prepared)
        groups[group["name"]] = {
            "dataset_names": ["prepared"],
            "weight": group["weight"],
            "is_mandatory": group["is_mandatory"],
            "case": case,
            "number": number,
        }
        info[group["name"]] = {"prepared": {"data_dir": str(tmp_path)}}
    return build(golden, grouped_datasets=groups, dataset_info=info)


@pytest.mark.parametrize("case", CASES)
def test_prepared_samples_of_a_users_class_give_golden_batches(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = packing_dataset(case, tmp_path, monkeypatch)
    expected = load_json(f"packing/{case}/batches.json")["batches"]

    for number, batch in enumerate(islice(dataset, len(expected))):
        assert_batch(batch, expected[number], load_arrays(f"packing/{case}/batches.npz"))
    assert number == len(expected) - 1


def loop(dataset: PackedDataset, golden: dict[str, Any]) -> Iterator[dict[str, Any]]:  # noqa: C901 - a user's loop
    """A loop of one's own over a dataset's public parts: the rules of `tests/golden/README.md`, with process-wide draws."""
    groups = [iter(own) for own in dataset.class_datasets.values()]
    weights = np.cumsum([group["weight"] for group in golden["groups"]])
    buffer: list[dict[str, Any]] = []
    status, indexes = dataset.set_sequence_status(), []

    def need(sample: dict[str, Any]) -> int:
        return int(sample["num_tokens"]) + 2 * len(sample["sequence_plan"])

    while True:
        if status["curr"] == 0:
            for group, samples in zip(golden["groups"], groups, strict=True):
                if group["is_mandatory"]:
                    sample = next(own for own in samples if need(own) < golden["max_num_tokens_per_sample"])
                    status = dataset.pack_sequence(sample, status)
                    indexes.append(sample["data_indexes"])
        from_buffer = status["curr"] < golden["prefer_buffer_before"] and bool(buffer)
        if from_buffer:
            sample = buffer.pop(0)
        else:
            pick = random.random()
            sample = next(groups[next(i for i, top in enumerate(weights) if pick < top / weights[-1])])
        if need(sample) > golden["max_num_tokens_per_sample"]:
            continue
        if status["curr"] + need(sample) <= golden["max_num_tokens"]:
            status = dataset.pack_sequence(sample, status)
            indexes.append(sample["data_indexes"])
            if status["curr"] < golden["expected_num_tokens"]:
                continue
        elif len(buffer) < golden["max_buffer_size"] and not from_buffer:
            buffer.append(sample)
            continue
        yield {**dataset.to_tensor(status), "batch_data_indexes": indexes}
        status, indexes = dataset.set_sequence_status(), []


@pytest.mark.parametrize("case", CASES)
def test_samples_packed_one_by_one_give_golden_batches(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, golden = packing_dataset(case, tmp_path, monkeypatch), load_json(f"packing/{case}/config.json")
    trace = load_json(f"packing/{case}/trace.json")["batches"]
    expected = load_json(f"packing/{case}/batches.json")["batches"]
    before = random.getstate(), np.random.get_state()
    random.seed(golden["iter_seed"])
    np.random.seed(golden["iter_seed"])
    try:
        for number, batch in enumerate(islice(loop(dataset, golden), len(expected))):
            assert_batch(batch, expected[number], load_arrays(f"packing/{case}/batches.npz"))
        python, numpy = random.random(), np.random.randn()
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    assert python == trace[-1]["rng_after"]["python_next_random"]
    assert numpy == trace[-1]["rng_after"]["numpy_next_randn"]


def test_packing_leaves_a_sample_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = packing_dataset("default_mix", tmp_path, monkeypatch)
    first = load_json("packing/default_mix/samples.json")["samples"][0]
    sample, same = prepared("default_mix", first), prepared("default_mix", first)

    status = dataset.pack_sequence(sample, dataset.set_sequence_status())
    once, again = dataset.to_tensor(status), dataset.to_tensor(status)

    assert sample["text_ids_list"] == same["text_ids_list"]
    assert len(sample["image_tensor_list"]) == len(same["image_tensor_list"])
    assert list(once) == list(again)
    assert once["sample_lens"] == again["sample_lens"]
