"""The one home of simplejpeg: plain JPEGs as RGB, in less time than Pillow takes.

Whatever is not plain, or brings the decoder to the least doubt (a file that was cut or damaged), is left to Pillow.
Both stand on libjpeg-turbo, so what passes has Pillow's pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import simplejpeg

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]

_START = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_APP1, _SCAN = b"\xe1", b"\xda"
_WITH_LENGTH = frozenset(
    bytes([code]) for code in (*range(0xC0, 0xC8), *range(0xC9, 0xD0), *range(0xDB, 0xF0), 0xFE)
)
"""Markers that a length follows."""
_COLORS = ("YCbCr", "RGB", "Gray")
"""Of three channels, or one; Pillow turns these into RGB by the same sums."""


def plain_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that lies as it is seen: no EXIF block that could turn it, no four colours; else None."""
    if not data.startswith(_START) or _may_have_exif(data):
        return None
    try:
        height, width, color, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if color in _COLORS else None


def _may_have_exif(data: bytes) -> bool:
    """Whether an EXIF block stands before the pixels, or the way to them is not clear."""
    place = 2
    while data[place : place + 1] == b"\xff":
        marker = data[place + 1 : place + 2]
        if marker == _SCAN:
            return False
        if marker == b"\xff":  # a filling byte
            place += 1
            continue
        if marker not in _WITH_LENGTH:
            return True
        if marker == _APP1 and data.startswith(_EXIF, place + 4):
            return True
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return True


def decode(data: bytes, size_hw: tuple[int, int], memory: Levels | None = None) -> Levels | None:
    """The pixels as they are stored, uint8 (H, W, 3), at the JPEG's own size or at one of `reduced`; None in doubt.

    They lie in the memory given, uint8 (H * W * 3,), or in fresh one.
    """
    try:
        pixels: Levels = simplejpeg.decode_jpeg(
            data, "RGB", min_height=size_hw[0], min_width=size_hw[1], buffer=memory
        )
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == size_hw else None


def reduced(size_hw: tuple[int, int], wanted_hw: tuple[int, int]) -> tuple[int, int]:
    """The smallest of 1/8, 1/4, 1/2 and 1/1 of a JPEG that has the wanted edges, rounded up as libjpeg does."""
    height, width = size_hw
    for parts in (8, 4, 2):
        smaller = (-(-height // parts), -(-width // parts))
        if smaller[0] >= wanted_hw[0] and smaller[1] >= wanted_hw[1]:
            return smaller
    return size_hw
