"""One run of one contestant of `benchmarks.loader`, in a process of its own: prints its figures as JSON."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bagel_wds import PackedLoader, add_special_tokens
from benchmarks.loader_tasks import (
    LIMIT,
    MAX_NUM_TOKENS,
    PLAIN,
    SEED,
    UPSTREAM,
    Task,
    load_tokenizer,
    our_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.loader_tasks import Start

ROOMS = {
    UPSTREAM: "benchmarks.loader_upstream",
    PLAIN: "benchmarks.loader_plain",
    LIMIT: "benchmarks.loader_limit",
}


@dataclass(frozen=True)
class Figures:
    """What one run measured.

    Attributes:
        first_s: from the start of the build to the first batch, workers' start included, imports here excluded.
        wall_s: of the window.
        cpu_s: in the window, of this process and all that it started.
        batches, tokens, images: in the window; a picture that is shown twice counts twice.
        num_bytes: of all tensors in the window.
        peak_rss: bytes, at the end: of this process, or of its largest worker.
    """

    first_s: float
    wall_s: float
    cpu_s: float
    batches: int
    tokens: int
    images: int
    num_bytes: int
    peak_rss: int

    @property
    def fill(self) -> float:
        """Tokens of a pack, as a share of the most that one may have."""
        return self.tokens / self.batches / MAX_NUM_TOKENS


def prepare_ours(task: Task) -> Start:
    """Load the tokenizer; the rest is the contestant's own time."""
    # The build imports it no earlier.
    importlib.import_module("bagel_wds.datasets")
    tokenizer, special_tokens, _ = add_special_tokens(load_tokenizer(task))

    def start() -> Iterator[Any]:
        dataset = our_config(task).build(
            tokenizer, special_tokens, rank=0, world_size=1, num_workers=task.workers, global_seed=SEED
        )
        return iter(PackedLoader(dataset, num_workers=task.workers))

    return start


def measure(start: Start, task: Task) -> Figures:
    """Run a contestant through the warm-up and the window."""
    begin = time.perf_counter()
    batches = start()
    next(batches)
    first = time.perf_counter() - begin
    # None of them is kept: a training loop has one batch at a time.
    deque(islice(batches, task.warmup - 1), maxlen=0)
    tokens = images = num_bytes = 0
    cpu, wall = family_cpu(), time.perf_counter()
    for batch in islice(batches, task.batches):
        values = batch if isinstance(batch, Mapping) else vars(batch)
        tokens += values["sequence_length"]
        images += count_images(values)
        num_bytes += tensor_bytes(values)
    wall, cpu = time.perf_counter() - wall, family_cpu() - cpu
    return Figures(first, wall, cpu, task.batches, tokens, images, num_bytes, largest_peak())


def count_images(values: Mapping[str, Any]) -> int:
    """Pictures in a batch: those of the VAE and those of the ViT."""
    if "images" in values:
        return int(values["images"])
    return len(values.get("patchified_vae_latent_shapes", ())) + len(values.get("vit_token_seqlens", ()))


def tensor_bytes(value: object) -> int:
    """Bytes of the tensors in a value, however deep they lie."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(tensor_bytes(getattr(value, name)) for name in value.__dataclass_fields__)
    return 0


def family() -> list[int]:
    """This process and all below it."""
    found, parents = [os.getpid()], _parents()
    for own in found:
        found += [child for child, parent in parents.items() if parent == own]
    return found


def _parents() -> dict[int, int]:
    """Of each process its parent."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (stat := _stat(int(folder.name))):
            parents[int(folder.name)] = int(stat[1])
    return parents


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; none of a process that has ended."""
    try:
        # The second is the name in brackets, which may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def family_cpu() -> float:
    """Seconds of CPU that this process and those below it have used."""
    ticks = sum(int(stat[11]) + int(stat[12]) for pid in family() if (stat := _stat(pid)))
    return ticks / os.sysconf("SC_CLK_TCK")


def largest_peak() -> int:
    """Peak of the memory, in bytes, of the largest process below this one that started none itself; without any, of this one.

    The server that workers are forked from is none of them: it holds the libraries, once for all.
    This is the kernel's mark of the process image, from which `ru_maxrss` is taken: but that begins at the peak of the
    parent, and of a running worker only the worker itself can ask it.
    """
    own, *below = family()
    workers = set(below) - set(_parents().values())
    return max(_memory(pid, "VmHWM") for pid in workers or [own])


def _memory(pid: int, name: str) -> int:
    """Bytes, as the kernel says of a process under this name; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def main() -> None:
    """Run the task that the command line holds as JSON."""
    told = json.loads(sys.argv[1])
    task = Task(**{**told, "groups": tuple(told["groups"])})
    # One core a process, as DataLoader sets it in workers: what is compared is work, not how many threads do it.
    torch.set_num_threads(1)
    # As the README says; the other loaders' workers are forks of this process, which has imported all as well.
    multiprocessing.set_forkserver_preload(["bagel_wds.worker"])
    room = ROOMS.get(task.contestant)
    prepare = importlib.import_module(room).prepare if room else prepare_ours
    print(json.dumps(asdict(measure(prepare(task), task))))


if __name__ == "__main__":
    main()
