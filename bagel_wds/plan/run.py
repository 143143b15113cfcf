"""What a run would look like, from its settings and manifests alone: no shard is read, and torch is not imported.

What follows from the settings is exact: how an epoch is divided, and how large a state may become. What depends on the
lengths of samples is an expectation, and is left out (None) where nobody said or sampled them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bagel_wds.config import Packing
from bagel_wds.errors import ConfigError
from bagel_wds.groups import find_shards, groups_of, resolve, streams_for
from bagel_wds.plan.advice import advise, divisors
from bagel_wds.plan.figures import GroupPlan, Rates, RunPlan, Spread
from bagel_wds.plan.footprint import memory_of, state_bytes, traffic_of
from bagel_wds.plan.lengths import sample_lengths
from bagel_wds.plan.shares import divide
from bagel_wds.rng import KeyedDraws

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bagel_wds.config import BagelDatasetConfig, GroupConfig
    from bagel_wds.plan.shares import Counts
    from bagel_wds.shards import Shard


MOST_STREAMS = 1 << 22
"""A plan holds figures of every stream, a few seconds' work for so many."""


def plan_run(
    config: BagelDatasetConfig,
    world_size: int,
    num_workers: int,
    *,
    tokens: Mapping[str, float] | None = None,
    sample_index: bool = False,
    text_tokens: int = 64,
    step_seconds: float = 1.0,
    memory_limit: int | None = None,
) -> RunPlan:
    """Say what a run would look like.

    Args:
        config: as training takes it.
        world_size: ranks.
        num_workers: of each rank's DataLoader.
        tokens: mean tokens of a sample, by group, where they are known.
        sample_index: of the other groups, plan samples of one shard's index of each dataset.
        text_tokens: how long each text is then taken to be.
        step_seconds: how long a step takes.
        memory_limit: bytes that a worker may have; more is told.

    Raises:
        ConfigError: for whatever `build` would refuse, for tokens of a group that is not there, and for figures out of
            bounds.
    """
    config = resolve(config)
    groups = groups_of(config)
    tokens = dict(tokens or {})
    for name in tokens:
        if name not in groups:
            raise ConfigError(
                f"tokens of group {name!r}: the mixture has no such group; it has {', '.join(groups)}"
            )
        if not 0 < tokens[name] <= min(config.max_num_tokens_per_sample, config.max_num_tokens):
            raise ConfigError(
                f"tokens of group {name!r}: {tokens[name]:g} must be above 0 and at most "
                f"{min(config.max_num_tokens_per_sample, config.max_num_tokens)}, the longest that a sample may be"
            )
    if not 0 < step_seconds < math.inf:
        raise ConfigError(
            f"step_seconds={step_seconds:g}: a step cannot take so long; give seconds, a number above 0"
        )
    longest = min(config.max_num_tokens_per_sample, config.max_num_tokens)
    if not 0 <= text_tokens <= longest:
        raise ConfigError(
            f"text_tokens={text_tokens} must be at least 0 and at most {longest}, the longest that a sample may be"
        )
    streams = max(config.num_streams or 0, world_size * max(1, num_workers))
    if streams > MOST_STREAMS:
        raise ConfigError(
            f"world_size={world_size}, num_workers={num_workers} and num_streams={config.num_streams} make {streams} streams; at "
            f"most {MOST_STREAMS} are planned, give smaller numbers"
        )
    num_streams = streams_for(config, world_size, num_workers)
    tables = find_shards(config, look=False)
    plans = [
        _plan_group(
            config, name, group, tables[name], num_streams, tokens.get(name), sample_index, text_tokens
        )
        for name, group in groups.items()
    ]
    pack_tokens = _pack_tokens(config)
    if all(plan.mean_tokens for plan in plans):
        plans = _with_rates(plans, pack_tokens, world_size)
    hosted = num_streams // (world_size * max(1, num_workers))
    state = state_bytes(config, plans, tables)
    memory = memory_of(config, plans, tables, hosted, num_workers)
    fingerprint = 1000 + 100 * len(plans)
    plan = RunPlan(
        world_size=world_size,
        num_workers=num_workers,
        num_streams=num_streams,
        streams_per_worker=hosted,
        pack_tokens=pack_tokens,
        text_tokens=text_tokens,
        groups=tuple(plans),
        state_bytes=state,
        rank_state_bytes=num_streams // world_size * state + fingerprint,
        run_state_bytes=num_streams * state + fingerprint,
        memory=memory,
        traffic=traffic_of(config, plans, memory, hosted, world_size, step_seconds),
        world_sizes=divisors(num_streams),
    )
    return replace(plan, advice=tuple(advise(config, plan, memory_limit)))


