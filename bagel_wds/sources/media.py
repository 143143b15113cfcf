"""Media that a row names: files, and folders of frames, by a path under the media root, and bytes inside the row.

A path may not lead out of the root: one that has a `..` in it, or goes out from `/` or through a link is refused, unless the
source allows it. A URL in a row is never fetched. The root itself may be a folder of a bucket.
"""

from __future__ import annotations

import binascii
import errno
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagel_wds import storage
from bagel_wds.conversations import DATA_KEYS, PATH_KEYS, Tag, is_null_like
from bagel_wds.errors import BadSample, Reason
from bagel_wds.schema import IMAGE_EXTENSIONS, frame_order
from bagel_wds.sources import remote_media
from bagel_wds.sources.places import reads_lines
from bagel_wds.sources.rows import Medium, SourceImage, read_source_clip, read_source_image

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagel_wds.conversations import NamedMedium
    from bagel_wds.sources.rows import Source

MAX_FILE_BYTES = 1 << 30
"""A larger file of an image or a video is refused."""

MAX_FRAMES = 50_000
"""A clip of more frames is refused."""

ROWS_AT_ONCE = 8
"""So many rows are read side by side where their media come from a store, which answers each request after a while."""

MAX_LISTED = 200_000
"""In a folder of more files, a missing one is not looked for under a name in other case."""

_NOT_THERE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
_NOTHING = {Tag.IMAGE: Reason.IMAGE_EMPTY, Tag.VIDEO: Reason.VIDEO_MISSING}
"""The verdict where an entry of a list names nothing."""

