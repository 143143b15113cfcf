"""The commands `convert` and `check`."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
import yaml
from rich.console import Console
from rich.table import Table

from bagel_wds import storage
from bagel_wds.config import BUILT_IN_RECIPES, load_mapping, parse_groups
from bagel_wds.console import clean_errors, format_size, parse_size
from bagel_wds.errors import ConfigError
from bagel_wds.manifest import QUARANTINE_NAME
from bagel_wds.sources import Placeholders, Source, Verify, absolute

from .check import CheckSummary, Entry, check_source
from .convert import run_conversion
from .downscale import Encoder
from .mixture import RowRules, convert_mixture, find_sources
from .options import (
    USAGE,
    Address,
    AllowOutside,
    AsJson,
    BatchBytes,
    CaptionsColumn,
    Config,
    ConversationsColumn,
    EngineName,
    EngineOption,
    ImageColumn,
    Info,
    InstructionsColumn,
    MaxQuarantine,
    MediaRoot,
    Name,
    PlaceholdersOption,
    Processes,
    VerifyOption,
    VideoColumn,
    check_kind,
    check_mixture_options,
    one_source,
    open_engine,
)
from .planning import plan_conversion
from .progress import progress
from .quarantine import parse_limit
from .record import Mode, as_text
from .settings import ShardSettings
from .watcher import place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .convert import ConversionSummary

_GROUPS = {recipe: group for group, recipe in BUILT_IN_RECIPES.items()}
"""The group that each kind has in upstream's mixtures."""

_CONVERT_USAGE = USAGE.format(command="convert", out=" OUT")
_CHECK_USAGE = USAGE.format(command="check", out="")


