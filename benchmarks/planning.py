"""How many samples a core can plan and pack in a second: `python -m benchmarks.planning [--out DIR]`.

Makes the corpus of `benchmarks.loader`, with few rows, and prints one Markdown table. Planning is everything between a parsed
sample and a plan: sizes out of headers, tokens, draws. What it takes is set against the time in which the `tokenizers` library
encodes the texts of the same plans. Packing is mixing and the rule that chooses.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import webdataset as wds

from bagel_wds import stages
from bagel_wds.config import Packing
from bagel_wds.records import Kind
from bagel_wds.tokens import TextEncoder, add_special_tokens
from benchmarks.loader_corpus import GROUPS, Corpus, Rows, make_corpus
from benchmarks.loader_tasks import MAX_NUM_TOKENS, SEED, Task, load_tokenizer, our_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bagel_wds import BagelDatasetConfig
    from bagel_wds.records import RawSample, SamplePlan

ROWS = Rows(t2i=100, edit=100, vlm=100)
ROUNDS = 9
PACKS = 400

Plans = dict[str, list["SamplePlan"]]


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        what: was done.
        seconds: of CPU time that each plan takes.
        library: that the library takes for its texts; None where there are none.
        goal: plans a second that are wanted.
        note: what else is to say.
    """

    what: str
    seconds: float
    library: float | None = None
    goal: int = 0
    note: str = ""

    def cells(self) -> list[str]:
        """As text."""
        library = "" if self.library is None else f"{self.library * 1e6:.0f}"
        return [
            self.what,
            f"{1 / self.seconds:,.0f}",
            f"{self.seconds * 1e6:.1f}",
            library,
            f"{self.goal:,}" if self.goal else "",
            self.note,
        ]


def fastest(work: Callable[[], int]) -> float:
    """CPU seconds of a unit of work, in the fastest of some rounds: what others on the machine take is not ours."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        units = work()
        times.append((time.process_time() - start) / units)
    return min(times)


def plan_rows(corpus: Corpus, config: BagelDatasetConfig, encoder: TextEncoder) -> tuple[list[Row], Plans]:
    """The groups' rows, the mean of all, and the plans."""
    rows, plans = [], {}
    for group, dataset in GROUPS.items():
        raw = _raw_samples(corpus, config, group, dataset)
        plan = stages.plan(config, group, encoder, seed=SEED)
        plans[group] = list(plan(iter(raw)))
        ours = fastest(lambda raw=raw, plan=plan: sum(1 for _ in plan(iter(raw))))  # type: ignore[misc]
        rows.append(Row(f"plan {group}", ours, _library_time(encoder, plans[group])))
    mean, library = (
        sum(column) / len(rows)
        for column in ([row.seconds for row in rows], [row.library or 0 for row in rows])
    )
    return [*rows, Row("plan all three", mean, library, goal=10_000)], plans


def _raw_samples(corpus: Corpus, config: BagelDatasetConfig, group: str, dataset: str) -> list[RawSample]:
    source = str(corpus.shards / group / dataset)
    return list(
        wds.DataPipeline(stages.shards(source, epochs=1), stages.read(config), stages.decode(config, group))
    )


def _library_time(encoder: TextEncoder, plans: Sequence[SamplePlan]) -> float:
    """Seconds a plan in which the library encodes the texts."""
    tokenizer: Any = encoder.tokenizer
    texts = [
        tokenizer.decode(segment.token_ids)
        for plan in plans
        for segment in plan.segments
        if segment.kind is Kind.TEXT
    ]
    encode = tokenizer.backend_tokenizer.encode
    return fastest(lambda: len([encode(text).ids for text in texts])) * len(texts) / len(plans)


def pack_row(config: BagelDatasetConfig, plans: Plans, packing: Packing) -> Row:
    """The row of a rule."""
    config = replace(config, packing=packing)
    tokens = num_packs = 0

    def work() -> int:
        nonlocal tokens, num_packs
        supply = stages.mix({group: cycle(own) for group, own in plans.items()}, config, seed=SEED)
        packs = list(islice(stages.pack(config)(supply()), PACKS))
        tokens, num_packs = sum(pack.length for pack in packs), len(packs)
        return sum(len(pack.plans) for pack in packs)

    seconds = fastest(work)
    return Row(
        f"pack, {packing}", seconds, goal=50_000, note=f"fill {tokens / num_packs / MAX_NUM_TOKENS:.3f}"
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="where the corpus stays; by default a folder that is removed"
    )
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        corpus = make_corpus(out or Path(scratch), ROWS)
        task = Task("ours fast", str(corpus.folder), tuple(GROUPS), workers=0, warmup=1, batches=1)
        config = our_config(task)
        rows, plans = plan_rows(corpus, config, TextEncoder(add_special_tokens(load_tokenizer(task))[0]))
        rows += [pack_row(config, plans, packing) for packing in Packing]
    print("| what | plans/s | us a plan | us of `tokenizers` for its texts | goal, plans/s | |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        print("| " + " | ".join(row.cells()) + " |")


if __name__ == "__main__":
    main()
