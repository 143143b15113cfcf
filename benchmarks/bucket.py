"""How fast shards come over a network: `python -m benchmarks.bucket [--size 300MB] [--latency 0 50] [--rounds 3] [--out DIR]`.

Converts text-to-image parquet of photo-like JPEGs to shards of 32 MiB, serves them by HTTP on the loopback, each request
with the latency and each connection with at most `--rate` bytes a second, and runs in turn, each in a fresh process:

    disk           ours, from the disk (page cache)
    ours           ours, over the network, with the default `read_ahead_bytes`
    ours, 0        ours with nothing read ahead: range by range, as they are wanted
    ours, cached   ours with a local cache that an earlier run has filled
    plain          webdataset's reader on one HTTP request a shard (no `pipe:`), the rest as ours

and of each, two things: all samples once, as bytes (`read`), and packed batches of them (`batches`: fast pixels, uint8, no
workers, behind `--warmup` batches). Prints one Markdown table: medians over the rounds, and ratios to the disk and to plain in
the same round. Server and reader share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagel_wds.console import parse_size
from bagel_wds.converters import ShardSettings, convert_source
from bagel_wds.sources import Source, Verify
from benchmarks.conversion import make_corpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parent.parent
GROUP = "t2i_pretrain"
VAE = {"image_stride": 16, "max_image_size": 1024, "min_image_size": 512}
GROUPS = {GROUP: {"dataset_names": ["t2i"], "image_transform_args": VAE, "is_mandatory": True, "weight": 1}}
SHARD_BYTES = 32 << 20
DISK, OURS, BARE, CACHED, PLAIN = "disk", "ours", "ours, 0", "ours, cached", "plain"
CONTESTANTS = (DISK, OURS, BARE, CACHED, PLAIN)
READ, BATCHES = "read", "batches"


@dataclass(frozen=True)
class Task:
    """One run of one contestant.

    Attributes:
        contestant: one of `CONTESTANTS`.
        what: "read" or "batches".
        root: folder or URL of the shards.
        cache: folder of the cache.
        warmup: batches before the window that is measured.
        batches: in the window.
    """

    contestant: str
    what: str
    root: str
    cache: str
    warmup: int
    batches: int


@dataclass(frozen=True)
class Figures:
    """What a run took.

    Attributes:
        first: seconds to the first sample or batch.
        amount: bytes of samples, or tokens of batches, in the window.
        wall: seconds of the window.
    """

    first: float
    amount: int
    wall: float


def _config(task: Task) -> Any:
    from bagel_wds import BagelDatasetConfig  # noqa: PLC0415 - torch, which only the runs need

    more: dict[str, Any] = {"read_ahead_bytes": 0} if task.contestant == BARE else {}
    if task.contestant == CACHED:
        more["storage"] = {"cache_dir": task.cache, "cache_bytes": 1 << 40}
    return BagelDatasetConfig(
        grouped_datasets=GROUPS,
        dataset_info={GROUP: {"t2i": {"shards": f"{task.root}/manifest.json"}}},
        max_latent_size=64,
        use_flex=True,
        transport="uint8",
        num_streams=1,
        **more,
    )


def _samples(task: Task, urls: Sequence[str]) -> Iterator[dict[str, Any]]:
    from bagel_wds import stages  # noqa: PLC0415

    if task.contestant != PLAIN:
        return stages.read(_config(task))({"url": url} for url in urls)
    return _plain_samples(urls)


def _plain_samples(urls: Sequence[str]) -> Iterator[dict[str, Any]]:
    from urllib.request import urlopen  # noqa: PLC0415

    from webdataset.tariterators import group_by_keys, tar_file_expander  # noqa: PLC0415

    for url in urls:
        with urlopen(url) as stream:  # noqa: S310 - our own server
            yield from group_by_keys(tar_file_expander([{"url": url, "stream": stream}]))


def _urls(task: Task) -> list[str]:
    from bagel_wds.shards import list_shards  # noqa: PLC0415

    return [shard.url for shard in list_shards(f"{task.root}/manifest.json")]


def _batches(task: Task) -> Iterator[Any]:
    import webdataset as wds  # noqa: PLC0415

    from bagel_wds import PackedLoader, stages  # noqa: PLC0415
    from bagel_wds.tokens import add_special_tokens  # noqa: PLC0415
    from examples.demo import train_tokenizer  # noqa: PLC0415

    config = _config(task)
    tokenizer, special_tokens, _ = add_special_tokens(train_tokenizer(iter(["a picture of noise, number 1"])))
    if task.contestant != PLAIN:
        dataset = config.build(tokenizer, special_tokens, rank=0, world_size=1, num_workers=0, global_seed=1)
        return iter(PackedLoader(dataset))
    urls = _urls(task)
    plans = wds.DataPipeline(
        lambda: (sample for _ in range(1000) for sample in _plain_samples(urls)),
        stages.shuffle(config, GROUP, seed=1),
        stages.decode(config, GROUP),
        stages.plan(config, GROUP, tokenizer, seed=1),
    )
    return iter(
        wds.DataPipeline(
            stages.mix({GROUP: plans}, config, seed=1),
            stages.pack(config),
            stages.materialize(config, special_tokens),
        )
    )


def run(task: Task) -> Figures:
    """Run one contestant in this process, which has one thread for torch."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    begun = time.perf_counter()
    if task.what == READ:
        samples = _samples(task, _urls(task))
        amount = _num_bytes(next(samples))
        first = time.perf_counter() - begun
        amount += sum(map(_num_bytes, samples))
        return Figures(first, amount, time.perf_counter() - begun)
    batches = _batches(task)
    next(batches)
    first = time.perf_counter() - begun
    for _ in islice(batches, task.warmup - 1):
        pass
    begun = time.perf_counter()
    tokens = sum(_num_tokens(batch) for batch in islice(batches, task.batches))
    return Figures(first, tokens, time.perf_counter() - begun)


