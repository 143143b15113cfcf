"""Upstream's list of parquet files and their row groups, compared with the files that are there.

Upstream reads what the list and the folder have in common, and leaves the rest out without a word. Row groups are read
from the files themselves here, so the list has nothing to add; but where it says otherwise, somebody is mistaken.
"""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.sources import list_files
from bagel_wds.sources.places import PARQUET

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bagel_wds.sources import Lines, RowGroups, Source
    from bagel_wds.storage import StorageOptions

COUNT = "num_row_groups"
"""What an entry says of its file."""


def read_parquet_info(url: str, options: StorageOptions | None = None) -> dict[str, int | None]:
    """The paths that a list names, and how many row groups it gives each; None where it does not say.

    Args:
        url: of a JSON file `{path: {"num_row_groups": 3}}`.
        options: how its store is reached.

    Raises:
        ConfigError: if it cannot be read, or is of another form.
    """
    try:
        value = orjson.loads(storage.read_bytes(url, options))
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{url}: cannot be read as a list of row groups: {error}") from error
    entries = value.items() if isinstance(value, dict) else ()
    counts = {path: entry.get(COUNT) for path, entry in entries if isinstance(entry, dict)}
    well_formed = isinstance(value, dict) and len(counts) == len(value)
    if not well_formed or not all(count is None or type(count) is int for count in counts.values()):
        raise ConfigError(
            f'{url}: a list of row groups is a JSON object such as {{"a/b.parquet": {{"{COUNT}": 3}}}}, and this is not'
        )
    return counts


def check_parquet_info(source: Source, pieces: Iterable[RowGroups | Lines], url: str) -> None:
    """Refuse a list of row groups that speaks of other files than a source has, or of other row groups.

    Args:
        source: whose files are meant.
        pieces: of the files that are read, each row group by itself.
        url: of the list.

    Raises:
        ConfigError: naming what either side has alone.
    """
    told = read_parquet_info(url, source.options)
    files = list_files(source)
    if not all(file.endswith(PARQUET) for file in files):
        raise ConfigError(f"{url}: parquet_info_path speaks of parquet, and its rows are JSON; leave it out")
    meant = match_files(list(told), source.root, files, url)
    nowhere = [path for path in told if path not in meant]
    named = set(meant.values())
    unnamed = [file for file in files if file not in named]
    if nowhere or unnamed:
        raise ConfigError(
            f"parquet_info_path {url} and the files under {source.root} do not agree: {_some(nowhere, 'entries', told)} "
            f"match no file, and {_some(unnamed, 'files', files)} are in no entry; write it anew, or leave it out: row groups "
            "are read from the files themselves"
        )
    counts = Counter(piece.file for piece in pieces)
    for path, file in meant.items():
        said = told[path]
        # A file that a cap leaves out was not looked at.
        if said is not None and said != counts.get(file, said):
            raise ConfigError(
                f"parquet_info_path {url} gives {path} {said} row groups, and {storage.join(source.root, file)} has "
                f"{counts[file]}; write it anew, or leave it out"
            )


def match_files(paths: Sequence[str], root: str, files: Sequence[str], url: str) -> Mapping[str, str]:
    """Which file of a folder each path of a list means; a path that means none is left out.

    A relative path is looked for from the current folder, from that of the list, and from the folder of the files; and else it
    is the file whose own path ends in it, if that is only one.

    Args:
        paths: of the list.
        root: the folder.
        files: relative to it.
        url: of the list.
    """
    places = {_absolute(storage.join(root, file)): file for file in files}
    by_name: dict[str, list[str]] = {}
    for place in places:
        by_name.setdefault(posixpath.basename(place), []).append(place)
    found: dict[str, str] = {}
    for path in paths:
        is_relative = "://" not in path and not posixpath.isabs(path)
        folders = [_absolute(folder) for folder in ("", storage.parent(url), root)] if is_relative else []
        exact = [f"{folder}/{posixpath.normpath(path)}" for folder in folders] or [_absolute(path)]
        tail = "/" + posixpath.normpath(path)
        ends = [place for place in by_name.get(posixpath.basename(path), ()) if place.endswith(tail)]
        candidates = [_without_dots(place) for place in exact] + (
            ends if is_relative and len(ends) == 1 else []
        )
        known = next((place for place in candidates if place in places), None)
        if known is not None:
            found[path] = places[known]
    return found


def _without_dots(place: str) -> str:
    scheme, mark, path = place.rpartition("://")
    return scheme + mark + posixpath.normpath(path)


def _absolute(path: str) -> str:
    """A path from the root of the disk; a URL as it is."""
    if "://" in path and not path.startswith("file://"):
        return path
    return posixpath.normpath(posixpath.join(os.fspath(Path.cwd()), os.fspath(storage.local_path(path))))


def _some(alone: Sequence[str], what: str, of: Sequence[str] | Mapping[str, object]) -> str:
    return f"{len(alone)} of {len(of)} {what}" + (f" (such as {alone[0]})" if alone else "")
