"""What the commands `convert` and `check` are told on the command line, as the values that they work with."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, cast

import typer

from bagel_wds.errors import ConfigError
from bagel_wds.schema import SAMPLE_KINDS, SampleKind
from bagel_wds.sources import Placeholders, Source, Verify

from .engine_pool import pool_engine
from .engine_ray import ClusterShare, ray_engine
from .output import propose_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .engine import Engine
    from .mixture import RowRules


class EngineName(StrEnum):
    """Where a conversion works."""

    LOCAL = "local"
    """In a pool of processes on this machine."""
    RAY = "ray"
    """On the nodes of a Ray cluster."""


USAGE = (
    "write `bagel-wds {command} t2i|vlm|edit|interleaved SRC...{out}` for one dataset, or "
    "`bagel-wds {command} --config MIX.yaml --info INFO.yaml{out}` for a mixture"
)

Config = Annotated[str | None, typer.Option(help="Mixture file: each dataset it names.")]
Info = Annotated[str | None, typer.Option(help="Dataset info that goes with the mixture file.")]
Name = Annotated[
    str | None, typer.Option(help="Of the dataset and its shards; else as the source is called.")
]
MediaRoot = Annotated[
    str | None, typer.Option(help="What media paths are relative to; else the source's own folder.")
]
AllowOutside = Annotated[
    bool, typer.Option("--allow-outside", help="Take media paths that lead out of the media root.")
]
ImageColumn = Annotated[
    str | None, typer.Option(help="The source's column (or JSON field) with the image or images.")
]
CaptionsColumn = Annotated[str | None, typer.Option(help="Its column with the captions.")]
InstructionsColumn = Annotated[str | None, typer.Option(help="Its column with the instructions.")]
ConversationsColumn = Annotated[str | None, typer.Option(help="Its field with the conversation.")]
VideoColumn = Annotated[str | None, typer.Option(help="Its field with the video or videos.")]
VerifyOption = Annotated[
    Verify,
    typer.Option(help="How far each image is looked at: decoded, up to its end marker, or its header only."),
]
PlaceholdersOption = Annotated[
    Placeholders,
    typer.Option(
        help="Conversations whose <image> tags do not match: left out, taken as they are, or mended."
    ),
]
BatchBytes = Annotated[
    str, typer.Option(help="Bytes of parquet rows that a process holds at a time, whatever the row group.")
]
Processes = Annotated[int | None, typer.Option(min=1, help="How many work at a time; else one a CPU.")]
EngineOption = Annotated[
    EngineName, typer.Option("--engine", help="Where the work is done: on this machine, or on a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option(help="Of the Ray cluster: HOST:PORT or auto; else RAY_ADDRESS, else one is started here."),
]
MaxQuarantine = Annotated[
    str | None, typer.Option(help="Stop when more rows than this are left out: a share (1%) or a number.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]

_PROCESS_BYTES = 256 << 20
"""Memory of a process that converts, beside its batches of rows."""
_BATCHES = 6
"""A batch of rows is in memory about so often: compressed, decoded, and on its way into a shard."""


def open_engine(
    engine: EngineName, address: str | None, processes: int | None, batch_bytes: int
) -> AbstractContextManager[Engine]:
    """The engine that the command line asks for, to be used inside the block.

    Raises:
        ConfigError: if an address is given that nobody uses; on entry also as `ray_engine`.
    """
    if engine is EngineName.RAY:
        return _on_ray(address, ClusterShare(processes, _PROCESS_BYTES + _BATCHES * batch_bytes))
    if address is not None:
        raise ConfigError("--address is of a Ray cluster; give --engine ray too")
    return nullcontext(pool_engine(processes or os.cpu_count() or 1))


@contextmanager
def _on_ray(address: str | None, share: ClusterShare) -> Iterator[Engine]:
    # Ray prints what befalls nodes on standard output, which is for the summary.
    with redirect_stdout(sys.stderr), ray_engine(address, share) as run:
        yield run


_COLUMNS_OF_KIND: dict[str, dict[str, str]] = {
    "t2i": {"image": "image", "captions": "captions"},
    "edit": {"image": "image_list", "instructions": "instruction_list"},
    "vlm": {"image": "image", "conversations": "conversations", "video": "video"},
    "interleaved": {"image": "images", "video": "videos"},
}
"""For each kind: what a column option is about, and our name for that column."""


def source_columns(kind: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """The columns that options name, by our names.

    Raises:
        ConfigError: for an option that is not of this kind.
    """
    ours = _COLUMNS_OF_KIND[kind]
    columns = {what: column for what, column in given.items() if column is not None}
    for what in columns:
        if what not in ours:
            options = ", ".join(f"--{name}-column" for name in ours)
            raise ConfigError(f"--{what}-column is not for {kind}; it has {options}")
    return {ours[what]: column for what, column in columns.items()}


def one_source(
    kind: str,
    paths: Sequence[str],
    *,
    name: str | None,
    media_root: str | None,
    columns: Mapping[str, str | None],
    rules: RowRules,
) -> Source:
    """The source that the command line names.

    Raises:
        ConfigError: for an option that is not of its kind.
    """
    return Source(
        kind=cast("SampleKind", kind),
        name=propose_name(paths[0]) if name is None else name,
        path=paths[0] if len(paths) == 1 else tuple(paths),
        media_root=media_root,
        columns=source_columns(kind, columns),
        allow_outside=rules.allow_outside,
        placeholders=rules.placeholders,
        verify=rules.verify,
        batch_bytes=rules.batch_bytes,
    )


def check_kind(kind: str, usage: str) -> None:
    """Refuse what is no kind of source.

    Raises:
        ConfigError: with how the command is used.
    """
    if kind not in SAMPLE_KINDS:
        raise ConfigError(f"{kind!r} is none of {', '.join(SAMPLE_KINDS)}; {usage}")


def check_mixture_options(
    config: str | None, info: str | None, others: Mapping[str, object], usage: str
) -> bool:
    """Whether a mixture is meant.

    Raises:
        ConfigError: if one of its two files is not given, or an option is that a mixture does not take.
    """
    if config is None and info is None:
        return False
    if config is None or info is None:
        raise ConfigError(f"--config and --info go together; {usage}")
    for option, value in others.items():
        if value is not None:
            raise ConfigError(f"{option} is not taken with --config, whose info file has that; {usage}")
    return True
