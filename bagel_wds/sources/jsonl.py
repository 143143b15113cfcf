"""Rows of JSON, one object a line or the elements of an array, cut up by byte offset; plain, or in gzip or zstd.

A slice of a plain file is read without what lies before it. A compressed file has no way in but its start: each of
its slices decompresses, and passes over, all that comes before.
"""

from __future__ import annotations

import json
import os
import random
import re
from contextlib import contextmanager
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from bagel_wds import storage
from bagel_wds.ahead import look_ahead
from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.sources import elements, lines
from bagel_wds.sources.content import BYTE_ORDER_MARK, MAX_LINE_BYTES, open_content, open_digested
from bagel_wds.sources.rows import (
    Lines,
    ParsedRow,
    Place,
    RejectedRow,
    Slice,
    Source,
    SourceFile,
    SourcePlan,
    SourceSample,
)

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from bagel_wds.sources.content import DigestedFile

_DIGITS_AS_ZEROS = bytes(ord("0") if chr(octet) in "0123456789" else ord(" ") for octet in range(256))
_WIDE = re.compile(
    rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff|[^\0]\0(?:[^\0]\0|\0\0)|\0[^\0]\0[^\0]|\0\0\0[^\0]", re.DOTALL
)
"""How UTF-16 and UTF-32 begin, with a byte order mark or with ASCII."""
_LONG_INTEGER = b"0" * 19
"""How an integer that may not fit into 64 bits looks in it."""


class _Rows(NamedTuple):
    """Some rows of a file in order: the number and the offset of each."""

    file: str
    in_array: bool
    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def take(self, which: slice | NDArray[np.int64]) -> _Rows:
        return self._replace(numbers=self.numbers[which], offsets=self.offsets[which])


def plan_lines(source: Source, slice_rows: int, files: Sequence[str]) -> SourcePlan:
    """Cut files of JSON rows into slices of `slice_rows` rows, over the borders of files.

    Each file is read once; twice where `shuffle_lines` has a say. A file that `max_units` leaves unread is not in the
    plan.

    Args:
        source: that they belong to; its `max_units` counts the rows of all of them.
        slice_rows: rows a slice.
        files: relative to the source's root, in order.

    Raises:
        ConfigError: for a file that is UTF-16, compressed and broken, or a JSON array that is broken.
    """
    chosen = _choose_rows(source, files)
    cutter = _Cutter(slice_rows, by_name=chosen is not None)
    described: list[SourceFile] = []
    seen = 0
    for file in files:
        if chosen is None and source.max_units is not None and seen >= source.max_units:
            break
        with _open_rows(source, file) as (found, digested):
            for rows in found:
                cutter.add(rows.take(_wanted(seen, len(rows.numbers), chosen, source.max_units)))
                seen += len(rows.numbers)
            described.append(digested.describe())
    return SourcePlan(tuple(described), tuple(cutter.slices()))


def _wanted(
    first: int, count: int, chosen: NDArray[np.int64] | None, max_units: int | None
) -> slice | NDArray[np.int64]:
    """Which of so many rows, of which the first has this ordinal, are to be taken."""
    if chosen is not None:
        start, stop = np.searchsorted(chosen, (first, first + count))
        return chosen[start:stop] - first
    return slice(None if max_units is None else max(0, max_units - first))


def _choose_rows(source: Source, files: Sequence[str]) -> NDArray[np.int64] | None:
    """Ordinals of the rows to take, in order, where that is a seeded choice; None where it is the first ones."""
    if source.max_units is None or not source.shuffle_lines:
        return None
    count = 0
    for file in files:
        with _open_rows(source, file) as (found, _):
            count += sum(len(rows.numbers) for rows in found)
    ordinals = list(range(count))
    random.Random(source.shuffle_seed).shuffle(ordinals)  # noqa: S311 - upstream's generator; not for secrets
    return np.sort(np.array(ordinals[: source.max_units], np.int64))


def plan_chosen_lines(source: Source, places: Sequence[Place], slice_rows: int) -> list[Slice]:
    """Cut some rows alone into slices, in the order of the source, whose files come in the order of their bytes.

    Args:
        source: that they belong to.
        places: of the rows, in any order.
        slice_rows: rows a slice.

    Raises:
        ConfigError: as `plan_lines`, or if there is no such row.
    """
    by_file: dict[str, set[int]] = {}
    for place in places:
        by_file.setdefault(place.file, set()).add(place.row)
    cutter = _Cutter(slice_rows, by_name=True)
    for file in sorted(by_file, key=os.fsencode):
        for rows in _find_rows(source, file, by_file[file]):
            cutter.add(rows)
    return cutter.slices()


def _find_rows(source: Source, file: str, numbers: set[int]) -> list[_Rows]:
    """The rows of a file that have these numbers."""
    wanted = np.array(sorted(numbers))
    with _open_rows(source, file) as (found, _):
        taken = [rows.take(np.flatnonzero(np.isin(rows.numbers, wanted))) for rows in found]
    if missing := numbers.difference(*(rows.numbers.tolist() for rows in taken)):
        raise ConfigError(
            f"{storage.join(source.root, file)}: no row {min(missing)}; has the file changed since it was listed?"
        )
    return taken


