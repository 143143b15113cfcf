"""Where the files of a source lie: in a folder, by a pattern, by a list, and in several of these.

A name that is there as it is written is never read as a pattern.

| place | its files | its root |
| --- | --- | --- |
| a file | itself | its folder |
| a folder | those with the kind's suffixes, at any depth, but for hidden ones | itself |
| a pattern with `*`, `?`, `[...]` or `**` | what matches; a folder that does gives what lies in it | the folder before the first special character |
| a pattern with braces | what each of its spellings names | the same |
| a list: `.txt`, for parquet `.json` | what each entry names | its folder; where an entry lies outside, the common folder |

The root of several places is their common folder. Files are named relative to it: their keys depend on it, so it depends
on nothing but what is written here.

In a bucket a place is the same with a URL: `s3://bucket/folder`, `s3://bucket/*.parquet`. A web server is not listed, so a
file there is given by its own URL, by braces, or in a list.
"""

from __future__ import annotations

import os
import posixpath
import re
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import orjson
from braceexpand import braceexpand

from bagel_wds import storage
from bagel_wds.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.schema import SampleKind
    from bagel_wds.storage import StorageOptions

PARQUET = ".parquet"
"""Suffix of parquet files."""

_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
_SUFFIXES: dict[SampleKind, tuple[str, ...]] = {
    "t2i": (PARQUET,),
    "edit": (PARQUET,),
    "vlm": (*_LINES, PARQUET),
    "interleaved": (*_LINES, PARQUET),
}
_SPECIAL = re.compile(r"[*?\[{]")
_MAGIC = re.compile(r"[*?\[]")


def reads_lines(kind: SampleKind) -> bool:
    """Whether rows of a kind may be JSON, and name their media by paths; others are parquet that holds them."""
    return _LINES[0] in _SUFFIXES[kind]


def find_root(path: str | Sequence[str], kind: SampleKind, options: StorageOptions | None = None) -> str:
    """The folder that the files of a place, or of several, are named relative to.

    Args:
        path: the place, or places.
        kind: of the rows.
        options: how a store is reached.

    Raises:
        ConfigError: if a place is not there.
    """
    return _common_folder([_root(place, kind, options) for place in _places(path)])


def find_files(
    path: str | Sequence[str], kind: SampleKind, root: str, options: StorageOptions | None = None
) -> list[str]:
    """The files of a place, or of several, relative to a root, in the order of their bytes.

    Args:
        path: the place, or places.
        kind: of the rows, which says what the files are called.
        root: what `find_root` gives for them.
        options: how a store is reached.

    Raises:
        ConfigError: for a place, or a spelling of a pattern, that names no file; a file that the kind is not read
            from, or that comes twice; parquet and JSON side by side.
    """
    files = [file for place in _places(path) for file in _files(place, kind, options)]
    _check_suffixes(files, kind)
    start = len(_absolute(root).rstrip("/")) + 1
    decode = unquote if storage.scheme_of(root) in storage.WEB else str
    names = sorted((decode(_absolute(file)[start:]) for file in files), key=os.fsencode)
    for name, following in pairwise(names):
        if name == following:
            raise ConfigError(f"{storage.join(root, name)} comes twice; name each file once")
    return names


def _places(path: str | Sequence[str]) -> list[str]:
    """Places as URLs, or as paths on the disk, without a slash at the end; on a web server that marks a folder."""
    places = [path] if isinstance(path, str) else list(path)
    if not places or not all(places):
        raise ConfigError("an empty path; give a file, a folder, a pattern or a list of files")
    return [_place(place) for place in places]


def _place(place: str) -> str:
    if storage.is_local(place):
        return os.fspath(storage.local_path(place))
    if storage.scheme_of(place) not in storage.WEB:
        return place.rstrip("/")
    if "?" in place:
        raise ConfigError(
            f"{place}: a URL with a query cannot be a source: what signs it would be kept as the name of the file; "
            "download the file first"
        )
    return place


def _root(place: str, kind: SampleKind, options: StorageOptions | None) -> str:
    if storage.is_folder(place, options):
        return place
    if storage.scheme_of(place) in storage.WEB and place.endswith("/"):
        return place.rstrip("/")
    folder = storage.parent(place)
    if storage.exists(place, options):
        return _list_root(place, options) if _is_list(place, kind) else folder
    if not _SPECIAL.search(place):
        raise ConfigError(f"{place}: no such file or folder")
    return storage.parent(_SPECIAL.split(place, maxsplit=1)[0])


