"""Which streams a worker hosts.

A run has G numbered streams whatever the ranks and workers, and global batch n comes from stream n mod G. Pure
arithmetic, and the only room below the datasets that knows rank and worker.
"""

from __future__ import annotations

from bagel_wds.errors import ConfigError


def check_split(num_streams: int, world_size: int, num_workers: int) -> None:
    """Refuse a number of streams that ranks and workers cannot share.

    Raises:
        ConfigError: naming the values and the nearest legal ones.
    """
    workers = max(1, num_workers)
    if world_size < 1:
        raise ConfigError(f"world_size={world_size} must be at least 1")
    if num_streams < 1 or num_streams % world_size:
        below = max(0, num_streams) // world_size * world_size
        legal = [count for count in (below, below + world_size) if count > 0]
        raise ConfigError(
            f"num_streams={num_streams} must be a multiple of world_size={world_size}; "
            + ("the nearest are " if len(legal) > 1 else "the nearest is ")
            + " and ".join(map(str, legal))
        )
    per_rank = num_streams // world_size
    if per_rank % workers:
        # Not above the streams, and not far from what was asked for.
        near = (workers + step for step in range(workers) for step in (-step, step))
        nearest = next(count for count in near if 0 < count <= per_rank and per_rank % count == 0)
        raise ConfigError(
            f"num_workers={num_workers} must divide the {per_rank} stream{'s' * (per_rank > 1)} of a rank "
            f"({num_streams} streams / {world_size} ranks); the nearest is {nearest}"
        )


def streams_of(
    num_streams: int, *, rank: int, world_size: int, worker: int, num_workers: int, first: int = 0
) -> list[int]:
    """The streams that a worker hosts, in the order in which it takes turns between them.

    From global batch `first` on, rank r of R consumes batches first + r, first + r + R, ...; its DataLoader takes them
    from its W workers in turn, so worker w makes batch first + r + R*w, then those R*W further on, and batch n comes
    from stream n mod G.

    >>> streams_of(8, rank=1, world_size=2, worker=0, num_workers=2)
    [1, 5]

    Raises:
        ConfigError: if ranks and workers cannot share the streams, or there is no such rank or worker.
    """
    workers = max(1, num_workers)
    check_split(num_streams, world_size, workers)
    if not (0 <= rank < world_size and 0 <= worker < workers):
        raise ConfigError(
            f"there is no worker {worker} of rank {rank}: ranks are 0..{world_size - 1}, workers 0..{workers - 1}"
        )
    turns = range(rank + world_size * worker, num_streams, world_size * workers)
    return [(first + turn) % num_streams for turn in turns]


def worker_of(stream: int, world_size: int) -> int:
    """The worker that hosts a stream at the start of a run in which each worker has one.

    >>> [worker_of(stream, world_size=2) for stream in range(6)]
    [0, 0, 1, 1, 2, 2]
    """
    return stream // world_size