def _plan_group(
    config: BagelDatasetConfig,
    name: str,
    group: GroupConfig,
    shards: Sequence[Shard],
    num_streams: int,
    given: float | None,
    sample_index: bool,
    text_tokens: int,
) -> GroupPlan:
    samples = _total([shard.samples for shard in shards])
    num_bytes = _total([shard.bytes for shard in shards])
    order = KeyedDraws(config.data_seed, "shards", name).permutation(len(shards), "epoch:0")
    shares = divide([shard.samples for shard in shards], order, num_streams)
    lengths = (
        sample_lengths(config, name, group, shards, text_tokens) if sample_index and given is None else None
    )
    return GroupPlan(
        name=name,
        datasets=len(group.dataset_names),
        shards=len(shards),
        samples=samples,
        bytes=num_bytes,
        weight=group.weight,
        is_mandatory=group.is_mandatory,
        mean_bytes=num_bytes / samples if num_bytes is not None and samples else None,
        mean_tokens=lengths.mean_tokens if lengths else given,
        mean_square=lengths.mean_square if lengths else None if given is None else given**2,
        tokens_from="sampled" if lengths else "unknown" if given is None else "given",
        over_length=lengths.over_length / lengths.samples if lengths else 0.0,
        padding=lengths.padding if lengths else 1.0,
        shards_per_stream=_spread(shares.shards),
        samples_per_stream=None if shares.samples is None else _spread(shares.samples),
        sharing_streams=shares.sharing,
        openings=shares.openings,
        index_reads=shares.inside,
        rates=None,
        raw_units=sum(shard.raw is not None for shard in shards),
    )


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _spread(counts: Counts) -> Spread:
    mean = float(counts.mean())
    return Spread(
        least=int(counts.min()),
        median=float(np.median(counts)),
        most=int(counts.max()),
        skew=float(counts.max()) / mean - 1 if mean else 0.0,
    )


def _pack_tokens(config: BagelDatasetConfig) -> int:
    """How many tokens a pack is taken to have: greedy ones end somewhere between their two budgets."""
    if config.packing == Packing.BEST_FIT:
        return config.max_num_tokens
    return (config.expected_num_tokens + config.max_num_tokens) // 2


def _with_rates(plans: Sequence[GroupPlan], pack_tokens: int, world_size: int) -> list[GroupPlan]:
    """A pack has a sample of each mandatory group; the room that is left goes to draws by weight."""
    tokens = [plan.mean_tokens or 0.0 for plan in plans]
    opening = sum(mean for plan, mean in zip(plans, tokens, strict=True) if plan.is_mandatory)
    drawn = sum(plan.weight * mean for plan, mean in zip(plans, tokens, strict=True))
    # Draws a unit of weight.
    draws = max(0.0, pack_tokens - opening) / drawn if drawn else 0.0
    per_pack = [plan.is_mandatory + plan.weight * draws for plan in plans]
    all_tokens = sum(count * mean for count, mean in zip(per_pack, tokens, strict=True))
    return [
        replace(
            plan,
            rates=None
            if plan.samples is None or count == 0
            else Rates(
                samples_per_pack=count,
                token_share=count * mean / all_tokens,
                packs_per_epoch=plan.samples / count,
                steps_per_epoch=plan.samples / count / world_size,
                epochs_per_1000_steps=1000 * count * world_size / plan.samples,
            ),
        )
        for plan, count, mean in zip(plans, per_pack, tokens, strict=True)
    ]
