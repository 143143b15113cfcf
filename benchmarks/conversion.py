"""How fast a conversion is: `python -m benchmarks.conversion [--size 1GB] [--rounds 5] [--out DIR]`.

Makes t2i and edit parquet of photo-like JPEGs, and converts it with 1 and 2 processes and each way to verify. In turn
with them, over the same rows: a plain loop of pyarrow and webdataset's ShardWriter, and `cp` of the same files. Prints
one Markdown table: megabytes of media a second, and the ratios to the loop and to `cp`.

Each contestant is a fresh interpreter, and times itself after its imports (webdataset's load torch); ours with the start
of its worker processes, and with its flush to the disk, which neither the loop nor `cp` does. All sources are in the page
cache.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from bagel_wds.console import parse_size
from bagel_wds.converters import ShardSettings, convert_source
from bagel_wds.sources import Source, Verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bagel_wds.schema import SampleKind

KINDS: tuple[SampleKind, ...] = ("t2i", "edit")
NUM_PICTURES = 150
SIDES = (512, 900)
"""Edges of the pictures in pixels; at Pillow's default quality they take 100 to 300 KB."""

ROWS_OF_GROUP = {"t2i": 100, "edit": 40}
GROUPS_OF_FILE = 5
SHARD_BYTES = 64 << 20
"""Of a shard at most, ours and the loop's. So a gigabyte has enough of them for two processes to share it evenly, as
larger data has with the default of 256 MiB."""


def draw_pictures(count: int, seed: int) -> list[bytes]:
    """JPEGs of 1/f noise, whose spectrum, and so whose size, is like a photo's."""
    draws = np.random.default_rng(seed)
    return [_encode(_draw_noise(draws, *draws.integers(*SIDES, 2))) for _ in range(count)]


def _draw_noise(draws: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Pixels, uint8 (height, width, 3): a grey picture with some colour in it."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf
    grey, *colours = draws.standard_normal((4, height, width))
    planes = np.stack([grey + 0.4 * colour for colour in colours])
    planes = np.fft.irfft2(np.fft.rfft2(planes) / frequency, s=(height, width))
    pixels: np.ndarray = np.clip(128 + 45 * planes / planes.std(), 0, 255).astype(np.uint8)
    return pixels.transpose(1, 2, 0)


def _encode(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


@dataclass(frozen=True)
class Corpus:
    """The sources that are converted.

    Attributes:
        folder: with a folder of parquet files a kind.
        media_bytes: of all images.
        num_rows: of both kinds.
    """

    folder: Path
    media_bytes: int
    num_rows: int


def make_corpus(folder: Path, size: int) -> Corpus:
    """Write about so many bytes of parquet, half of it of each kind."""
    pictures = draw_pictures(NUM_PICTURES, seed=0)
    media_bytes = num_rows = 0
    for kind, make_row in (("t2i", _t2i_row), ("edit", _edit_row)):
        (folder / kind).mkdir(parents=True)
        written = number = 0
        while written < size // 2:
            rows = [make_row(pictures, number + i) for i in range(GROUPS_OF_FILE * ROWS_OF_GROUP[kind])]
            path = folder / kind / f"part-{number:06d}.parquet"
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=ROWS_OF_GROUP[kind])
            written += sum(len(image) for row in rows for image in _images(row))
            number += len(rows)
        media_bytes += written
        num_rows += number
    return Corpus(folder, media_bytes, num_rows)


def _t2i_row(pictures: Sequence[bytes], number: int) -> dict[str, Any]:
    captions = {"short": f"picture {number}", "long": f"a picture of noise, number {number}, " * 8}
    return {"image": pictures[number % len(pictures)], "captions": json.dumps(captions), "id": number}


def _edit_row(pictures: Sequence[bytes], number: int) -> dict[str, Any]:
    images = [pictures[(4 * number + i) % len(pictures)] for i in range(2 + number % 3)]
    steps = [[f"make it picture {number}", f"turn it into step {i}"] for i in range(1, len(images))]
    return {"image_list": images, "instruction_list": steps, "id": number}


def _images(row: dict[str, Any]) -> list[bytes]:
    images: list[bytes] = row["image_list"] if "image_list" in row else [row["image"]]
    return images


def convert(folder: str, out: str, verify: str, processes: int) -> None:
    """Ours, in a process of its own; prints how many rows were written, and its time."""
    start = time.perf_counter()
    settings = ShardSettings(shard_bytes=SHARD_BYTES)
    written = 0
    for kind in KINDS:
        source = Source(kind=kind, name=kind, path=f"{folder}/{kind}", verify=Verify(verify))
        written += convert_source(
            source, f"{out}/{kind}", settings=settings, processes=processes
        ).counts.written
    print(written, time.perf_counter() - start)


def convert_plainly(folder: str, out: str) -> None:
    """The loop that one would write without us, in a process of its own; prints how many rows it wrote, and its time."""
    import webdataset as wds  # noqa: PLC0415 - it loads torch, which no other contestant should wait for

    start = time.perf_counter()
    written = 0
    for kind in KINDS:
        os.makedirs(f"{out}/{kind}")  # noqa: PTH103 - as in the loop below, nothing but strings
        with wds.ShardWriter(f"{out}/{kind}/{kind}-%06d.tar", maxsize=SHARD_BYTES, verbose=0) as sink:
            for row in _plain_rows(f"{folder}/{kind}"):
                sink.write(_plain_sample(row, f"{written:09d}"))
                written += 1
    print(written, time.perf_counter() - start)


def _plain_rows(folder: str) -> Iterator[dict[str, Any]]:
    for path in sorted(Path(folder).glob("*.parquet")):
        with pq.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=100):
                yield from batch.to_pylist()


