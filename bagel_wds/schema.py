"""The contract of a sample in a tar: member names, keys, and the JSON header.

A sample is `KEY.json` followed by its media with their original bytes: `KEY.0.jpg`, `KEY.1.png`, a clip as the file that it
is, `KEY.0.mp4`, or as the frames that it is given as, `KEY.0.000.jpg`, `KEY.0.001.jpg`. `KEY.json` holds the source's fields unchanged and one reserved key,
`"_bagel"`: `{"kind", "media": [{"ext", "width", "height", "frames"?, "orientation"?}], "source": {"file",
"row_group"?, "row"}}`. Width and height are those of the encoded pixels; `orientation` is the EXIF tag where it
asks for more than that (of a TIFF, which Pillow turns when it opens it, both are upright and no tag is needed). Those of a
clip's file are upright, and it has `fps`, `duration` and, where frames have no times, `sequential` beside `frames`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import xxhash

from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMAT_VERSION = 1
"""Of shards and sidecars; written into the manifest."""

RESERVED = "_bagel"
"""The one key of `KEY.json` that is ours."""

SampleKind = Literal["t2i", "vlm", "edit", "interleaved"]
SAMPLE_KINDS: tuple[SampleKind, ...] = get_args(SampleKind)

REJECTED = "__rejected__"
"""Where a sample that was read from a raw row, and found to be of no use, has the verdict, a `BadSample`."""

MAX_KEY_BYTES = 76
"""With the longest suffix, `.NNN.NNNNNN.EXTENS`, a member name stays within the 100 bytes of a plain tar header."""

MAX_JSON_BYTES = 16 << 20
"""A sample's JSON above this is refused."""

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")


def make_key(file: str, row: int, row_group: int | None = None) -> str:
    """The key of a row: where it came from, with nothing that a tar or webdataset would read into it.

    The path is written with every byte but letters, digits, `_` and `-` as `=XX`, so that the key has no dot and no
    slash and two paths never meet in one key. One that would be too long keeps its end and a digest of the whole.

    Args:
        file: path of the source file relative to the source's root, with forward slashes.
        row: number of the row in its row group, or of the line in its file, from 0.
        row_group: of a parquet row.

    >>> make_key("a/chunk_0.parquet", 12, row_group=3)
    'a=2Fchunk_0=2Eparquet-3-12'
    """
    name = _UNSAFE.sub(
        lambda match: b"=%02X" % match.group()[0], file.encode("utf-8", "surrogateescape")
    ).decode()
    place = f"-{row}" if row_group is None else f"-{row_group}-{row}"
    if len(name) + len(place) <= MAX_KEY_BYTES:
        return name + place
    digest = xxhash.xxh3_128_hexdigest(name.encode())
    return f"{digest}={name[-(MAX_KEY_BYTES - len(place) - len(digest) - 1) :]}{place}"


def media_name(key: str, medium: int, ext: str, frame: int | None = None) -> str:
    """The member name of a medium, or of one frame of a clip."""
    return f"{key}.{medium}.{ext}" if frame is None else f"{key}.{medium}.{frame:03d}.{ext}"


def split_member(name: str) -> tuple[str, str]:
    """Key and field of a member name, as webdataset splits it: at the first dot after the last slash.

    >>> split_member("a/b.0.jpg")
    ('a/b', '0.jpg')
    """
    folder, slash, base = name.rpartition("/")
    stem, _, ext = base.partition(".")
    return folder + slash + stem, ext.lower()


IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "img"})
VIDEO_EXTENSIONS = frozenset({"mp4", "mkv", "webm", "mov", "avi"})
MEDIA_EXTENSIONS = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS


def media_fields(names: Iterable[str]) -> tuple[tuple[bool, tuple[str, ...]], ...]:
    """The fields of a sample that hold media, one entry a medium, in numeric order: (is a clip, its fields).

    `0.jpg` is an image; `1.000.jpg`, `1.001.jpg` are the frames of a clip, `2.mp4` is a clip by itself. Fields of other
    tools (`jpg`, `input.png`, `mp4`) are images or clips by their extension.
    """
    return _media_fields(tuple(names))


@lru_cache(maxsize=1024)
def _media_fields(names: tuple[str, ...]) -> tuple[tuple[bool, tuple[str, ...]], ...]:
    """Most samples of a dataset have the same fields."""
    media: dict[str, tuple[bool, list[str]]] = {}
    for name in sorted(names, key=natural):
        stem, _, ext = name.rpartition(".")
        if name.startswith("__") or ext not in MEDIA_EXTENSIONS:
            continue
        clip = None if ext in VIDEO_EXTENSIONS else re.fullmatch(r"(\d+)\.\d+", stem)
        medium = clip.group(1) + "." if clip else name
        media.setdefault(medium, (clip is not None or ext in VIDEO_EXTENSIONS, []))[1].append(name)
    return tuple((is_clip, tuple(fields)) for is_clip, fields in media.values())


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key in which digits count as numbers: `2` before `10`."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", name)
    )


def frame_order(name: str, number: re.Pattern[str]) -> tuple[int, tuple[tuple[int, int, str], ...]]:
    """A sort key of the frames in a folder: by the number in their names, before it those without, in natural order.

    Args:
        name: of a frame's file.
        number: finds the number, as its first group.
    """
    found = number.search(name)
    return int(found.group(1)) if found else -1, natural(name)


def read_header(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The source's own fields and our header of a parsed `KEY.json`; the header is empty in foreign shards.

    Raises:
        BadSample: if the reserved key holds something that is not our header.
    """
    own = {name: value for name, value in fields.items() if name != RESERVED}
    header = fields.get(RESERVED, {})
    if not isinstance(header, dict):
        raise BadSample(Reason.ROW_INVALID, f"{RESERVED!r} is {type(header).__name__}, not an object")
    return own, header
