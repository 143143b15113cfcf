"""A dataset class that was written for upstream runs unchanged, beside ordinary groups, under both fidelities."""

from __future__ import annotations

import json
import logging
import math
import random
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from golden_data import tokenizer
from PIL import ImageFile
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_info
from upstream_corpus import BUDGETS, VAE, VIT, mixture, write_corpus
from upstream_subclass import GROUP, MyEdits

from bagel_wds import (
    DATASET_REGISTRY,
    BagelDatasetConfig,
    ConfigError,
    DistributedIterableDataset,
    NoUsableSampleError,
    PackedDataset,
    PackedLoader,
    T2IIterableDataset,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The user's group in raw files, the others in shards."""
    raw = write_corpus(tmp_path_factory.mktemp("raw"))
    return {**foreign_info(tmp_path_factory.mktemp("shards")), GROUP: raw[GROUP]}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASET_REGISTRY, GROUP, MyEdits)


def build(info: dict[str, Any], groups: dict[str, Any], workers: int = 0, **settings: Any) -> PackedDataset:
    config = BagelDatasetConfig(
        grouped_datasets=groups, dataset_info=info, **{**BUDGETS, "shuffle_samples": 4, **settings}
    )
    return config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, workers, global_seed=5)


def beside(*names: str) -> dict[str, Any]:
    """The user's group and some in shards."""
    return {**mixture(GROUP), **{name: MIXTURE[name] for name in names}}


def positions(batches: list[dict[str, Any]], group: str) -> list[list[int]]:
    origins = [origin for batch in batches for origin in batch["batch_data_indexes"]]
    return [origin["data_indexes"] for origin in origins if origin["dataset_name"] == group]


def process_generators() -> Any:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()


def test_its_samples_are_packed_beside_those_of_shards_and_none_is_lost(info: dict[str, Any]) -> None:
    before = process_generators()
    dataset = build(info, beside("t2i_pretrain", "vlm_sft"), max_buffer_size=0)

    batches = list(islice(iter(dataset), 12))

    assert process_generators() == before
    assert all(batch["sequence_length"] <= BUDGETS["max_num_tokens"] for batch in batches)
    assert {origin["dataset_name"] for batch in batches for origin in batch["batch_data_indexes"]} == {
        GROUP, "t2i_pretrain", "vlm_sft",
    }  # fmt: skip
    found = positions(batches, GROUP)
    # In the order of the class, again from the start behind the last; without the rows that its `parse_row` passes over.
    expected = [
        [place, row]
        for place, (path, row_group) in enumerate(class_of(info).data_paths_per_rank)
        for row, number in enumerate(pq.ParquetFile(path).read_row_group(row_group)["number"].to_pylist())
        if number % 10 != 1
    ]
    assert len(expected) == 15
    assert found == (6 * expected)[: len(found)]
    assert len(found) > 8
    assert dataset.stats()["groups"][GROUP]["packed"] == len(found)


def class_of(info: dict[str, Any]) -> Any:
    dataset = build(info, beside()).class_datasets[GROUP]
    assert type(dataset) is MyEdits
    return dataset


