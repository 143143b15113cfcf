"""Image files and folders of frames that a row names by a path under the media root.

A path may not lead out of the root: one that is absolute, a URL, has a `..` in it, or goes out through a link is
refused.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, Reason
from bagel_wds.schema import IMAGE_EXTENSIONS, natural
from bagel_wds.sources.rows import Medium, SourceImage, read_source_image

if TYPE_CHECKING:
    from pathlib import Path

MAX_IMAGE_BYTES = 1 << 30
"""A larger image file is refused."""

MAX_FRAMES = 50_000
"""A clip of more frames is refused."""

_NOT_THERE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
_FRAME_NUMBER = re.compile(r"_(\d+)\.[^.]+$")


def read_image(root: Path, path: str) -> SourceImage:
    """An image file.

    Args:
        root: the media root, links resolved.
        path: relative to it.

    Raises:
        BadSample: naming the path, if it leads outside, is not there, is empty, or has no sound header.
    """
    file = _locate(root, path, Reason.IMAGE_MISSING)
    if not file.is_file():
        raise BadSample(Reason.IMAGE_MISSING, f"{path}: not a file")
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= MAX_IMAGE_BYTES else b""
    except OSError as error:
        raise _absent(error, path, Reason.IMAGE_MISSING) from error
    if size > MAX_IMAGE_BYTES:
        raise BadSample(Reason.IMAGE_TOO_LARGE, f"{path}: {size} bytes; the most is {MAX_IMAGE_BYTES}")
    return read_source_image(data, path)


def read_clip(root: Path, path: str) -> Medium:
    """A clip given as a folder of frames, in the order of their numbers: `*_7.jpg` before `*_10.jpg`.

    Names without such a number come first, in natural order.

    Args:
        root: the media root, links resolved.
        path: of the folder, relative to it.

    Raises:
        BadSample: if there is no such folder, it holds no image, or a frame cannot be used.
    """
    folder = _locate(root, path, Reason.VIDEO_MISSING)
    if not folder.is_dir():
        raise BadSample(Reason.VIDEO, f"{path}: a video file; only folders of frames are read so far")
    try:
        names = [entry.name for entry in folder.iterdir() if _is_frame(entry.name)]
    except OSError as error:
        raise _absent(error, path, Reason.VIDEO_MISSING) from error
    if not names:
        raise BadSample(Reason.VIDEO_MISSING, f"{path}: no image in this folder")
    if len(names) > MAX_FRAMES:
        raise BadSample(Reason.VIDEO, f"{path}: {len(names)} frames; the most is {MAX_FRAMES}")
    return Medium(
        tuple(read_image(root, f"{path.rstrip('/')}/{name}") for name in sorted(names, key=_frame_order)),
        is_clip=True,
    )


def _is_frame(name: str) -> bool:
    return not name.startswith(".") and name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS


def _frame_order(name: str) -> tuple[int, tuple[tuple[int, int, str], ...]]:
    number = _FRAME_NUMBER.search(name)
    return (int(number.group(1)) if number else -1, natural(name))


def _locate(root: Path, path: str, missing: Reason) -> Path:
    """The file or folder that a path names, with its links resolved."""
    if "://" in path or path.startswith("/") or ".." in path.split("/"):
        raise BadSample(Reason.PATH_OUTSIDE, f"{path}: not a path under the media root")
    try:
        found = (root / path).resolve(strict=True)
    except OSError as error:
        raise _absent(error, path, missing) from error
    except (ValueError, RuntimeError) as error:
        # A zero byte in the name; a ring of links.
        raise BadSample(missing, f"{path!r}: {type(error).__name__}") from error
    if not found.is_relative_to(root):
        raise BadSample(Reason.PATH_OUTSIDE, f"{path}: a link that leads out of the media root")
    return found


def _absent(error: OSError, path: str, reason: Reason) -> BadSample | OSError:
    """A verdict on the row where the file is not there for us; the error itself where the disk is at fault."""
    if error.errno in _NOT_THERE:
        return BadSample(reason, f"{path}: {error.strerror}")
    return error
