"""JSON rows as lines of a file, one object a line; blank ones are no rows, but count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bagel_wds.sources.content import BLOCK_BYTES, BUFFER_BYTES, BYTE_ORDER_MARK, MAX_LINE_BYTES

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLANK = b" \t\n\r\v\f" + BYTE_ORDER_MARK
"""A line of nothing else is no row. (Files that were joined have byte order marks in the middle.)"""

_MAY_BE_BLANK = np.isin(np.arange(256), np.frombuffer(BLANK, np.uint8))


def scan(content: io.BufferedReader) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Numbers and offsets of the lines that are not blank, those of a block at a time."""
    number = offset = base = 0  # of the line that is being read; of the block
    filled = False
    while block := content.read(BLOCK_BYTES):
        # The block in pieces: what is left of the line, whole lines, and the start of one, which may have no byte.
        starts = np.concatenate(([0], np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1))
        has_text = _have_text(block, starts)
        has_text[0] |= filled
        offsets = starts + base
        offsets[0] = offset
        rows = np.flatnonzero(has_text[:-1])
        yield rows + number, offsets[rows]
        number, offset, filled = number + len(starts) - 1, int(offsets[-1]), has_text[-1]
        base += len(block)
    if filled:
        yield np.array([number]), np.array([offset])


def _have_text(block: bytes, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the pieces of a block that start there are not blank."""
    octets = np.frombuffer(block, np.uint8)
    has_text = ~_MAY_BE_BLANK[octets[np.minimum(starts, len(octets) - 1)]]
    for piece in np.flatnonzero(~has_text):
        stop = starts[piece + 1] if piece + 1 < len(starts) else None
        has_text[piece] = not is_blank(block[starts[piece] : stop])
    return has_text


def is_blank(line: bytes) -> bool:
    """Whether a line is no row."""
    return not line.strip(BLANK)


def read(content: io.BufferedReader) -> Iterator[bytes]:
    """Every line from where the content stands, one that is too long up to where that shows."""
    while line := content.readline(MAX_LINE_BYTES + 1):
        yield line
        is_cut = len(line) > MAX_LINE_BYTES
        while is_cut and not line.endswith(b"\n") and (line := content.readline(BUFFER_BYTES)):
            pass
