"""NeMo AutoModel's own parts, made small: its loader on raw files, its BAGEL model and its recipe's training step.

Nothing of it is imported before a function asks for it; a test module that uses this one begins with
`pytest.importorskip("nemo_automodel", reason=NEEDS)`. Three kernels of the model want a GPU; `run_on_cpu` puts plain
attention in their places.
"""

from __future__ import annotations

import contextlib
import copy
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS, VAE, VIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

NEEDS = "needs NeMo AutoModel 0.7.0: make test-peer"
MULTIMODAL = "nemo_automodel.components.datasets.multimodal"
BAGEL = "nemo_automodel.components.models.bagel"
REAL = Path(__file__).parent / "data" / "real"
SEED = 7
STEP_KEYS = ("loss", "ce", "mse", "grad_norm")

BUDGETS: dict[str, Any] = {
    "expected_num_tokens": 400,
    "max_num_tokens": 512,
    "max_num_tokens_per_sample": 400,
    "prefer_buffer_before": 200,
    "max_buffer_size": 4,
}


def mixture() -> dict[str, Any]:
    """Settings of the three groups, made anew for each loader: upstream empties what it is given."""
    groups = {
        "t2i_pretrain": {"dataset_names": ["t2i"], "image_transform_args": VAE, "num_used_data": [2]},
        "unified_edit": {
            "dataset_names": ["seed"],
            "image_transform_args": VAE,
            "vit_image_transform_args": VIT,
            "num_used_data": [1],
        },
        "vlm_sft": {
            "dataset_names": ["vlm"],
            "image_transform_args": VIT,
            "frame_sampler_args": {"max_num_frames": 4, "min_num_frames": 2},
            "num_used_data": [100],
        },
    }
    return copy.deepcopy(
        {name: {**group, "is_mandatory": True, "weight": 1.0} for name, group in groups.items()}
    )


