"""The pipeline of one stream: the stages in their order, as a `wds.DataPipeline`.

shards -> read -> shuffle -> decode -> plan   (one a group)
                                         mix -> pack -> materialize
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import webdataset as wds

from bagel_wds import stages
from bagel_wds.config import Fidelity
from bagel_wds.rng import CallOrderDraws
from bagel_wds.shards import Shard, count_samples

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from bagel_wds.config import BagelDatasetConfig
    from bagel_wds.errors import Tally


@dataclass(frozen=True)
class Run:
    """What all streams of a run have in common.

    Attributes:
        config: resolved.
        shards: of each group, in the order of the mixture.
        tokenizer: one that `add_special_tokens` has seen.
        special_tokens: the ids that it returned.
        num_streams: G.
        draw_seed: of every draw.
        order_seed: of the order of shards.
    """

    config: BagelDatasetConfig
    shards: Mapping[str, tuple[Shard, ...]]
    tokenizer: PreTrainedTokenizerBase
    special_tokens: Mapping[str, object]
    num_streams: int
    draw_seed: int
    order_seed: int


def stream_pipeline(run: Run, stream: int, tally: Tally) -> wds.DataPipeline:
    """The endless packed batches of one stream."""
    config, seed = run.config, run.draw_seed
    groups = {}
    for name, listed in run.shards.items():
        size = count_samples(listed)
        groups[name] = wds.DataPipeline(
            stages.shards(
                listed, group=name, seed=run.order_seed, num_streams=run.num_streams, stream=stream
            ),
            stages.read(),
            stages.shuffle(config, name, seed=seed, stream=stream),
            stages.decode(config, name, tally=tally, group_size=size),
            stages.plan(config, name, run.tokenizer, seed=seed, tally=tally, group_size=size),
        )
    return wds.DataPipeline(
        stages.mix(groups, config, seed=seed, stream=stream),
        stages.pack(config, stream=stream, tally=tally),
        stages.materialize(config, run.special_tokens, tally=tally),
    )


def upstream_pipeline(run: Run, stream: int, worker: int, iter_seed: int, tally: Tally) -> wds.DataPipeline:
    """The endless batches of `fidelity="upstream"`: draws in call order, samples in the order of the shards.

    Args:
        run: with `fidelity="upstream"`.
        stream: whose share of the shards is read.
        worker: number of the worker in its rank, for `batch_data_indexes`.
        iter_seed: of the draws.
        tally: of drops.
    """
    assert run.config.fidelity == Fidelity.UPSTREAM, run.config.fidelity  # noqa: S101 - the caller's promise
    config, draws = run.config, CallOrderDraws(iter_seed)
    groups = {}
    for name, listed in run.shards.items():
        size = count_samples(listed)
        groups[name] = wds.DataPipeline(
            stages.shards(
                listed, group=name, seed=run.order_seed, num_streams=run.num_streams, stream=stream
            ),
            stages.read(),
            stages.decode(config, name, tally=tally, group_size=size),
            stages.plan(config, name, run.tokenizer, draws=draws, tally=tally, group_size=size),
        )
    return wds.DataPipeline(
        stages.mix(groups, config, draws=draws),
        stages.pack(config, stream=worker, draws=draws, tally=tally),
        stages.materialize(config, run.special_tokens, tally=tally),
    )