_FRAME_NUMBER = re.compile(r"_(\d+)\.[^.]+$")
_DATA_URI = re.compile(r"data:(?:image|video)/[^,]*;base64,", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


MediaRoot = Path | str
"""What media paths are relative to: a folder with its links resolved, or the URL of one in a bucket."""


def find_media_root(source: Source) -> MediaRoot:
    """The folder that the media paths of a source are relative to."""
    folder = source.media_folder
    return _resolve(storage.local_path(folder).absolute()) if storage.is_local(folder) else folder


def rows_at_once(source: Source) -> int:
    """How many rows are best read side by side."""
    names_files = reads_lines(source.kind) or source.media_root is not None
    return ROWS_AT_ONCE if names_files and not storage.is_local(source.media_folder) else 1


@lru_cache(maxsize=1)
def _resolve(folder: Path) -> Path:
    """A folder with its links resolved; kept, for that takes longer than to read a short row."""
    return folder.resolve()


def read_medium(named: NamedMedium, source: Source, root: MediaRoot) -> tuple[Medium, object]:
    """A medium that a row names, and what is left of the row's value without the bytes of the medium.

    Args:
        named: a path; a `data:image/...;base64,...` or `data:video/...` URI; the bytes; or an object with `bytes` (or `base64`) or, where
            these are null, `path` or `url`.
        source: how its media are read.
        root: the media root.

    Raises:
        BadSample: naming the path, or the place in the row, if there is no such medium or it cannot be used.
    """
    path, data, left = _take_out(named.value, named)
    if path is None and named.tag is Tag.VIDEO:
        return _clip_of(data, str(named), source), left
    if path is None:
        return Medium((_verified(data, str(named), source),)), left
    if named.tag is Tag.VIDEO:
        return read_clip(path, source, root), left
    return Medium((read_image(path, source, root),)), left


def _take_out(value: object, named: NamedMedium) -> tuple[str | None, bytes, object]:
    """(path, bytes where there is no path, what is left of the value)."""
    match value:
        case bytes():
            return None, value, {DATA_KEYS[0]: None}
        case str() if uri := _DATA_URI.match(value):
            return None, _decode_base64(value[uri.end() :], named), uri.group()
        case str() if value[:5].lower() == "data:":
            reason = Reason.VIDEO if named.tag is Tag.VIDEO else Reason.ROW_INVALID
            raise BadSample(
                reason, f"{named} is {value[:40]!r}; of data: URIs only images and videos in base64 are read"
            )
        case str() if not is_null_like(value):
            return value, b"", value
        case dict():
            return _take_out_of_object(value, named)
        case None | str():
            raise BadSample(_NOTHING[named.tag], f"{named} is {value!r}")
        case _:
            raise BadSample(
                Reason.ROW_INVALID,
                f"{named} is {type(value).__name__}, neither a path nor an object with bytes or a path",
            )


def _take_out_of_object(value: Mapping[str, Any], named: NamedMedium) -> tuple[str | None, bytes, object]:
    for key in (key for key in DATA_KEYS if value.get(key) is not None):
        data = value[key]
        # Bytes of a parquet column that is no media column come as {"base64": ...}.
        data = data.get("base64") if isinstance(data, dict) else data
        if isinstance(data, str):
            data = _decode_base64(data, named)
        if not isinstance(data, bytes):
            raise BadSample(Reason.ROW_INVALID, f"{named}: {key!r} is {type(data).__name__}, not base64 text")
        return None, data, {**value, key: None}
    for key in (key for key in PATH_KEYS if not is_null_like(value.get(key))):
        if not isinstance(value[key], str):
            raise BadSample(
                Reason.ROW_INVALID, f"{named}: {key!r} is {type(value[key]).__name__}, not a path"
            )
        path, data, left = _take_out(value[key], named)
        return path, data, {**value, key: left}
    known = ", ".join(map(repr, DATA_KEYS + PATH_KEYS))
    if not set(value) & {*DATA_KEYS, *PATH_KEYS}:
        raise BadSample(Reason.ROW_INVALID, f"{named} is an object with none of {known}")
    raise BadSample(_NOTHING[named.tag], f"{named} is an object with nothing in any of {known}")


def _decode_base64(text: str, named: NamedMedium) -> bytes:
    try:
        return binascii.a2b_base64("".join(text.split()), strict_mode=True)
    except ValueError as error:
        reason = Reason.VIDEO_UNREADABLE if named.tag is Tag.VIDEO else Reason.IMAGE_UNREADABLE
        raise BadSample(reason, f"{named} is no base64: {error}") from error


def read_image(path: str, source: Source, root: MediaRoot) -> SourceImage:
    """An image file.

    Args:
        path: relative to the media root.
        source: how its media are read.
        root: the media root.

    Raises:
        BadSample: naming the path, if it leads outside, is not there, is empty, or is no sound image.
    """
    _check_path(path, source)
    return _verified(_read_file(path, source, root, Tag.IMAGE), path, source)


_MISSING = {Tag.IMAGE: Reason.IMAGE_MISSING, Tag.VIDEO: Reason.VIDEO_MISSING}
_TOO_LARGE = {Tag.IMAGE: Reason.IMAGE_TOO_LARGE, Tag.VIDEO: Reason.VIDEO_TOO_LARGE}


def _read_file(path: str, source: Source, root: MediaRoot, tag: Tag) -> bytes:
    missing, too_large = _MISSING[tag], _TOO_LARGE[tag]
    if isinstance(root, str):
        return remote_media.read_file(path, source, root, MAX_FILE_BYTES, missing, too_large)
    file = _locate(path, source, root, missing)
    if not file.is_file():
        what = "a folder" if file.is_dir() else "no plain file"
        raise BadSample(missing, f"{path}: {what}, where {_WHAT_BELONGS[tag]} belongs")
    return _read(file, path, missing, too_large)


_WHAT_BELONGS = {Tag.IMAGE: "an image file", Tag.VIDEO: "a video file or a folder of frames"}


def _read(file: Path, path: str, missing: Reason, too_large: Reason) -> bytes:
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise _absent(error, path, missing) from error
    if size > MAX_FILE_BYTES:
        raise BadSample(too_large, f"{path}: {size} bytes; the most is {MAX_FILE_BYTES}")
    return data


def _verified(data: bytes, name: str, source: Source) -> SourceImage:
    return read_source_image(data, name, source.verify)


def _clip_of(data: bytes, name: str, source: Source) -> Medium:
    return Medium((), is_clip=True, clip=read_source_clip(data, name, source.verify))


def read_clip(path: str, source: Source, root: MediaRoot) -> Medium:
    """A clip: a file, or a folder of frames in the order of their numbers: `*_7.jpg` before `*_10.jpg`.

    Names without such a number come first, in natural order.

    Args:
        path: of the file or folder, relative to the media root.
        source: how its media are read.
        root: the media root.

    Raises:
        BadSample: if there is neither, the folder holds no image, or the file or a frame cannot be used.
    """
    _check_path(path, source)
    listed = (
        remote_media.list_folder(path, source, root)
        if isinstance(root, str)
        else _list_folder(path, source, root)
    )
    if listed is None:
        return _clip_of(_read_file(path, source, root, Tag.VIDEO), path, source)
    names = list(filter(_is_frame, listed))
    if not names:
        raise BadSample(Reason.VIDEO_MISSING, f"{path}: no image in this folder")
    if len(names) > MAX_FRAMES:
        raise BadSample(Reason.VIDEO_TOO_LARGE, f"{path}: {len(names)} frames; the most is {MAX_FRAMES}")
    frames = (
        f"{path.rstrip('/')}/{name}" for name in sorted(names, key=partial(frame_order, number=_FRAME_NUMBER))
    )
    return Medium(tuple(read_image(frame, source, root) for frame in frames), is_clip=True)


def _list_folder(path: str, source: Source, root: Path) -> list[str] | None:
    """The names in a folder; None if it is none."""
    folder = _locate(path, source, root, Reason.VIDEO_MISSING)
    if not folder.is_dir():
        return None
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise _absent(error, path, Reason.VIDEO_MISSING) from error


def _is_frame(name: str) -> bool:
    return not name.startswith(".") and name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS


def _check_path(path: str, source: Source) -> None:
    if _URL.match(path):
        raise BadSample(
            Reason.PATH_OUTSIDE,
            f"{path[:200]}: a URL, and none is fetched; download it first, and name the file in the row",
        )
    if not source.allow_outside and ".." in path.split("/"):
        raise remote_media.outside(path)


def _locate(path: str, source: Source, root: Path, missing: Reason) -> Path:
    """The file or folder that a path names, with its links resolved."""
    if path.startswith("/") and not source.allow_outside and not _is_inside(path, root):
        raise remote_media.outside(path)
    try:
        found = (root / path).resolve(strict=True)
    except OSError as error:
        hint = _hint(path, source, root) if error.errno == errno.ENOENT else ""
        raise _absent(error, path, missing, hint) from error
    except (ValueError, RuntimeError) as error:
        # A zero byte in the name; a ring of links.
        raise BadSample(missing, f"{path!r}: {type(error).__name__}") from error
    if not source.allow_outside and not found.is_relative_to(root):
        raise remote_media.outside(path, "a link that leads out of the media root")
    return found


def _is_inside(path: str, root: Path) -> bool:
    """Whether an absolute path leads into the root, be there such a file or not."""
    try:
        return Path(path).resolve().is_relative_to(root)
    except (OSError, ValueError, RuntimeError):
        return False


def _absent(error: OSError, path: str, reason: Reason, hint: str = "") -> BadSample | OSError:
    """A verdict on the row where the file is not there for us; the error itself where the disk is at fault."""
    if error.errno in _NOT_THERE:
        return BadSample(reason, f"{path}: {error.strerror}{hint}")
    return error


def _hint(path: str, source: Source, root: Path) -> str:
    """What may be wrong with a path that is not there."""
    if other := _in_other_case(path, root):
        return f"; there is {other}"
    return remote_media.where_hint(source)


def _in_other_case(path: str, root: Path) -> str | None:
    """The path of a file under the root that differs from this one by case alone."""
    there = Path()
    try:
        for part in Path(path).parts:
            folder = root / there
            names = {} if (folder / part).exists() else _names_by_case(folder, folder.stat().st_mtime_ns)
            there /= names.get(part.casefold(), part)
        return str(there) if (root / there).resolve(strict=True).is_relative_to(root) else None
    except OSError:
        return None


@lru_cache(maxsize=2)
def _names_by_case(folder: Path, changed_ns: int) -> Mapping[str, str]:  # noqa: ARG001 - a changed folder is listed anew
    """The names in a folder without regard to case, kept for the next row that misses a file there."""
    names: list[str] = []
    for entry in folder.iterdir():
        names.append(entry.name)
        if len(names) > MAX_LISTED:
            return {}
    return {name.casefold(): name for name in sorted(names, reverse=True)}
