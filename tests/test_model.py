"""A tiny embedding-only model consumes batches as BAGEL does: whatever it indexes is there."""

from __future__ import annotations

from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS, foreign_info, small_config
from torch.utils.data import DataLoader

from bagel_wds import SimpleCustomBatch, collate_wrapper
from bagel_wds.attention import prepare_attention_mask_per_sample, visible_pairs

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 423
LATENT_SIDE, VIT_SIDE = 8, 6
WIDTH = 8


class TinyBagel(torch.nn.Module):
    """Embeds text, ViT patches and latents into one sequence, mixes it once by attention, and has both losses."""

    def __init__(self) -> None:
        super().__init__()
        self.text = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.vit = torch.nn.Linear(14 * 14 * 3, WIDTH)
        self.vit_position = torch.nn.Embedding(VIT_SIDE**2, WIDTH)
        self.latent = torch.nn.Linear(16 * 16 * 3, WIDTH)
        self.latent_position = torch.nn.Embedding(LATENT_SIDE**2, WIDTH)
        self.position = torch.nn.Embedding(1000, WIDTH)
        self.words = torch.nn.Linear(WIDTH, VOCABULARY)
        self.velocity = torch.nn.Linear(WIDTH, 16 * 16 * 3)

    def latents(self, batch: SimpleCustomBatch) -> torch.Tensor:
        """A stand-in for the VAE: each picture, cut from its padding, as 16 x 16 patches."""
        patches = []
        for image, (rows, columns) in zip(
            batch.padded_images, batch.patchified_vae_latent_shapes, strict=True
        ):
            shown = image[:, : rows * 16, : columns * 16]
            assert not image[:, rows * 16 :].any()
            assert not image[:, :, columns * 16 :].any()
            patches.append(
                shown.reshape(3, rows, 16, columns, 16).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
            )
        return torch.cat(patches)

    def forward(self, batch: SimpleCustomBatch) -> torch.Tensor:
        """The sum of both losses."""
        sequence = torch.full((batch.sequence_length, WIDTH), torch.nan)
        sequence[batch.packed_text_indexes] = self.text(batch.packed_text_ids)
        if hasattr(batch, "packed_vit_tokens"):
            patches = self.vit(batch.packed_vit_tokens) + self.vit_position(batch.packed_vit_position_ids)
            sequence[batch.packed_vit_token_indexes] = patches
        clean = self.latents(batch)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
        time = torch.sigmoid(batch.packed_timesteps)[:, None]
        noised = (1 - time) * clean + time * noise
        sequence[batch.packed_vae_token_indexes] = self.latent(noised) + self.latent_position(
            batch.packed_latent_position_ids
        )
        assert not sequence.isnan().any(), "a token that nothing filled"
        hidden = self.attend(sequence + self.position(batch.packed_position_ids), batch)
        words = self.words(hidden[batch.ce_loss_indexes])
        ce = (
            torch.nn.functional.cross_entropy(words, batch.packed_label_ids, reduction="none")
            * batch.ce_loss_weights
        )
        target = (noise - clean)[batch.packed_timesteps > -torch.inf]
        mse = (self.velocity(hidden[batch.mse_loss_indexes]) - target) ** 2
        total: torch.Tensor = ce.sum() + mse.mean()
        return total

    def attend(self, sequence: torch.Tensor, batch: SimpleCustomBatch) -> torch.Tensor:
        """One attention without weights, by whichever form of mask the batch has."""
        if batch.use_flex:
            visible = visible_pairs(batch.sample_lens, batch.split_lens, batch.attn_modes)[
                : len(sequence), : len(sequence)
            ]
            bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        else:
            bias = torch.block_diag(*(mask.exp() for mask in batch.nested_attention_masks)).log()  # type: ignore[no-untyped-call] # torch has no type for it
        return torch.softmax(sequence @ sequence.T + bias, dim=1) @ sequence


