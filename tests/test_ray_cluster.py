"""What the engine on Ray says when it cannot begin, and how it leaves the machine; and slices that run twice at once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from source_factory import captions, encode_image, write_t2i
from test_restart import digests

from bagel_wds.converters import ShardSettings, convert_source, ray_engine
from bagel_wds.converters.engine_ray import _Done, _work_on
from bagel_wds.converters.marks import Marks
from bagel_wds.converters.slices import SliceWork
from bagel_wds.errors import ConfigError
from bagel_wds.sources import Source, absolute_source, plan_source


def write_rows(folder: Path, num_rows: int = 24) -> Source:
    rows = [(b"no image" if i % 5 == 3 else encode_image(seed=i), captions(i)) for i in range(num_rows)]
    write_t2i(folder / "a.parquet", rows, group_rows=8)
    return Source(kind="t2i", name="x", path=str(folder))


def convert(*more: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bagel_wds.converters", "t2i", "in", "out", "--name", "x", *more]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120, **options
    )


# Cannot begin


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r"pip install 'bagel-wds\[ray\]'"), ray_engine():
        pass


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nobody", r"--address nobody is no address of a Ray cluster: give HOST:PORT"),
        ("host:port", r"--address host:port is no address"),
        ("127.0.0.1:{free}", r"--address 127\.0\.0\.1:\d+: nothing answers there \(.*refused.*HOST:PORT"),
        ("ray://127.0.0.1:{free}", r"on a node of the cluster, with HOST:PORT.*ray job submit"),
    ],
    ids=["no port", "no number", "head", "client"],
)
def test_an_address_that_does_not_answer_is_refused_at_once(address: str, message: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    began = time.monotonic()

    with pytest.raises(ConfigError, match=message), ray_engine(address.format(free=free)):
        pass

    assert time.monotonic() - began < 20


def test_a_server_that_is_not_the_head_node_is_refused_at_once() -> None:
    # Such as the cluster's dashboard. Ray would ask it again and again.
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with (
                pytest.raises(ConfigError, match="what answers there is not Ray's head node; give HOST:PORT"),
                ray_engine(f"127.0.0.1:{server.server_port}"),
            ):
                pass
        finally:
            server.shutdown()


def test_an_address_without_ray_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "in")

    done = convert("--address", "head:6379", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr == "error: --address is of a Ray cluster; give --engine ray too\n"
    assert not (tmp_path / "out").exists()


def test_overwriting_does_not_begin_before_the_cluster_answers(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    convert_source(source, str(tmp_path / "out"))
    before = digests(tmp_path / "out")

    done = convert("--overwrite", "--engine", "ray", "--address", "127.0.0.1:1", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert "nothing answers there" in done.stderr
    assert digests(tmp_path / "out") == before


def test_a_node_with_other_libraries_is_named_with_both_versions() -> None:
    wanted = {"bagel-wds": "0", "orjson": "0", "pillow": "0", "pyarrow": "0.0.1"}

    class Idle:
        def __init__(self) -> None:
            self.sums = (0, 0, 0)

        def add(self, rows: int, num_bytes: int, quarantined: int) -> None:
            """Never told."""

    done: _Done[object] = _work_on(lambda part, tell: 1, "slice 1", Idle(), wanted)

    assert done.result is None
    assert isinstance(done.failure, ConfigError)
    assert "bagel-wds 0.1.0, and the conversion was started with 0" in str(done.failure)


# Leaves nothing


def ray_processes(marker: str) -> list[int]:
    """Processes whose environment holds a marker, as those do that come from one that had it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_until_gone(marker: str) -> list[int]:
    deadline = time.monotonic() + 60
    while (left := ray_processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_a_cluster_that_was_started_here_ends_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in")
    convert_source(source, str(tmp_path / "local"))
    marker = f"{tmp_path}/ended"
    monkeypatch.setenv("TEST_MARKER", marker)

    done = convert("--engine", "ray", "--processes", "1", "--json", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    (dataset,) = json.loads(done.stdout)["datasets"]
    assert (dataset["read"], dataset["written"]) == (24, 19)
    assert digests(tmp_path / "out") == digests(tmp_path / "local")
    assert wait_until_gone(marker) == []


# The same slice twice at once


def test_a_slice_that_runs_twice_at_once_gives_the_same_files(tmp_path: Path) -> None:
    # As when a node that was believed dead lives: here in two threads, which share even the process's number.
    source = write_rows(tmp_path / "in", num_rows=40)
    settings = ShardSettings(shard_samples=3)
    convert_source(source, str(tmp_path / "local"), settings=settings)
    expected = {name: digest for name, digest in digests(tmp_path / "local").items() if name.startswith("x-")}
    (part,) = plan_source(source, slice_bytes=1 << 30, slice_rows=100).slices
    for trial in range(10):
        out = tmp_path / f"out-{trial}"
        work = SliceWork(absolute_source(source), str(out), settings)
        reports: list[Any] = []
        errors: list[BaseException] = []
        start = threading.Barrier(3)

        def run(work: SliceWork = work) -> None:
            start.wait()  # noqa: B023 - the threads end before the next trial
            try:
                reports.append(work(part, lambda *told: None))  # noqa: B023
            except BaseException as error:  # noqa: BLE001 - it is looked at below
                errors.append(error)  # noqa: B023

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert errors == []
        assert reports[0] == reports[1] == reports[2]
        files = digests(out)
        assert {name: digest for name, digest in files.items() if "/" not in name} == expected
        assert Marks(str(out)).finished(0) is not None
        assert not [name for name in files if "partial" in name]


def test_a_slice_that_was_done_before_is_not_done_again(tmp_path: Path) -> None:
    # As when its node died after the last shard, before it could say so.
    source = write_rows(tmp_path / "in")
    (part,) = plan_source(source, slice_bytes=1 << 30, slice_rows=100).slices
    work = SliceWork(absolute_source(source), str(tmp_path / "out"), ShardSettings())
    told: list[tuple[int, int, int]] = []
    first = work(part, lambda *sums: None)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}

    again = work(part, lambda *sums: told.append(sums))

    assert again == first
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()} == before
    assert told == [(24, first.num_bytes, 5)]
