"""What a run would take: bytes of its state, of a worker's memory, and of what is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import orjson

from bagel_wds import storage
from bagel_wds.config import Packing, Transport
from bagel_wds.groups import groups_of, transforms_of
from bagel_wds.object_file import FIRST_WINDOW, LAST_WINDOW
from bagel_wds.plan.figures import Memory, Traffic
from bagel_wds.prefetch import last_window
from bagel_wds.records import Cursor, Kind
from bagel_wds.state import GroupState, StreamState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bagel_wds.config import BagelDatasetConfig
    from bagel_wds.plan.figures import GroupPlan
    from bagel_wds.shards import Shard

LIBRARIES_BYTES = 720 << 20
"""Interpreter and libraries of a worker: torch 2.14 and Numba on Linux, of which 420 MB are files that processes share."""
WAITING = 2
"""Batches of a worker on their way: the default `prefetch_factor` of a DataLoader."""
BATCHES = (WAITING + 2) * 5 // 4
"""What a worker has memory for: those, one in the making, one that the trainer has, and a quarter more for larger ones."""
ROW_BYTES = 500
"""A shard in the table that each worker has: two URLs and their numbers."""
INDEX_BYTES = 64
"""Of a batch, a token, besides its pixels: ids, positions, losses."""


def _waiting(mean_bytes: float | None, most: int, most_bytes: int) -> int:
    """How many samples a buffer has, bounded by samples and bytes; the last may be over the bytes."""
    return most if not mean_bytes else max(1, min(most, int(most_bytes // mean_bytes) + 1))


def state_bytes(
    config: BagelDatasetConfig, plans: Sequence[GroupPlan], tables: Mapping[str, Sequence[Shard]]
) -> int:
    """The JSON of a stream whose buffers are full, each reference with as many digits as it can have."""
    large = 10**7 - 1
    refs = {}
    states = {}
    for plan in plans:
        offset = max((shard.bytes or 10**10 - 1 for shard in tables[plan.name]), default=0)
        length = int(2 * plan.mean_bytes) if plan.mean_bytes else 10**7 - 1
        refs[plan.name] = [plan.shards - 1, offset, length, 9]
        shuffled = _waiting(plan.mean_bytes, config.shuffle_samples, config.shuffle_bytes)
        piece = int(plan.shards_per_stream.most)
        ordinal = plan.samples if plan.samples is not None else large
        states[plan.name] = GroupState(
            cursor=Cursor(9, piece, ordinal, offset),
            shuffled=np.tile(np.array(refs[plan.name], dtype=np.int64), (shuffled, 1)),
            taken=large,
        )
    # Whichever group's references are longest may be all that waits.
    longest = max(refs, key=lambda name: len(name) + len(str(refs[name])))
    best_fit = config.packing == Packing.BEST_FIT
    waiting = config.look_ahead if best_fit else config.max_buffer_size
    rows = (waiting * (longest,), np.tile(np.array(refs[longest], dtype=np.int64), (waiting, 1)))
    state = StreamState(
        stream=0,
        batches=large,
        groups=states,
        picks=large,
        held=(tuple(refs), np.array(list(refs.values()), dtype=np.int64)),
        buffer=rows,
        deferred=large,
        packs=large,
        tokens=10**11 - 1,
        counts={
            plan.name: {"read": large, "packed": large, "dropped": {"over_length": large}} for plan in plans
        },
    )
    return len(orjson.dumps(state.to_json())) + len('"1000000":,')


def memory_of(
    config: BagelDatasetConfig,
    plans: Sequence[GroupPlan],
    tables: Mapping[str, Sequence[Shard]],
    hosted: int,
    num_workers: int,
) -> Memory:
    """Of a worker that hosts so many streams; with 0 workers, of the process that trains, its model not counted."""
    largest = max((plan.mean_bytes or 0 for plan in plans), default=0)
    shuffled = sum(
        _waiting(plan.mean_bytes, config.shuffle_samples, config.shuffle_bytes) * plan.mean_bytes
        if plan.mean_bytes
        else config.shuffle_bytes
        for plan in plans
    )
    best_fit = config.packing == Packing.BEST_FIT
    ahead = _waiting(largest, config.look_ahead, config.look_ahead_bytes) * largest if best_fit else 0
    wanted = int(hosted * (shuffled + ahead))
    remote = sum(not all(storage.is_local(shard.url) for shard in table) for table in tables.values())
    parts = {
        "libraries": LIBRARIES_BYTES,
        "table": ROW_BYTES * sum(plan.shards for plan in plans),
        "buffers": min(wanted, config.memory_bytes),
        "held": 0 if best_fit else int(hosted * config.max_buffer_size * largest),
        "read_ahead": remote * (config.read_ahead_bytes and config.read_ahead_bytes + hosted * FIRST_WINDOW),
        "batches": _batch_bytes(config, plans) * (BATCHES if num_workers else 1),
    }
    return Memory(**parts, buffers_wanted=wanted, total=sum(parts.values()))


def _batch_bytes(config: BagelDatasetConfig, plans: Sequence[GroupPlan]) -> int:
    """Of a full pack that is all pictures of the larger kind of patch, padded as sampled, and of its masks."""
    kinds = {kind for group in groups_of(config).values() for kind in transforms_of(group)}
    patch = {Kind.VAE_IMAGE: config.vae_image_downsample, Kind.VIT_IMAGE: config.vit_patch_size}
    channel_bytes = 1 if config.transport == Transport.UINT8 else 4
    padding = {Kind.VAE_IMAGE: max(plan.padding for plan in plans), Kind.VIT_IMAGE: 1.0}
    pixels = max(3 * patch[kind] ** 2 * channel_bytes * padding[kind] for kind in kinds)
    longest = min(config.max_num_tokens_per_sample, config.max_num_tokens)
    if config.use_flex:
        masks = 0.0
    elif all(plan.rates for plan in plans):
        masks = sum(4 * plan.rates.samples_per_pack * (plan.mean_square or 0) for plan in plans if plan.rates)
    else:
        masks = 4 * longest * config.max_num_tokens
    return int(config.max_num_tokens * (pixels + INDEX_BYTES) + masks)


def _requests_for(num_bytes: float, longest: int) -> int:
    """How many ranges an opened shard is read in: each twice as long as the one before, up to a limit."""
    requests, window = 0, FIRST_WINDOW
    while num_bytes > 0 and window < longest:
        requests, num_bytes, window = requests + 1, num_bytes - window, 2 * window
    return requests + max(0, math.ceil(num_bytes / longest))


def traffic_of(
    config: BagelDatasetConfig,
    plans: Sequence[GroupPlan],
    memory: Memory,
    hosted: int,
    world_size: int,
    step_seconds: float,
) -> Traffic | None:
    """What all ranks read in a second; None where sizes or lengths are unknown."""
    longest = last_window(config.read_ahead_bytes // hosted) if config.read_ahead_bytes else LAST_WINDOW
    again = 1 - memory.buffers / memory.buffers_wanted if memory.buffers_wanted else 0.0
    openings = requests = num_bytes = 0.0
    for plan in plans:
        if plan.rates is None or plan.samples is None or plan.mean_bytes is None or plan.bytes is None:
            return None
        samples = plan.rates.samples_per_pack * world_size / step_seconds
        opened = samples * plan.openings / plan.samples
        read = samples * plan.mean_bytes
        openings += opened
        # What is read again may come sample by sample.
        requests += opened * _requests_for(plan.bytes / plan.openings, longest) + samples * again
        requests += samples * plan.index_reads / plan.samples
        num_bytes += read * (1 + again)
    return Traffic(step_seconds, openings, requests, num_bytes, again)
