"""Training under `torchrun` with gloo: killed in the middle of an epoch, and resumed on other numbers of ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS, foreign_info, small_config
from test_datasets import digest

from bagel_wds import PackedLoader

TESTS = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def start(folder: Path, ranks: int, form: str, *how: str) -> subprocess.Popen[Any]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()),
        str(TESTS / "train_script.py"), "--info", str(folder / "info.json"), "--record", str(folder / "log"),
        "--checkpoint", str(folder / "checkpoint"), "--form", form, *how,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def kill(process: subprocess.Popen[Any], folder: Path) -> None:
    """SIGKILL to the launcher and every rank at once."""
    ranks = [int(pid) for pid in (folder / "pids").read_text().split()]
    for pid in [process.pid, *ranks]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=60)
    workers = [int(pid) for rank in folder.glob("workers-*") for pid in rank.read_text().split()]
    assert workers
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, f"workers outlive their killed trainers: {workers}"
        time.sleep(0.05)


def logged(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def global_batches(entries: list[dict[str, Any]]) -> list[str]:
    """Digests in the order of the global batches."""
    return [
        entry["digest"] for entry in sorted(entries, key=lambda entry: (entry["step_end"], entry["rank"]))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "resumed_ranks"), [("json", 4), ("dcp", 1)])
def test_killed_run_goes_on_on_another_number_of_ranks(tmp_path: Path, form: str, resumed_ranks: int) -> None:
    info = foreign_info(tmp_path, sizes=[5, 6])
    (tmp_path / "info.json").write_text(json.dumps(info))
    (tmp_path / "checkpoint").mkdir()
    process = start(tmp_path, 2, form, "--steps", "1000")
    try:
        deadline = time.monotonic() + 180
        while len(logged(tmp_path)) < 10 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        kill(process, tmp_path)
    entries = logged(tmp_path)
    assert len(entries) >= 10, (tmp_path / "output").read_text()[-3000:]

    assert start(tmp_path, resumed_ranks, form, "--steps", str(8 // resumed_ranks)).wait(timeout=200) == 0, (
        tmp_path / "output"
    ).read_text()[-3000:]

    # A step that was saved and not logged by every rank is known by its checkpoint alone.
    resumed = logged(tmp_path)[len(entries) :]
    first = min(entry["step_end"] for entry in resumed) - resumed_ranks
    config = small_config(dataset_info=info, num_streams=8, shuffle_samples=4)
    alone = PackedLoader(config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=0))
    unbroken = [digest(batch.to_dict()) for batch, _ in zip(alone, range(first + 8), strict=False)]
    whole_steps = [entry for entry in entries if entry["step_end"] <= first]
    assert first >= 10
    assert global_batches(whole_steps) == unbroken[: len(whole_steps)]
    assert global_batches(resumed) == unbroken[first:]


def test_ranks_agree_on_the_end_of_a_finite_pass(tmp_path: Path) -> None:
    info = foreign_info(tmp_path, sizes=[5, 6])
    (tmp_path / "info.json").write_text(json.dumps(info))
    (tmp_path / "checkpoint").mkdir()

    run = start(tmp_path, 2, "json", "--epochs", "1")

    assert run.wait(timeout=200) == 0, (tmp_path / "output").read_text()[-3000:]
    steps = Counter(entry["rank"] for entry in logged(tmp_path))
    assert steps[0] == steps[1] > 0
    assert sum(entry["samples"] for entry in logged(tmp_path)) == 3 * 11
