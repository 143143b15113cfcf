"""Upstream's sequence status: a dict of lists that samples are packed into one by one. The writing is `layout`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bagel_wds.layout import KEY_ORDER, Arrays, as_batch, write_sample
from bagel_wds.pixels import ReadyImage, patchify, write_pixels
from bagel_wds.planners import settle
from bagel_wds.records import Kind
from bagel_wds.upstream.draws import ProcessDraws
from bagel_wds.upstream.samples import plan_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagel_wds.layout import LayoutRules
    from bagel_wds.planners import DropoutRates

    Status = dict[str, Any]

_NUMBERS = {
    "packed_text_ids": "text_ids",
    "packed_label_ids": "label_ids",
    "vit_token_seqlens": "vit_lens",
    "sample_lens": "sample_lens",
    "split_lens": "split_lens",
    "attn_modes": "attn_modes",
    "nested_attention_masks": "masks",
    "vae_latent_shapes": "vae_shapes",
    "packed_vit_position_ids": "vit_positions",
    "packed_latent_position_ids": "vae_positions",
}
"""Lists that the status and the layout have alike, by both their names."""

_CHUNKS = {
    "packed_text_indexes": "text_index",
    "packed_position_ids": "position_ids",
    "ce_loss_indexes": "ce_index",
    "ce_loss_weights": "ce_weights",
    "packed_vae_token_indexes": "vae_index",
    "packed_timesteps": "timesteps",
    "mse_loss_indexes": "mse_index",
    "packed_vit_token_indexes": "vit_index",
}
"""Lists of numbers, which the layout has in pieces."""

_DTYPES = {"ce_loss_weights": np.float32, "packed_timesteps": np.float32}

_PICTURES = ("vae_image_tensors", "packed_vit_tokens")


def empty_status() -> Status:
    """The status of a pack with nothing in it: `curr`, the next position, and upstream's lists."""
    return {"curr": 0, **{name: [] for name in (*_NUMBERS, *_CHUNKS, *_PICTURES)}}


def pack_into(status: Status, sample: Mapping[str, Any], rules: LayoutRules, rates: DropoutRates) -> Status:
    """Write a sample dict behind those that a status holds; gives the same status.

    Dropout and timesteps are drawn from the process-wide generators, in upstream's order. The sample stays as it is.

    Raises:
        ConfigError: if the sample is not of upstream's form.
    """
    patch = {Kind.VIT_IMAGE: rules.vit_patch, Kind.VAE_IMAGE: rules.vae_patch}
    name = (sample.get("data_indexes") or {}).get("dataset_name", "")
    plan = settle(plan_of(sample, name, patch), rates, ProcessDraws(), upstream=True)
    arrays = Arrays(end=status["curr"])
    write_sample(plan, rules, arrays)
    for ours, theirs in _NUMBERS.items():
        status[ours] += getattr(arrays, theirs)
    for ours, theirs in _CHUNKS.items():
        status[ours] += [value for chunk in getattr(arrays, theirs) for value in chunk.tolist()]
    for segment in plan.segments:
        if segment.view >= 0 and not segment.dropped:
            tensor = sample["image_tensor_list"][segment.view]
            if segment.kind is Kind.VAE_IMAGE:
                status["vae_image_tensors"].append(tensor)
            else:
                status["packed_vit_tokens"].append(patchify(tensor, rules.vit_patch))
    status["curr"] = arrays.end
    return status


def batch_of(status: Mapping[str, Any], rules: LayoutRules) -> dict[str, Any]:
    """The batch of a status: upstream's keys but `batch_data_indexes`. The status stays as it is."""
    arrays = Arrays(end=status["curr"])
    for ours, theirs in _NUMBERS.items():
        setattr(arrays, theirs, list(status[ours]))
    for ours, theirs in _CHUNKS.items():
        numbers = np.array(status[ours], _DTYPES.get(ours, np.int64))
        setattr(arrays, theirs, [numbers] if len(numbers) else [])
    batch = as_batch(arrays, rules)
    batch |= write_pixels([ReadyImage(tensor) for tensor in status["vae_image_tensors"]], [], rules.vit_patch)
    if status["packed_vit_tokens"]:
        batch["packed_vit_tokens"] = torch.cat(status["packed_vit_tokens"])
    return {key: batch[key] for key in KEY_ORDER if key in batch}
