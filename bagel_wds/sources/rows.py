"""What moves here: a source, the slices of work that it is cut into, and its rows, good and bad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bagel_wds import storage
from bagel_wds.errors import BadSample, ConfigError
from bagel_wds.images import ImageHeader, read_header
from bagel_wds.schema import SampleKind, make_key

if TYPE_CHECKING:
    from bagel_wds.errors import Reason


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset in one of upstream's raw layouts.

    Attributes:
        kind: t2i and edit are parquet, vlm is JSON lines.
        name: of the dataset.
        path: a file, or a folder of them.
        media_root: what the media paths of a vlm row are relative to; None is the folder of the JSONL.
        max_units: at most so many files (parquet) or lines (JSONL), the first ones.
        shuffle_lines: take a seeded choice of `max_units` lines instead of the first; they keep their order.
        shuffle_seed: of that choice.
    """

    kind: SampleKind
    name: str
    path: str
    media_root: str | None = None
    max_units: int | None = None
    shuffle_lines: bool = False
    shuffle_seed: int = 0

    @property
    def root(self) -> str:
        """The folder that files of the source are named relative to."""
        return self.path if storage.is_folder(self.path) else storage.parent(self.path)

    @property
    def media_folder(self) -> str:
        """The folder that media paths are relative to."""
        return self.media_root or self.root


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Consecutive row groups of a parquet file.

    Attributes:
        file: path relative to the source's root.
        first, stop: row groups `first` up to, not including, `stop`.
        num_rows: in them.
    """

    file: str
    first: int
    stop: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a JSONL file; blank ones do not count.

    Attributes:
        file: path relative to the source's root.
        first: number of the first line, from 0.
        offset: of that line, in bytes.
        num_rows: how many lines are taken.
        chosen: numbers of the lines to take; None takes each from the first on.
    """

    file: str
    first: int
    offset: int
    num_rows: int
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """One unit of work: a stretch of the source's rows. Which rows depends on source and settings alone.

    Attributes:
        number: of the slice, from 0.
        pieces: stretches of files, in order.
    """

    number: int
    pieces: tuple[RowGroups, ...] | tuple[Lines, ...]

    @property
    def num_rows(self) -> int:
        """Rows in it."""
        return sum(piece.num_rows for piece in self.pieces)

    def __str__(self) -> str:
        first, last = self.pieces[0], self.pieces[-1]
        if isinstance(last, RowGroups):
            return f"slice {self.number} ({first.file} row group {first.first} to {last.file} row group {last.stop - 1})"
        return f"slice {self.number} ({self.num_rows} lines from {first.file} line {first.first} on)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row came from.

    Attributes:
        file: path relative to the source's root.
        row: number of the row in its row group, or of the line in its file, from 0.
        row_group: of a parquet row.
    """

    file: str
    row: int
    row_group: int | None = None

    @property
    def key(self) -> str:
        """The sample's key."""
        return make_key(self.file, self.row, self.row_group)

    def as_json(self) -> dict[str, str | int]:
        """`{"file", "row_group"?, "row"}`."""
        # A file name that is no UTF-8 has no other way into JSON.
        file = self.file.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        group = {} if self.row_group is None else {"row_group": self.row_group}
        return {"file": file, **group, "row": self.row}


@dataclass(frozen=True, slots=True)
class SourceImage:
    """An image as the source has it: its encoded bytes, and what their header says."""

    data: bytes
    header: ImageHeader


def read_source_image(data: bytes | None, name: str) -> SourceImage:
    """An image with its header.

    Args:
        data: the encoded bytes; null is an image of zero bytes.
        name: of the image in its row, for the verdict.

    Raises:
        BadSample: `image_empty`, `image_unreadable` or `image_too_large`.
    """
    data = data or b""
    try:
        return SourceImage(data, read_header(data))
    except BadSample as bad:
        raise BadSample(bad.reason, f"{name}: {bad.detail}") from bad


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of a row.

    Attributes:
        images: one, or the frames of a clip in order.
        is_clip: whether it is a clip.
    """

    images: tuple[SourceImage, ...]
    is_clip: bool = False


@dataclass(frozen=True, slots=True)
class SourceSample:
    """A row that can be used.

    Attributes:
        key: unique in the source, safe in a tar.
        fields: the row's fields, without the columns that hold the media themselves.
        media: in order.
        place: where the row came from.
    """

    key: str
    fields: Mapping[str, Any]
    media: tuple[Medium, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be used, and why."""

    place: Place
    reason: Reason
    detail: str


ParsedRow = tuple[Mapping[str, Any], tuple[Medium, ...]]
"""Fields and media of a row."""


def list_source_files(source: Source, suffix: str) -> list[str]:
    """The files of a source, relative to its root, in byte order; hidden files and folders are passed over.

    Raises:
        ConfigError: if the path is not there, or is a folder without such a file.
    """
    if not storage.exists(source.path):
        raise ConfigError(f"dataset {source.name!r}: {source.path}: no such file or folder")
    if not storage.is_folder(source.path):
        return [source.path.rpartition("/")[2]]
    files = [
        file
        for file in storage.list_files(source.path)
        if file.endswith(suffix) and not any(part.startswith(".") for part in file.split("/"))
    ]
    if not files:
        raise ConfigError(f"dataset {source.name!r}: {source.path}: no {suffix} file in this folder")
    return files
