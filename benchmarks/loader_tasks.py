"""What a contestant of `benchmarks.loader` is asked to do, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from bagel_wds import BagelDatasetConfig
from benchmarks.loader_corpus import Corpus

if TYPE_CHECKING:
    from collections.abc import Mapping

SEED = 1
"""Of every draw; upstream takes 0 for unset."""

PACKED_TOKENS, MAX_NUM_TOKENS = 32768, 36864
"""A pack is given out once it has the first, and never has more than the second: upstream's defaults."""

BUDGETS: Mapping[str, Any] = {
    "expected_num_tokens": PACKED_TOKENS,
    "max_num_tokens": MAX_NUM_TOKENS,
    "max_num_tokens_per_sample": 16384,
    "prefer_buffer_before": 16384,
    "max_buffer_size": 50,
    "max_latent_size": 64,
    "use_flex": True,
}
"""Settings that upstream and we both have."""

OURS: Mapping[str, Mapping[str, Any]] = {
    "ours exact": {"pixels": "exact"},
    "ours fast": {"pixels": "fast", "transport": "float32"},
    "ours uint8": {"pixels": "fast", "transport": "uint8"},
    "ours best_fit": {"pixels": "fast", "transport": "float32", "packing": "best_fit"},
}
"""Our contestants, and what each sets."""

UPSTREAM, PLAIN, LIMIT = "upstream", "plain", "limit"
CONTESTANTS = (UPSTREAM, PLAIN, LIMIT, *OURS)

Start = Callable[[], Iterator[Any]]
"""Builds a contestant's loader and begins to iterate it; the clock starts when it is called."""


@dataclass(frozen=True)
class Task:
    """One run of one contestant.

    Attributes:
        contestant: one of `CONTESTANTS`.
        folder: of the corpus.
        groups: names of those in the mixture.
        workers: of the DataLoader; 0 loads in the process itself.
        warmup: batches before the window that is measured, at least 1.
        batches: in the window.
    """

    contestant: str
    folder: str
    groups: tuple[str, ...]
    workers: int
    warmup: int
    batches: int

    @property
    def corpus(self) -> Corpus:
        """The corpus that is in the folder."""
        return Corpus(Path(self.folder))


def load_tokenizer(task: Task) -> Any:
    """The corpus's, without control tokens yet."""
    return AutoTokenizer.from_pretrained(task.corpus.tokenizer)


def known_settings(contestant: str) -> dict[str, Any]:
    """What one of ours sets, as far as this version of the package has the settings."""
    known = {field.name for field in fields(BagelDatasetConfig)}
    return {name: value for name, value in OURS.get(contestant, {}).items() if name in known}


def available() -> tuple[str, ...]:
    """The contestants, less those of ours that this version of the package cannot tell from an earlier one."""
    ours = [name for place, name in enumerate(OURS) if not _is_earlier(place, name)]
    return (UPSTREAM, PLAIN, LIMIT, *ours)


def _is_earlier(place: int, name: str) -> bool:
    return any(known_settings(other) == known_settings(name) for other in list(OURS)[:place])


def our_config(task: Task) -> BagelDatasetConfig:
    """The settings of one of ours; of the limit, those whose packs it takes."""
    return BagelDatasetConfig(
        grouped_datasets=task.corpus.groups(task.groups),
        dataset_info_path=str(task.corpus.shard_info),
        **BUDGETS,
        **known_settings(task.contestant),
    )