def _files(place: str, kind: SampleKind, options: StorageOptions | None) -> list[str]:
    if "{" in place and not storage.exists(place, options):
        return _all_named(_spellings(place), kind, options)
    if _is_list(place, kind) and storage.exists(place, options) and not storage.is_folder(place, options):
        return _all_named(_read_list(place, options), kind, options)
    return _named(place, kind, options)


def _all_named(places: Sequence[str], kind: SampleKind, options: StorageOptions | None) -> list[str]:
    """The files of many places; of those in buckets it is asked with few requests which are files."""
    known = storage.which_are_files((place for place in places if not storage.is_local(place)), options)
    return [
        file for place in places for file in ([place] if place in known else _named(place, kind, options))
    ]


def _named(place: str, kind: SampleKind, options: StorageOptions | None) -> list[str]:
    """The files of a place that is neither a list nor has braces."""
    if storage.is_folder(place, options):
        files = _in_folder(place, kind, options)
        if not files:
            raise ConfigError(f"{place}: no {_wanted(kind)} file in this folder")
        return files
    if storage.is_file(place, options):
        return [place]
    if storage.exists(place, options):
        raise ConfigError(f"{place}: neither a file nor a folder")
    if not _MAGIC.search(place):
        raise ConfigError(f"{place}: no such file or folder")
    files = _matching(place, kind, options)
    if not files:
        raise ConfigError(f"{place}: no file matches this pattern")
    return files


def _in_folder(folder: str, kind: SampleKind, options: StorageOptions | None) -> list[str]:
    return [
        storage.join(folder, file)
        for file in storage.list_files(folder, options)
        if file.endswith(_SUFFIXES[kind]) and not any(part.startswith(".") for part in file.split("/"))
    ]


def _check_suffixes(files: Sequence[str], kind: SampleKind) -> None:
    for file in files:
        if not file.endswith(_SUFFIXES[kind]):
            raise ConfigError(f"{file}: {kind} rows are read from {_wanted(kind)} files")
    parquet = next((file for file in files if file.endswith(PARQUET)), None)
    lines = next((file for file in files if not file.endswith(PARQUET)), None)
    if parquet and lines:
        raise ConfigError(
            f"both parquet and JSON, for example {parquet} and {lines}; name the files of one form, for example "
            f"{storage.parent(parquet)}/*{PARQUET}"
        )


def _wanted(kind: SampleKind) -> str:
    *others, last = _SUFFIXES[kind]
    return f"{', '.join(others)} or {last}" if others else last


# Lists


def _is_list(place: str, kind: SampleKind) -> bool:
    """Whether a file is a list of files. JSON holds the rows themselves, of kinds that are read from it."""
    return place.endswith(".txt") or (place.endswith(".json") and not reads_lines(kind))


def _list_root(place: str, options: StorageOptions | None) -> str:
    folder = storage.parent(place)
    entries = _read_list(place, options)
    known = storage.which_are_files((entry for entry in entries if not storage.is_local(entry)), options)
    folders = [
        entry if entry not in known and storage.is_folder(entry, options) else storage.parent(entry)
        for entry in entries
    ]
    if all(PurePosixPath(_absolute(below)).is_relative_to(_absolute(folder)) for below in folders):
        return folder
    return _common_folder(folders)


def _read_list(place: str, options: StorageOptions | None) -> list[str]:
    """The paths that a list names: relative to its folder, or else to the current one.

    Raises:
        ConfigError: if it names none, or one that is not there.
    """
    folder = storage.parent(place)
    entries = _json_entries(place, options) if place.endswith(".json") else _text_entries(place, options)
    if not entries:
        raise ConfigError(f"{place}: this list of files is empty")
    paths = [_place(entry) for entry in entries]
    beside = [storage.join(folder, path) for path in paths]
    known = storage.which_are_files((url for url in beside if not storage.is_local(url)), options)
    return [
        url if url in known else _find_entry(place, url, path, options)
        for url, path in zip(beside, paths, strict=True)
    ]


def _find_entry(place: str, beside: str, path: str, options: StorageOptions | None) -> str:
    for candidate in (beside, path):
        if storage.exists(candidate, options):
            return candidate
    tried = path if beside == path else f"{beside} (nor {path} from the current folder)"
    raise ConfigError(f"{place}: there is no {tried}; the paths of a list are relative to its folder")


