"""How many tokens samples need, judged by their sizes in an index: no shard is read, and no text.

The group's own recipe plans each sample, with the sizes of its pictures as the index has them, and with texts that are
all of one assumed length.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from bagel_wds import storage
from bagel_wds.config import Fidelity
from bagel_wds.errors import BadSample, ConfigError
from bagel_wds.groups import planner_of, transforms_of
from bagel_wds.planners import DropoutRates, PlanTools, settle
from bagel_wds.records import Kind, RawSample
from bagel_wds.rng import KeyedDraws

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bagel_wds.config import BagelDatasetConfig, GroupConfig
    from bagel_wds.records import SamplePlan
    from bagel_wds.shards import Shard
    from bagel_wds.storage import StorageOptions

MOST_SAMPLES = 1000
"""So many samples of a dataset are planned at most."""

_BY_MEDIA = ("t2i", "edit", "vlm")
"""The recipes whose samples are alike but for their media, which an index has."""


@dataclass(frozen=True)
class Lengths:
    """What samples of a group were found to need.

    Attributes:
        samples: how many were planned.
        mean_tokens, mean_square: of those that are not over length; the second is the mean of squared tokens.
        over_length: how many are longer than any sample may be.
        padding: how many times the mean area of a VAE picture one that holds them all has.
    """

    samples: int
    mean_tokens: float
    mean_square: float
    over_length: int
    padding: float


@dataclass(frozen=True)
class _Size:
    """A picture of which only the size is known."""

    size_hw: tuple[int, int]
    num_bytes: int = 0


def sample_lengths(
    config: BagelDatasetConfig, name: str, group: GroupConfig, shards: Sequence[Shard], text_tokens: int
) -> Lengths:
    """Plan samples of the first indexed shard of each dataset of a group; datasets count by their samples.

    Args:
        config: holds budgets and dropout.
        name: of the group.
        group: its settings.
        shards: its table.
        text_tokens: how long each text is taken to be.

    Raises:
        ConfigError: if a dataset has no index, or one that says nothing of media, or of no sample that can be used.
    """
    if group.recipe not in _BY_MEDIA:
        raise ConfigError(
            f"group {name!r}: an index does not say what its recipe {group.recipe!r} makes of a sample; give its length with "
            f"--tokens-per-sample {name}=N"
        )
    tools = PlanTools(
        group=name,
        encode=lambda _: [0] * text_tokens,
        resize={kind: transform.resize for kind, transform in transforms_of(group).items()},
        patch={Kind.VIT_IMAGE: config.vit_patch_size, Kind.VAE_IMAGE: config.vae_image_downsample},
        frames=group.frame_sampler_args.rule(Fidelity.CORRECTED),
    )
    rates = DropoutRates(
        text=config.text_cond_dropout_prob, vit=config.vit_cond_dropout_prob, vae=config.vae_cond_dropout_prob
    )
    longest = min(config.max_num_tokens_per_sample, config.max_num_tokens)
    planned = over = 0
    lengths: list[int] = []
    weights: list[float] = []
    sizes: list[tuple[int, int]] = []
    for dataset in dict.fromkeys(shard.dataset for shard in shards):
        own = [shard for shard in shards if shard.dataset == dataset]
        plans: list[SamplePlan] = []
        for sample, draws in _samples(name, dataset, own, str(group.recipe), config.storage_options):
            # What the recipe refuses is dropped in training, too.
            with suppress(BadSample):
                plans.append(settle(planner_of(group)(sample, tools, draws), rates, draws))
        fitting = [plan for plan in plans if 0 < plan.length <= longest]
        planned, over = planned + len(plans), over + sum(plan.length > longest for plan in plans)
        held = sum(shard.samples or 0 for shard in own)
        lengths += [plan.length for plan in fitting]
        weights += [held / len(fitting)] * len(fitting)
        sizes += [view.size_hw for plan in fitting for view in plan.views if view.kind is Kind.VAE_IMAGE]
    if not lengths:
        raise ConfigError(
            f"group {name!r}: none of the {planned} samples of its index that were looked at can be used, {over} are over "
            f"{longest} tokens; raise max_num_tokens_per_sample, or lower max_image_size"
        )
    tokens = np.array(lengths, dtype=np.float64)
    areas = np.array(sizes or [(1, 1)], dtype=np.float64)
    return Lengths(
        samples=planned,
        mean_tokens=float(np.average(tokens, weights=weights)),
        mean_square=float(np.average(tokens**2, weights=weights)),
        over_length=over,
        padding=float(areas.max(axis=0).prod() / areas.prod(axis=1).mean()),
    )


def _samples(
    group: str, dataset: str, shards: Sequence[Shard], recipe: str, options: StorageOptions | None
) -> Iterator[tuple[RawSample, KeyedDraws]]:
    """Samples of an index with pictures of its sizes, and the draws of each."""
    index_url = next((shard.index_url for shard in shards if shard.index_url and shard.samples != 0), None)
    if index_url is None:
        raise ConfigError(
            f"group {group!r}: dataset {dataset!r} has no index to sample; give its length with "
            f"--tokens-per-sample {group}=N"
        )
    for number, media in enumerate(_media(index_url, group, options)):
        is_clip = tuple(medium["frames"] is not None for medium in media)
        pictures = tuple(
            (_Size((medium["height"], medium["width"])),) * (medium["frames"] or 1) for medium in media
        )
        yield (
            RawSample(str(number), index_url, _fields(recipe, is_clip), pictures, is_clip),
            KeyedDraws(0, "lengths", group, dataset, number),
        )


def _media(index_url: str, group: str, options: StorageOptions | None) -> list[list[dict[str, Any]]]:
    try:
        with storage.open_read(index_url, options) as file:
            batch = next(pq.ParquetFile(file).iter_batches(MOST_SAMPLES, columns=["media"]))
            return [row or [] for row in batch["media"].to_pylist()]
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise ConfigError(
            f"{index_url}: its media cannot be read: {error!r}; give --tokens-per-sample {group}=N instead"
        ) from error


def _fields(recipe: str, is_clip: Sequence[bool]) -> Mapping[str, object]:
    """What the JSON of a sample with these media may say; its texts count for `text_tokens` whatever they are."""
    if recipe == "t2i":
        return {"captions": {"caption": "text"}}
    if recipe == "edit":
        return {"instruction_list": [["text"]] * max(0, len(is_clip) - 1)}
    tags = "".join("<video>" if clip else "<image>" for clip in is_clip)
    return {
        "conversations": [{"from": "human", "value": f"{tags}text"}, {"from": "gpt", "value": "text"}],
    }