def convert(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[t2i|vlm|edit|interleaved SRC...] OUT",
            help="Kind and places of one dataset, and the folder to write to; with --config the folder alone.",
            show_default=False,
        ),
    ],
    config: Config = None,
    info: Info = None,
    name: Name = None,
    media_root: MediaRoot = None,
    allow_outside: AllowOutside = False,
    image_column: ImageColumn = None,
    captions_column: CaptionsColumn = None,
    instructions_column: InstructionsColumn = None,
    conversations_column: ConversationsColumn = None,
    video_column: VideoColumn = None,
    verify: VerifyOption = Verify.FULL,
    placeholders: PlaceholdersOption = Placeholders.STRICT,
    shard_size: Annotated[str, typer.Option(help="Bytes of a shard at most.")] = "256MiB",
    shard_samples: Annotated[int, typer.Option(min=1, help="Samples of a shard at most.")] = 10_000,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Shuffle all rows over all shards, by this seed.")
    ] = None,
    max_side: Annotated[
        int | None,
        typer.Option(min=1, help="Scale larger images down to so many pixels on their longer side."),
    ] = None,
    encoder: Annotated[Encoder, typer.Option(help="Of images that are scaled down.")] = Encoder.PNG,
    max_quarantine: MaxQuarantine = None,
    batch_bytes: BatchBytes = "2MiB",
    processes: Processes = None,
    engine: EngineOption = EngineName.LOCAL,
    address: Address = None,
    append: Annotated[bool, typer.Option("--append", help="Add the source's new files to OUT.")] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Read again only the rows that OUT's quarantine names.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a converted dataset.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert parquet or JSON lines in BAGEL's layouts to WebDataset shards.

    Rows that cannot be used are left out and listed in quarantine.jsonl, with their place and the reason. A run that
    was stopped goes on when the same command is given again. The exit status is 0 only if the conversion is complete.
    """
    with clean_errors(), _interruptible():
        settings = ShardSettings(
            shard_bytes=parse_size(shard_size),
            shard_samples=shard_samples,
            shuffle=shuffle,
            max_side=max_side,
            encoder=encoder,
        )
        rules = RowRules(verify, placeholders, allow_outside, parse_size(batch_bytes))
        columns = _columns(
            image_column, captions_column, instructions_column, conversations_column, video_column
        )
        mode = _mode(append=append, retry=retry, overwrite=overwrite)
        opened = open_engine(engine, address, processes, rules.batch_bytes)
        limit = None if max_quarantine is None else parse_limit(max_quarantine)
        alone = {"--name": name, "--media-root": media_root} | {
            f"--{what}-column": column for what, column in columns.items()
        }
        if encoder is not Encoder.PNG and max_side is None:
            raise ConfigError("--encoder is of images that --max-side scales down; give that too")
        if check_mixture_options(config, info, alone, _CONVERT_USAGE):
            if len(places) != 1:
                raise ConfigError(f"with --config only OUT is given; {_CONVERT_USAGE}")
            with opened as run, progress() as report:
                done = convert_mixture(
                    str(config),
                    str(info),
                    places[0],
                    rules=rules,
                    settings=settings,
                    mode=mode,
                    engine=run,
                    limit=limit,
                    report=report,
                )
            print_summaries(done.datasets, as_json=as_json, info_path=done.info_path)
            return
        check_kind(places[0], _CONVERT_USAGE)
        if len(places) < 3:
            raise ConfigError(
                f"{len(places)} arguments where a kind, a source and OUT belong; {_CONVERT_USAGE}"
            )
        kind, *paths, out = places
        source = one_source(kind, paths, name=name, media_root=media_root, columns=columns, rules=rules)
        plan = plan_conversion(source, out, settings=settings, mode=mode)
        _tell_notes(source.name, plan.notes)
        with opened as run, progress() as report:
            summary = run_conversion(plan, engine=run, limit=limit, report=report)
        print_summaries([summary], as_json=as_json)


def check(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[t2i|vlm|edit|interleaved SRC...]",
            help="Kind and places of one dataset; with --config none.",
            show_default=False,
        ),
    ] = None,
    config: Config = None,
    info: Info = None,
    media_root: MediaRoot = None,
    allow_outside: AllowOutside = False,
    image_column: ImageColumn = None,
    captions_column: CaptionsColumn = None,
    instructions_column: InstructionsColumn = None,
    conversations_column: ConversationsColumn = None,
    video_column: VideoColumn = None,
    verify: VerifyOption = Verify.FULL,
    placeholders: PlaceholdersOption = Placeholders.STRICT,
    max_quarantine: MaxQuarantine = None,
    rows: Annotated[
        int, typer.Option(min=0, help="Print so many of the rows that would be left out; 0 prints all.")
    ] = 100,
    batch_bytes: BatchBytes = "2MiB",
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Do all that a conversion would check, and write nothing.

    Rows that would be left out are printed with their place and the reason. The exit status is 0 if there are none, or
    no more than --max-quarantine allows, and 1 otherwise.
    """
    with clean_errors(), _interruptible():
        rules = RowRules(verify, placeholders, allow_outside, parse_size(batch_bytes))
        columns = _columns(
            image_column, captions_column, instructions_column, conversations_column, video_column
        )
        limit = parse_limit("0" if max_quarantine is None else max_quarantine)
        alone = {"--media-root": media_root} | {
            f"--{what}-column": column for what, column in columns.items()
        }
        places = places or []
        if check_mixture_options(config, info, alone, _CHECK_USAGE):
            if places:
                raise ConfigError(f"with --config no place is given; {_CHECK_USAGE}")
            found = find_sources(parse_groups(load_mapping(str(config))), str(info), rules)
            sources = [source for _, _, source in found if isinstance(source, Source)]
        else:
            if len(places) < 2:
                raise ConfigError(f"{len(places)} arguments where a kind and a source belong; {_CHECK_USAGE}")
            check_kind(places[0], _CHECK_USAGE)
            sources = [
                one_source(
                    places[0], places[1:], name=None, media_root=media_root, columns=columns, rules=rules
                )
            ]
        listing = _Listing(rows or None, silent=as_json)
        count = processes or os.cpu_count() or 1
        with progress() as report:
            summaries = [
                check_source(source, processes=count, report=report, tell_row=listing.add)
                for source in sources
            ]
        listing.end()
        _print_checked(summaries, listing.kept if as_json else None)
        if any(summary.quarantined > limit.of(summary.read) for summary in summaries):
            raise SystemExit(1)


def _columns(
    image: str | None,
    captions: str | None,
    instructions: str | None,
    conversations: str | None,
    video: str | None,
) -> dict[str, str | None]:
    """The columns that options name, by what they are about."""
    return {
        "image": image,
        "captions": captions,
        "instructions": instructions,
        "conversations": conversations,
        "video": video,
    }


