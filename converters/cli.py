"""The command `convert`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from bagel_wds import storage
from bagel_wds.console import clean_errors, format_size, parse_size
from bagel_wds.errors import ConfigError
from bagel_wds.manifest import QUARANTINE_NAME
from bagel_wds.schema import SAMPLE_KINDS, SampleKind
from bagel_wds.sources import Source

from .convert import convert_source
from .mixture import convert_mixture
from .output import propose_name
from .progress import progress_bar
from .settings import ShardSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .convert import ConversionSummary

USAGE = (
    "write `bagel-wds convert t2i|vlm|edit SRC OUT` for one dataset, or "
    "`bagel-wds convert --config MIX.yaml --info INFO.yaml OUT` for a mixture"
)


def convert(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[t2i|vlm|edit SRC] OUT",
            help="Kind and place of one dataset, and the folder to write to; with --config the folder alone.",
            show_default=False,
        ),
    ],
    config: Annotated[str | None, typer.Option(help="Mixture file: convert each dataset it names.")] = None,
    info: Annotated[str | None, typer.Option(help="Dataset info that goes with the mixture file.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the dataset and its shards; else as the source is called.")
    ] = None,
    media_root: Annotated[
        str | None,
        typer.Option(help="What the media paths of vlm are relative to; else the JSONL's folder."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many work at a time; else one a CPU.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Bytes of a shard at most.")] = "256MiB",
    shard_samples: Annotated[int, typer.Option(min=1, help="Samples of a shard at most.")] = 10_000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a converted dataset.")] = False,
) -> None:
    """Convert parquet or JSON lines in BAGEL's layouts to WebDataset shards.

    Rows that cannot be used are left out and listed in quarantine.jsonl, with their place and the reason. The exit
    status is 0 only if the conversion is complete.
    """
    with clean_errors():
        settings = ShardSettings(shard_bytes=parse_size(shard_size), shard_samples=shard_samples)
        count = processes or os.cpu_count() or 1
        if config is not None or info is not None:
            if config is None or info is None:
                raise ConfigError(f"--config and --info go together; {USAGE}")
            if len(places) != 1 or name is not None or media_root is not None:
                raise ConfigError(f"with --config only OUT and no --name or --media-root is taken; {USAGE}")
            with progress_bar() as report:
                done = convert_mixture(
                    config,
                    info,
                    places[0],
                    settings=settings,
                    processes=count,
                    overwrite=overwrite,
                    report=report,
                )
            print_summaries(done.datasets)
            typer.echo(f"dataset info: {done.info_path}")
            return
        source, out = _read_places(places, name, media_root)
        with progress_bar() as report:
            summary = convert_source(
                source, out, settings=settings, processes=count, overwrite=overwrite, report=report
            )
        print_summaries([summary])


def _read_places(places: list[str], name: str | None, media_root: str | None) -> tuple[Source, str]:
    if places[0] not in SAMPLE_KINDS:
        raise ConfigError(f"{places[0]!r} is none of {', '.join(SAMPLE_KINDS)}; {USAGE}")
    if len(places) != 3:
        raise ConfigError(f"{len(places)} arguments where three belong; {USAGE}")
    kind, path, out = places
    if media_root is not None and kind != "vlm":
        raise ConfigError(f"--media-root is for vlm; the images of {kind} lie in its parquet files")
    source = Source(
        kind=cast("SampleKind", kind),
        name=propose_name(path) if name is None else name,
        path=path,
        media_root=media_root,
    )
    return source, out


def print_summaries(summaries: Iterable[ConversionSummary]) -> None:
    """Print what became of each dataset's rows, and where the rows left out are listed."""
    table = Table("dataset", "kind", title="Converted", title_justify="left")
    for heading in ("read", "written", "quarantined", "shards", "size"):
        table.add_column(heading, justify="right")
    table.add_column("reasons", overflow="fold")
    notes = []
    for summary in summaries:
        counts = summary.counts
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.reasons.items())
        table.add_row(
            summary.name,
            summary.kind,
            *map(str, (counts.read, counts.written, counts.quarantined, summary.num_shards)),
            format_size(summary.num_bytes),
            reasons,
        )
        if counts.quarantined:
            notes.append(f"quarantined: {storage.join(storage.parent(summary.manifest), QUARANTINE_NAME)}")
    # In a log there is no edge to fold the table at.
    Console(markup=False, width=None if sys.stdout.isatty() else 160).print(table)
    for note in notes:
        typer.echo(note)
