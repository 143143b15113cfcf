"""What each room needs out of the settings: one function a room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.config import BagelDatasetConfig, Fidelity, GroupConfig
from bagel_wds.errors import ConfigError
from bagel_wds.groups import groups_of, transforms_of
from bagel_wds.layout import LayoutRules
from bagel_wds.materialize import Normalization, ViewLoader
from bagel_wds.packer import PackLimits
from bagel_wds.planners import DropoutRates, PlanTools
from bagel_wds.records import Kind
from bagel_wds.tokens import TextEncoder, control_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase


def text_encoder(config: BagelDatasetConfig, tokenizer: PreTrainedTokenizerBase | TextEncoder) -> TextEncoder:
    """How texts become tokens.

    Raises:
        ConfigError: if an encoder that is given treats control tokens otherwise than the settings say.
    """
    allows = config.fidelity == Fidelity.UPSTREAM or config.allow_control_tokens
    if not isinstance(tokenizer, TextEncoder):
        return TextEncoder(tokenizer, allow_control_tokens=allows)
    if tokenizer.allow_control_tokens != allows:
        raise ConfigError(
            f"the TextEncoder has allow_control_tokens={tokenizer.allow_control_tokens}, and by the settings it is {allows}; give "
            "both the same, or pass the tokenizer"
        )
    return tokenizer


def plan_tools(config: BagelDatasetConfig, name: str, group: GroupConfig, encoder: TextEncoder) -> PlanTools:
    """What the group's planner works with."""
    return PlanTools(
        group=name,
        encode=encoder,
        resize={kind: transform.resize for kind, transform in transforms_of(group).items()},
        patch={Kind.VIT_IMAGE: config.vit_patch_size, Kind.VAE_IMAGE: config.vae_image_downsample},
        frames=group.frame_sampler_args.rule(Fidelity(config.fidelity)),
        upstream=config.fidelity == Fidelity.UPSTREAM,
        has_id=encoder.has_id,
    )


def dropout_rates(config: BagelDatasetConfig) -> DropoutRates:
    """Probabilities of conditioning dropout."""
    return DropoutRates(
        text=config.text_cond_dropout_prob, vit=config.vit_cond_dropout_prob, vae=config.vae_cond_dropout_prob
    )


def pack_limits(config: BagelDatasetConfig) -> PackLimits:
    """Budgets of a pack, and of what waits for one."""
    return PackLimits(
        expected_num_tokens=config.expected_num_tokens,
        max_num_tokens_per_sample=config.max_num_tokens_per_sample,
        max_num_tokens=config.max_num_tokens,
        prefer_buffer_before=config.prefer_buffer_before,
        max_buffer_size=config.max_buffer_size,
        look_ahead=config.look_ahead,
        look_ahead_bytes=config.look_ahead_bytes,
    )


def layout_rules(config: BagelDatasetConfig, special_tokens: Mapping[str, object]) -> LayoutRules:
    """What the model expects of a batch."""
    return LayoutRules(
        **control_ids(special_tokens),
        use_flex=config.use_flex,
        max_num_tokens=config.max_num_tokens,
        interpolate_pos=config.interpolate_pos,
        vit_patch=config.vit_patch_size,
        vit_side=config.max_num_patch_per_side,
        vae_patch=config.vae_image_downsample,
        vae_side=config.max_latent_size,
        upstream=config.fidelity == Fidelity.UPSTREAM,
    )


def view_loader(config: BagelDatasetConfig) -> ViewLoader:
    """How pictures become pixels, and how those of each group are normalized."""
    return ViewLoader(
        {
            (name, kind): Normalization(transform.image_mean, transform.image_std)
            for name, group in groups_of(config).items()
            for kind, transform in transforms_of(group).items()
        },
        path=config.pixel_path,
        threads=config.decode_threads,
        video_seconds=config.video_seconds,
    )
