"""The pipeline of one stream: the stages in their order, as a `wds.DataPipeline`.

shards -> read -> shuffle -> decode -> plan   (one a group)
                                         mix -> pack -> materialize
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import webdataset as wds

from bagel_wds import stages
from bagel_wds.shards import Shard, count_samples

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from bagel_wds.config import BagelDatasetConfig
    from bagel_wds.errors import Tally
    from bagel_wds.rng import Draws


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


def stream_pipeline(
    run: Run, stream: int, tally: Tally, *, draws: Draws | None = None, worker: int | None = None
) -> wds.DataPipeline:
    """The endless packed batches of one stream.

    Args:
        run: what the streams have in common.
        stream: whose share of the shards is read.
        tally: of samples read, packed and dropped.
        draws: shared draws in call order, with `fidelity="upstream"` alone; samples then keep the order of the shards.
        worker: number that `batch_data_indexes` gives instead of the stream's.
    """
    config, seed = run.config, run.draw_seed
    groups = {}
    for name, listed in run.shards.items():
        size = count_samples(listed)
        shuffled = [] if draws else [stages.shuffle(config, name, seed=seed, stream=stream)]
        groups[name] = wds.DataPipeline(
            stages.shards(
                listed, group=name, seed=run.order_seed, num_streams=run.num_streams, stream=stream
            ),
            stages.read(),
            *shuffled,
            stages.decode(config, name, tally=tally, group_size=size),
            stages.plan(config, name, run.tokenizer, seed=seed, draws=draws, tally=tally, group_size=size),
        )
    return wds.DataPipeline(
        stages.mix(groups, config, seed=seed, stream=stream, draws=draws),
        stages.pack(config, stream=stream if worker is None else worker, draws=draws, tally=tally),
        stages.materialize(config, run.special_tokens, tally=tally),
    )