def test_its_pictures_stand_in_the_batch_as_its_transforms_made_them(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run takes cut files for the class, as upstream does.
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    [batch] = islice(build(info, beside(), vae_cond_dropout_prob=0.0, vit_cond_dropout_prob=0.0), 1)
    samples = {
        tuple(sample["data_indexes"]["data_indexes"]): sample for sample in islice(iter(class_of(info)), 20)
    }
    shown = [samples[tuple(place)] for place in positions([batch], GROUP)]

    tensors = [
        image
        for sample in shown
        for entry, image in zip(
            [entry for entry in sample["sequence_plan"] if entry["type"] != "text"],
            sample["image_tensor_list"],
            strict=True,
        )
        if entry["type"] == "vae_image"
    ]
    assert len(tensors) == len(batch["padded_images"]) >= 3
    for padded, tensor in zip(batch["padded_images"], tensors, strict=True):
        _, height, width = tensor.shape
        assert torch.equal(padded[:, :height, :width], tensor)
        assert not padded[:, height:].any()
        assert not padded[:, :, width:].any()


def test_workers_share_out_its_rows(info: dict[str, Any]) -> None:
    dataset = build(info, beside("t2i_pretrain"), workers=2)

    batches = [batch.to_dict() for batch in islice(PackedLoader(dataset, num_workers=2), 12)]

    own = [
        origin
        for batch in batches
        for origin in batch["batch_data_indexes"]
        if origin["dataset_name"] == GROUP
    ]
    assert {origin["worker_id"] for origin in own} == {0, 1}
    assert {origin["dataset_name"] for batch in batches for origin in batch["batch_data_indexes"]} == {
        GROUP,
        "t2i_pretrain",
    }


@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_state_says_so_and_the_other_groups_go_on_exactly(
    info: dict[str, Any], packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    def loader() -> PackedLoader:
        return PackedLoader(build(info, beside("t2i_pretrain"), packing=packing), epochs=1)

    first = loader()
    before = list(islice(first, 4))
    state = json.loads(json.dumps(first.state_dict()))
    second = loader()
    with caplog.at_level(logging.WARNING):
        second.load_state_dict(state)
    after = list(second)

    assert state["fingerprint"]["classes"] == {GROUP: "upstream_subclass.MyEdits"}
    assert "starts anew" in caplog.text
    batches = [batch.to_dict() for batch in [*before, *after] if not batch.is_padding]
    # Each sample of the epoch exactly once, before the break or behind it.
    found = sorted(map(tuple, positions(batches, "t2i_pretrain")))
    assert len(found) == len(set(found)) == 16
    assert positions(batches, GROUP)


def test_levels_travel_where_no_sample_of_its_is_in_the_pack(info: dict[str, Any]) -> None:
    plain = build(info, beside("t2i_pretrain"), max_buffer_size=0)
    levels = plain.with_transport("uint8")

    kinds = set()
    for one, other in zip(islice(plain, 12), islice(levels, 12), strict=True):
        kinds.add("pixels" in other)
        pixels = other["pixels"].finish() if "pixels" in other else other
        assert torch.equal(pixels["padded_images"], one["padded_images"])
        assert one["batch_data_indexes"] == other["batch_data_indexes"]
    assert kinds >= {False}


class Fails(MyEdits):  # type: ignore[misc]
    """Cannot read most rows."""

    only = 2

    def parse_row(self, row: Any) -> dict[str, Any]:
        if row["number"] % 10 != self.only:
            raise KeyError("colour")
        sample: dict[str, Any] = super().parse_row(row)
        return sample


def test_row_that_it_cannot_read_is_told_of_and_counted(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(DATASET_REGISTRY, GROUP, Fails)
    dataset = build(info, beside())

    with caplog.at_level(logging.WARNING):
        batches = list(islice(dataset, 4))

    told = next(
        record.getMessage() for record in caplog.records if "parquet_row_parse" in record.getMessage()
    )
    assert "Fails.parse_row: KeyError: 'colour'" in told
    assert "row 0 of row group" in told
    assert ".parquet" in told
    counts = dataset.stats()["groups"][GROUP]
    assert counts["dropped"]["row_invalid"] >= 5
    assert {place[1] for place in positions(batches, GROUP)} == {0}


def test_class_of_which_no_row_can_be_read_is_an_error(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASET_REGISTRY, GROUP, Fails)
    monkeypatch.setattr(Fails, "only", 77)

    with pytest.raises(
        NoUsableSampleError, match=r"my_edits' \(Fails\): no usable sample .*row_invalid 18.*KeyError"
    ):
        next(iter(build(info, beside())))


class Own(DistributedIterableDataset):
    """Has an iteration of its own, which ends in an error."""

    def __init__(self, dataset_name: str, data_dir_list: list[str], answer: int, **more: Any) -> None:
        super().__init__(dataset_name, more["local_rank"], more["world_size"], more["num_workers"])
        self.more, self.answer, self.data_dir_list = more, answer, data_dir_list

    def __iter__(self) -> Iterator[dict[str, Any]]:
        text = {
            "type": "text",
            "enable_cfg": 0,
            "loss": 1,
            "special_token_loss": 0,
            "special_token_label": None,
        }
        for number in range(3):
            drawn = random.randrange(100)
            yield {
                "sequence_plan": [text],
                "text_ids_list": [[self.answer] * 50],
                "image_tensor_list": [],
                "num_tokens": 50,
                "data_indexes": {"number": number, "drawn": drawn},
            }
        raise LookupError("no more of these")


def own_entry(**more: Any) -> dict[str, Any]:
    return {"dataset_names": ["edit"], "weight": 1, **more}


@pytest.mark.parametrize("fidelity", ["corrected", "upstream"])
def test_settings_of_its_own_reach_its_constructor_and_its_errors_say_whose_they_are(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fidelity: str
) -> None:
    monkeypatch.setitem(DATASET_REGISTRY, "mine", Own)
    settings = {"mine": own_entry(answer=42, image_transform_args=VAE, vit_image_transform_args=VIT)}
    dataset = build(
        {"mine": info[GROUP]}, settings, fidelity=fidelity, expected_num_tokens=100, max_num_tokens=110
    )
    own = dataset.class_datasets["mine"]
    batches = iter(dataset)

    batch = next(batches)

    assert batch["packed_label_ids"].tolist()[:50] == [42] * 50
    assert [origin["number"] for origin in batch["batch_data_indexes"]] == [0, 1]
    assert batch["batch_data_indexes"] == next(iter(dataset))["batch_data_indexes"]
    assert sorted(own.more) == [
        "data_status", "local_rank", "num_workers", "parquet_info", "tokenizer", "transform", "vit_transform", "world_size",
    ]  # fmt: skip
    assert own.more["transform"].stride == 16
    assert own.more["vit_transform"].stride == 14
    with pytest.raises(LookupError, match="no more of these") as caught:
        next(batches)
    assert "raised by Own, which reads group 'mine', after 3 samples" in str(caught.value.__notes__)


def test_what_cannot_work_is_refused_when_the_dataset_is_built(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASET_REGISTRY, "mine", Own)
    mine = {"mine": info[GROUP]}
    for match, groups, where in (
        ("Own cannot be built with what the mixture and the dataset info say", {"mine": own_entry()}, mine),
        ("weight=-1 must be a number from 0 on", {"mine": own_entry(weight=-1, answer=1)}, mine),
        ("has no dataset_names", {"mine": own_entry(dataset_names=[], answer=1)}, mine),
        (
            r"\['nothing'\] is missing; the group has edit",
            {"mine": own_entry(dataset_names=["nothing"], answer=1)},
            mine,
        ),
        (
            "has no data_dir, but shards",
            {"mine": own_entry(answer=1)},
            {"mine": {"edit": {"shards": "x.tar"}}},
        ),
        ("there is no nowhere", {"mine": own_entry(answer=1)}, {"mine": {"edit": {"data_dir": "nowhere"}}}),
        ("group 'other' is none of .*DATASET_REGISTRY", {"other": own_entry(image_transform_args=VAE)}, mine),
    ):
        with pytest.raises(ConfigError, match=match):
            build(where, groups)
    with pytest.raises(ConfigError, match="no group of mine has an end that is known"):
        build(mine, {"mine": own_entry(answer=1)}).finite(1)


@pytest.mark.parametrize("fidelity", ["corrected", "upstream"])
def test_group_without_a_weight_is_drawn_as_others_are_or_it_is_told_of(
    info: dict[str, Any], fidelity: str, caplog: pytest.LogCaptureFixture
) -> None:
    groups = beside("vlm_sft")
    del groups[GROUP]["weight"]

    batches = list(islice(build(info, groups, fidelity=fidelity), 8))

    told = f"group {GROUP!r} has weight 0, as upstream takes it where none is named" in caplog.text
    assert (len(positions(batches, GROUP)) > 5, told) == (fidelity == "corrected", fidelity == "upstream")


def test_group_of_weight_0_is_refused(info: dict[str, Any]) -> None:
    groups = beside("vlm_sft")
    groups[GROUP]["weight"] = 0

    with pytest.raises(ConfigError, match=f"group '{GROUP}' has weight 0 and is not mandatory"):
        build(info, groups)


class Leaves(MyEdits):  # type: ignore[misc]
    """Counts what it leaves out by words of ours, and of its own."""

    def parse_row(self, row: Any) -> dict[str, Any]:
        if row["number"] % 10 != 2:
            self._log_drop("too_few_images" if row["number"] % 2 else "dull", "%s", row["number"])
            return {}
        sample: dict[str, Any] = super().parse_row(row)
        return sample


def test_drops_are_counted_by_the_words_of_the_class(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASET_REGISTRY, GROUP, Leaves)
    dataset = build(info, beside())

    list(islice(dataset, 2))

    dropped = dataset.stats()["groups"][GROUP]["dropped"]
    # Of each six rows, three have an odd number, and two of the others are not number 2.
    assert dropped["too_few_images"] > 2
    assert dropped["row_invalid"] > 2


class HandsOn(MyEdits):  # type: ignore[misc] # upstream's classes have no types
    """Knows one setting, and hands on the others."""

    def __init__(self, *args: Any, flavour: str, **others: Any) -> None:
        super().__init__(*args, **others)
        self.flavour = flavour


def test_a_constructor_that_hands_on_what_it_does_not_know_gets_what_its_bases_need(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASET_REGISTRY, GROUP, HandsOn)
    entry = {name: value for name, value in mixture(GROUP)[GROUP].items() if name != "num_used_data"}

    dataset = build(info, {GROUP: {**entry, "flavour": "salt"}})

    assert dataset.class_datasets[GROUP].flavour == "salt"
    assert next(iter(dataset))["sequence_length"] > 0


def test_a_group_that_is_not_read_in_upstreams_order_is_told_of(
    info: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    build(info, beside("t2i_pretrain"), fidelity="upstream")

    told = [record.message for record in caplog.records if "upstream's order" in record.message]
    assert [message[:24] for message in told] == ["group 't2i_pretrain' is n"[:24]]


def test_group_whose_samples_are_all_too_long_is_an_error(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Long(Own):
        """Never ends."""

        def __iter__(self) -> Iterator[dict[str, Any]]:
            first = next(super().__iter__())
            while True:
                yield first

    monkeypatch.setitem(DATASET_REGISTRY, "mine", Long)
    for fidelity, match in (("upstream", "10000 samples in a row are too long, the last of group 'mine' with 52 "),
                            ("corrected", "over_length 1000; the last was Long-999: 52 tokens; the most is 20")):  # fmt: skip
        dataset = build(
            {"mine": info[GROUP]},
            {"mine": own_entry(answer=1, is_mandatory=True)},
            fidelity=fidelity,
            max_num_tokens_per_sample=20,
        )
        with pytest.raises(NoUsableSampleError, match=match):
            next(iter(dataset))


def test_class_that_takes_the_place_of_ours_reads_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(T2IIterableDataset):
        """Says what ours says."""

    raw = write_corpus(tmp_path)
    entry = {
        "t2i_pretrain": {
            "dataset_names": ["t2i"],
            "image_transform_args": VAE,
            "num_used_data": [5],
            "weight": 1,
        }
    }
    monkeypatch.setitem(DATASET_REGISTRY, "t2i_pretrain", Short)

    dataset = build(raw, entry)

    assert type(dataset.class_datasets["t2i_pretrain"]) is Short
    assert {origin["dataset_name"] for origin in next(iter(dataset))["batch_data_indexes"]} == {
        "t2i_pretrain"
    }


def test_example_of_the_docs_runs_as_it_stands(info: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "upstream-classes.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.setitem(DATASET_REGISTRY, "before_after", None)
    exec(example, {"__name__": "example"})
    groups = {"before_after": mixture(GROUP)[GROUP]}

    batch = next(iter(build({"before_after": info[GROUP]}, groups, vae_cond_dropout_prob=0.0)))

    # A clean image and a noised one a sample, of which the second has loss.
    samples = len(batch["batch_data_indexes"])
    assert len(batch["padded_images"]) == 2 * samples > 2
    noised = batch["packed_timesteps"][batch["packed_timesteps"] > -math.inf]
    assert len(noised) == len(batch["mse_loss_indexes"]) < len(batch["packed_timesteps"])
