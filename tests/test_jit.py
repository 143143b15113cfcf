"""Compiled functions are kept on the disk, and nothing on the disk can make them wrong or stop them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODULE = """
from bagel_wds.jit import compiled


@compiled
def add(values, number):
    total = number
    for n in range(len(values)):
        total += values[n]
    return total


def times(factor):
    @compiled
    def multiply(number):
        return number * factor

    return multiply


twice, thrice = times(2), times(3)
"""
USE = """
import numpy as np
import loops

found = [
    loops.add(np.arange(5), 1), loops.add(np.arange(5.0), 0.5), loops.add(np.arange(10)[::2], 1),
    loops.twice(7), loops.thrice(7),
]
assert found == [11, 10.5, 21, 14, 21], found
compiled = (loops.add, loops.twice, loops.thrice)
print(*(sum(counter.values()) for one in compiled for counter in (one.stats.cache_hits, one.stats.cache_misses)))
"""
ALL_MADE, ALL_KEPT = "0 3 0 1 0 1", "3 0 1 0 1 0"
"""Hits and misses of each function."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loops.py").write_text(MODULE)
    return tmp_path


def start(folder: Path, cache: str = "", **environment: str) -> subprocess.Popen[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    known |= {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": cache or str(folder / "cache"), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", USE],
        env=known,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def use(folder: Path, cache: str = "", **environment: str) -> str:
    """Hits and misses of a process that uses the functions, and has the right values of them."""
    process = start(folder, cache, **environment)
    out, said = process.communicate()
    assert process.returncode == 0, said
    return out.strip()


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "bagel-wds" / "compiled").iterdir())


def test_a_later_process_compiles_nothing(folder: Path) -> None:
    assert use(folder) == ALL_MADE
    assert use(folder) == ALL_KEPT
    assert len(kept(folder)) == 5


def test_what_the_code_depends_on_makes_it_another(folder: Path) -> None:
    assert use(folder) == ALL_MADE
    assert use(folder, NUMBA_OPT="1") == ALL_MADE

    (folder / "loops.py").write_text(MODULE.replace("total = number", "total = number + 0"))

    assert use(folder) == ALL_MADE


def cut(files: list[Path]) -> None:
    for file in files:
        file.write_bytes(file.read_bytes()[:-10])


def empty(files: list[Path]) -> None:
    for file in files:
        file.write_bytes(b"")


def damage(files: list[Path]) -> None:
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def exchange(files: list[Path]) -> None:
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)


@pytest.mark.parametrize("spoil", [cut, empty, damage, exchange])
def test_a_broken_file_is_made_again(folder: Path, spoil: Callable[[list[Path]], None]) -> None:
    use(folder)
    spoil(kept(folder))

    assert use(folder) == ALL_MADE
    assert use(folder) == ALL_KEPT


def test_where_nothing_can_be_written_each_process_compiles(folder: Path) -> None:
    (folder / "file").write_text("no folder")

    for _ in range(2):
        assert use(folder, str(folder / "file")) == ALL_MADE


def test_processes_that_compile_at_once_do_not_disturb_each_other(folder: Path) -> None:
    processes = [start(folder) for _ in range(4)]
    for process in processes:
        _, said = process.communicate()
        assert process.returncode == 0, said

    assert use(folder) == ALL_KEPT
    # No part of a file was left.
    assert len(kept(folder)) == 5
