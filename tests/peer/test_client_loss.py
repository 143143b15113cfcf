"""NeMo AutoModel's model trains on our batches: upstream fidelity gives the losses of its own loader."""

from __future__ import annotations

import math
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS
from torch.utils.data import DataLoader
from upstream_client import (
    BUDGETS,
    MULTIMODAL,
    NEEDS,
    SEED,
    STEP_KEYS,
    losses,
    mixture,
    raw_info,
    run_on_cpu,
    their_loader,
    tiny_model,
    tiny_vae,
    train_step,
)

from bagel_wds import BagelDatasetConfig, collate_wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bagel_wds import SimpleCustomBatch

pytest.importorskip("nemo_automodel", reason=NEEDS)
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)


def our_batches(info: dict[str, Any], **settings: Any) -> Iterable[SimpleCustomBatch]:
    config = BagelDatasetConfig(grouped_datasets=mixture(), dataset_info=info, **{**BUDGETS, **settings})
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, SEED)
    return DataLoader(dataset, batch_size=1, num_workers=0, collate_fn=collate_wrapper())


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal keys and values, tensors in dtype and every bit."""
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[key].dtype == value.dtype, key
            assert torch.equal(ours[key], value), key
        elif key == "nested_attention_masks":
            assert all(map(torch.equal, ours[key], value))
            assert len(ours[key]) == len(value)
        else:
            assert ours[key] == value, key


@pytest.mark.parametrize("use_flex", [False, True])
def test_model_has_the_same_losses_on_our_batches_as_on_its_own_loaders(
    tmp_path: Path, *, use_flex: bool
) -> None:
    info = raw_info(tmp_path)
    model, vae = tiny_model(), tiny_vae()
    theirs = their_loader(info, use_flex=use_flex)
    ours = our_batches(info, fidelity="upstream", use_flex=use_flex)

    seen = []
    # The second form of attention compiles itself for each length; its plain form computes the same.
    with torch.compiler.set_stance("force_eager"):
        for own, other in islice(zip(theirs, ours, strict=True), 4):
            want = losses(model, vae, own.to_dict())
            got = losses(model, vae, other.to_dict())

            assert_same(other.to_dict(), own.to_dict())
            assert torch.equal(got["ce"], want["ce"])
            assert torch.equal(got["mse"], want["mse"])
            assert got["ce"].shape == own.packed_label_ids.shape
            assert len(got["mse"]) == len(own.mse_loss_indexes)
            seen.append((float(got["ce"].mean()), float(got["mse"].mean())))

    assert len(set(seen)) == 4
    assert all(math.isfinite(value) for pair in seen for value in pair)


def test_recipes_training_step_learns_from_our_batches_whatever_way_their_pixels_travel(
    tmp_path: Path,
) -> None:
    info = raw_info(tmp_path)
    metrics = {}
    for transport in ("float32", "uint8"):
        model, vae = tiny_model(), tiny_vae()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        before = [weight.clone() for weight in trained]
        optimizer = torch.optim.AdamW(trained, lr=3e-3)
        batches = [batch.to("cpu") for batch in islice(our_batches(info, transport=transport), 2)]

        metrics[transport] = [train_step(model, vae, optimizer, batches) for _ in range(3)]

        tokens = metrics[transport][0]
        assert tokens["num_tokens_per_step"] == sum(batch.sequence_length for batch in batches)
        assert tokens["num_ce_tokens"] == sum(len(batch.ce_loss_indexes) for batch in batches)
        assert tokens["num_mse_tokens"] == sum(len(batch.mse_loss_indexes) for batch in batches) > 0
        assert sum(not torch.equal(*pair) for pair in zip(before, trained, strict=True)) > 0.9 * len(trained)

    steps = [[step[key] for key in STEP_KEYS] for step in metrics["float32"]]
    assert all(math.isfinite(value) for step in steps for value in step)
    for key in ("ce", "mse"):
        assert metrics["float32"][-1][key] < metrics["float32"][0][key]
    assert steps == [[step[key] for key in STEP_KEYS] for step in metrics["uint8"]]


def test_positions_that_a_run_of_upstreams_wrote_down_lead_to_the_same_batches(tmp_path: Path) -> None:
    info = raw_info(tmp_path)
    # As BAGEL's training script keeps it: of each group, the last row of each worker that was packed.
    status = {"t2i_pretrain": {0: [1, 0, 1]}, "vlm_sft": {0: 4}, "unified_edit": {0: [0, 0]}}
    run: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "num_workers": 0,
        "global_seed": SEED,
        "data_status": status,
    }
    configs: list[Any] = [
        import_module(MULTIMODAL).BagelDatasetConfig(
            grouped_datasets=mixture(), dataset_info=info, **BUDGETS
        ),
        BagelDatasetConfig(grouped_datasets=mixture(), dataset_info=info, fidelity="upstream", **BUDGETS),
    ]
    theirs, ours = (
        config.build(tokenizer=tokenizer(), special_tokens=SPECIAL_TOKENS, **run) for config in configs
    )

    first, second = (list(islice(dataset, 3)) for dataset in (theirs, ours))

    for own, other in zip(first, second, strict=True):
        assert_same(other, own)
    begins = {
        index["dataset_name"]: index["data_indexes"] for index in reversed(first[0]["batch_data_indexes"])
    }
    assert begins == {"t2i_pretrain": [1, 1, 0], "vlm_sft": 5, "unified_edit": [0, 1]}
