"""NeMo AutoModel's recipe builds its loader from our settings, iterates it, and keeps its place in a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS, foreign_info, small_config
from upstream_client import BUDGETS, MULTIMODAL, NEEDS, SEED, build, mixture, raw_info

import bagel_wds

if TYPE_CHECKING:
    from collections.abc import Sequence

pytest.importorskip("nemo_automodel", reason=NEEDS)
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")


@pytest.fixture
def dataset_settings(tmp_path: Path) -> dict[str, Any]:
    """The block `dataset:` of a recipe's YAML, with fields of upstream's and of ours."""
    config = small_config(dataset_info=foreign_info(tmp_path), num_streams=2)
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }


def recipe_config(dataset: dict[str, Any], **dataloader: Any) -> Any:
    """What the recipe reads, from the blocks of its YAML."""
    node = import_module("nemo_automodel.components.config.loader").ConfigNode
    return _typed(node({"dataset": dataset, "dataloader": {"pin_memory": False, **dataloader}}))


def _typed(blocks: Any) -> Any:
    return import_module("nemo_automodel.recipes._typed_config").RecipeConfig(blocks)


@pytest.fixture
def _swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the start script of docs/migrating.md changes, until the test is over; its recipe is not run."""
    datasets = import_module(f"{MULTIMODAL}.datasets")
    monkeypatch.setattr(datasets, "BagelDatasetConfig", datasets.BagelDatasetConfig)
    started: list[str] = []
    finetune = import_module("nemo_automodel.recipes.multimodal.finetune")
    monkeypatch.setattr(finetune, "main", started.append)
    script, _ = re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL)

    exec(script, {})

    assert datasets.BagelDatasetConfig is bagel_wds.BagelDatasetConfig
    assert started == ["bagel_sft.yaml"]


@pytest.mark.usefixtures("_swapped")
def test_yaml_of_the_docs_is_one_that_the_recipe_takes(tmp_path: Path) -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "bagel_sft.yaml").write_text(block)
    load = import_module("nemo_automodel.components.config.loader").load_yaml_config

    config = _typed(load(tmp_path / "bagel_sft.yaml")).bagel_dataloader

    assert config.num_workers == 2
    assert (config.dataset_config.max_latent_size, config.dataset_config.num_streams) == (64, 16)


def contents(batches: Sequence[Any]) -> list[tuple[list[int], list[dict[str, Any]]]]:
    return [(batch.packed_text_ids.tolist(), batch.batch_data_indexes) for batch in batches]


@pytest.mark.usefixtures("_swapped")
def test_recipe_builds_our_dataset_from_its_own_yaml(dataset_settings: dict[str, Any]) -> None:
    loader = build(recipe_config(dataset_settings, num_workers=0).bagel_dataloader)

    batches = list(islice(loader, 3))

    assert isinstance(loader.dataset, bagel_wds.PackedDataset)
    alone = small_config(**dataset_settings).build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=SEED)
    for batch, own in zip(batches, alone, strict=False):
        assert type(batch).__module__ == f"{MULTIMODAL}.collate_fns"
        assert batch.to_dict().keys() == own.keys()
        assert torch.equal(batch.padded_images, own["padded_images"])
        assert torch.equal(batch.packed_text_ids, own["packed_text_ids"])


def test_recipe_has_the_same_batches_of_either_dataset_under_upstream_fidelity(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    info = raw_info(tmp_path)
    own = {"dataset_info": info, **BUDGETS}
    theirs = build(recipe_config({"grouped_datasets": mixture(), **own}, num_workers=0).bagel_dataloader)
    request.getfixturevalue("_swapped")
    ours = build(
        recipe_config(
            {"grouped_datasets": mixture(), **own, "fidelity": "upstream"}, num_workers=0
        ).bagel_dataloader
    )

    for batch, other in islice(zip(theirs, ours, strict=True), 3):
        assert batch.batch_data_indexes == other.batch_data_indexes
        assert torch.equal(batch.packed_text_ids, other.packed_text_ids)
        assert torch.equal(batch.packed_vit_tokens, other.packed_vit_tokens)
        assert torch.equal(batch.padded_images, other.padded_images)
        assert torch.equal(batch.packed_timesteps, other.packed_timesteps)
    assert [type(loader.dataset).__module__ for loader in (theirs, ours)] == [
        f"{MULTIMODAL}.packing",
        "bagel_wds.datasets",
    ]


def test_recipe_takes_our_dataset_by_no_other_name(dataset_settings: dict[str, Any]) -> None:
    # Why docs/migrating.md does not say `_target_`; should upstream learn it, say it there.
    named = {"_target_": "bagel_wds.BagelDatasetConfig", **dataset_settings}

    with pytest.raises(ValueError, match="does not support _target_"):
        _ = recipe_config(named).bagel_dataloader


@pytest.mark.usefixtures("_swapped")
def test_setting_that_nobody_knows_is_refused_by_its_name(dataset_settings: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="shuffle_sample"):
        _ = recipe_config({**dataset_settings, "shuffle_sample": 3}).bagel_dataloader


@pytest.mark.usefixtures("_swapped")
def test_pixels_that_its_collate_does_not_know_are_an_error(dataset_settings: dict[str, Any]) -> None:
    config = recipe_config({**dataset_settings, "transport": "uint8"}, num_workers=0).bagel_dataloader

    with pytest.raises(RuntimeError, match=r"padded_images: .* still uint8 .* this collate does not know"):
        next(iter(build(config)))


@pytest.mark.usefixtures("_swapped")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_recipes_checkpoint_brings_the_loader_back_to_its_place(
    tmp_path: Path, dataset_settings: dict[str, Any], num_workers: int
) -> None:
    config = recipe_config(dataset_settings, num_workers=num_workers).bagel_dataloader
    checkpointing = import_module("nemo_automodel.components.checkpoint.checkpointing")
    settings = checkpointing.CheckpointingConfig(
        checkpoint_dir=str(tmp_path), model_cache_dir="", model_repo_id=""
    )
    checkpointer = checkpointing.Checkpointer(settings, dp_rank=0, tp_rank=0, pp_rank=0)
    tracks = import_module("nemo_automodel.recipes.base_recipe").is_dataloader

    loader = build(config)
    batches = iter(loader)
    list(islice(batches, 3))
    checkpointer.save_on_dp_ranks(loader, "dataloader", str(tmp_path))
    following = contents(list(islice(batches, 3)))
    resumed = build(config)
    checkpointer.load_on_dp_ranks(resumed, "dataloader", str(tmp_path))

    assert tracks(loader)
    assert contents(list(islice(resumed, 3))) == following
    assert len({tuple(ids) for ids, _ in following}) == 3
    assert (tmp_path / "dataloader" / "dataloader_dp_rank_0.pt").stat().st_size < 20_000
