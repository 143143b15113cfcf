"""Where files of images end: whether one goes on to there, seen from its bytes alone.

The bytes are those of a file whose header was read: that it is of its format is taken for granted here.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def has_end(data: bytes, image_format: str) -> bool:
    """Whether a file goes on to its end, as far as one knows where that is.

    Args:
        data: the whole file.
        image_format: by Pillow's name; of one that is not in the table below, nothing is known.
    """
    look = _HAS_END.get(image_format)
    return look is None or look(data)


_JPEG_MARKER = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd9])")
"""A marker of a JPEG that a segment follows: no restart, and neither start nor end of a picture."""
_JPEG_SCAN = b"\xda"
_JPEG_END = b"\xff\xd9"


def _has_jpeg_end(data: bytes) -> bool:
    """Whether an end marker follows the start of the first scan; what lies before that may hold thumbnails with theirs.

    start, segments (marker, length, content), start of scan, bits and more segments, end; then whatever there is
    """
    at = 2
    while marker := _JPEG_MARKER.search(data, at):
        at = marker.end()
        if marker[1] == _JPEG_SCAN:
            return data.rfind(_JPEG_END, at) >= 0
        at += int.from_bytes(data[at : at + 2])
    return False


_PNG_END = b"IEND\xaeB`\x82"


def _has_png_end(data: bytes) -> bool:
    # Looked for from behind, where it should be.
    return data.rfind(_PNG_END) >= 0


def _has_gif_trailer(data: bytes) -> bool:
    """Walk the blocks of a GIF (whose first frame Pillow has read) up to its trailer.

    header, colour table, then: "!" label, sub-blocks | "," descriptor, colour table, code size, sub-blocks | ";"
    """
    try:
        at = 13 + _colour_table_bytes(data[10])
        while data[at] != ord(";"):
            if data[at] == ord("!"):
                at += 2
            elif data[at] == ord(","):
                at += 11 + _colour_table_bytes(data[at + 9])
            else:
                # As Pillow does: a byte that starts no block is passed over.
                at += 1
                continue
            while data[at]:
                at += 1 + data[at]
            at += 1
    except IndexError:
        return False
    return True


def _colour_table_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _has_webp_end(data: bytes) -> bool:
    """Whether the file holds as many bytes as its RIFF header says."""
    return 8 + int.from_bytes(data[4:8], "little") <= len(data)


def _has_bmp_end(data: bytes) -> bool:
    """Whether the last row is there, its padding aside; the rows of a compressed BMP have no known length."""
    if int.from_bytes(data[14:18], "little") < 40:
        return True
    offset, width, height, _planes, bits, packing = struct.unpack_from("<I4xiiHHI", data, 10)
    if packing not in (0, 3):
        return True
    used = (width * bits + 7) // 8
    end: int = offset + (abs(height) - 1) * (-(-used // 4) * 4) + used
    return end <= len(data)


_HAS_END: Mapping[str, Callable[[bytes], bool]] = {
    "JPEG": _has_jpeg_end,
    "MPO": _has_jpeg_end,
    "PNG": _has_png_end,
    "GIF": _has_gif_trailer,
    "WEBP": _has_webp_end,
    "BMP": _has_bmp_end,
}
