"""Conversions on two nodes of Ray's own in-process cluster: the same bytes as on one machine, whatever dies."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kill_points import Conversion, kill_at
from ray_works import Dying, Meeting, Noted, Piece, Raising
from source_factory import captions, encode_image, write_corpus, write_t2i
from test_restart import digests, inodes, spoiled

from bagel_wds import storage
from bagel_wds.converters import ClusterShare, Limit, ShardSettings, convert_source, ray_engine
from bagel_wds.converters.engine_ray import TRIES
from bagel_wds.converters.ray_cluster import joined_cluster
from bagel_wds.errors import ConfigError, QuarantineLimitError, ShardError
from bagel_wds.sources import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from s3_store import S3Store

    from bagel_wds.converters.engine import Engine
    from bagel_wds.converters.progress import Step

EIGHT_A_SLICE = ShardSettings(shard_bytes=1, shard_samples=8)
"""One row group a slice, one sample a shard."""
SLOW_ROWS = 48
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster(s3_store: S3Store) -> Iterator[Any]:
    """A cluster of two nodes, with room for one slice each. Nodes find the modules beside this one, and the object store."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        for name, value in s3_store.environment.items():
            patch.setenv(name, value)
        # A dead node is seen after a second. One that is slow to answer is given ten.
        health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200}
        head = {**NODE, "include_dashboard": False, "_system_config": health}
        cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**NODE)
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[dict[str, Any]]:
    """This process is connected to the cluster; what of it was different before and after."""
    before = process_state()
    with joined_cluster(cluster.address):
        yield {"before": before, "after": process_state()}


@pytest.fixture(scope="module")
def engine(connected: dict[str, Any]) -> Iterator[Engine]:
    with ray_engine() as run:
        yield run


def process_state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "sigterm": signal.getsignal(signal.SIGTERM),
        "sigint": signal.getsignal(signal.SIGINT),
        "handlers": [*logging.getLogger().handlers, *logging.getLogger("ray").handlers],
        "levels": (logging.getLogger().level, logging.getLogger("ray").level),
    }


def quiet(rows: int, num_bytes: int, quarantined: int) -> None:
    """Nobody watches."""


def begun(folder: Path) -> Counter[int]:
    """How often each slice was begun."""
    return Counter(int(path.name.split("-")[1]) for path in folder.glob("*-begun-*"))


def write_rows(folder: Path, num_rows: int = 48) -> Source:
    """A source of a slice for every eight rows, some of which cannot be used."""
    rows = [(b"no image" if i % 11 == 5 else encode_image(seed=i), captions(i)) for i in range(num_rows)]
    write_t2i(folder / "a.parquet", rows, group_rows=8)
    return Source(kind="t2i", name="x", path=str(folder))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    """A source whose rows take some tens of milliseconds each, for each image is decoded; and what becomes of it."""
    folder = tmp_path_factory.mktemp("slow")
    rows = [(large_image() if i % 7 else b"no image", captions(i)) for i in range(SLOW_ROWS)]
    write_t2i(folder / "in" / "a.parquet", rows, group_rows=4)
    source = Source(kind="t2i", name="x", path=str(folder / "in"))
    convert_source(source, str(folder / "local"), settings=ShardSettings(shard_bytes=1))
    return source, folder / "local"


