"""The command `bagel-wds`."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from importlib import metadata
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from bagel_wds import storage
from bagel_wds.console import clean_errors, format_size, parse_size
from bagel_wds.converters.cli import check, convert
from bagel_wds.converters.progress import Step, progress
from bagel_wds.converters.record import as_text
from bagel_wds.errors import BadSample
from bagel_wds.images import read_header
from bagel_wds.manifest import read_manifest
from bagel_wds.orphans import end_with_parent
from bagel_wds.plan.load import load_config, parse_tokens
from bagel_wds.plan.run import plan_run
from bagel_wds.plan.text import plan_lines
from bagel_wds.redact import redact
from bagel_wds.schema import IMAGE_EXTENSIONS, media_fields
from bagel_wds.show import Contents, Holding, find_holdings, find_sample, look_into
from bagel_wds.verify import find_manifests, verify_shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bagel_wds.converters.progress import Report
    from bagel_wds.verify import Findings, ShardFindings

app = typer.Typer(
    name="bagel-wds",
    help="Convert and inspect training data for BAGEL-style multimodal models.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bagel-wds {metadata.version('bagel-wds')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Convert and inspect training data for BAGEL-style multimodal models."""


app.command()(convert)
app.command()(check)


@app.command()
def verify(
    path: Annotated[
        str, typer.Argument(help="A converted dataset: its folder or manifest, or a dataset info of several.")
    ],
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many shards are read at a time; else one a CPU.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Read shards again, and compare them with their manifest, checksums and indexes.

    Whatever is wrong is printed with its shard. The exit status is 0 if nothing is, and 1 otherwise.
    """
    with clean_errors(), progress() as report:
        found = [
            _verify(manifest, processes or os.cpu_count() or 1, report) for manifest in find_manifests(path)
        ]
    if as_json:
        values = [asdict(dataset) | {"manifest": as_text(dataset.manifest)} for dataset in found]
        typer.echo(orjson.dumps(values, option=orjson.OPT_INDENT_2).decode())
    else:
        for dataset in found:
            _print_findings(dataset)
    if not all(dataset.sound for dataset in found):
        raise SystemExit(1)


def _verify(manifest: str, processes: int, report: Report) -> Findings:
    shards = read_manifest(manifest).shards
    step = Step(storage.parent(manifest), sum(shard.samples for shard in shards))

    def tell(done: ShardFindings) -> None:
        nonlocal step
        step = step.after(rows=done.num_samples, num_bytes=done.num_bytes, quarantined=0)
        report(step)

    report(step)
    if processes == 1 or len(shards) <= 1:
        return verify_shards(manifest, report=tell)
    count = min(processes, len(shards))
    with ProcessPoolExecutor(count, get_context("forkserver"), end_with_parent) as pool:
        return verify_shards(manifest, report=tell, run=pool.map)


def _print_findings(found: Findings) -> None:
    for finding in found.faults:
        typer.echo(f"fault: {finding}")
    for finding in found.notes:
        typer.echo(f"note: {finding}")
    verdict = "sound" if found.sound else f"{len(found.faults)} faults"
    typer.echo(
        f"{found.manifest}: {verdict}; {found.num_shards} shards, {found.num_samples} samples, "
        f"{format_size(found.num_bytes)} read"
    )


@app.command()
def plan(
    config: Annotated[
        str, typer.Argument(help="The mixture, or a file of settings (fields of BagelDatasetConfig).")
    ],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks: processes that train.")],
    workers: Annotated[int, typer.Option(min=0, help="DataLoader workers of each rank.")],
    info: Annotated[str | None, typer.Option(help="The dataset info: where the shards lie.")] = None,
    num_streams: Annotated[
        int | None, typer.Option(help="Streams of the run; else the settings', else one a rank and worker.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A setting, such as max_latent_size=64; may come again."
        ),
    ] = None,
    tokens_per_sample: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP=N", help="Mean tokens of a sample of a group; may come again."),
    ] = None,
    sample_index: Annotated[
        bool, typer.Option("--sample-index", help="Judge the other groups' by one index of each dataset.")
    ] = False,
    text_tokens: Annotated[int, typer.Option(min=0, help="How long --sample-index takes a text to be.")] = 64,
    step_seconds: Annotated[float, typer.Option(help="How long a training step takes.")] = 1.0,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a worker may have, such as 8GiB; more is told.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Say what a run would look like, from its settings and manifests; no shard is read."""
    with clean_errors():
        settings = load_config(config, info, changes or [])
        found = plan_run(
            settings if num_streams is None else replace(settings, num_streams=num_streams),
            world_size,
            workers,
            tokens=parse_tokens(tokens_per_sample or []),
            sample_index=sample_index,
            text_tokens=text_tokens,
            step_seconds=step_seconds,
            memory_limit=None if memory is None else parse_size(memory),
        )
    if as_json:
        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        for line in plan_lines(found):
            typer.echo(line)


@app.command()
def show(
    path: Annotated[
        str, typer.Argument(help="A tar, a folder or manifest of a dataset, or a dataset info file.")
    ],
    key: Annotated[str | None, typer.Option(help="Print the sample of this key in full.")] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Look into so many samples of a dataset; 0 looks into all.")
    ] = 10_000,
) -> None:
    """Print what a shard or a dataset holds."""
    with clean_errors():
        holdings = find_holdings(path)
        if key is not None:
            _print_sample(find_sample(holdings, key))
            return
        for holding in holdings:
            _print_holding(holding, look_into(holding, samples or None))


