"""Upstream's names have upstream's signatures; ours come after theirs."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest

import bagel_wds
from bagel_wds import BagelDatasetConfig

REQUIRED = inspect.Parameter.empty

CONFIG: dict[str, Any] = {
    "grouped_datasets": None,
    "grouped_datasets_path": None,
    "dataset_info": None,
    "dataset_info_path": None,
    "expected_num_tokens": 32768,
    "max_num_tokens_per_sample": 16384,
    "max_num_tokens": 36864,
    "prefer_buffer_before": 16384,
    "max_buffer_size": 50,
    "interpolate_pos": False,
    "use_flex": False,
    "data_seed": 42,
    "text_cond_dropout_prob": 0.1,
    "vit_cond_dropout_prob": 0.4,
    "vae_cond_dropout_prob": 0.1,
    "vae_image_downsample": 16,
    "max_latent_size": 32,
    "vit_patch_size": 14,
    "max_num_patch_per_side": 70,
}
_NAMES = list(CONFIG)
BUDGETS = {
    name: CONFIG[name] for name in _NAMES[_NAMES.index("expected_num_tokens") : _NAMES.index("data_seed")]
}
MODEL = {name: CONFIG[name] for name in _NAMES[_NAMES.index("data_seed") :]}

SIGNATURES: dict[str, dict[str, Any]] = {
    "PackedDataset": {
        "data_config": REQUIRED,
        "tokenizer": REQUIRED,
        "special_tokens": REQUIRED,
        "local_rank": REQUIRED,
        "world_size": REQUIRED,
        "num_workers": REQUIRED,
        **BUDGETS,
        "data_status": None,
        "dataset_info": None,
        "global_seed": None,
    },
    "make_bagel_multimodal_dataset": {
        "tokenizer": REQUIRED,
        "special_tokens": REQUIRED,
        "grouped_datasets": REQUIRED,
        "local_rank": 0,
        "world_size": 1,
        "num_workers": 4,
        **BUDGETS,
        "data_status": None,
        **MODEL,
        "dataset_info": None,
    },
    "ImageTransform": {
        "max_image_size": REQUIRED,
        "min_image_size": REQUIRED,
        "image_stride": REQUIRED,
        "max_pixels": 14 * 14 * 9 * 1024,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
    "MaxLongEdgeMinShortEdgeResize": {
        "max_size": REQUIRED,
        "min_size": REQUIRED,
        "stride": REQUIRED,
        "max_pixels": REQUIRED,
        "interpolation": None,
        "antialias": True,
    },
    "SimpleCustomBatch": {"batch": REQUIRED},
    "add_special_tokens": {"tokenizer": REQUIRED},
    "bagel_packed_collate_fn": {"batch": REQUIRED},
    "collate_wrapper": {},
    "get_flattened_position_ids_extrapolate": {
        "img_h": REQUIRED,
        "img_w": REQUIRED,
        "patch_size": REQUIRED,
        "max_num_patches_per_side": REQUIRED,
    },
    "get_flattened_position_ids_interpolate": {
        "img_h": REQUIRED,
        "img_w": REQUIRED,
        "patch_size": REQUIRED,
        "max_num_patches_per_side": REQUIRED,
    },
    "len2weight": {"x": REQUIRED, "loss_reduction": "square"},
    "patchify": {"image": REQUIRED, "patch_size": REQUIRED},
    "pil_img2rgb": {"image": REQUIRED},
    "prepare_attention_mask_per_sample": {"split_lens": REQUIRED, "attn_modes": REQUIRED, "device": "cpu"},
}


def parameters(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature_is_upstreams(name: str) -> None:
    got = parameters(getattr(bagel_wds, name))
    want = SIGNATURES[name]

    assert list(got.items())[: len(want)] == list(want.items())
    # What is ours comes last and has a default.
    assert set(list(got)[len(want) :]) <= {"fidelity"}


def test_config_has_upstreams_fields_and_defaults_first() -> None:
    got = [(field.name, field.default) for field in fields(BagelDatasetConfig)]

    assert got[: len(CONFIG)] == list(CONFIG.items())
    assert all(default is not MISSING for _, default in got)
    assert list(parameters(BagelDatasetConfig.build)) == [
        "self", "tokenizer", "special_tokens", "rank", "world_size", "num_workers", "global_seed", "data_status",
    ]  # fmt: skip
    assert bagel_wds.DataConfig is BagelDatasetConfig


def test_inline_mappings_are_resolved_without_being_shared() -> None:
    inline: dict[str, object] = {"t2i_pretrain": {"t2i": "x"}}
    resolved = BagelDatasetConfig._resolve_mapping(inline, None, "dataset_info")

    assert resolved == inline
    assert resolved is not inline
