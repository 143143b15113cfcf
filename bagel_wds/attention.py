"""Who sees whom in a packed sequence, as dense masks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def prepare_attention_mask_per_sample(
    split_lens: Sequence[int], attn_modes: Sequence[str], device: str | torch.device = "cpu"
) -> torch.Tensor:
    """The additive attention mask of one sample: float32 (n, n), 0 where a query (row) sees a key, else -inf.

    Args:
        split_lens: tokens of each split; n is their sum.
        attn_modes: of each split: "causal" sees itself backwards, "full" and "noise" see all of themselves; all see
            earlier splits, but nobody sees a noise split from outside it.
        device: of the result.
    """
    total = sum(split_lens)
    # A mask of 16384 tokens is 1 GiB: each element is written once, and nothing else of that size is made.
    mask = torch.empty((total, total), device=device)
    start = 0
    noise: list[tuple[int, int]] = []
    # strict=False: as in `visible_pairs`.
    for length, mode in zip(split_lens, attn_modes, strict=False):
        end = start + length
        rows = mask[start:end]
        rows[:, :start] = 0
        for noise_start, noise_end in noise:
            rows[:, noise_start:noise_end] = -math.inf
        if mode == "causal":
            rows[:, start:end].fill_(-math.inf).triu_(1)
        else:
            rows[:, start:end] = 0
        rows[:, end:] = -math.inf
        if mode == "noise":
            noise.append((start, end))
        start = end
    mask[start:] = -math.inf
    return mask


def visible_pairs(
    sample_lens: Sequence[int],
    split_lens: Sequence[int],
    attn_modes: Sequence[str],
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Who sees whom in a packed sequence: bool (n, n), [query, key], n the sum of `sample_lens`.

    What `split_lens` and `attn_modes` of a flex batch mean, as a dense mask: the rule of
    `prepare_attention_mask_per_sample`, and a query sees only its own sample.
    """
    total = sum(sample_lens)
    visible = torch.zeros((total, total), dtype=torch.bool, device=device)
    start = 0
    # strict=False: upstream's lists may differ in length, and then the tail of the longer one counts for nothing.
    splits = []
    for length, mode in zip(split_lens, attn_modes, strict=False):
        end = start + length
        visible[start:end, : start if mode == "causal" else end] = True
        if mode == "causal":
            visible[start:end, start:end] = torch.ones(
                (length, length), dtype=torch.bool, device=device
            ).tril_()
        splits.append((start, end, mode))
        start = end
    for start, end, mode in splits:
        if mode == "noise":
            visible[:start, start:end] = False
            visible[end:, start:end] = False
    sample = torch.repeat_interleave(
        torch.arange(len(sample_lens)), torch.tensor(sample_lens, dtype=torch.int64)
    )
    return visible & (sample[:, None] == sample[None, :]).to(device)
