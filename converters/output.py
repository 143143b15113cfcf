"""The folder that a conversion writes to: what may lie there already, and what `overwrite` removes."""

from __future__ import annotations

import re

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.manifest import MANIFEST_NAME, QUARANTINE_NAME, read_manifest

_NAME = re.compile(r"\w[\w.-]*")
_UNNAMEABLE = re.compile(r"[^\w.-]+")


def check_name(name: str) -> str:
    """A name that can begin a file's name, as it is.

    Raises:
        ConfigError: if it holds anything but letters, digits, `_`, `-` and `.`, or begins with one of the last two.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name {name!r} cannot begin the names of shards: use letters, digits, `_`, `-` and `.`, "
            f"for example {propose_name(name)!r}"
        )
    return name


def propose_name(path: str) -> str:
    """A name for the dataset that lies at a path: its last part, without what a name cannot hold."""
    last = storage.local_path(path).absolute().name
    return _UNNAMEABLE.sub("-", last.removesuffix(".parquet").removesuffix(".jsonl")).strip("-.") or "dataset"


def check_output(out: str, source_path: str, *, overwrite: bool) -> None:
    """Refuse a folder whose content a conversion would mix with its own.

    Raises:
        ConfigError: naming what lies there.
    """
    if storage.exists(out) and not storage.is_folder(out):
        raise ConfigError(f"{out} is a file; give a folder to write the shards to")
    folder, source = storage.local_path(out).resolve(), storage.local_path(source_path).resolve()
    if source.is_dir() and folder.is_relative_to(source):
        raise ConfigError(f"{out} lies in the source {source_path}; write the shards somewhere else")
    if overwrite or not storage.exists(out):
        return
    if storage.exists(storage.join(out, MANIFEST_NAME)):
        raise ConfigError(
            f"{out} holds a converted dataset already; pass --overwrite to replace it, or give another folder"
        )
    tars = [name for name in storage.list_files(out) if name.endswith(".tar") and "/" not in name]
    if tars:
        raise ConfigError(
            f"{out} holds {len(tars)} tars without a manifest, the first is {tars[0]}: a conversion that was not "
            "finished, or another tool's shards; pass --overwrite to replace those of this dataset, or give another "
            "folder"
        )


def clear_output(out: str, name: str) -> None:
    """Remove what an earlier conversion left: all that its manifest names, and unfinished shards of this name.

    The manifest goes first: without it, what is left does not pass for a dataset.
    """
    if not storage.exists(out):
        return
    manifest_url = storage.join(out, MANIFEST_NAME)
    doomed = [QUARANTINE_NAME]
    if storage.exists(manifest_url):
        for shard in read_manifest(manifest_url).shards:
            doomed += [shard.url, *([shard.index] if shard.index else [])]
        storage.remove(manifest_url)
    unfinished = re.compile(rf"\.?{re.escape(name)}-\d{{6,}}-\d{{3,}}\.(tar|idx\.parquet)(\.partial-\d+)?")
    doomed += [file for file in storage.list_files(out) if unfinished.fullmatch(file)]
    for file in doomed:
        # Only what lies in this folder itself: a manifest may name shards that lie elsewhere.
        if "/" not in file:
            storage.remove(storage.join(out, file))