@contextmanager
def _interruptible() -> Iterator[None]:
    """Say that Ctrl-C has done no harm."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            "interrupted; what is finished is kept: run it again (without --overwrite) to go on", err=True
        )
        raise SystemExit(130) from None


def _mode(*, append: bool, retry: bool, overwrite: bool) -> Mode:
    chosen = [
        mode
        for mode, given in ((Mode.APPEND, append), (Mode.RETRY, retry), (Mode.OVERWRITE, overwrite))
        if given
    ]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(f'--{mode}' for mode in chosen)} do not go together; give one")
    return chosen[0] if chosen else Mode.CONVERT


class _Listing:
    """Prints rows that would be left out, up to a number of them."""

    def __init__(self, most: int | None, *, silent: bool) -> None:
        self._most = most
        self._silent = silent
        self._more = 0
        self.kept: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """One more row."""
        if self._most is not None and len(self.kept) >= self._most:
            self._more += 1
            return
        self.kept.append(entry)
        if not self._silent:
            typer.echo(f"{place_of(entry)}: {entry['reason']}: {entry['detail']}")

    def end(self) -> None:
        """Say how many were not printed."""
        if self._more and not self._silent:
            typer.echo(f"... and {self._more} more; --rows 0 prints all")


def _tell_notes(name: str, notes: Iterable[str]) -> None:
    for note in notes:
        typer.echo(f"note: {name}: {note}", err=True)


def print_summaries(
    summaries: Iterable[ConversionSummary], *, as_json: bool = False, info_path: str | None = None
) -> None:
    """Print what became of each dataset's rows, where the rows left out are listed, and how to train on the shards."""
    summaries = list(summaries)
    if as_json:
        value = {"complete": True, "datasets": [_converted_json(summary) for summary in summaries]}
        _print_json(value | ({"dataset_info": as_text(info_path)} if info_path else {}))
        return
    _print_table(
        "Converted",
        ("read", "written", "quarantined", "shards", "size"),
        [
            (
                summary.name,
                summary.kind,
                summary.counts.read,
                summary.counts.written,
                summary.counts.quarantined,
                summary.num_shards,
                format_size(summary.num_bytes),
                _reasons(summary.counts.reasons, summary.counts.repaired),
            )
            for summary in summaries
        ],
    )
    for summary in summaries:
        if summary.was_complete:
            typer.echo(f"{summary.name} was complete: nothing to do")
        if summary.counts.quarantined:
            typer.echo(f"quarantined: {storage.join(storage.parent(summary.manifest), QUARANTINE_NAME)}")
    if info_path is not None:
        typer.echo(f"dataset info: {info_path}")
        return
    for summary in summaries:
        place = absolute(summary.manifest)
        entry = {_GROUPS[summary.kind]: {summary.name: {"shards": place}}}
        line = yaml.safe_dump(entry, default_flow_style=True, allow_unicode=True, width=10**6).strip()
        typer.echo(f"in a dataset info: {line[1:-1]}")


def _converted_json(summary: ConversionSummary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "kind": summary.kind,
        "manifest": as_text(summary.manifest),
        "read": summary.counts.read,
        "written": summary.counts.written,
        "quarantined": summary.counts.quarantined,
        "reasons": dict(summary.counts.reasons),
        "repaired": dict(summary.counts.repaired),
        "shards": summary.num_shards,
        "bytes": summary.num_bytes,
        "was_complete": summary.was_complete,
        "notes": list(summary.notes),
    }


def _print_checked(summaries: Iterable[CheckSummary], rows: list[Entry] | None) -> None:
    summaries = list(summaries)
    if rows is not None:
        datasets = [
            {
                "name": summary.name,
                "kind": summary.kind,
                "read": summary.read,
                "usable": summary.read - summary.quarantined,
                "reasons": dict(summary.reasons),
                "repaired": dict(summary.repaired),
                "bytes": summary.num_bytes,
                "notes": list(summary.notes),
            }
            for summary in summaries
        ]
        _print_json({"datasets": datasets, "rows": rows})
        return
    for summary in summaries:
        _tell_notes(summary.name, summary.notes)
    _print_table(
        "Checked",
        ("read", "usable", "left out", "size"),
        [
            (
                summary.name,
                summary.kind,
                summary.read,
                summary.read - summary.quarantined,
                summary.quarantined,
                format_size(summary.num_bytes),
                _reasons(summary.reasons, summary.repaired),
            )
            for summary in summaries
        ],
    )


def _print_json(value: Mapping[str, Any]) -> None:
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def _reasons(reasons: Mapping[str, int], repaired: Mapping[str, int]) -> str:
    parts = [f"{reason} {count}" for reason, count in reasons.items()]
    parts += [f"repaired {what} {count}" for what, count in repaired.items()]
    return ", ".join(parts)


def _print_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    table = Table("dataset", "kind", title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("reasons", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    # In a log there is no edge to fold the table at.
    Console(markup=False, width=None if sys.stdout.isatty() else 160).print(table)
