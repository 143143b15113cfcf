"""Files of video: which container one is, and whether it goes on to its end, seen from its bytes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_EBML = b"\x1aE\xdf\xa3"
_SEGMENT = b"\x18S\x80g"
_FIRST_BOXES = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
"""What a QuickTime file without a `ftyp` may start with."""


def find_container(data: bytes) -> str | None:
    """The extension of a file that starts so: mp4, mov, mkv, webm or avi; None for any other.

    >>> find_container(b"RIFF....AVI LIST")
    'avi'
    """
    if data.startswith(_EBML):
        return "webm" if b"webm" in data[:64] else "mkv"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[4:8] == b"ftyp":
        return "mov" if data[8:12] == b"qt  " else "mp4"
    return "mov" if data[4:8] in _FIRST_BOXES else None


def has_end(data: bytes, container: str) -> bool:
    """Whether a file goes on to where its container says that it ends; one that does not say so has its end.

    Args:
        data: the whole file.
        container: as `find_container` gives it.
    """
    return _HAS_END[container](data)


def _has_last_box(data: bytes) -> bool:
    """mp4, mov: boxes one after another: length, four letters, content."""
    at = 0
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        if length == 1:
            length = int.from_bytes(data[at + 8 : at + 16])
        if length < 8:
            # 0 goes on to the end of the file; anything else is no box.
            return True
        at += length
    return at <= len(data) or len(data) < 8


def _has_last_chunk(data: bytes) -> bool:
    """avi: RIFF, length, content; a large file has several of them. A writer that was stopped leaves a length of 0."""
    at = 0
    while data[at : at + 4] == b"RIFF":
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + length
        if at > len(data):
            return False
        at += length & 1
    return True


def _has_segment_end(data: bytes) -> bool:
    """mkv, webm: a header, then one segment: its id, its length, its content."""
    at = 4
    length, at = _read_length(data, at)
    if length is None:
        return True
    at += length
    if data[at : at + 4] != _SEGMENT:
        return at <= len(data)
    length, at = _read_length(data, at + 4)
    return length is None or at + length <= len(data)


def _read_length(data: bytes, at: int) -> tuple[int | None, int]:
    """A length of EBML at a place, None if it is not known, and the place behind it.

    The first byte's leading zeros say how many bytes follow; all other bits set means not known.
    """
    width = 9 - data[at].bit_length() if at < len(data) and data[at] else 0
    if not width or at + width > len(data):
        return None, at
    value = int.from_bytes(data[at : at + width]) & ((1 << 7 * width) - 1)
    return (None if value == (1 << 7 * width) - 1 else value), at + width


_HAS_END: Mapping[str, Callable[[bytes], bool]] = {
    "mp4": _has_last_box,
    "mov": _has_last_box,
    "avi": _has_last_chunk,
    "mkv": _has_segment_end,
    "webm": _has_segment_end,
}