def large_image() -> bytes:
    """A picture of few bytes and many pixels."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (2400, 1800), (9, 99, 199)).save(buffer, "PNG")
    return buffer.getvalue()


# The same bytes


@pytest.mark.parametrize("shuffle", [None, 3], ids=["plain", "shuffled"])
def test_the_output_is_that_of_the_local_engine_file_by_file(
    tmp_path: Path, engine: Engine, shuffle: int | None
) -> None:
    source = write_rows(tmp_path / "in")
    settings = ShardSettings(shard_bytes=1, shard_samples=8, shuffle=shuffle)
    local = convert_source(source, str(tmp_path / "local"), settings=settings)
    steps: list[Step] = []

    summary = convert_source(
        source, str(tmp_path / "ray"), settings=settings, engine=engine, report=steps.append
    )

    assert summary.counts == local.counts
    assert summary.counts.quarantined == 4
    assert digests(tmp_path / "ray") == digests(tmp_path / "local")
    assert [step.rows for step in steps] == sorted(step.rows for step in steps) or shuffle is not None
    assert all(step.rows <= step.num_rows for step in steps)
    last = steps[-1]
    assert shuffle is not None or (last.rows, last.quarantined) == (48, 4)


def test_relative_paths_are_those_of_the_process_that_was_started(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The nodes' processes have another current folder.
    write_corpus(tmp_path / "in", rows=9)
    monkeypatch.chdir(tmp_path)
    source = Source(kind="vlm", name="talks", path="in/vlm/*.jsonl", media_root="in/vlm/media")
    settings = ShardSettings(shard_samples=4)
    convert_source(source, "local", settings=settings)

    summary = convert_source(source, "ray", settings=settings, engine=engine)

    assert (summary.counts.read, summary.counts.written) == (11, 9)
    assert digests(tmp_path / "ray") == digests(tmp_path / "local")


def test_a_bucket_is_written_to_from_every_node(
    tmp_path: Path, cluster: Any, s3_store: S3Store, s3_folder: str
) -> None:
    source = write_rows(tmp_path / "in")
    convert_source(source, str(tmp_path / "local"), settings=ShardSettings(shard_bytes=1))
    ran = command(source, f"{s3_folder}/out", "--engine", "ray", "--address", cluster.address, "--json")

    done = subprocess.run(
        ran, env=os.environ | s3_store.environment, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["datasets"][0]["written"] == 44
    written = {
        name: hashlib.sha256(storage.read_bytes(f"{s3_folder}/out/{name}", s3_store.options)).hexdigest()
        for name in storage.list_files(f"{s3_folder}/out", s3_store.options)
    }
    assert written == digests(tmp_path / "local")


def test_connecting_changes_nothing_of_the_process(connected: dict[str, Any]) -> None:
    assert connected["after"] == connected["before"]


def test_another_cluster_than_the_one_that_the_process_is_connected_to_is_refused(
    connected: dict[str, Any],
) -> None:
    with (
        pytest.raises(ConfigError, match=r"connected to the Ray cluster at .* and 127\.0\.0\.1:1 was asked"),
        ray_engine("127.0.0.1:1"),
    ):
        pass


# Nodes and processes that die


def test_a_node_that_is_killed_half_way_changes_no_byte(
    tmp_path: Path,
    cluster: Any,
    engine: Engine,
    slow: tuple[Source, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, local = slow
    settings = ShardSettings(shard_bytes=1)
    out = tmp_path / "ray"
    doomed = next(iter(cluster.worker_nodes))
    left: list[int] = []
    killer = threading.Thread(target=kill_node_at_work, args=(cluster, doomed, out, left))
    killer.start()
    steps: list[Step] = []

    try:
        summary = convert_source(source, str(out), settings=settings, engine=engine, report=steps.append)
        killer.join()
    finally:
        cluster.add_node(**NODE)

    assert left, "no moment was found at which both nodes were at work"
    assert 0 < left[0] < SLOW_ROWS, "it was not half-way"
    assert "its worker was lost" in caplog.text
    assert summary.counts.read == SLOW_ROWS
    assert digests(out) == digests(local)
    assert [step.rows for step in steps] == sorted(step.rows for step in steps)
    assert steps[-1].rows == SLOW_ROWS
    assert all(step.quarantined <= summary.counts.quarantined for step in steps)


def kill_node_at_work(cluster: Any, node: Any, out: Path, left: list[int]) -> None:
    """Kill a node once some shards are there and two are being written, so one of them on that node."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shards = len(list(out.glob("x-*.tar")))
        if shards >= 4 and len(list(out.glob(".x-*.tar.partial-*"))) == 2:
            left.append(SLOW_ROWS - shards)
            cluster.remove_node(node, allow_graceful=False)
            return
        time.sleep(0.001)


def test_a_slice_whose_process_dies_is_begun_again_and_counted_once(tmp_path: Path, engine: Engine) -> None:
    told: list[tuple[int, int, int]] = []
    work = Dying(str(tmp_path), times=2)

    results = engine(work, [Piece(i) for i in range(4)], lambda *sums: told.append(sums))

    assert sorted(results) == [0, 10, 20, 30]
    assert begun(tmp_path) == {0: 1, 1: 3, 2: 1, 3: 1}
    assert told[-1] == (20, 2000, 0)
    assert told == sorted(told)


def test_a_slice_that_kills_every_process_is_given_up_and_named(tmp_path: Path, engine: Engine) -> None:
    work = Dying(str(tmp_path), times=99)

    with pytest.raises(ShardError, match=rf"slice 1: its worker was lost {TRIES} times.*run it again"):
        list(engine(work, [Piece(i) for i in range(3)], quiet))

    assert begun(tmp_path)[1] == TRIES


# Errors


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (ConfigError("a.parquet: give another"), ConfigError, r"^a\.parquet: give another$"),
        (OSError(28, "No space left on device"), ShardError, r"^slice 1: OSError: .*No space.*run it again"),
        (ShardError("cut short"), ShardError, r"^slice 1: ShardError: cut short.*run it again"),
    ],
    ids=["config", "disk", "shard"],
)
def test_an_error_in_a_slice_is_raised_once_and_not_tried_again(
    tmp_path: Path, engine: Engine, error: Exception, raised: type[Exception], message: str
) -> None:
    with pytest.raises(raised, match=message):
        list(engine(Raising(str(tmp_path), error=error), [Piece(i) for i in range(3)], quiet))

    assert begun(tmp_path)[1] == 1


