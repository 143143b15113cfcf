"""Contestant (a) of `benchmarks.loader`: the loader of NeMo AutoModel, as its own configuration builds it."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.loader_tasks import BUDGETS, SEED, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.loader_tasks import Start, Task

REQUIREMENTS = ("nemo-automodel==0.7.0", "pandas", "python-dateutil", "pytz", "six", "tzdata")
"""Upstream's package, and pandas, which reads its parquet: what its datasets need and this project does not."""

MULTIMODAL = "nemo_automodel.components.datasets.multimodal"
LATE = ("torchvision.transforms.functional", "pandas")
"""What its datasets import no earlier than they are built, or read their first row."""


def install(folder: Path) -> str | None:
    """Put upstream's package into a folder, unless it is there; say why where that is not possible.

    Without dependencies: torch, torchdata, transformers, numpy, Pillow and pyarrow are those of the environment that
    runs the benchmark, so that both loaders stand on the same ones.
    """
    if all((folder / package).is_dir() for package in ("nemo_automodel", "pandas")):
        return None
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, *REQUIREMENTS], check=False, capture_output=True, text=True)  # noqa: S603 - our own
    return None if done.returncode == 0 else (done.stderr.strip() or "pip failed").splitlines()[-1]


def prepare(task: Task) -> Start:
    """Import it and load the tokenizer; the rest is the contestant's own time."""
    # It warns of each worker's share and of each sample that it drops.
    logging.disable(logging.WARNING)
    multimodal: Any = importlib.import_module(MULTIMODAL)
    loader: Any = importlib.import_module(f"{MULTIMODAL}.loader")
    for name in LATE:
        importlib.import_module(name)
    tokenizer, special_tokens, _ = multimodal.add_special_tokens(load_tokenizer(task))

    def start() -> Iterator[Any]:
        config = multimodal.BagelDatasetConfig(
            grouped_datasets=task.corpus.groups(task.groups),
            dataset_info_path=str(task.corpus.raw_info),
            **BUDGETS,
        )
        built = loader.BagelDataloaderConfig(config, num_workers=task.workers, pin_memory=False).build(
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            rank=0,
            world_size=1,
            batch_size=1,
            global_seed=SEED,
        )
        return iter(built.dataloader)

    return start
