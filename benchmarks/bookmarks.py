"""What bookmarks cost, and what is lost without them: `python -m benchmarks.bookmarks [--out DIR]`.

Makes its own data and prints one Markdown table: the size of a state with full default buffers, the time to take it
against the time of a batch, the time to restore near the start and near the end of an epoch of 100 000 samples, the
reads that takes, and the samples that upstream's packing rule loses against ours.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from bagel_wds import BagelDatasetConfig, PackedDataset, PackedLoader, storage
from bagel_wds.bookmark import StreamBook
from bagel_wds.converters.convert import convert_source
from bagel_wds.converters.mixture import convert_mixture
from bagel_wds.reader import read_offsets
from bagel_wds.records import Cursor
from bagel_wds.shards import list_shards, walk_epochs
from bagel_wds.sources import Source
from bagel_wds.state import GroupState, LoaderState, StreamState
from bagel_wds.tokens import add_special_tokens
from examples.corpus import draw_corpus
from examples.demo import corpus_texts, train_tokenizer

EPOCH = 100_000
GROUPS = ("one", "two", "three")


def small_dataset(folder: Path) -> str:
    """Shards with 100 000 samples of one tiny picture."""
    picture = io.BytesIO()
    Image.new("RGB", (32, 32), (90, 120, 200)).save(picture, "JPEG")
    sources = folder / "small"
    sources.mkdir(parents=True)
    rows = {
        "image": [picture.getvalue()] * EPOCH,
        "captions": [f'{{"a": "picture {n}"}}' for n in range(EPOCH)],
    }
    pq.write_table(pa.table(rows), sources / "rows.parquet", row_group_size=10_000)
    convert_source(Source(kind="t2i", name="small", path=str(sources)), str(folder / "shards"), processes=2)
    return str(folder / "shards" / "manifest.json")


def small_run(manifest: str, tokenizer: Any, special_tokens: dict[str, int]) -> PackedDataset:
    """Three groups over those shards, with default buffers."""
    transform = {"image_stride": 16, "max_image_size": 32, "min_image_size": 32}
    group = {
        "dataset_names": ["small"],
        "image_transform_args": transform,
        "recipe": "t2i",
        "is_mandatory": True,
    }
    config = BagelDatasetConfig(
        grouped_datasets=dict.fromkeys(GROUPS, group),
        dataset_info={name: {"small": {"shards": manifest}} for name in GROUPS},
        expected_num_tokens=2048,
        max_num_tokens=2304,
        prefer_buffer_before=1024,
    )
    return config.build(tokenizer, special_tokens, rank=0, world_size=1, num_workers=0, global_seed=0)


def state_near(dataset: PackedDataset, manifest: str, sample: int) -> dict[str, Any]:
    """The state of a run that is so far in its first epoch, with full buffers."""
    shards = list_shards(manifest, "small")
    groups = {}
    for name in GROUPS:
        passed = 0
        for piece in walk_epochs(shards, seed=42, group=name):
            held = (piece.stop or 0) - piece.start
            if passed + held > sample:
                ordinal = piece.start + sample - passed
                offset = read_offsets(str(piece.index_url))[ordinal]
                groups[name] = GroupState(Cursor(0, piece.piece, ordinal, offset))
                break
            passed += held
    fresh = LoaderState.from_json(dataset.state_dict())
    start = replace(fresh, next_batch=1, streams={0: StreamState(0, batches=1, groups=groups)})
    loader = PackedLoader(dataset)
    loader.load_state_dict(start.to_json())
    for _ in islice(loader, 5):
        pass
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def time_restore(dataset: PackedDataset, state: dict[str, Any]) -> tuple[float, int]:
    """Seconds from a state to the batch after it, and how many reads that takes."""
    reads = 0
    plain = storage.read_range

    def counted(url: Any, offset: int, length: int) -> bytes:
        nonlocal reads
        reads += 1
        return plain(url, offset, length)

    disk: Any = storage
    disk.read_range = counted
    gc.collect()
    try:
        loader = PackedLoader(dataset)
        start = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - start, reads
    finally:
        disk.read_range = plain


def time_snapshots(dataset: PackedDataset, state: dict[str, Any]) -> float:
    """Median seconds to take a state with full buffers."""
    times: list[float] = []
    plain = StreamBook.snapshot

    def timed(book: StreamBook, *arguments: Any) -> StreamState:
        start = time.perf_counter()
        taken = plain(book, *arguments)
        times.append(time.perf_counter() - start)
        return taken

    book_class: Any = StreamBook
    book_class.snapshot = timed
    try:
        loader = PackedLoader(dataset)
        loader.load_state_dict(state)
        for _ in islice(loader, 30):
            pass
    finally:
        book_class.snapshot = plain
    return statistics.median(times)


def mixed_config(folder: Path, **more: Any) -> tuple[BagelDatasetConfig, Any, dict[str, int]]:
    """The demo's corpus, scaled up, with the budgets of upstream's fine-tuning example."""
    sources = folder / "sources"
    corpus = draw_corpus(sources, t2i_rows=192, vlm_rows=192, edit_rows=96)
    info = convert_mixture(
        str(corpus.mixture), str(corpus.dataset_info), str(folder / "mixed"), processes=2
    ).info_path
    tokenizer, special_tokens, _ = add_special_tokens(train_tokenizer(corpus_texts(corpus)))
    config = BagelDatasetConfig(
        grouped_datasets_path=str(corpus.mixture),
        dataset_info_path=info,
        expected_num_tokens=10240,
        max_num_tokens=11520,
        max_num_tokens_per_sample=10240,
        max_latent_size=64,
        use_flex=True,
        **more,
    )
    return config, tokenizer, special_tokens


def lost_samples(
    config: BagelDatasetConfig, tokenizer: Any, special_tokens: dict[str, int], batches: int
) -> tuple[int, int, float]:
    """(samples lost, samples packed, seconds a batch) over so many batches."""
    dataset = config.build(tokenizer, special_tokens, rank=0, world_size=1, num_workers=0, global_seed=0)
    start = time.perf_counter()
    packed = sum(len(batch["batch_data_indexes"]) for batch in islice(dataset, batches))
    seconds = (time.perf_counter() - start) / batches
    counts = dataset.stats()["groups"]
    lost = sum(group["dropped"].get("lost", 0) for group in counts.values())
    return lost, packed, seconds


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the data goes; by default a folder that is removed")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        config, tokenizer, special_tokens = mixed_config(folder)
        manifest = small_dataset(folder)
        dataset = small_run(manifest, tokenizer, special_tokens)
        early, late = (state_near(dataset, manifest, sample) for sample in (2000, 97_000))
        size = len(json.dumps(early["streams"]["0"]))
        # In turn, so that a slow moment of the machine falls on both.
        pairs = [(time_restore(dataset, early), time_restore(dataset, late)) for _ in range(15)]
        snapshot = time_snapshots(dataset, early)
        held = sum(len(group["shuffled"][0]) for group in early["streams"]["0"]["groups"].values())
        ours, ours_packed, batch = lost_samples(config, tokenizer, special_tokens, 60)
        upstream, upstream_packed, _ = lost_samples(
            replace(config, fidelity="upstream"), tokenizer, special_tokens, 60
        )
    near_start, near_end = (statistics.median(pair[place][0] for pair in pairs) for place in (0, 1))
    ratio = statistics.median(late_time / early_time for (early_time, _), (late_time, _) in pairs)
    rows = [
        ("samples in the shuffle buffers of 3 groups", f"{held}", ""),
        ("state of a stream as JSON", f"{size / 1024:.0f} KiB", "at most 128"),
        ("time to take it", f"{snapshot * 1e3:.2f} ms", ""),
        ("share of a batch's time (mixed corpus)", f"{snapshot / batch:.2%}", "under 1 %"),
        ("state to next batch, near the start of 100 000 samples", f"{near_start:.2f} s", "under 2 s"),
        ("state to next batch, near the end", f"{near_end:.2f} s", "under 2 s"),
        ("end against start", f"{ratio:.2f}", "0.8 to 1.2"),
        ("reads to restore", f"{pairs[0][0][1]}", f"at most {held}"),
        ("samples lost in 60 batches, ours", f"{ours} of {ours + ours_packed}", "0"),
        ("samples lost in 60 batches, upstream's rule", f"{upstream} of {upstream + upstream_packed}", ""),
    ]
    print("| what | measured | goal |")
    print("| --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
