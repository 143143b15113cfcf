"""A pack laid out as flat index, position, loss and attention arrays; no pixels are read.

Every array speaks of one packed sequence: its samples one after another, each sample its segments one after another,
an image between its two control tokens. Names and order are those of upstream's batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bagel_wds.attention import prepare_attention_mask_per_sample
from bagel_wds.errors import ConfigError
from bagel_wds.geometry import patch_grid
from bagel_wds.positions import (
    get_flattened_position_ids_extrapolate,
    get_flattened_position_ids_interpolate,
)
from bagel_wds.records import Kind, SamplePlan, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    Chunk = np.ndarray[Any, np.dtype[Any]]

KEY_ORDER = (
    "sequence_length",
    "sample_lens",
    "packed_text_ids",
    "packed_text_indexes",
    "packed_position_ids",
    "nested_attention_masks",
    "split_lens",
    "attn_modes",
    "padded_images",
    "patchified_vae_latent_shapes",
    "packed_latent_position_ids",
    "packed_vae_token_indexes",
    "packed_vit_tokens",
    "packed_vit_position_ids",
    "packed_vit_token_indexes",
    "vit_token_seqlens",
    "packed_timesteps",
    "mse_loss_indexes",
    "packed_label_ids",
    "ce_loss_indexes",
    "ce_loss_weights",
    "batch_data_indexes",
)
"""Keys of a batch, in upstream's order."""


@dataclass(frozen=True, kw_only=True)
class LayoutRules:
    """What the model expects of a batch.

    Attributes:
        bos_token_id, eos_token_id, start_of_image, end_of_image: ids of the control tokens.
        use_flex: attention as `split_lens` and `attn_modes`, padded to `max_num_tokens`; else one dense mask a sample.
        max_num_tokens: of a pack.
        interpolate_pos: position ids of patches by interpolation.
        vit_patch: pixels a ViT patch, along each edge.
        vit_side: rows and columns of the table of ViT positions.
        vae_patch: pixels a latent patch, along each edge.
        vae_side: rows and columns of the table of latent positions.
        upstream: BAGEL: an empty list of ids is a float32 tensor. Ours is int64.
    """

    bos_token_id: int
    eos_token_id: int
    start_of_image: int
    end_of_image: int
    use_flex: bool = False
    max_num_tokens: int = 36864
    interpolate_pos: bool = False
    vit_patch: int = 14
    vit_side: int = 70
    vae_patch: int = 16
    vae_side: int = 32
    upstream: bool = False


@dataclass
class Arrays:
    """What `write_sample` fills, in the order of the sequence: numbers one by one, or arrays of them.

    A pack has tens of thousands of tokens and some hundred segments, so an array is made a segment, not a list of tokens.

    Attributes:
        end: where the next token goes.
    """

    end: int = 0
    text_ids: list[int] = field(default_factory=list)
    text_index: list[Chunk] = field(default_factory=list)
    position_ids: list[Chunk] = field(default_factory=list)
    label_ids: list[int] = field(default_factory=list)
    ce_index: list[Chunk] = field(default_factory=list)
    ce_weights: list[Chunk] = field(default_factory=list)
    vit_index: list[Chunk] = field(default_factory=list)
    vit_positions: list[torch.Tensor] = field(default_factory=list)
    vit_lens: list[int] = field(default_factory=list)
    vae_index: list[Chunk] = field(default_factory=list)
    vae_positions: list[torch.Tensor] = field(default_factory=list)
    vae_shapes: list[tuple[int, int]] = field(default_factory=list)
    timesteps: list[Chunk] = field(default_factory=list)
    mse_index: list[Chunk] = field(default_factory=list)
    sample_lens: list[int] = field(default_factory=list)
    split_lens: list[int] = field(default_factory=list)
    attn_modes: list[str] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)


def lay_out(plans: Sequence[SamplePlan], rules: LayoutRules) -> dict[str, Any]:
    """Every key of a batch but the pixels and `batch_data_indexes`.

    Args:
        plans: settled, in the order of the pack.
        rules: what the model expects.

    Returns:
        Lists and integers as upstream has them; ids, indexes and lengths int64, weights and timesteps float32, dense
        masks float32 (n, n) for each sample. Keys of images, timesteps or labels are absent where there are none.

    Raises:
        ConfigError: if an image has more patches along an edge than the model's table of positions.
    """
    arrays = Arrays()
    for plan in plans:
        write_sample(plan, rules, arrays)
    return as_batch(arrays, rules)


