"""Compares a batch with a golden one, and reads a golden case's settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from golden_data import assert_bits

from bagel_wds.config import BagelDatasetConfig


def config_of(config: dict[str, Any], **more: Any) -> BagelDatasetConfig:
    """The settings of a golden case, under the upstream fidelity."""
    known = {field.name for field in fields(BagelDatasetConfig)}
    return BagelDatasetConfig(
        **{name: value for name, value in config.items() if name in known}, fidelity="upstream", **more
    )


def assert_batch(batch: dict[str, Any], expected: dict[str, Any], arrays: Any) -> None:
    """The batch has the golden keys in their order, equal lists and integers, and tensors equal in every bit."""
    assert list(batch) == expected["key_order"]
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert_bits(value, arrays[expected["tensors"][key]["key"]])
        elif key == "nested_attention_masks":
            masks = expected["tensors"].get(key, expected["values"].get(key))
            assert len(value) == len(masks)
            for mask, entry in zip(value, masks, strict=True):
                assert_bits(mask, arrays[entry["key"]])
        elif key == "patchified_vae_latent_shapes":
            assert [list(shape) for shape in value] == expected["values"][key]
        else:
            assert value == expected["values"][key], key
