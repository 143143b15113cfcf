"""Media files under a URL, by the rules and in the words that hold on a disk.

An object has no links, so a path leads out of the root only by `..`, from `/`, or by a URL. What is not there is a verdict
on the row; a store that does not answer, or refuses, stops the conversion: it says nothing of the row.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
from typing import TYPE_CHECKING

from bagel_wds import storage
from bagel_wds.errors import BadSample, ConfigError, Reason

if TYPE_CHECKING:
    from bagel_wds.sources.rows import Source

_MAX_KEY_BYTES = 1024
"""Stores take no longer names of objects."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def read_file(
    path: str, source: Source, root: str, max_bytes: int, missing: Reason, too_large: Reason
) -> bytes:
    """The bytes of a file.

    Args:
        path: relative to the root.
        source: whether it may lead outside.
        root: URL of the media root.
        max_bytes: of the file.
        missing: what is said where there is no such file.
        too_large: what is said of a larger one.

    Raises:
        BadSample: if there is no such file, it may not be read, or is too large.
        OSError: if the store does not give it.
    """
    url = _locate(path, root, missing)
    try:
        data = storage.read_range(url, 0, max_bytes + 1, source.options) if url != root else None
    except FileNotFoundError as error:
        if not storage.is_folder(url, source.options):
            raise _missing(path, source, missing) from error
        data = None
    if data is None:
        raise BadSample(missing, f"{path}: a folder, where an image file belongs")
    if len(data) > max_bytes:
        raise BadSample(
            too_large, f"{path}: {storage.size(url, source.options)} bytes; the most is {max_bytes}"
        )
    return data


def list_folder(path: str, source: Source, root: str) -> list[str] | None:
    """The names of the files in a folder; None if a file has this name.

    Raises:
        BadSample: if there is no such folder, or it may not be read.
        OSError: if the store does not list it.
    """
    url = _locate(path, root, Reason.VIDEO_MISSING)
    names = storage.list_folder(url, source.options)
    if names:
        return [name for name in names if not name.endswith("/")]
    if storage.is_file(url, source.options):
        return None
    raise _missing(path, source, Reason.VIDEO_MISSING)


def _locate(path: str, root: str, missing: Reason) -> str:
    if path.startswith("/"):
        raise BadSample(
            Reason.PATH_OUTSIDE, f"{path}: a path from the root of a disk, and the media root is in a bucket"
        )
    try:
        num_bytes = len(path.encode())
    except UnicodeEncodeError as error:
        raise BadSample(missing, f"{path!r}: {type(error).__name__}") from error
    if _CONTROL.search(path):
        raise BadSample(missing, f"{path!r}: no object has such a name")
    if num_bytes > _MAX_KEY_BYTES:
        raise BadSample(missing, f"{path}: {os.strerror(errno.ENAMETOOLONG)}")
    flat = posixpath.normpath(path)
    try:
        return root if flat == "." else storage.join(root, flat)
    except ConfigError as error:
        # Only where paths may lead outside: any other with `..` was refused before.
        raise BadSample(Reason.PATH_OUTSIDE, f"{path}: leads out of the bucket") from error


def _missing(path: str, source: Source, reason: Reason) -> BadSample:
    return BadSample(reason, f"{path}: {os.strerror(errno.ENOENT)}{where_hint(source)}")


def where_hint(source: Source) -> str:
    """What may be wrong with a path that is not there.

    Which folder that is stays unsaid: a quarantine holds no path of the machine that it was written on.
    """
    where = "the source's own folder" if source.media_root is None else "the media root"
    return (
        f" under {where}; is that folder right (`data_dir` of a dataset info, --media-root of the command)?"
    )


def outside(path: str, why: str = "not a path under the media root") -> BadSample:
    """The verdict on a path that leads out of the media root, and how it is taken nevertheless."""
    return BadSample(
        Reason.PATH_OUTSIDE,
        f"{path[:200]}: {why}; `allow_outside: true` of a dataset info, or --allow-outside of the command, takes it",
    )
