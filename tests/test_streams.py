"""Streams are shared by ranks and workers without rest, and batch n of the run comes from stream n mod G."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagel_wds.errors import ConfigError
from bagel_wds.streams import check_split, streams_of

MACHINES = [
    (per_worker * ranks * max(1, workers), ranks, workers)
    for ranks in (1, 2, 3, 4, 8)
    for workers in (0, 1, 2, 3, 5)
    for per_worker in (1, 2, 3, 7)
]
"""Legal (G, R, W)."""


def hosted(num_streams: int, ranks: int, workers: int) -> list[list[list[int]]]:
    """The streams of each worker of each rank."""
    return [
        [
            streams_of(num_streams, rank=rank, world_size=ranks, worker=worker, num_workers=workers)
            for worker in range(max(1, workers))
        ]
        for rank in range(ranks)
    ]


def run(num_streams: int, ranks: int, workers: int, steps: int) -> list[int]:
    """The streams that the global batches come from: each rank's DataLoader asks its workers in turn."""
    loaders: list[list[int]] = []
    for of_rank in hosted(num_streams, ranks, workers):
        turns = [cycle(streams) for streams in of_rank]
        loaders.append([next(turns[step % len(turns)]) for step in range(steps)])
    # In each step rank 0 consumes a batch, then rank 1, and so on.
    return [stream for step in zip(*loaders, strict=True) for stream in step]


@pytest.mark.parametrize(("num_streams", "ranks", "workers"), MACHINES)
def test_every_stream_has_one_host_and_global_batch_n_comes_from_stream_n_mod_g(
    num_streams: int, ranks: int, workers: int
) -> None:
    streams = [
        stream for of_rank in hosted(num_streams, ranks, workers) for part in of_rank for stream in part
    ]
    steps = 2 * num_streams // ranks + 1

    assert sorted(streams) == list(range(num_streams))
    assert run(num_streams, ranks, workers, steps) == [n % num_streams for n in range(steps * ranks)]


def test_the_batches_of_a_run_do_not_depend_on_its_machines() -> None:
    machines = [
        (ranks, workers)
        for ranks in range(1, 25)
        for workers in range(25)
        if 24 % (ranks * max(1, workers)) == 0
    ]
    runs = {tuple(run(24, ranks, workers, 48 // ranks)) for ranks, workers in machines}

    assert len(machines) > 30
    assert runs == {tuple(range(24)) * 2}


def test_a_small_machine_literally() -> None:
    assert [[list(part) for part in of_rank] for of_rank in hosted(8, 2, 2)] == [
        [[0, 4], [2, 6]],
        [[1, 5], [3, 7]],
    ]
    assert list(streams_of(3, rank=0, world_size=1, worker=0, num_workers=0)) == [0, 1, 2]


@settings(max_examples=300, deadline=None)
@given(num_streams=st.integers(-5, 80), ranks=st.integers(1, 12), workers=st.integers(0, 12))
def test_what_is_legal_is_what_divides(num_streams: int, ranks: int, workers: int) -> None:
    legal = num_streams > 0 and num_streams % ranks == 0 and num_streams // ranks % max(1, workers) == 0

    if legal:
        check_split(num_streams, ranks, workers)
        assert (
            sum(len(part) for of_rank in hosted(num_streams, ranks, workers) for part in of_rank)
            == num_streams
        )
    else:
        with pytest.raises(ConfigError) as error:
            check_split(num_streams, ranks, workers)
        # Whatever the message offers instead is legal.
        setting, offers = str(error.value).split("=")[0], str(error.value).rsplit("nearest ", 1)[1]
        numbers = [int(word) for word in offers.replace("are", "").replace("is", "").split(" and ")]
        for number in numbers:
            check_split(*((number, ranks, 1) if setting == "num_streams" else (num_streams, ranks, number)))


@pytest.mark.parametrize(
    ("num_streams", "ranks", "workers", "says"),
    [
        (10, 4, 1, "num_streams=10 must be a multiple of world_size=4; the nearest are 8 and 12"),
        (3, 4, 0, "num_streams=3 must be a multiple of world_size=4; the nearest is 4"),
        (0, 4, 0, "num_streams=0 must be a multiple of world_size=4; the nearest is 4"),
        (-3, 2, 0, "num_streams=-3 must be a multiple of world_size=2; the nearest is 2"),
        (
            12,
            2,
            4,
            r"num_workers=4 must divide the 6 streams of a rank \(12 streams / 2 ranks\); the nearest is 3",
        ),
        (
            8,
            1,
            100,
            r"num_workers=100 must divide the 8 streams of a rank \(8 streams / 1 ranks\); the nearest is 8",
        ),
        (8, 0, 1, "world_size=0 must be at least 1"),
    ],
)
def test_an_illegal_split_is_refused_with_the_nearest_legal_one(
    num_streams: int, ranks: int, workers: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_split(num_streams, ranks, workers)


@pytest.mark.parametrize(("rank", "worker"), [(2, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_rank_or_worker_that_is_not_there_is_refused(rank: int, worker: int) -> None:
    with pytest.raises(ConfigError, match=f"no worker {worker} of rank {rank}: ranks are 0..1, workers 0..1"):
        streams_of(8, rank=rank, world_size=2, worker=worker, num_workers=2)


@pytest.mark.parametrize(("streams", "ranks", "workers"), [(8, 2, 2), (12, 3, 2), (6, 1, 3), (4, 4, 1)])
@pytest.mark.parametrize("first", [0, 1, 5, 12, 31])
def test_run_that_goes_on_at_a_batch_keeps_the_order_of_streams(
    streams: int, ranks: int, workers: int, first: int
) -> None:
    steps = 3 * streams // ranks
    taken = [[0] * ranks for _ in range(steps)]
    for rank in range(ranks):
        turns = [
            cycle(
                streams_of(streams, rank=rank, world_size=ranks, worker=w, num_workers=workers, first=first)
            )
            for w in range(workers)
        ]
        for step in range(steps):
            taken[step][rank] = next(turns[step % workers])

    assert [stream for step in taken for stream in step] == [
        (first + n) % streams for n in range(steps * ranks)
    ]
