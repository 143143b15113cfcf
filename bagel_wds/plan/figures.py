"""What is said of a run: the values, all plain, so that they go to JSON as they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A figure over all streams: least, middle, most, and by what share the most is over the mean."""

    least: float
    median: float
    most: float
    skew: float


@dataclass(frozen=True)
class Rates:
    """What is expected of a group, given the lengths of samples.

    Attributes:
        samples_per_pack: of this group, in a pack of the mixture.
        token_share: of the tokens of a pack.
        packs_per_epoch: until each of its samples has come once, over all ranks.
        steps_per_epoch: likewise; a step is a pack on each rank.
        epochs_per_1000_steps: how often it comes round.
    """

    samples_per_pack: float
    token_share: float
    packs_per_epoch: float
    steps_per_epoch: float
    epochs_per_1000_steps: float


@dataclass(frozen=True)
class GroupPlan:
    """What is known of a group.

    Attributes:
        name: of the group.
        datasets, shards: how many it has.
        raw_units: how many of the shards are units of raw files.
        samples: how many it has; None where a shard does not tell.
        bytes: of the shards; None where no manifest tells.
        weight, is_mandatory: as in the mixture.
        mean_bytes: of a sample.
        mean_tokens: of a sample; None where nobody said or sampled it.
        mean_square: mean of squared tokens; of given ones the square of their mean.
        tokens_from: "given", "sampled" or "unknown".
        over_length: share of the sampled samples that are longer than any may be.
        padding: how many times the mean area of a sampled VAE picture one that holds them all has; else 1.
        shards_per_stream: how many shards a stream opens in an epoch.
        samples_per_stream: how many samples it reads in an epoch; None where a shard does not tell.
        sharing_streams: how many streams read from a shard that another reads from, too.
        openings: how often a shard is opened in an epoch, over all streams.
        index_reads: how often in the middle, for which its index is read.
        rates: None where the tokens of a sample of any group are unknown.
    """

    name: str
    datasets: int
    shards: int
    samples: int | None
    bytes: int | None
    weight: float
    is_mandatory: bool
    mean_bytes: float | None
    mean_tokens: float | None
    mean_square: float | None
    tokens_from: str
    over_length: float
    padding: float
    shards_per_stream: Spread
    samples_per_stream: Spread | None
    sharing_streams: int
    openings: int
    index_reads: int
    rates: Rates | None
    raw_units: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes in one worker whose buffers are full; what the store's client holds comes on top.

    Attributes:
        libraries: interpreter and libraries, a stated figure.
        table: of the shards.
        buffers: encoded samples that wait for their turn, as far as `memory_bytes` lets them.
        buffers_wanted: what they would be without that.
        held: encoded samples that wait in the packer.
        read_ahead: of shards that are not on a disk.
        batches: tensors of the batch that is made and of those that wait, each a full pack of pictures.
        total: of all but `buffers_wanted`.
    """

    libraries: int
    table: int
    buffers: int
    buffers_wanted: int
    held: int
    read_ahead: int
    batches: int
    total: int


@dataclass(frozen=True)
class Traffic:
    """What all ranks together ask of the store, a second.

    Attributes:
        step_seconds: how long a step takes.
        openings: of shards.
        requests: for ranges of shards, and for indexes.
        bytes: that are read.
        read_again: share of the bytes that are read a second time, as the buffers have no memory for them.
    """

    step_seconds: float
    openings: float
    requests: float
    bytes: float
    read_again: float


@dataclass(frozen=True)
class RunPlan:
    """What a run would look like.

    Attributes:
        world_size, num_workers: ranks, and workers of each.
        num_streams: G.
        streams_per_worker: how many a worker hosts.
        pack_tokens: how many tokens a pack is taken to have.
        text_tokens: how many tokens each text is taken to have, where lengths are sampled.
        groups: of the mixture.
        state_bytes: of one stream's state as JSON, at most; `rank_state_bytes` of all that a rank saves, and
            `run_state_bytes` of the run's.
        memory: of one worker.
        traffic: None where lengths or sizes are unknown.
        world_sizes: those that can host these streams.
        advice: what is legal and may hurt.
    """

    world_size: int
    num_workers: int
    num_streams: int
    streams_per_worker: int
    pack_tokens: int
    text_tokens: int
    groups: tuple[GroupPlan, ...]
    state_bytes: int
    rank_state_bytes: int
    run_state_bytes: int
    memory: Memory
    traffic: Traffic | None
    world_sizes: tuple[int, ...]
    advice: tuple[str, ...] = ()
