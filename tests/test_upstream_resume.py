"""Under `fidelity="upstream"` a run goes on from any batch with the very batches that an unbroken one gives."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from golden_data import tokenizer
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_info
from test_datasets import digest
from upstream_corpus import BUDGETS, THREE, mixture, write_corpus

from bagel_wds import BagelDatasetConfig, ConfigError, PackedDataset, PackedLoader, collate_wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    raw = write_corpus(tmp_path_factory.mktemp("raw"))
    return {
        **raw,
        "unified_edit": {**raw["unified_edit"], **foreign_info(tmp_path_factory.mktemp("s"))["unified_edit"]},
    }


TIGHT = {**BUDGETS, "expected_num_tokens": 480, "max_num_tokens": 500, "prefer_buffer_before": 120}
"""Budgets under which samples wait."""


def build(info: dict[str, Any], *, shards: bool = False, workers: int = 0, **arguments: Any) -> PackedDataset:
    groups = mixture(*THREE)
    if shards:
        # The edits come from shards, the others from raw files.
        groups["unified_edit"]["dataset_names"] = MIXTURE["unified_edit"]["dataset_names"]
        del groups["unified_edit"]["num_used_data"]
    config = BagelDatasetConfig(
        grouped_datasets=groups,
        dataset_info=info,
        **{"fidelity": "upstream", **TIGHT, **arguments.pop("settings", {})},
    )
    return config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, workers, global_seed=5, **arguments)


def digests(batches: Iterable[Any], count: int) -> list[str]:
    return [digest(batch if isinstance(batch, dict) else batch.to_dict()) for batch in islice(batches, count)]


@pytest.mark.parametrize("shards", [False, True])
def test_goes_on_from_every_batch(info: dict[str, Any], *, shards: bool) -> None:
    unbroken = digests(build(info, shards=shards), 14)
    assert len(set(unbroken)) == 14
    dataset = build(info, shards=shards)
    batches, waited = iter(dataset), 0
    for number in range(1, 11):
        next(batches)
        state = json.loads(json.dumps(dataset.state_dict()))
        waited += len(state["streams"]["0"]["call_order"]["buffer"])
        resumed = build(info, shards=shards)
        resumed.load_state_dict(state)

        assert digests(resumed, 3) == unbroken[number : number + 3]
        assert len(json.dumps(state)) < 40_000
    # Samples did wait in the buffer.
    assert waited > 5


def test_loader_of_two_workers_goes_on_after_any_number_of_batches(info: dict[str, Any]) -> None:
    unbroken = digests(
        PackedLoader(build(info, workers=2), num_workers=2, multiprocessing_context="fork"), 12
    )
    # After three, the next batch is the second worker's; the first of the new workers makes it.
    first = PackedLoader(build(info, workers=2), num_workers=2, multiprocessing_context="fork")
    assert digests(first, 3) == unbroken[:3]
    state = json.loads(json.dumps(first.state_dict()))
    second = PackedLoader(build(info, workers=2), num_workers=2, multiprocessing_context="fork")
    second.load_state_dict(state)

    assert digests(second, 7) == unbroken[3:10]
    assert second.stats["groups"]["t2i_pretrain"]["packed"] > 0


def test_goes_on_with_as_many_workers_alone(info: dict[str, Any]) -> None:
    dataset = build(info)
    next(iter(dataset))
    two = build(info, workers=2)
    with pytest.raises(ConfigError, match="num_workers=2 must divide the 1 stream of"):
        two.load_state_dict(dataset.state_dict())
    one = PackedLoader(build(info, workers=1), num_workers=1, multiprocessing_context="fork")
    one.load_state_dict({**dataset.state_dict(), "next_batch": 1})
    with pytest.raises(ConfigError, match="state is of 0 workers, and the DataLoader has 1"):
        next(iter(one))
    other = BagelDatasetConfig(grouped_datasets=mixture(*THREE), dataset_info=info, **BUDGETS)
    with pytest.raises(ConfigError, match="fidelity was upstream and is None"):
        other.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, 5).load_state_dict(dataset.state_dict())


def test_data_status_of_upstream_is_where_the_groups_go_on(info: dict[str, Any]) -> None:
    status = {"t2i_pretrain": [[2, 1, 0]], "unified_edit": [[4, 0]], "vlm_sft": [6]}
    plain, moved = build(info), build(info, data_status=status)

    for group, own in plain.class_datasets.items():
        own.set_data_status(status[group])
        behind = moved.class_datasets[group]
        assert behind.state_dict() == {"data_status": status[group]}
    assert digests(moved, 5) == digests(plain, 5)
    assert digests(moved, 5) != digests(build(info), 5)
    first = next(iter(moved))["batch_data_indexes"][0]
    assert (first["dataset_name"], first["data_indexes"]) == ("t2i_pretrain", [2, 1, 1])


def test_data_status_that_means_nothing_is_refused(info: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="data_status speaks of group 'unified_edit', which is read from shards"
    ):
        build(info, shards=True, data_status={"unified_edit": [[0, 0]]})
    with pytest.raises(ConfigError, match="data_status is list"):
        build(info, data_status=[[0, 0]])
    with pytest.raises(ConfigError, match='needs fidelity="upstream"'):
        build(info, data_status={}, settings={"fidelity": "corrected"})
    with pytest.raises(ConfigError, match="knows no end of an epoch"):
        build(info).finite(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_goes_on(info: dict[str, Any], workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def load() -> Any:
        return stateful.StatefulDataLoader(
            build(info, workers=workers),
            batch_size=1,
            num_workers=workers,
            collate_fn=collate_wrapper(),
            multiprocessing_context="fork" if workers else None,
        )

    unbroken = digests(load(), 8)
    first = load()
    assert digests(first, 3) == unbroken[:3]
    second = load()
    second.load_state_dict(first.state_dict())

    assert digests(second, 5) == unbroken[3:]
