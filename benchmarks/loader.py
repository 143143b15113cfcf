"""How fast packed batches come, against the alternatives: `python -m benchmarks.loader [--out DIR] [--quick]`.

Makes a corpus of photo-like JPEGs (or of `--photos`) in upstream's raw layout, converts it, and runs in turn, each in a
fresh process, on the same mixture and budgets:

    upstream    the loader of NeMo AutoModel on the parquet and JSONL, installed into a folder of the benchmark's own
    plain       webdataset, torchvision's v2 transforms and a naive packer on the shards
    limit       decode and resize of just the pictures that our packs show: one thread, no batch
    ours ...    exact pixels; fast ones; fast ones as uint8, without their finishing on the device; best_fit packing

Prints medians over the rounds, and the ratios of contestants in one round; by wall time and, for a machine that has
other work, by CPU time of the process and its workers. Every process has one thread for torch. Files are in the page
cache. The time to the first batch runs from the start of the build, with the start of workers (ours: forkserver, which
imports torch anew; the others: fork), without imports in the process itself. Peak RSS is that of the process, or of
its largest worker; in brackets what is left without interpreter and libraries. A shown picture is an image of the VAE or
of the ViT.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bagel_wds.errors import ConfigError
from benchmarks.loader_corpus import GROUPS, Rows, make_corpus
from benchmarks.loader_report import GOALS, MIXED, Run, goals_table, places, runs_table, summary
from benchmarks.loader_runs import Figures
from benchmarks.loader_tasks import CONTESTANTS, LIMIT, UPSTREAM, Task, available
from benchmarks.loader_upstream import install

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        rows: of the corpus.
        mixes: "mixed", or a group alone.
        workers: numbers of workers; 0 loads in the process itself.
        contestants: their names.
        rounds: of all of it.
        warmup, batches: of each worker: those before the window, in which memory is written to for the first time, and those
            in it.
    """

    rows: Rows = field(default_factory=Rows)
    mixes: tuple[str, ...] = (MIXED, *GROUPS)
    workers: tuple[int, ...] = (0, 2)
    contestants: tuple[str, ...] = CONTESTANTS
    rounds: int = 3
    warmup: int = 24
    batches: int = 24


QUICK = Plan(Rows(24, 12, 24), mixes=(MIXED,), workers=(0,), rounds=1, warmup=1, batches=3)


def tasks(plan: Plan, folder: Path) -> Iterator[tuple[str, Task]]:
    """The runs of one round, each with the name of its mix."""
    for mix in plan.mixes:
        groups = tuple(GROUPS) if mix == MIXED else (mix,)
        for workers in plan.workers:
            for contestant in plan.contestants:
                if contestant == LIMIT and workers:
                    continue
                each = max(1, workers)
                yield (
                    mix,
                    Task(contestant, str(folder), groups, workers, plan.warmup * each, plan.batches * each),
                )


def run_task(task: Task, upstream: Path) -> Figures:
    """Run one contestant in a process of its own.

    Raises:
        RuntimeError: with the last line of what it said, if it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if task.contestant == UPSTREAM:
        environment["PYTHONPATH"] = str(upstream)
    command = [sys.executable, "-m", "benchmarks.loader_runs", json.dumps(asdict(task))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)  # noqa: S603 - our own
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1])
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def run_all(plan: Plan, folder: Path, upstream: Path) -> tuple[list[Run], list[str]]:
    """All rounds; a contestant that failed is left out from there on, and said why."""
    runs: list[Run] = []
    failed: dict[tuple[str, int, str], str] = {}
    for number in range(plan.rounds):
        for mix, task in tasks(plan, folder):
            place = (mix, task.workers, task.contestant)
            if place in failed:
                continue
            _say(f"round {number + 1} of {plan.rounds}: {mix}, {task.workers} workers, {task.contestant}")
            try:
                runs.append(Run(*place, number, run_task(task, upstream)))
            except RuntimeError as error:
                failed[place] = f"{mix}, {task.workers} workers, {task.contestant} failed: {error}"
                _say(failed[place])
    return runs, list(failed.values())


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def report(runs: Sequence[Run], notes: Sequence[str]) -> dict[str, Any]:
    """All that was measured, as plain values."""
    return {
        "notes": list(notes),
        "places": [summary(runs, place) for place in places(runs)],
        "goals": [{"goal": goal.text, "measured": goal.measure(runs)} for goal in GOALS],
        "runs": [asdict(run) for run in runs],
    }


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, Plan]:
    """The command line: its options, and the plan that they make."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="where the corpus stays; by default a folder that is removed"
    )
    parser.add_argument("--photos", type=Path, help="folder of JPEGs to take crops of")
    parser.add_argument(
        "--upstream-env", type=Path, help="where upstream is, or goes; by default OUT/upstream"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rows, one short round: whether it runs at all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    for kind in GROUPS.values():
        parser.add_argument(f"--{kind}-rows", type=int, help=f"of the corpus, {getattr(Rows, kind)}")
    parser.add_argument("--mixes", nargs="+", choices=Plan.mixes)
    parser.add_argument("--workers", nargs="+", type=int)
    parser.add_argument("--only", dest="contestants", nargs="+", choices=CONTESTANTS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--batches", type=int, help="that are measured, of each worker")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    given = {
        name: value
        for name in ("mixes", "workers", "contestants", "rounds", "batches")
        if (value := getattr(options, name)) is not None
    }
    rows = {
        kind: value for kind in GROUPS.values() if (value := getattr(options, f"{kind}_rows")) is not None
    }
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return options, replace(plan, **given, rows=replace(plan.rows, **rows))


def can_run(plan: Plan, upstream: Path) -> tuple[Plan, list[str]]:
    """The plan with the contestants that there are, and why others are left out."""
    notes = [
        f"{name}: this version has no setting for it" for name in plan.contestants if name not in available()
    ]
    kept = [name for name in plan.contestants if name in available()]
    if UPSTREAM in kept and (why := install(upstream)):
        notes.append(f"{UPSTREAM} could not be installed: {why}")
        kept.remove(UPSTREAM)
    return replace(plan, contestants=tuple(kept)), notes


def main() -> int:
    """Measure, and print the tables."""
    options, plan = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        upstream = (options.upstream_env or folder / "upstream").resolve()
        plan, notes = can_run(plan, upstream)
        try:
            corpus = make_corpus(folder / "corpus", plan.rows, options.photos)
        except ConfigError as error:
            sys.exit(str(error))
        runs, failed = run_all(plan, corpus.folder, upstream)
    notes += failed
    if options.json:
        print(json.dumps(report(runs, notes), indent=1))
        return bool(failed)
    console = Console(width=200)
    print(f"medians of {plan.rounds} rounds of {plan.batches} batches; ratios by wall time (by CPU time)")
    console.print(runs_table(runs))
    console.print(goals_table(runs))
    for note in notes:
        print(note)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
