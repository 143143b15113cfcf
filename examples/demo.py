"""Draw a corpus, convert it to shards, stream packed batches, and print what came: `make demo`.

Everything is small enough for a laptop without a GPU, and needs no download: the pictures are drawn, and the
tokenizer is a byte-level BPE trained on the corpus's own texts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bagel_wds import BagelDatasetConfig, SimpleCustomBatch, add_special_tokens, collate_wrapper
from bagel_wds.converters import Mode, convert_mixture
from bagel_wds.converters.cli import print_summaries
from examples.corpus import CorpusPaths, draw_corpus

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_BATCHES = 8
NUM_WORKERS = 2


def corpus_texts(corpus: CorpusPaths) -> Iterator[str]:
    """Every caption, turn and instruction of the corpus."""
    for file in sorted(corpus.t2i_dir.glob("*.parquet")):
        for captions in pq.read_table(file, columns=["captions"])["captions"].to_pylist():
            yield from json.loads(captions).values()
    for line in corpus.vlm_jsonl.read_text(encoding="utf-8").splitlines():
        yield from (turn["value"] for turn in json.loads(line)["conversations"])
    for file in sorted(corpus.edit_dir.glob("*.parquet")):
        for steps in pq.read_table(file, columns=["instruction_list"])["instruction_list"].to_pylist():
            yield from itertools.chain.from_iterable(steps)


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerBase:
    """A small tokenizer in Qwen2's manner: byte-level BPE."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe)  # type: ignore[no-untyped-call] # it has no types


@dataclass
class Seen:
    """What the batches held, by group."""

    samples: Counter[str]
    images: Counter[str]
    text_tokens: Counter[str]

    def add(self, batch: SimpleCustomBatch, start_of_image: int) -> None:
        """Count one batch by what its arrays say."""
        text = list(zip(batch.packed_text_indexes.tolist(), batch.packed_text_ids.tolist(), strict=True))
        start = 0
        for length, origin in zip(batch.sample_lens, batch.batch_data_indexes, strict=False):
            group = origin["dataset_name"]
            own = [token for index, token in text if start <= index < start + length]
            images = own.count(start_of_image)
            self.samples[group] += 1
            self.images[group] += images
            # Each image has two control tokens that are no text.
            self.text_tokens[group] += len(own) - 2 * images
            start += length


def print_batches(seen: Seen, lengths: list[int], config: BagelDatasetConfig, seconds: float) -> None:
    """One table: what came, by group and by batch."""
    table = Table(title=f"{len(lengths)} packed batches from {NUM_WORKERS} workers", title_justify="left")
    for heading in ("", "samples", "images", "text tokens", "tokens", "fill"):
        table.add_column(heading, justify="left" if not heading else "right")
    for group in sorted(seen.samples):
        table.add_row(
            group, str(seen.samples[group]), str(seen.images[group]), str(seen.text_tokens[group]), "", ""
        )
    table.add_section()
    for number, length in enumerate(lengths):
        table.add_row(f"batch {number}", "", "", "", str(length), f"{length / config.max_num_tokens:.1%}")
    table.add_section()
    total = sum(lengths)
    samples, images, text = (
        sum(counter.values()) for counter in (seen.samples, seen.images, seen.text_tokens)
    )
    fill = total / len(lengths) / config.max_num_tokens
    table.add_row("all", str(samples), str(images), str(text), str(total), f"{fill:.1%}")
    Console().print(table)
    Console().print(f"{total / seconds:,.0f} tokens a second, the start of the workers included")


def main() -> None:
    """Run the demonstration in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-data"), help="where corpus and shards go")
    out = parser.parse_args().out

    corpus = draw_corpus(out / "sources")
    converted = convert_mixture(
        str(corpus.mixture),
        str(corpus.dataset_info),
        str(out / "shards"),
        processes=NUM_WORKERS,
        mode=Mode.OVERWRITE,
    )
    print_summaries(converted.datasets, info_path=converted.info_path)

    tokenizer, special_tokens, _ = add_special_tokens(train_tokenizer(corpus_texts(corpus)))
    config = BagelDatasetConfig(
        grouped_datasets_path=str(corpus.mixture),
        dataset_info_path=converted.info_path,
        expected_num_tokens=10240,
        max_num_tokens=11520,
        max_num_tokens_per_sample=10240,
        max_latent_size=64,
        use_flex=True,
    )
    dataset = config.build(
        tokenizer, special_tokens, rank=0, world_size=1, num_workers=NUM_WORKERS, global_seed=0
    )
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=1, num_workers=NUM_WORKERS, collate_fn=collate_wrapper()
    )
    seen, lengths = Seen(Counter(), Counter(), Counter()), []
    start = time.perf_counter()
    for batch in itertools.islice(loader, NUM_BATCHES):
        seen.add(batch, special_tokens["start_of_image"])
        lengths.append(batch.sequence_length)
    print_batches(seen, lengths, config, time.perf_counter() - start)


if __name__ == "__main__":
    main()