def test_c24_a_reader_that_fails_is_gone_on_with(tmp_path: Path, engine: Engine) -> None:
    source = write_rows(tmp_path / "in")
    convert_source(source, str(tmp_path / "local"), settings=EIGHT_A_SLICE)
    path = tmp_path / "in" / "a.parquet"
    whole = path.read_bytes()
    path.write_bytes(spoiled(path, 4))
    out = tmp_path / "ray"

    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as parquet"):
        convert_source(source, str(out), settings=EIGHT_A_SLICE, engine=engine)
    kept = inodes(out)
    assert kept.keys() < digests(tmp_path / "local").keys()
    assert not list(out.glob(".x-*"))
    path.write_bytes(whole)
    convert_source(source, str(out), settings=EIGHT_A_SLICE, engine=engine)

    assert digests(out) == digests(tmp_path / "local")


def test_max_quarantine_stops_it_and_what_is_finished_is_gone_on_with(tmp_path: Path, engine: Engine) -> None:
    source = write_rows(tmp_path / "in")
    convert_source(source, str(tmp_path / "local"), settings=EIGHT_A_SLICE)

    with pytest.raises(QuarantineLimitError, match=r"of 48 rows were left out so far.*allows 1"):
        convert_source(
            source, str(tmp_path / "ray"), settings=EIGHT_A_SLICE, engine=engine, limit=Limit(rows=1)
        )
    convert_source(source, str(tmp_path / "ray"), settings=EIGHT_A_SLICE, engine=engine, limit=Limit(rows=4))

    assert digests(tmp_path / "ray") == digests(tmp_path / "local")


# How much of the cluster


def test_no_more_slices_are_at_work_than_processes_are_given(
    tmp_path: Path, connected: dict[str, Any]
) -> None:
    with ray_engine(share=ClusterShare(processes=1)) as run:
        results = list(run(Noted(str(tmp_path), seconds=0.1), [Piece(i) for i in range(4)], quiet))

    assert results == [0, 10, 20, 30]
    events = [path.name.split("-")[1:3] for path in sorted(tmp_path.iterdir())]
    assert events == [[str(i), what] for i in range(4) for what in ("begun", "ended")]


def test_both_nodes_work_at_the_same_time(tmp_path: Path, engine: Engine) -> None:
    results = engine(Meeting(str(tmp_path)), [Piece(i) for i in range(2)], quiet)

    assert sorted(results) == [0, 10]


def test_a_cluster_without_room_for_one_slice_is_not_waited_for_without_end(
    tmp_path: Path, connected: dict[str, Any]
) -> None:
    share = ClusterShare(memory_bytes=1 << 48, patience_seconds=1)

    with (
        ray_engine(share=share) as run,
        pytest.raises(
            ShardError, match=r"no node of the Ray cluster had 1 CPU and 281\.5 TB .*--batch-bytes"
        ),
    ):
        list(run(Noted(str(tmp_path)), [Piece(0)], quiet))

    assert begun(tmp_path) == {}


# Interrupted, and gone on with elsewhere


def command(source: Source, out: Path | str, *more: str) -> list[str]:
    assert isinstance(source.path, str)
    start = [sys.executable, "-m", "bagel_wds.converters", "t2i", source.path, str(out)]
    return [*start, "--name", "x", "--shard-size", "1", *more]


def test_the_command_interrupted_is_gone_on_with_by_the_local_engine(
    tmp_path: Path, cluster: Any, connected: dict[str, Any], slow: tuple[Source, Path]
) -> None:
    source, local = slow
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(source, out, "--engine", "ray", "--address", cluster.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and len(list(out.glob("x-*.tar"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)

    assert process.returncode == 130, said
    assert printed == ""
    assert said == "interrupted; what is finished is kept: run it again (without --overwrite) to go on\n"
    assert not list(out.glob(".x-*")), "a slice that was stopped left its unfinished shard"
    finished = inodes(out)
    assert 3 <= len(finished) < len(inodes(local))
    convert_source(source, str(out), settings=ShardSettings(shard_bytes=1))
    kept = inodes(out)
    again = [name for name, inode in finished.items() if kept[name] != inode]
    assert len(again) <= 2, "more was done again than what was under way on two nodes"
    assert digests(out) == digests(local)


def test_a_local_conversion_that_was_killed_is_gone_on_with_on_the_cluster(
    tmp_path: Path, engine: Engine
) -> None:
    source = write_rows(tmp_path / "in")
    convert_source(source, str(tmp_path / "local"), settings=EIGHT_A_SLICE)
    out = tmp_path / "ray"
    assert kill_at(150, str(out), Conversion(source, str(out), EIGHT_A_SLICE))
    finished = inodes(out)
    assert 0 < len(finished) < 44

    convert_source(source, str(out), settings=EIGHT_A_SLICE, engine=engine)

    kept = inodes(out)
    assert sum(kept[name] != inode for name, inode in finished.items()) <= 1
    assert digests(out) == digests(tmp_path / "local")