class _Cutter:
    """Puts rows into slices, as they are found.

    Args:
        slice_rows: rows a slice.
        by_name: whether a piece lists the numbers of its rows, because there are others between them.
    """

    def __init__(self, slice_rows: int, *, by_name: bool) -> None:
        self._slice_rows = slice_rows
        self._by_name = by_name
        self._slices: list[Slice] = []
        self._open: list[_Rows] = []
        self._room = slice_rows

    def add(self, rows: _Rows) -> None:
        """Add some rows."""
        while len(rows.numbers):
            part, rows = rows.take(slice(self._room)), rows.take(slice(self._room, None))
            self._open.append(part)
            self._room -= len(part.numbers)
            if not self._room:
                self._close()

    def slices(self) -> list[Slice]:
        """The slices; the last may have fewer rows."""
        if self._open:
            self._close()
        return self._slices

    def _close(self) -> None:
        pieces = tuple(self._piece(list(rows)) for _, rows in groupby(self._open, key=lambda rows: rows.file))
        self._slices.append(Slice(len(self._slices), pieces))
        self._open, self._room = [], self._slice_rows

    def _piece(self, found: Sequence[_Rows]) -> Lines:
        numbers = np.concatenate([rows.numbers for rows in found])
        return Lines(
            found[0].file,
            int(numbers[0]),
            int(found[0].offsets[0]),
            len(numbers),
            tuple(numbers.tolist()) if self._by_name else None,
            found[0].in_array,
        )


@contextmanager
def _open_rows(source: Source, file: str) -> Iterator[tuple[Iterator[_Rows], DigestedFile]]:
    """Where the rows of a file are, stretch by stretch, and the file, to be described when these have been gone through."""
    with open_digested(source.root, file, source.options) as digested:
        path = storage.join(source.root, file)
        content = digested.content()
        in_array = _is_array(content, path)
        found = elements.scan(content, path) if in_array else lines.scan(content)
        yield (_Rows(file, in_array, numbers, offsets) for numbers, offsets in found), digested


def _is_array(content: io.BufferedReader, path: str) -> bool:
    """Whether a file, at whose start we are, is an array and not lines."""
    head = content.peek()
    if _WIDE.match(head):
        raise ConfigError(
            f"{path}: UTF-16 or UTF-32; write it anew as UTF-8, as `iconv -f UTF-16 -t UTF-8` does"
        )
    if b"\0" in head[:2]:
        raise ConfigError(
            f"{path}: begins with {head[:4]!r}, and no JSON has zero bytes; was it written, or copied, to its end? Copy it anew "
            "from where it came from"
        )
    return head.lstrip(lines.BLANK).startswith(b"[")


def read_lines(
    source: Source,
    pieces: Sequence[Lines],
    parse: Callable[[dict[str, Any]], ParsedRow],
    skip_rows: int = 0,
    at_once: int = 1,
) -> Iterator[SourceSample | RejectedRow]:
    """The rows of some stretches of lines or elements, in order.

    Args:
        source: that they belong to.
        pieces: the stretches.
        parse: fields and media of a JSON object, or BadSample.
        skip_rows: pass over so many rows, unparsed.
        at_once: parse so many side by side.

    Raises:
        ConfigError: if a file cannot be read any more.
    """
    yield from look_ahead(partial(_read_row, parse), _read_pieces(source, pieces, skip_rows), at_once)


def _read_row(
    parse: Callable[[dict[str, Any]], ParsedRow], row: tuple[Place, bytes]
) -> SourceSample | RejectedRow:
    place, line = row
    try:
        parsed = parse(parse_line(line))
    except BadSample as bad:
        return RejectedRow(place, bad.reason, bad.detail)
    return SourceSample(place.key, parsed.fields, parsed.media, place, parsed.repaired)


def _read_pieces(source: Source, pieces: Sequence[Lines], skip_rows: int) -> Iterator[tuple[Place, bytes]]:
    for piece in pieces:
        for number, line in _read_piece(source, piece, skip_rows):
            yield Place(piece.file, number), line
        skip_rows = max(0, skip_rows - piece.num_rows)


def _read_piece(source: Source, piece: Lines, skip_rows: int) -> Iterator[tuple[int, bytes]]:
    """The number and the JSON text of each row of a stretch, but for some at its start."""
    if skip_rows >= piece.num_rows:
        return
    path = storage.join(source.root, piece.file)
    wanted = None if piece.chosen is None else set(piece.chosen)
    with open_content(path, piece.offset, source.options) as content:
        rows = elements.read(content, path, piece.offset) if piece.in_array else lines.read(content)
        taken = (
            (number, row)
            for number, row in enumerate(rows, piece.first)
            if (wanted is None or number in wanted) and not lines.is_blank(row)
        )
        yield from islice(taken, skip_rows, piece.num_rows)


def parse_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; NaN and the infinities become null.

    Raises:
        BadSample: if it is too large, no JSON, or no object.
    """
    if len(line) > MAX_LINE_BYTES:
        raise BadSample(Reason.JSON_TOO_LARGE, f"a line of more than {MAX_LINE_BYTES} bytes")
    try:
        value = _loads(line.removeprefix(BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise BadSample(Reason.ROW_INVALID, f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadSample(Reason.ROW_INVALID, f"the row is a JSON {type(value).__name__}, not an object")
    return value


def _loads(line: bytes) -> Any:
    # Python's own parser where orjson would be unfaithful: it makes a float of an integer over 64 bits, and refuses
    # the NaN that Python's own writer makes.
    if _LONG_INTEGER not in line.translate(_DIGITS_AS_ZEROS):
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            if b"NaN" not in line and b"Infinity" not in line:
                raise
    return json.loads(line, parse_constant=lambda _: None)


def describe_lines_file(source: Source, file: str) -> SourceFile:
    """What tells a file from what it was.

    Args:
        source: that it belongs to.
        file: relative to the source's root.

    Raises:
        ConfigError: if it cannot be read.
    """
    with open_digested(source.root, file, source.options) as digested:
        return digested.describe()
