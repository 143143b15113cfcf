"""Beside NeMo AutoModel itself on one corpus: the same samples, plans and batches, bit for bit."""

from __future__ import annotations

import copy
import json
import random
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS
from torch.utils.data import DataLoader
from upstream_client import MULTIMODAL, NEEDS
from upstream_corpus import BUDGETS, THREE, VIT, mixture, write_corpus
from upstream_subclass import GROUP, make_class

import bagel_wds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytest.importorskip("nemo_automodel", reason=NEEDS)
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

SEED = 11


def upstream() -> Any:
    return import_module(MULTIMODAL)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_corpus(tmp_path_factory.mktemp("raw"))


def batches(
    module: Any,
    info: dict[str, Any],
    groups: tuple[str, ...],
    workers: int,
    rank: int,
    world_size: int,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """The batches of one of the two packages, out of a DataLoader."""
    config = module.BagelDatasetConfig(
        grouped_datasets=mixture(*groups), dataset_info=copy.deepcopy(info), **BUDGETS, **settings
    )
    dataset = config.build(
        tokenizer=tokenizer(),
        special_tokens=SPECIAL_TOKENS,
        rank=rank,
        world_size=world_size,
        num_workers=workers,
        global_seed=SEED,
    )
    yield from DataLoader(
        dataset,
        batch_size=1,
        num_workers=workers,
        collate_fn=only,
        multiprocessing_context="fork" if workers else None,
    )


def only(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The dict as the dataset gave it, keys in their order."""
    [batch] = batches
    return batch


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Equal in type, keys in their order, dtypes and every bit."""
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        assert ours.contiguous().numpy().tobytes() == theirs.contiguous().numpy().tobytes(), where
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for number, value in enumerate(theirs):
            assert_same(ours[number], value, f"{where}[{number}]")
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("use_flex", [False, True])
@pytest.mark.parametrize(("workers", "rank", "world_size"), [(0, 0, 1), (2, 0, 1), (2, 1, 2)])
def test_raw_files_give_the_same_batches(
    info: dict[str, Any], workers: int, rank: int, world_size: int, *, use_flex: bool
) -> None:
    theirs = batches(upstream(), info, THREE, workers, rank, world_size, use_flex=use_flex)
    ours = batches(bagel_wds, info, THREE, workers, rank, world_size, use_flex=use_flex, fidelity="upstream")

    seen = set()
    for number, (own, other) in enumerate(zip(islice(ours, 14), theirs, strict=False)):
        assert_same(own, other, f"batch {number}")
        seen |= {(origin["dataset_name"], origin["worker_id"]) for origin in own["batch_data_indexes"]}

    assert number == 13
    assert seen == {(name, worker) for name in THREE for worker in range(max(1, workers))}


@pytest.mark.parametrize("group", THREE)
def test_each_group_alone_gives_the_same_batches(info: dict[str, Any], group: str) -> None:
    theirs = batches(upstream(), info, (group,), 0, 0, 1, interpolate_pos=True)
    ours = batches(bagel_wds, info, (group,), 0, 0, 1, interpolate_pos=True, fidelity="upstream")

    for number, (own, other) in enumerate(zip(islice(ours, 6), theirs, strict=False)):
        assert_same(own, other, f"batch {number}")


def samples_of(module: Any, info: dict[str, Any], group: str) -> Any:
    """The dataset of a group, called by itself."""
    entry = mixture(group)[group]
    common = {
        "dataset_name": group,
        "transform": module.ImageTransform(**entry["image_transform_args"]),
        "tokenizer": tokenizer(),
        "num_used_data": entry["num_used_data"],
        "num_workers": 1,
    }
    [place] = info[group].values()
    match group:
        case "t2i_pretrain":
            return module.T2IIterableDataset(data_dir_list=[place["data_dir"]], **common)
        case "unified_edit":
            return module.UnifiedEditIterableDataset(
                vit_transform=module.ImageTransform(**VIT),
                data_dir_list=[place["data_dir"]],
                parquet_info=json.loads(Path(place["parquet_info_path"]).read_text()),
                **common,
            )
        case _:
            return module.SftJSONLIterableDataset(
                frame_sampler=module.FrameSampler(**entry["frame_sampler_args"]),
                jsonl_path_list=[place["jsonl_path"]],
                data_dir_list=[place["data_dir"]],
                **common,
            )


def drawn(make: Callable[[], Any], count: int) -> tuple[list[dict[str, Any]], Any]:
    """Samples of a dataset with seeded generators, and what these would give next."""
    before = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        samples = list(islice(make(), count))
        return samples, (random.random(), np.random.randn())
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@pytest.mark.parametrize("group", THREE)
def test_classes_called_by_themselves_give_the_same_samples(info: dict[str, Any], group: str) -> None:
    theirs, their_next = drawn(lambda: iter(samples_of(upstream(), info, group)), 40)
    ours, our_next = drawn(lambda: iter(samples_of(bagel_wds, info, group)), 40)

    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own.keys() == other.keys()
        for key in other:
            assert_same(own[key], other[key], f"sample {number}.{key}")
    assert our_next == their_next


@pytest.mark.parametrize("group", THREE)
def test_classes_go_on_from_the_same_positions(info: dict[str, Any], group: str) -> None:
    theirs, ours = samples_of(upstream(), info, group), samples_of(bagel_wds, info, group)
    drawn(lambda: iter(theirs), 9)
    drawn(lambda: iter(ours), 9)
    assert ours.state_dict() == theirs.state_dict()
    state = theirs.state_dict()

    for dataset in (theirs, ours):
        dataset.load_state_dict(state)
    after, rest = drawn(lambda: iter(theirs), 20)[0], drawn(lambda: iter(ours), 20)[0]

    assert [sample["data_indexes"] for sample in rest] == [sample["data_indexes"] for sample in after]
    assert [sample["text_ids_list"] for sample in rest] == [sample["text_ids_list"] for sample in after]


def test_subclass_written_for_upstream_gives_the_same_batches(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = ("vlm_sft", GROUP)
    for module in (upstream(), bagel_wds):
        monkeypatch.setitem(module.DATASET_REGISTRY, GROUP, make_class(module))
    theirs = batches(upstream(), info, groups, 0, 0, 1, use_flex=True)
    ours = batches(bagel_wds, info, groups, 0, 0, 1, use_flex=True, fidelity="upstream")

    seen = set()
    for number, (own, other) in enumerate(zip(islice(ours, 8), theirs, strict=False)):
        assert_same(own, other, f"batch {number}")
        seen |= {origin["dataset_name"] for origin in own["batch_data_indexes"]}

    assert seen == set(groups)