def _plain_sample(row: dict[str, Any], key: str) -> dict[str, Any]:
    images = row.pop("image_list") if "image_list" in row else [row.pop("image")]
    return {"__key__": key, "json": row, **{f"{number}.jpg": image for number, image in enumerate(images)}}


def time_convert(corpus: Corpus, out: Path, verify: str, processes: int) -> float:
    """Seconds of a conversion, after its imports."""
    code = "import sys; from benchmarks.conversion import convert; convert(*sys.argv[1:4], int(sys.argv[4]))"
    return _timed_by_itself(corpus, [code, str(corpus.folder), str(out), verify, str(processes)])


def time_loop(corpus: Corpus, out: Path) -> float:
    """Seconds of the plain loop, after its imports."""
    code = "import sys; from benchmarks.conversion import convert_plainly; convert_plainly(*sys.argv[1:])"
    return _timed_by_itself(corpus, [code, str(corpus.folder), str(out)])


def _timed_by_itself(corpus: Corpus, arguments: list[str]) -> float:
    written, seconds = _run([sys.executable, "-c", *arguments]).split()
    if int(written) != corpus.num_rows:
        raise RuntimeError(f"{written} of {corpus.num_rows} rows were written")
    return float(seconds)


def time_copy(corpus: Corpus, out: Path) -> float:
    """Seconds of `cp`."""
    start = time.perf_counter()
    _run(["cp", "-r", str(corpus.folder), str(out)])
    return time.perf_counter() - start


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own


LOOP, COPY = "pyarrow loop + ShardWriter", "cp"


def contestants(corpus: Corpus) -> dict[str, Callable[[Path], float]]:
    """What is timed, by name: each writes to a folder that is not there yet, and says how many seconds it took."""

    def ours(verify: str, processes: int) -> Callable[[Path], float]:
        return lambda out: time_convert(corpus, out, verify, processes)

    return {
        LOOP: lambda out: time_loop(corpus, out),
        COPY: lambda out: time_copy(corpus, out),
        **{_ours(verify, count): ours(verify, count) for verify in Verify for count in (1, 2)},
    }


def _ours(verify: str, processes: int) -> str:
    return f"ours, verify {verify}, {processes} process{'es' if processes > 1 else ''}"


GOALS = {
    _ours(Verify.NONE, 1): "at least 1 x loop",
    _ours(Verify.NONE, 2): "at least 2.5 x loop, 0.5 x cp",
}


def measure(corpus: Corpus, folder: Path, rounds: int) -> list[dict[str, float]]:
    """Seconds of each contestant in each round; the rounds go through all of them in turn."""
    out = folder / "out"
    runs = contestants(corpus)
    # Not counted: they bring sources and libraries into the page cache, and memory that the machine has not used yet.
    for name in (COPY, _ours(Verify.NONE, 2)):
        _run_once(runs[name], out)
    return [{name: _run_once(run, out) for name, run in runs.items()} for _ in range(rounds)]


def _run_once(run: Callable[[Path], float], out: Path) -> float:
    # What an earlier one left for the disk to do is not put on the next one's account.
    os.sync()
    seconds = run(out)
    shutil.rmtree(out)
    return seconds


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", default="1GB", help="of the parquet files; the same again is written, and removed"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of all contestants in turn")
    parser.add_argument("--out", type=Path, help="the folder to work in; nothing stays there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.out) as scratch:
        corpus = make_corpus(Path(scratch) / "sources", parse_size(arguments.size))
        times = measure(corpus, Path(scratch), arguments.rounds)
    print(
        f"{corpus.media_bytes / 1e6:.0f} MB of media in {corpus.num_rows} rows; medians of {len(times)} rounds\n"
    )
    print("| what | MB/s | x loop | x cp | goal |")
    print("| --- | --- | --- | --- | --- |")
    for name in times[0]:
        rate = statistics.median(corpus.media_bytes / 1e6 / seconds[name] for seconds in times)
        by_loop, by_copy = (
            statistics.median(seconds[other] / seconds[name] for seconds in times) for other in (LOOP, COPY)
        )
        print(f"| {name} | {rate:.0f} | {by_loop:.2f} | {by_copy:.2f} | {GOALS.get(name, '')} |")


if __name__ == "__main__":
    main()
