"""`conversion.json`: what a folder of shards was made from, so that another run can go on, add to it, or refuse.

It is written before the first shard. Names in it are relative to the source's root: nothing tells where that lay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.manifest import RECORD_NAME
from bagel_wds.schema import FORMAT_VERSION
from bagel_wds.sources import SourceFile
from bagel_wds.sources.places import reads_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bagel_wds.sources import Source

    from .settings import ShardSettings


class Mode(StrEnum):
    """What a conversion does with a dataset that lies there already."""

    CONVERT = "convert"
    """Goes on with an unfinished one of the same source and settings, and leaves a finished one as it is."""
    APPEND = "append"
    """Adds the source's new files to it, as shards of their own."""
    RETRY = "retry"
    """Reads again the rows that were quarantined, and adds those that can be used now, as shards of their own."""
    OVERWRITE = "overwrite"
    """Replaces it."""


@dataclass(frozen=True)
class Part:
    """What one run added.

    Attributes:
        mode: of the run: convert, append or retry.
        files: that were read, in order.
        num_slices: that they were cut into.
        num_rows: in these.
        settings: that decided the bytes.
    """

    mode: Mode
    files: tuple[SourceFile, ...]
    num_slices: int
    num_rows: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ConversionRecord:
    """Of which parts a dataset consists; all but the last are finished.

    Attributes:
        name: of the dataset.
        kind: of its samples.
        parts: in the order in which they were added.
    """

    name: str
    kind: str
    parts: tuple[Part, ...] = ()

    @property
    def num_slices(self) -> int:
        """Slices of all parts: the number of the next one."""
        return sum(part.num_slices for part in self.parts)

    @property
    def files(self) -> dict[str, SourceFile]:
        """Every file that was read, by name."""
        return {file.name: file for part in self.parts for file in part.files}

    def with_part(self, part: Part) -> ConversionRecord:
        """The record with one more part."""
        return replace(self, parts=(*self.parts, part))

    def without_last(self) -> ConversionRecord:
        """The record as it was before its last part."""
        return replace(self, parts=self.parts[:-1])


def settings_of(source: Source, settings: ShardSettings) -> dict[str, Any]:
    """Every choice that decides which bytes a conversion writes, as JSON values."""
    choices: dict[str, Any] = {
        "shard_bytes": settings.shard_bytes,
        "shard_samples": settings.shard_samples,
        "shuffle": settings.shuffle,
        "max_side": settings.max_side,
        "encoder": None if settings.max_side is None else str(settings.encoder),
        "verify": str(source.verify),
        "columns": dict(sorted(source.columns.items())),
        "max_units": source.max_units,
    }
    if source.kind == "vlm":
        choices["placeholders"] = str(source.placeholders)
    if reads_lines(source.kind):
        choices |= {
            "allow_outside": source.allow_outside,
            "shuffle_lines": source.shuffle_lines,
            "shuffle_seed": source.shuffle_seed,
        }
    return choices


def read_record(out: str) -> ConversionRecord | None:
    """The record in a folder; None if there is none.

    Raises:
        ConfigError: if it cannot be read, or was written by a later version.
    """
    url = storage.join(out, RECORD_NAME)
    if not storage.exists(url):
        return None
    try:
        value = orjson.loads(storage.read_bytes(url))
        if value["format_version"] != FORMAT_VERSION:
            raise ConfigError(
                f"{url}: format_version {value['format_version']!r}, this version of bagel-wds knows {FORMAT_VERSION}; "
                "go on with the bagel-wds that began it, or pass --overwrite"
            )
        return ConversionRecord(value["name"], value["kind"], tuple(_part(part) for part in value["parts"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{url}: no record of a conversion ({type(error).__name__}: {error}); pass --overwrite to convert anew"
        ) from error


def _part(value: Mapping[str, Any]) -> Part:
    return Part(
        mode=Mode(value["mode"]),
        files=tuple(SourceFile(file["name"], file["bytes"], file["digest"]) for file in value["files"]),
        num_slices=value["slices"],
        num_rows=value["rows"],
        settings=value["settings"],
    )


def write_record(out: str, record: ConversionRecord) -> None:
    """Write `conversion.json`, atomically."""
    value = {
        "format_version": FORMAT_VERSION,
        "name": record.name,
        "kind": record.kind,
        "parts": [
            {
                "mode": part.mode,
                "settings": dict(part.settings),
                "slices": part.num_slices,
                "rows": part.num_rows,
                "files": [
                    {"name": as_text(file.name), "bytes": file.bytes, "digest": file.digest}
                    for file in part.files
                ],
            }
            for part in record.parts
        ],
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    storage.write_bytes(storage.join(out, RECORD_NAME), orjson.dumps(value, option=options))


def as_text(name: str) -> str:
    """A file name that is no UTF-8 has no other way into JSON."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def tell_apart(recorded: Sequence[SourceFile], found: Sequence[SourceFile]) -> str | None:
    """In which file an input differs from the one that was recorded; None if in none."""
    before = {as_text(file.name): file for file in recorded}
    now = {as_text(file.name): file for file in found}
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            return f"{name} is not there any more"
        if name not in before:
            return f"{name} was not there when it began"
        if (before[name].bytes, before[name].digest) != (now[name].bytes, now[name].digest):
            return f"{name} has changed, or is another file: {before[name].bytes} bytes then, {now[name].bytes} now"
    return None
