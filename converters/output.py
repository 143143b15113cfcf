"""The folder that a conversion writes to: what may lie there already, and what of it is removed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.manifest import MANIFEST_NAME, QUARANTINE_NAME, RECORD_NAME, read_manifest

from .marks import Marks

if TYPE_CHECKING:
    from bagel_wds.sources import Source

MAX_NAME_BYTES = 128
"""File systems take 255, and a shard's number, suffix and hidden form come on top."""
_NAME = re.compile(r"\w[\w.-]*")
_UNNAMEABLE = re.compile(r"[^\w.-]+")
_SUFFIX = re.compile(r"\.(parquet|jsonl?|txt)(\.gz|\.zst)?$")


def check_name(name: str) -> str:
    """A name that can begin a file's name, as it is.

    Raises:
        ConfigError: if it holds anything but letters, digits, `_`, `-` and `.`, or begins with one of the last two.
    """
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(
            f"name {name[:20]}... of {len(name.encode())} bytes is too long for files; the most is {MAX_NAME_BYTES}"
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name {name!r} cannot begin the names of shards: use letters, digits, `_`, `-` and `.`, "
            f"for example {propose_name(name)!r}"
        )
    return name


def propose_name(path: str) -> str:
    """A name for the dataset that lies at a path: its last part, without what a name cannot hold."""
    is_local = storage.is_local(path)
    last = storage.local_path(path).absolute().name if is_local else storage.base_name(path.rstrip("/"))
    return _UNNAMEABLE.sub("-", _SUFFIX.sub("", last)).strip("-.") or "dataset"


def check_output(out: str, source: Source) -> None:
    """Refuse a place that a conversion cannot write to, or would read from.

    Raises:
        ConfigError: naming what lies there.
    """
    if storage.scheme_of(out) in storage.WEB:
        raise ConfigError(
            f"{out}: a web server is not written to; give a folder, or an s3://, gs:// or az:// URL"
        )
    if storage.exists(out) and not storage.is_folder(out):
        raise ConfigError(f"{out} is a file; give a folder to write the shards to")
    paths = (source.path,) if isinstance(source.path, str) else source.path
    if not storage.is_local(out):
        for path in paths:
            if f"{out.rstrip('/')}/".startswith(f"{path.rstrip('/')}/"):
                raise _inside(out, path)
        return
    try:
        folder = storage.local_path(out).resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{out}: a link that leads nowhere; give a folder to write the shards to"
        ) from error
    if storage.local_path(out).is_symlink() and not storage.exists(out):
        raise ConfigError(f"{out}: a link that leads nowhere; give a folder to write the shards to")
    for path in filter(storage.is_local, paths):
        if storage.is_folder(path) and folder.is_relative_to(storage.local_path(path).resolve()):
            raise _inside(out, path)


def _inside(out: str, path: str) -> ConfigError:
    return ConfigError(f"{out} lies in the source {path}; write the shards somewhere else")


def check_no_foreign_tars(out: str) -> None:
    """Refuse a folder whose shards a conversion would mix with its own.

    Raises:
        ConfigError: naming what lies there.
    """
    if not storage.exists(out):
        return
    if storage.exists(storage.join(out, MANIFEST_NAME)):
        raise ConfigError(
            f"{out} holds a dataset that has no {RECORD_NAME}, so what it was made from is not known; pass --overwrite "
            "to replace it, or give another folder"
        )
    tars = [name for name in storage.list_files(out) if name.endswith(".tar") and "/" not in name]
    if tars:
        raise ConfigError(
            f"{out} holds {len(tars)} tars without a manifest, the first is {tars[0]}, perhaps another tool's shards; "
            "pass --overwrite to replace those of this dataset, or give another folder"
        )


def clear_output(out: str, name: str) -> None:
    """Remove what an earlier conversion left: all that its manifest names, and unfinished shards of this name.

    The manifest goes first: without it, what is left does not pass for a dataset. The record stays, so that nobody takes
    the rest for another tool's.
    """
    manifest_url = storage.join(out, MANIFEST_NAME)
    doomed = [QUARANTINE_NAME]
    if storage.exists(manifest_url):
        for shard in read_manifest(manifest_url).shards:
            doomed += [shard.url, *([shard.index] if shard.index else [])]
        storage.remove(manifest_url)
    shards = _shard_names(name)
    doomed += [file for file in storage.list_files(out) if shards.fullmatch(file)]
    # Only what lies in this folder itself: a manifest may name shards that lie elsewhere.
    storage.remove_files(out, [file for file in dict.fromkeys(doomed) if "/" not in file])
    Marks(out).clear()


def clear_partials(out: str, name: str) -> None:
    """Remove files that a run began to write and did not finish, for it was killed; in a bucket they are not seen."""
    if not storage.is_local(out):
        return
    partial = re.compile(
        rf"(.*/)?\.({_shard_names(name).pattern}|[\w-]+\.(json|jsonl|npy))\.partial-[0-9a-f]+"
    )
    for file in storage.list_files(out):
        if partial.fullmatch(file) and ("/" not in file or file.startswith(".conversion/")):
            storage.remove(storage.join(out, file))


def _shard_names(name: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(name)}-\d{{6,}}-\d{{3,}}\.(tar|idx\.parquet)")