def _text_entries(place: str, options: StorageOptions | None) -> list[str]:
    text = storage.read_bytes(place, options).decode("utf-8-sig", "surrogateescape")
    lines = (line.strip() for line in text.split("\n"))
    return [line for line in lines if line and not line.startswith("#")]


def _json_entries(place: str, options: StorageOptions | None) -> list[str]:
    try:
        value = orjson.loads(storage.read_bytes(place, options))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place}: no JSON, so no list of files: {error}") from error
    entries: list[Any] = list(value) if isinstance(value, list | dict) else [None]
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise ConfigError(
            f"{place}: as a list of files it must be a JSON array of paths, or an object whose keys are paths"
        )
    return entries


# Patterns


def _spellings(pattern: str) -> list[str]:
    try:
        return list(braceexpand(pattern))
    except ValueError as error:
        raise ConfigError(f"{pattern}: no such file, and as a pattern its braces do not match") from error


def _matching(pattern: str, kind: SampleKind, options: StorageOptions | None) -> list[str]:
    """Files that a pattern matches, and those in the folders that it does, each once."""
    head = _MAGIC.split(pattern, maxsplit=1)[0]
    parts = pattern[head.rfind("/") + 1 :].split("/")
    found: dict[str, None] = {}
    for place, is_folder in _walk(storage.parent(head), parts, options):
        found |= dict.fromkeys(_in_folder(place, kind, options) if is_folder else [place])
    return list(found)


def _walk(folder: str, parts: Sequence[str], options: StorageOptions | None) -> Iterator[tuple[str, bool]]:
    """What lies under a folder by a pattern, part by part, and whether it is a folder.

    `**` goes through links, but not round a ring of them.
    """
    part, *rest = parts
    if part == "**":
        for below in _folders(folder, (), options):
            yield from _walk(below, rest or ["*"], options)
        return
    for place, is_folder in _entries(folder, part, options):
        if not rest:
            yield place, is_folder
        elif is_folder:
            yield from _walk(place, rest, options)


def _entries(folder: str, part: str, options: StorageOptions | None) -> list[tuple[str, bool]]:
    if not _MAGIC.search(part):
        place = _below(folder, part)
        return [(place, storage.is_folder(place, options))] if storage.exists(place, options) else []
    if storage.is_local(folder) and not storage.is_folder(folder, options):
        return []
    names = ((name.rstrip("/"), name.endswith("/")) for name in storage.list_folder(folder, options))
    return [
        (_below(folder, name), is_folder)
        for name, is_folder in names
        if fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))
    ]


def _below(folder: str, name: str) -> str:
    return name if folder == "." else storage.join(folder, name)


def _folders(folder: str, above: tuple[str, ...], options: StorageOptions | None) -> Iterator[str]:
    """A folder and those below it, but for hidden ones."""
    real = os.path.realpath(folder) if storage.is_local(folder) else folder
    if real in above or (storage.is_local(folder) and not storage.is_folder(folder, options)):
        return
    yield folder
    for place, is_folder in _entries(folder, "*", options):
        if is_folder:
            yield from _folders(place, (*above, real), options)


# Paths


def _absolute(path: str) -> str:
    if not storage.is_local(path):
        return path.rstrip("/")
    return posixpath.normpath(posixpath.join(os.fspath(Path.cwd()), path))


def _common_folder(folders: Sequence[str]) -> str:
    """The folder that some lie under: the one itself, or else an absolute path."""
    if len(set(folders)) == 1:
        return folders[0]
    if len(set(map(_bucket, folders))) > 1:
        other = next(folder for folder in folders if _bucket(folder) != _bucket(folders[0]))
        raise ConfigError(
            f"{folders[0]} and {other} have no folder in common that their files could be named relative to; convert each "
            "as a dataset of its own"
        )
    bucket = _bucket(folders[0])
    below = posixpath.commonpath([_absolute(folder)[len(bucket) :] or "/" for folder in folders])
    return bucket + below if not bucket or below != "/" else bucket


def _bucket(folder: str) -> str:
    """`scheme://bucket` of a URL; "" of a path on the disk."""
    if storage.is_local(folder):
        return ""
    scheme, mark, rest = folder.partition("://")
    return f"{scheme}{mark}{rest.partition('/')[0]}"