def raw_info(folder: Path) -> dict[str, Any]:
    """The dataset info of the real sources, but for the row with a clip, which upstream decodes by decord."""
    lines = (REAL / "vlm" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    kept = folder / "train.jsonl"
    kept.write_text(
        "".join(f"{line}\n" for line in lines if "video" not in json.loads(line)), encoding="utf-8"
    )
    return {
        "t2i_pretrain": {"t2i": {"data_dir": str(REAL / "t2i")}},
        "unified_edit": {
            "seed": {
                "data_dir": str(REAL / "editing" / "seed"),
                "parquet_info_path": str(_info_with_places(folder)),
            }
        },
        "vlm_sft": {"vlm": {"data_dir": str(REAL / "vlm" / "images"), "jsonl_path": str(kept)}},
    }


def _info_with_places(folder: Path) -> Path:
    """The edit files' row groups, under the very paths that upstream looks up."""
    groups = json.loads((REAL / "editing" / "parquet_info.json").read_text(encoding="utf-8"))
    path = folder / "parquet_info.json"
    path.write_text(json.dumps({str(REAL / name): value for name, value in groups.items()}), encoding="utf-8")
    return path


def their_loader(info: Mapping[str, Any], **settings: Any) -> Any:
    """Upstream's dataloader over raw files, as upstream's own configuration builds it; in this process."""
    config = import_module(MULTIMODAL).BagelDatasetConfig(
        grouped_datasets=mixture(), dataset_info=info, **{**BUDGETS, **settings}
    )
    return build(
        import_module(f"{MULTIMODAL}.loader").BagelDataloaderConfig(config, num_workers=0, pin_memory=False)
    )


def build(dataloader_config: Any) -> Any:
    """The dataloader of upstream's configuration, built as its recipe does."""
    return dataloader_config.build(
        tokenizer=tokenizer(),
        special_tokens=SPECIAL_TOKENS,
        rank=0,
        world_size=1,
        batch_size=1,
        global_seed=SEED,
    ).dataloader


def tiny_model() -> torch.nn.Module:
    """Upstream's BAGEL, both halves of it, with two layers of width 64; the same weights each time."""
    config = import_module(f"{BAGEL}.configuration").BagelConfig(
        text_config={
            "vocab_size": len(tokenizer()),
            "pad_token_id": 0,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 70 * 14,
            "patch_size": 14,
        },
        stage=2,
        vae_config={"z_channels": 16, "downsample": 8},
        max_latent_size=32,
        vit_max_num_patch_per_side=70,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: torch.nn.Module = import_module(f"{BAGEL}.model").BagelForUnifiedMultimodal(config)
        # Zero at the start of training, when the target alone would decide the loss.
        torch.nn.init.normal_(model.get_submodule("model.llm2vae").weight, std=0.1)  # type: ignore[arg-type] # a Linear's
    return model.train()


def tiny_vae() -> torch.nn.Module:
    """Upstream's autoencoder, 8 pixels a latent and 16 channels as BAGEL's, but narrow; the same weights each time."""
    module = import_module(f"{BAGEL}.autoencoder")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae: torch.nn.Module = module.AutoEncoder(
            module.AutoEncoderParams(
                resolution=64,
                in_channels=3,
                downsample=8,
                ch=32,
                out_ch=3,
                ch_mult=[1, 1, 1, 1],
                num_res_blocks=1,
                z_channels=16,
                scale_factor=0.3611,
                shift_factor=0.1159,
            )
        )
    return vae.eval()


def losses(model: torch.nn.Module, vae: Any, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Cross entropy of each text token with loss, and squared error of each noised latent, of upstream's forward pass."""
    keys = import_module("nemo_automodel.recipes.multimodal.finetune")._BAGEL_STAGE2_FORWARD_KEYS
    with torch.no_grad(), torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
        # The autoencoder samples, and the model draws the noise.
        torch.manual_seed(SEED)
        given = {"padded_latent": vae.encode(batch["padded_images"]), **batch}
        found: dict[str, torch.Tensor] = model(**{key: given[key] for key in given if key in keys})
    return found


def train_step(
    model: torch.nn.Module, vae: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any]
) -> dict[str, float]:
    """One optimizer step of upstream's recipe, micro batch by micro batch: its metrics, `STEP_KEYS` among them."""
    finetune = import_module("nemo_automodel.recipes.multimodal.finetune")
    recipe = finetune.FinetuneRecipeForMultimodal(SimpleNamespace(get=lambda _, default=None: default))
    vars(recipe).update(
        model=model,
        vae_model=vae,
        optimizer=[optimizer],
        stage=2,
        ema=None,
        device_mesh=None,
        dist_env=SimpleNamespace(device=torch.device("cpu"), world_size=1, is_main=True),
        step_scheduler=SimpleNamespace(step=0, epoch=0, is_remote_logging_step=False),
        _use_lr_warmup=False,
        _get_dp_group_size=lambda **_: 1,
        _dp_allreduce=lambda value, **_: value,
    )
    with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(SEED)
        metrics: dict[str, float] = recipe._run_train_optim_step(batches, 1.0).metrics
    return metrics


def run_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put plain attention where the model asks for a GPU's kernels: flash attention, and the memory-efficient one."""
    vision = import_module(f"{BAGEL}.modeling_siglip_navit")
    monkeypatch.setattr(vision, "_flash_attn_varlen", _attend_each)
    text = import_module(f"{BAGEL}.modeling_qwen2_packed")
    monkeypatch.setattr(text, "sdpa_kernel", lambda backends: contextlib.nullcontext())


def _attend_each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, cu_seqlens_q: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Attention within each picture: (tokens, heads, width) of all of them, one behind the other."""
    lens = cu_seqlens_q.diff().tolist()
    return torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(0, 1) for part in parts)
            ).transpose(0, 1)
            for parts in zip(*(torch.split(each, lens) for each in (query, key, value)), strict=True)
        ]
    )
