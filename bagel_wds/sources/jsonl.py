"""Rows of JSON lines: cut up by byte offset, so that a slice is read without what lies before it."""

from __future__ import annotations

import json
import random
import re
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from bagel_wds import storage
from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.schema import MAX_JSON_BYTES
from bagel_wds.sources.rows import (
    Lines,
    ParsedRow,
    Place,
    RejectedRow,
    Slice,
    Source,
    SourceSample,
    list_source_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONG_INTEGER = re.compile(rb"\d{19}")


class _Line(NamedTuple):
    file: str
    number: int
    offset: int


def plan_lines(source: Source, slice_rows: int) -> list[Slice]:
    """Cut a source into slices of `slice_rows` lines, over the borders of files.

    Args:
        source: whose files are cut up; `max_units` counts lines.
        slice_rows: lines a slice.

    Raises:
        ConfigError: for a source without files, or one that is a JSON array.
    """
    files = list_source_files(source, ".jsonl")
    chosen = _choose_lines(source, files)
    lines = _walk_lines(source.root, files)
    taken = (
        islice(lines, source.max_units)
        if chosen is None
        else (line for ordinal, line in enumerate(lines) if ordinal in chosen)
    )
    slices: list[Slice] = []
    while stretch := list(islice(taken, slice_rows)):
        by_file = groupby(stretch, key=lambda line: line.file)
        slices.append(
            Slice(
                len(slices),
                tuple(_piece(list(group), name_lines=chosen is not None) for _, group in by_file),
            )
        )
    return slices


def _choose_lines(source: Source, files: Sequence[str]) -> set[int] | None:
    """Ordinals of the lines to take, where that is a seeded choice; None where it is the first ones."""
    if source.max_units is None or not source.shuffle_lines:
        return None
    ordinals = list(range(sum(1 for _ in _walk_lines(source.root, files))))
    random.Random(source.shuffle_seed).shuffle(ordinals)  # noqa: S311 - upstream's generator; not for secrets
    return set(ordinals[: source.max_units])


def _walk_lines(root: str, files: Sequence[str]) -> Iterator[_Line]:
    """Every line that is not blank."""
    for name in files:
        offset = 0
        with storage.open_read(storage.join(root, name)) as file:
            for number, line in enumerate(file):
                text = line.strip()
                if number == 0 and text.removeprefix(_BYTE_ORDER_MARK).startswith(b"["):
                    raise ConfigError(
                        f"{storage.join(root, name)}: a JSON array; write one object a line (JSON lines)"
                    )
                if text:
                    yield _Line(name, number, offset)
                offset += len(line)


def _piece(lines: Sequence[_Line], *, name_lines: bool) -> Lines:
    first = lines[0]
    chosen = tuple(line.number for line in lines) if name_lines else None
    return Lines(first.file, first.number, first.offset, len(lines), chosen)


def read_lines(
    source: Source, pieces: Sequence[Lines], parse: Callable[[dict[str, Any]], ParsedRow]
) -> Iterator[SourceSample | RejectedRow]:
    """The rows of some stretches of lines, in order.

    Args:
        source: that they belong to.
        pieces: the stretches.
        parse: fields and media of a JSON object, or BadSample.
    """
    for piece in pieces:
        for number, line in _read_piece(source.root, piece):
            place = Place(piece.file, number)
            try:
                fields, media = parse(parse_line(line))
            except BadSample as bad:
                yield RejectedRow(place, bad.reason, bad.detail)
            else:
                yield SourceSample(place.key, fields, media, place)


def _read_piece(root: str, piece: Lines) -> Iterator[tuple[int, bytes]]:
    wanted = None if piece.chosen is None else set(piece.chosen)
    with storage.open_read(storage.join(root, piece.file)) as file:
        file.seek(piece.offset)
        lines = (
            (number, line)
            for number, line in enumerate(file, piece.first)
            if line.strip() and (wanted is None or number in wanted)
        )
        yield from islice(lines, piece.num_rows)


def parse_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; NaN and the infinities become null.

    Raises:
        BadSample: if it is too large, no JSON, or no object.
    """
    if len(line) > MAX_JSON_BYTES:
        raise BadSample(Reason.JSON_TOO_LARGE, f"a line of {len(line)} bytes; the most is {MAX_JSON_BYTES}")
    try:
        value = _loads(line.removeprefix(_BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise BadSample(Reason.ROW_INVALID, f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadSample(Reason.ROW_INVALID, f"the line is a JSON {type(value).__name__}, not an object")
    return value


def _loads(line: bytes) -> Any:
    # Python's own parser where orjson would be unfaithful: it makes a float of an integer over 64 bits, and refuses
    # the NaN that Python's own writer makes.
    if not _LONG_INTEGER.search(line):
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            if b"NaN" not in line and b"Infinity" not in line:
                raise
    return json.loads(line, parse_constant=lambda _: None)