def as_batch(arrays: Arrays, rules: LayoutRules) -> dict[str, Any]:
    """What `lay_out` gives, of samples that were written."""
    length = sum(arrays.sample_lens)
    batch: dict[str, Any] = {
        "sequence_length": length,
        "sample_lens": arrays.sample_lens,
        "packed_text_ids": _ids(arrays.text_ids, rules),
        "packed_text_indexes": _joined(arrays.text_index, rules),
        "packed_position_ids": _joined(arrays.position_ids, rules),
    }
    if rules.use_flex:
        padding = rules.max_num_tokens - length
        batch["sample_lens"] = [*arrays.sample_lens, padding]
        batch["split_lens"] = [*arrays.split_lens, padding]
        batch["attn_modes"] = [*arrays.attn_modes, "causal"]
    else:
        batch["nested_attention_masks"] = arrays.masks
    if arrays.vae_shapes:
        batch["patchified_vae_latent_shapes"] = arrays.vae_shapes
        batch["packed_latent_position_ids"] = torch.cat(arrays.vae_positions)
        batch["packed_vae_token_indexes"] = _joined(arrays.vae_index, rules)
        batch["packed_timesteps"] = torch.from_numpy(np.concatenate(arrays.timesteps))
        batch["mse_loss_indexes"] = _joined(arrays.mse_index, rules)
    if arrays.vit_lens:
        batch["packed_vit_position_ids"] = torch.cat(arrays.vit_positions)
        batch["packed_vit_token_indexes"] = _joined(arrays.vit_index, rules)
        batch["vit_token_seqlens"] = _ids(arrays.vit_lens, rules)
    if arrays.label_ids:
        batch["packed_label_ids"] = _ids(arrays.label_ids, rules)
        batch["ce_loss_indexes"] = _joined(arrays.ce_index, rules)
        batch["ce_loss_weights"] = torch.from_numpy(np.concatenate(arrays.ce_weights))
    return batch


def write_sample(plan: SamplePlan, rules: LayoutRules, arrays: Arrays) -> None:
    """Write one settled sample behind those that are there; rope ids start at 0 in each.

    Raises:
        ConfigError: as `lay_out`.
    """
    rope = split_len = 0
    split_lens: list[int] = []
    attn_modes: list[str] = []
    for segment in plan.segments:
        if segment.split_start:
            split_len = 0
        if segment.dropped:
            # A left-out image still takes one rope id, a text none. The rest of its split is not looked at either:
            # BAGEL drops frames one by one, and then lengths and modes no longer match. We drop a clip whole.
            rope += segment.kind is not Kind.TEXT
            continue
        if segment.kind is Kind.TEXT:
            rope = _write_text(segment, rope, rules, arrays)
        else:
            rope = _write_image(segment, plan.views[segment.view].size_hw, rope, rules, arrays)
        split_len += segment.num_tokens
        if segment.split_start:
            attn_modes.append(_mode(segment))
        if segment.split_end:
            split_lens.append(split_len)
    arrays.sample_lens.append(sum(split_lens))
    if rules.use_flex:
        arrays.split_lens += split_lens
        arrays.attn_modes += attn_modes
    else:
        arrays.masks.append(prepare_attention_mask_per_sample(split_lens, attn_modes))


def _mode(segment: Segment) -> str:
    """How the tokens of a split see each other: the first segment of the split decides."""
    if segment.kind is Kind.TEXT:
        return "causal"
    noised = segment.kind is Kind.VAE_IMAGE and segment.loss and segment.frame_delta is None
    return "noise" if noised else "full"


