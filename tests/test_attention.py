"""A dense mask says what the rule of the splits says, element by element."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.attention import prepare_attention_mask_per_sample, visible_pairs


def test_mask_of_a_text_a_noised_image_and_a_text_literally() -> None:
    mask = prepare_attention_mask_per_sample([2, 2, 1], ["causal", "noise", "causal"])

    no = -math.inf
    assert mask.tolist() == [
        [0, no, no, no, no],
        [0, 0, no, no, no],
        [0, 0, 0, 0, no],
        [0, 0, 0, 0, no],
        [0, 0, no, no, 0],
    ]


@given(
    st.lists(st.integers(0, 7), max_size=7),
    st.lists(st.sampled_from(["causal", "full", "noise"]), max_size=8),
)
def test_mask_is_0_where_a_query_sees_a_key_and_minus_infinity_elsewhere(
    split_lens: list[int], attn_modes: list[str]
) -> None:
    mask = prepare_attention_mask_per_sample(split_lens, attn_modes)
    visible = visible_pairs([sum(split_lens)], split_lens, attn_modes)

    assert mask.dtype == torch.float32
    assert torch.equal(mask, torch.where(visible, 0.0, -math.inf))
    assert not torch.signbit(mask[visible]).any()