def _num_tokens(batch: Any) -> int:
    return int((batch if isinstance(batch, Mapping) else vars(batch))["sequence_length"])


def _num_bytes(sample: dict[str, Any]) -> int:
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))


def _run_apart(task: Task) -> Figures:
    command = [sys.executable, "-m", "benchmarks.bucket", "--task", json.dumps(asdict(task))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)  # noqa: S603 - our own
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def _served(folder: Path, latency: float, rate: float) -> Iterator[str]:
    """URL of the folder on a slow network: the one of the tests."""
    command = [sys.executable, str(ROOT / "tests" / "fault_proxy.py"), str(folder), str(latency), str(rate)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as server:  # type: ignore[call-overload] # noqa: S603
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def _shards(folder: Path, size: int) -> Path:
    # The other half of the corpus is of edits.
    source = make_corpus(folder / "source", 2 * size)
    convert_source(
        Source(kind="t2i", name="t2i", path=f"{source.folder}/t2i", verify=Verify.NONE),
        str(folder / "shards"),
        settings=ShardSettings(shard_bytes=SHARD_BYTES),
        processes=2,
    )
    shutil.rmtree(folder / "source")
    return folder / "shards"


def _round(
    shards: Path, folder: Path, what: str, latency: float, options: argparse.Namespace
) -> dict[str, Figures]:
    found = {}
    cache = folder / "cache"
    with _served(shards, latency, options.rate) as url:
        for name in CONTESTANTS:
            root = str(shards) if name == DISK else url
            task = Task(name, what, root, str(cache), options.warmup, options.batches)
            if name == CACHED:
                _run_apart(Task(name, READ, root, str(cache), 0, 0))
            found[name] = _run_apart(task)
    shutil.rmtree(cache, ignore_errors=True)
    return found


def _rows(what: str, latency: float, rounds: Sequence[dict[str, Figures]]) -> Iterator[str]:
    unit = 1e6 if what == READ else 1.0
    for name in CONTESTANTS:
        speeds = [found[name].amount / found[name].wall for found in rounds]
        to = {
            other: statistics.median(
                speed / (found[other].amount / found[other].wall)
                for speed, found in zip(speeds, rounds, strict=True)
            )
            for other in (DISK, PLAIN)
        }
        first = statistics.median(found[name].first for found in rounds)
        speed = statistics.median(speeds) / unit
        yield (
            f"| {what} | {latency * 1000:.0f} ms | {name} | {speed:,.0f} | {first:.2f} | {to[DISK]:.2f} | {to[PLAIN]:.2f} |"
        )


def main() -> None:
    """Make the shards, run everything, and print the table; or run one task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_size, default="300MB", help="of the shards")
    parser.add_argument(
        "--latency", type=float, nargs="+", default=[0.0, 50.0], help="milliseconds a request"
    )
    parser.add_argument("--rate", type=float, default=100e6, help="bytes a second and connection")
    parser.add_argument("--what", nargs="+", choices=(READ, BATCHES), default=[READ, BATCHES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--out", type=Path, help="where shards and cache are put; else a temporary folder")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        print(json.dumps(asdict(run(Task(**json.loads(options.task))))))
        return
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        shards = _shards(Path(scratch), options.size)
        print("| what | latency | reader | MB/s or tokens/s | first s | x disk | x plain |")
        print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
        for what in options.what:
            for latency in options.latency:
                rounds = [
                    _round(shards, Path(scratch), what, latency / 1000, options)
                    for _ in range(options.rounds)
                ]
                for row in _rows(what, latency / 1000, rounds):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