def _write_text(segment: Segment, rope: int, rules: LayoutRules, arrays: Arrays) -> int:
    """bos, the ids, eos; with loss each of bos and ids predicts the next. Gives the next rope id."""
    ids, start = segment.token_ids, arrays.end
    if segment.loss:
        count = len(ids) + 1
        arrays.ce_index.append(np.arange(start, start + count))
        arrays.ce_weights.append(np.full(count, len2weight(count), np.float32))
        arrays.label_ids += [*ids, rules.eos_token_id]
    arrays.text_ids += [rules.bos_token_id, *ids, rules.eos_token_id]
    arrays.end += segment.num_tokens
    arrays.text_index.append(np.arange(start, arrays.end))
    arrays.position_ids.append(np.arange(rope, rope + segment.num_tokens))
    _write_closing_loss(segment, arrays)
    return rope + segment.num_tokens


def _write_image(
    segment: Segment, size_hw: tuple[int, int], rope: int, rules: LayoutRules, arrays: Arrays
) -> int:
    """start-of-image, the patches, end-of-image, all with one rope id. Gives the next rope id."""
    start, patches = arrays.end, segment.num_tokens - 2
    places = np.arange(start + 1, start + 1 + patches)
    arrays.end += segment.num_tokens
    arrays.text_ids += [rules.start_of_image, rules.end_of_image]
    arrays.text_index.append(np.array([start, start + 1 + patches]))
    arrays.position_ids.append(np.full(segment.num_tokens, rope))
    if segment.kind is Kind.VIT_IMAGE:
        arrays.vit_index.append(places)
        arrays.vit_lens.append(patches)
        arrays.vit_positions.append(
            _positions(size_hw, rules.vit_patch, rules.vit_side, rules, "max_num_patch_per_side")
        )
    else:
        arrays.vae_index.append(places)
        arrays.vae_shapes.append(patch_grid(size_hw, rules.vae_patch))
        arrays.vae_positions.append(
            _positions(size_hw, rules.vae_patch, rules.vae_side, rules, "max_latent_size")
        )
        arrays.timesteps.append(np.full(patches, segment.timestep, np.float32))
        if segment.loss:
            arrays.mse_index.append(places)
    _write_closing_loss(segment, arrays)
    if segment.kind is Kind.VAE_IMAGE and segment.frame_delta is not None:
        return rope + segment.frame_delta
    # BAGEL: what comes after an image with loss shares its rope id. Kept: trained models have seen that.
    return rope + (not segment.loss if segment.kind is Kind.VAE_IMAGE else 1)


def _write_closing_loss(segment: Segment, arrays: Arrays) -> None:
    if segment.special_token_loss and segment.special_token_label is not None:
        arrays.ce_index.append(np.array([arrays.end - 1]))
        arrays.ce_weights.append(np.ones(1, np.float32))
        arrays.label_ids.append(segment.special_token_label)


def _joined(chunks: Sequence[Chunk], rules: LayoutRules) -> torch.Tensor:
    return _ids(np.concatenate(chunks) if chunks else (), rules)


def _ids(values: Sequence[int] | Chunk, rules: LayoutRules) -> torch.Tensor:
    if rules.upstream and not len(values):
        return torch.tensor([])
    return torch.from_numpy(np.asarray(values, dtype=np.int64))


def _positions(
    size_hw: tuple[int, int], patch: int, side: int, rules: LayoutRules, setting: str
) -> torch.Tensor:
    if rules.interpolate_pos:
        return get_flattened_position_ids_interpolate(*size_hw, patch, side)
    rows, columns = patch_grid(size_hw, patch)
    if max(rows, columns) > side:
        raise ConfigError(
            f"an image of {rows}x{columns} patches is beyond the model's table of positions, {setting}={side}; "
            f"set {setting} to {max(rows, columns)} or make max_image_size smaller"
        )
    return get_flattened_position_ids_extrapolate(*size_hw, patch, side)


def len2weight(x: int, loss_reduction: str = "square") -> float:
    """The loss weight of one token in a text of `x`: 1 ("token"), 1/x ("sample") or 1/sqrt(x) ("square").

    Raises:
        NotImplementedError: for another reduction (upstream's error).
    """
    if x == 0:
        return x
    if loss_reduction == "token":
        return 1
    if loss_reduction == "sample":
        return 1 / x
    if loss_reduction == "square":
        return 1 / math.sqrt(x)
    raise NotImplementedError(f"loss_reduction={loss_reduction!r} is none of 'token', 'sample', 'square'")