def _print_holding(holding: Holding, contents: Contents) -> None:
    typer.echo(holding.name)
    for label, value in _lines(holding, contents):
        typer.echo(f"  {label:<13}{value}")


def _lines(holding: Holding, contents: Contents) -> Iterable[tuple[str, str]]:
    """The rows of what is printed of a dataset: (label, value)."""
    if holding.raw is not None:
        yield "raw files", f"{holding.raw}; `bagel-wds check` looks into them"
        return
    counts = None if holding.manifest is None else holding.manifest.counts
    known = [shard.samples for shard in holding.shards if shard.samples is not None]
    total = sum(known) if len(known) == len(holding.shards) else None
    yield "shards", f"{len(holding.shards)}, {format_size(holding.num_bytes)}"
    if total is not None:
        yield "samples", str(total)
    if counts is not None:
        reasons = f": {_counted(counts.reasons)}" if counts.reasons else ""
        yield "quarantined", f"{counts.quarantined} of {counts.read} rows{reasons}"
    partly = total is not None and contents.samples < total
    yield "looked into", f"{'the first ' if partly else ''}{contents.samples} samples"
    yield "kinds", _counted(contents.kinds)
    yield "media", _media(contents)
    if contents.texts:
        yield "texts", _counted(contents.texts)
    yield "bytes", f"{format_size(contents.media_bytes)} media, {format_size(contents.json_bytes)} JSON"
    if contents.faults:
        yield "faults", _counted(contents.faults)


def _media(contents: Contents) -> str:
    if not contents.files:
        return "none"
    least, most = min(contents.media), max(contents.media)
    parts = [_counted(contents.files), f"{least}{'' if least == most else f' to {most}'} a sample"]
    if contents.clips:
        parts.append(f"{contents.clips} clips")
    if contents.smallest_hw and contents.largest_hw:
        parts.append(f"{_size(contents.smallest_hw)} to {_size(contents.largest_hw)} (height x width)")
    return "; ".join(parts)


def _counted(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _size(size_hw: tuple[int, int]) -> str:
    return f"{size_hw[0]}x{size_hw[1]}"


def _print_sample(sample: Mapping[str, Any]) -> None:
    typer.echo(f"{sample['__key__']} in {redact(sample['__url__'])}")
    text = sample.get("json")
    if text is None:
        typer.echo("no json member")
    else:
        typer.echo(_pretty(text))
    for _, names in media_fields(sample):
        for name in names:
            typer.echo(f"{name}: {len(sample[name])} bytes{_describe(name, sample[name])}")


def _pretty(text: bytes) -> str:
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError as error:
        return f"broken JSON ({error}): {text[:200]!r}"


def _describe(name: str, data: bytes) -> str:
    if name.rpartition(".")[2] not in IMAGE_EXTENSIONS:
        return ""
    try:
        header = read_header(data)
    except BadSample as bad:
        return f", {bad}"
    turned = f", orientation {header.orientation}" if header.orientation != 1 else ""
    return f", {header.ext}, {_size(header.size_hw)} (height x width){turned}"
