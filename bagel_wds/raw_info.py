"""A dataset that an info file finds by upstream's keys: where its raw files lie, and how its rows are read.

One definition for a conversion and for training straight from the raw files, so that both take the same rows, under the
same keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from bagel_wds import storage
from bagel_wds.config import validate
from bagel_wds.errors import ConfigError
from bagel_wds.schema import SAMPLE_KINDS
from bagel_wds.sources import Placeholders, Source
from bagel_wds.sources.places import reads_lines

if TYPE_CHECKING:
    from bagel_wds.config import GroupConfig
    from bagel_wds.storage import StorageOptions

RAW_KEYS = ("data_dir", "jsonl_path", "parquet_info_path")
"""Keys of an entry that lead to raw files."""


@dataclass(frozen=True, kw_only=True)
class InfoEntry:
    """One dataset of a dataset info: where it lies.

    Attributes:
        data_dir: folder of the parquet files; of rows in `jsonl_path`, the one that media paths are relative to.
        jsonl_path: of conversations, where they are.
        parquet_info_path: upstream's list of files and their row groups. What there is is read from the files themselves;
            a run from raw files refuses a list that does not agree with them, see `bagel_wds.parquet_info`.
        num_files, num_total_samples: upstream's counts. Not used: what there is is counted.
        columns: of the files, by the names that this package has for them, where they differ.
        placeholders: policy for tags that do not match the media, where it is not that of the whole run.
        allow_outside: take media paths that lead out of the folder that they are relative to.
        shards: a dataset that is shards already.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    data_dir: str | None = None
    jsonl_path: str | None = None
    parquet_info_path: str | None = None
    num_files: int | None = None
    num_total_samples: int | None = None
    columns: dict[str, str] = field(default_factory=dict)
    placeholders: Placeholders | None = None
    allow_outside: bool = False
    shards: str | list[str] | None = None


def parse_entry(value: object, where: str) -> InfoEntry:
    """An entry of a dataset info.

    Raises:
        ConfigError: for a key that is not known, or a value of another type.
    """
    return validate(InfoEntry, value, where)


def source_of(
    entry: InfoEntry,
    group: GroupConfig,
    name: str,
    where: str,
    folder: str,
    options: StorageOptions | None = None,
) -> Source:
    """The source that an entry describes; which of its rows are taken is up to the caller.

    Args:
        entry: of the dataset.
        group: that the dataset belongs to.
        name: of the dataset.
        where: how an error names the entry.
        folder: of the info file, from which a relative path is looked for after the current one.
        options: how a store is reached.

    Raises:
        ConfigError: if the entry lacks a path, or one leads nowhere.
    """
    kind = next((known for known in SAMPLE_KINDS if known == group.recipe), None)
    if kind is None:
        raise ConfigError(
            f"{where}: raw rows are read for the recipes {', '.join(SAMPLE_KINDS)}, and its group has the recipe "
            f"{group.recipe!r}; write shards, and name them as `shards:`"
        )
    wanted = "jsonl_path" if kind == "vlm" or (reads_lines(kind) and entry.jsonl_path) else "data_dir"
    place, data_dir = entry.jsonl_path if wanted == "jsonl_path" else entry.data_dir, entry.data_dir
    if not place:
        raise ConfigError(f"{where}: {wanted} is missing; {kind} rows are found by it")
    found = find_place(place, folder, f"{where}: {wanted}", options)
    media_root = None
    if data_dir and wanted == "jsonl_path":
        media_root = find_place(data_dir, folder, f"{where}: data_dir", options)
    return Source(
        kind=kind,
        name=name,
        path=found,
        media_root=media_root,
        columns=entry.columns,
        allow_outside=entry.allow_outside,
        placeholders=entry.placeholders or Placeholders.STRICT,
        shuffle_lines=group.shuffle_lines,
        shuffle_seed=group.shuffle_seed,
        options=options,
    )


def find_place(path: str, folder: str, where: str, options: StorageOptions | None = None) -> str:
    """A path of a dataset info: relative to the current folder, as upstream takes it, or else to the info's own.

    Raises:
        ConfigError: if it is in neither.
    """
    beside_info = storage.join(folder, path) if folder else path
    for candidate in (path, beside_info):
        if storage.exists(candidate, options):
            return candidate
    tried = path if beside_info == path else f"{path} (nor {beside_info})"
    raise ConfigError(f"{where}: there is no {tried}")
