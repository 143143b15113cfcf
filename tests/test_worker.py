"""Workers out of a server that has imported what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FileServer
from shard_factory import foreign_info
from test_datasets import build, digests

from bagel_wds import PackedLoader

SCRIPT = '''
import json, multiprocessing, sys


def of_files(process):
    """Resident KiB of memory that holds files."""
    status = dict(line.split(":", 1) for line in open(f"/proc/{process}/status"))
    return int(status["RssFile"].split()[0])


def main():
    multiprocessing.set_forkserver_preload(["bagel_wds.worker"])
    from multiprocessing import forkserver
    from test_datasets import build, digests
    from bagel_wds import PackedLoader

    dataset = build(json.loads(sys.argv[1]), workers=2, num_streams=2)
    batches = iter(PackedLoader(dataset, num_workers=2))
    found = digests(batches, 8)
    server = of_files(forkserver._forkserver._forkserver_pid)
    workers = [of_files(process.pid) for process in multiprocessing.active_children()]
    print(json.dumps({"digests": found, "server": server, "workers": workers}))


if __name__ == "__main__":
    main()
'''


def run(script: str, *arguments: str) -> Any:
    """What a script prints as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("is_remote", [False, True], ids=["disk", "http"])
def test_workers_of_a_server_that_has_all_imported_give_the_same_and_share_its_memory(
    tmp_path: Path, is_remote: bool
) -> None:
    info = foreign_info(tmp_path)
    expected = digests(PackedLoader(build(info, num_streams=2)), 8)
    (tmp_path / "script.py").write_text(SCRIPT)
    with FileServer(tmp_path) as server:
        told = (
            json.dumps(info).replace(str(tmp_path), f"http://{server.address}")
            if is_remote
            else json.dumps(info)
        )
        found = run(str(tmp_path / "script.py"), told)

    assert found["digests"] == expected
    # A process that imports the libraries itself has their files in its memory, as the server has.
    assert len(found["workers"]) == 2
    assert max(found["workers"]) < found["server"] * 0.6


IMPORTED = """
import json, sys
import bagel_wds.worker
from test_datasets import build, digests
from bagel_wds import PackedLoader

before = set(sys.modules)
assert len(digests(PackedLoader(build(json.loads(sys.argv[1]))), 4)) == 4
# Pillow finds its formats when it meets the first picture.
libraries = {"bagel_wds", "torch", "numba", "llvmlite", "transformers", "tokenizers", "pyarrow", "webdataset"}
print(json.dumps([name for name in sorted(set(sys.modules) - before) if name.partition(".")[0] in libraries]))
"""


def test_a_worker_that_makes_batches_imports_no_more(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IMPORTED)

    assert run(str(tmp_path / "script.py"), json.dumps(foreign_info(tmp_path))) == []
