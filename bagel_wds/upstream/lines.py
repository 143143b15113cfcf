"""Lines of text files by where they lie: what a worker of a DataLoader is given in place of the lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

import numpy as np
import xxhash

from bagel_wds.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, Self

    Line = tuple[str, str]

_PLACE = np.dtype([("file", "i4"), ("folder", "i4"), ("offset", "i8"), ("length", "i8"), ("digest", "u8")])

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""A line as a file that is opened as text has it."""


@dataclass(frozen=True, eq=False)
class PlacedLines(Sequence["Line"]):
    """(line, folder) one by one, each read from its file when it is asked for.

    Attributes:
        files: paths of the files.
        folders: that may stand beside a line.
        places: for each line the numbers of its file and its folder, where it lies in the file, in bytes, and what it was.
    """

    files: tuple[str, ...]
    folders: tuple[str, ...]
    places: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, number: int) -> Line: ...
    @overload
    def __getitem__(self, number: slice) -> Self: ...
    def __getitem__(self, number: int | slice) -> Line | Self:
        """A line, or a part of the lines.

        Raises:
            ConfigError: if the file cannot be read any more, or has another line there.
        """
        if isinstance(number, slice):
            return replace(self, places=self.places[number])
        file, folder, offset, length, digest = self.places[number].item()
        path = self.files[file]
        try:
            with open(path, "rb") as lines:  # noqa: PTH123 - a path as it was given
                lines.seek(offset)
                data = _ended(lines.read(length))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read any more: {error.strerror or error}") from error
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise ConfigError(
                f"{path}: the line at byte {offset} is another than when the dataset was built; leave the files as they are "
                "while a run reads them, and start it anew"
            )
        return data.decode(), self.folders[folder]


def place_lines(lines: Sequence[Line], files: Iterable[str]) -> PlacedLines | None:
    """Where the lines lie in the files, as far as a reader need know: equal ones may be one; None if some are not there."""
    paths = tuple(files)
    found: dict[int, tuple[int, int, int]] = {}
    try:
        for number, path in enumerate(paths):
            for offset, line in _split(path):
                found[xxhash.xxh3_64_intdigest(_ended(line))] = (number, offset, len(line))
    except OSError:
        return None
    folders = {folder: number for number, folder in enumerate(dict.fromkeys(folder for _, folder in lines))}
    places = np.empty(len(lines), _PLACE)
    for number, (text, folder) in enumerate(lines):
        digest = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
        if digest not in found:
            return None
        file, offset, length = found[digest]
        places[number] = (file, folders[folder], offset, length, digest)
    return PlacedLines(paths, tuple(folders), places)


def _split(path: str) -> Iterator[tuple[int, bytes]]:
    """Where each line starts, and the line."""
    offset = 0
    with open(path, "rb") as file:  # noqa: PTH123 - as above
        for part in file:
            yield from ((offset + match.start(), match[0]) for match in _LINE.finditer(part))
            offset += len(part)


def _ended(line: bytes) -> bytes:
    """The line with the end that text has."""
    return line.rstrip(b"\r\n") + b"\n" if line.endswith((b"\r", b"\n")) else line
