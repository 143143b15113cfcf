"""What each room needs out of the settings: one function a room, and the checks that need several settings at once."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from bagel_wds.config import (
    BagelDatasetConfig,
    Fidelity,
    GroupConfig,
    TransformConfig,
    parse_groups,
    resolve_mapping,
)
from bagel_wds.errors import ConfigError
from bagel_wds.layout import LayoutRules
from bagel_wds.materialize import Normalization, ViewLoader
from bagel_wds.packer import PackLimits
from bagel_wds.planners import PLANNERS, DropoutRates, PlanTools
from bagel_wds.records import Kind
from bagel_wds.tokens import TextEncoder, control_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from bagel_wds.planners import Planner

logger = logging.getLogger(__name__)


def groups_of(config: BagelDatasetConfig) -> dict[str, GroupConfig]:
    """The groups of the mixture, checked against the model's tables; those of a resolved config as they are.

    Raises:
        ConfigError: if a group's settings cannot work.
    """
    mixture = resolve_mapping(config.grouped_datasets, config.grouped_datasets_path, "grouped_datasets")
    groups = parse_groups(mixture)
    for name, group in groups.items():
        if mixture[name] is group:
            continue
        check_tables(config, name, group)
        if group.weight == 0 and not group.is_mandatory and config.fidelity == Fidelity.CORRECTED:
            raise ConfigError(
                f"group {name!r} has weight 0 and is not mandatory, so none of its samples would come; give it a weight or "
                "take it out of the mixture"
            )
    return groups


def resolve(config: BagelDatasetConfig) -> BagelDatasetConfig:
    """The same settings with the mixture read and checked, so that workers need not read it again."""
    return replace(config, grouped_datasets=groups_of(config), grouped_datasets_path=None)


def transforms_of(group: GroupConfig) -> dict[Kind, TransformConfig]:
    """Which transform makes each kind of view of a group."""
    match group.recipe:
        case "vlm":
            return {Kind.VIT_IMAGE: group.image_transform_args}
        case "edit" if group.vit_image_transform_args is not None:
            return {
                Kind.VAE_IMAGE: group.image_transform_args,
                Kind.VIT_IMAGE: group.vit_image_transform_args,
            }
        case _:
            return {Kind.VAE_IMAGE: group.image_transform_args}


def check_tables(config: BagelDatasetConfig, name: str, group: GroupConfig) -> None:
    """Refuse a group whose largest image has no place in the model's tables of positions.

    Upstream runs such a group until an index is out of range on the GPU; under its fidelity it is only warned of.

    Raises:
        ConfigError: naming the group, the setting and the smallest value that works.
    """
    tables = {
        Kind.VAE_IMAGE: (
            "vae_image_downsample",
            config.vae_image_downsample,
            "max_latent_size",
            config.max_latent_size,
        ),
        Kind.VIT_IMAGE: (
            "vit_patch_size",
            config.vit_patch_size,
            "max_num_patch_per_side",
            config.max_num_patch_per_side,
        ),
    }
    for kind, transform in transforms_of(group).items():
        patch_name, patch, side_name, side = tables[kind]
        if transform.image_stride % patch:
            raise ConfigError(
                f"group {name!r}: image_stride={transform.image_stride} of its {kind} is no multiple of "
                f"{patch_name}={patch}; set them equal"
            )
        needed = transform.resize.largest_edge() // patch
        if needed <= side or config.interpolate_pos:
            continue
        message = (
            f"group {name!r}: max_image_size={transform.max_image_size} gives {needed} patches of {patch} pixels along "
            f"an edge, but the model's table has {side_name}={side}; set {side_name} to {needed} or more (the model's "
            f"too), or max_image_size to {side * patch}"
        )
        if config.fidelity == Fidelity.UPSTREAM:
            logger.warning("%s", message)
        else:
            raise ConfigError(message)


def plan_tools(
    config: BagelDatasetConfig, name: str, group: GroupConfig, tokenizer: PreTrainedTokenizerBase
) -> PlanTools:
    """What the group's planner works with."""
    upstream = config.fidelity == Fidelity.UPSTREAM
    return PlanTools(
        group=name,
        encode=TextEncoder(tokenizer, allow_control_tokens=upstream or config.allow_control_tokens),
        resize={kind: transform.resize for kind, transform in transforms_of(group).items()},
        patch={Kind.VIT_IMAGE: config.vit_patch_size, Kind.VAE_IMAGE: config.vae_image_downsample},
        frames=group.frame_sampler_args.rule(Fidelity(config.fidelity)),
        upstream=upstream,
    )


def planner_of(group: GroupConfig) -> Planner:
    """The group's recipe."""
    return PLANNERS[str(group.recipe)]


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
    )