def spans(batch: SimpleCustomBatch) -> list[range]:
    """Where each sample lies in the sequence."""
    ends = [end for end in accumulate(batch.sample_lens) if end <= batch.sequence_length]
    return [range(end - length, end) for end, length in zip(ends, batch.sample_lens, strict=False)]


def check(batch: SimpleCustomBatch) -> None:
    """Every promise that a model relies on."""
    data = batch.to_dict()
    everything: list[int] = []
    for name in ("packed_text_indexes", "packed_vae_token_indexes", "packed_vit_token_indexes"):
        everything += data[name].tolist() if name in data else []
    assert sorted(everything) == list(range(batch.sequence_length))
    assert 0 <= int(batch.packed_text_ids.min()) <= int(batch.packed_text_ids.max()) < VOCABULARY
    assert int(batch.packed_latent_position_ids.max()) < LATENT_SIDE**2
    if "packed_vit_tokens" in data:
        assert int(batch.packed_vit_position_ids.max()) < VIT_SIDE**2
    latents = set(batch.packed_vae_token_indexes.tolist())
    assert set(batch.mse_loss_indexes.tolist()) == {
        index
        for index, time in zip(
            batch.packed_vae_token_indexes.tolist(), batch.packed_timesteps.tolist(), strict=True
        )
        if time > -torch.inf
    }
    text = set(batch.packed_text_indexes.tolist())
    assert set(batch.mse_loss_indexes.tolist()) <= latents
    assert set(batch.ce_loss_indexes.tolist()) <= text
    owners = {index: number for number, span in enumerate(spans(batch)) for index in span}
    labels = dict(zip(batch.ce_loss_indexes.tolist(), batch.packed_label_ids.tolist(), strict=True))
    ids = dict(zip(batch.packed_text_indexes.tolist(), batch.packed_text_ids.tolist(), strict=True))
    for index, label in labels.items():
        # Each token with loss predicts the next one of its own sample.
        assert owners[index] == owners[index + 1]
        assert label == ids[index + 1]
    if batch.use_flex:
        rest = iter(zip(batch.split_lens, batch.attn_modes, strict=True))
        for length in batch.sample_lens:
            covered = 0
            while covered < length:
                covered += next(rest)[0]
            assert covered == length
    for span in spans(batch):
        rope = batch.packed_position_ids[span.start : span.stop]
        assert int(rope[0]) <= 2
        assert (rope.diff() >= 0).all()


@pytest.mark.parametrize("use_flex", [False, True])
def test_tiny_model_learns_from_three_batches(tmp_path: Path, *, use_flex: bool) -> None:
    config = small_config(
        dataset_info=foreign_info(tmp_path),
        use_flex=use_flex,
        max_latent_size=LATENT_SIDE,
        max_num_patch_per_side=VIT_SIDE,
    )
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, rank=0, world_size=1, num_workers=1, global_seed=0)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=1, num_workers=1, collate_fn=collate_wrapper())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TinyBagel()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for batch in islice(loader, 3):
        check(batch)
        for _ in range(5):
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[-5]
    assert len(losses) == 15


def test_both_forms_of_attention_say_the_same(tmp_path: Path) -> None:
    info = foreign_info(tmp_path)
    dense, flex = (
        next(
            iter(
                small_config(dataset_info=info, use_flex=form).build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, 0)
            )
        )
        for form in (False, True)
    )

    visible = visible_pairs(flex["sample_lens"], flex["split_lens"], flex["attn_modes"])
    start = split = 0
    for mask, length in zip(dense["nested_attention_masks"], dense["sample_lens"], strict=True):
        assert torch.equal(mask == 0, visible[start : start + length, start : start + length])
        lens: list[int] = []
        modes: list[str] = []
        while sum(lens) < length:
            lens.append(flex["split_lens"][split])
            modes.append(flex["attn_modes"][split])
            split += 1
        assert torch.equal(mask, prepare_attention_mask_per_sample(lens, modes))
        start += length
    # Nobody sees another sample, or the padding, from outside it.
    assert not visible[:start, start:].any()
