"""What moves here: a source, the slices of work that it is cut into, and its rows, good and bad."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bagel_wds import storage
from bagel_wds.clips import ClipHeader, read_clip_header
from bagel_wds.errors import BadSample, ConfigError
from bagel_wds.images import ImageHeader, read_header, verify_end, verify_pixels
from bagel_wds.schema import SampleKind, make_key
from bagel_wds.sources.places import find_files, find_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bagel_wds.errors import Reason
    from bagel_wds.storage import StorageOptions


class Verify(StrEnum):
    """How far an image is looked at before its row is taken."""

    FULL = "full"
    """Decoded once, as training will: what is taken has sound pixels."""
    HEADER = "header"
    """Its header is read, and its end marker is looked for: finds files that were cut, not pixels that are broken."""
    NONE = "none"
    """Its header is read, since sizes are needed."""


class Placeholders(StrEnum):
    """What becomes of a conversation whose `<image>` and `<video>` tags do not match its media, one for one."""

    STRICT = "strict"
    """It is left out."""
    UPSTREAM = "upstream"
    """It is taken as it is: `fidelity="upstream"` trains on it as upstream does, the default drops and counts it."""
    REPAIR = "repair"
    """Media without any tag get theirs at the start of the first human turn; any other mismatch is left out."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset in one of upstream's raw layouts.

    Attributes:
        kind: of its rows.
        name: of the dataset.
        path: a file, a folder of them, a glob, a brace pattern, a list of files in a file, or several of these.
        media_root: what the media paths of a row are relative to; None is the source's own root.
        columns: of the files, by the names that this package knows them by (`image`, `captions`, ...), where they
            differ.
        allow_outside: take media paths that lead out of the media root.
        placeholders: policy for tags that do not match the media.
        check_texts: leave out rows whose texts, or whose number of images, a recipe could not use; without, the recipe is left to
            find that.
        verify: how far images are looked at.
        batch_bytes: about so many bytes of a parquet file's rows are in memory at a time.
        max_units: at most so many files (parquet) or lines (JSONL), the first ones.
        shuffle_lines: take a seeded choice of `max_units` lines instead of the first; they keep their order.
        shuffle_seed: of that choice.
        options: how a store is reached; None goes by the environment.
    """

    kind: SampleKind
    name: str
    path: str | tuple[str, ...]
    media_root: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    allow_outside: bool = False
    placeholders: Placeholders = Placeholders.STRICT
    check_texts: bool = True
    verify: Verify = Verify.FULL
    batch_bytes: int = 2 << 20
    max_units: int | None = None
    shuffle_lines: bool = False
    shuffle_seed: int = 0
    options: StorageOptions | None = None

    @cached_property
    def root(self) -> str:
        """The folder that files of the source are named relative to.

        Raises:
            ConfigError: if a place is not there.
        """
        with naming(self):
            return find_root(self.path, self.kind, self.options)

    @property
    def media_folder(self) -> str:
        """The folder that media paths are relative to."""
        return self.media_root or self.root


def absolute(url: str) -> str:
    """A path from the root of the disk, for work that is done elsewhere or later; a URL as it is."""
    return str(storage.local_path(url).absolute()) if storage.is_local(url) else url


def absolute_source(source: Source) -> Source:
    """The same files and rows, named from the root of the disk; enough to read slices that were cut before."""
    media_root = None if source.media_root is None else absolute(source.media_root)
    # A web server says of no URL that it is a folder's: the slash does.
    slash = "/" if storage.scheme_of(source.root) in storage.WEB else ""
    return replace(source, path=absolute(source.root) + slash, media_root=media_root)


def check_max_units(source: Source) -> None:
    """Refuse a cap that leaves nothing.

    Raises:
        ConfigError: naming the dataset.
    """
    if source.max_units is not None and source.max_units < 1:
        raise ConfigError(
            f"dataset {source.name!r}: num_used_data={source.max_units} must be at least 1; leave it out to take all"
        )


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Say which dataset it was that will not do."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"dataset {source.name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Consecutive row groups of a parquet file.

    Attributes:
        file: path relative to the source's root.
        first, stop: row groups `first` up to, not including, `stop`.
        num_rows: in them, or chosen.
        chosen: numbers of the rows to take, of a single row group; None takes each.
    """

    file: str
    first: int
    stop: int
    num_rows: int
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a JSONL file, where blank ones do not count, or elements of a JSON array.

    Attributes:
        file: path relative to the source's root.
        first: number of the first line or element, from 0.
        offset: of it, in bytes; in what is decompressed, of a compressed file.
        num_rows: how many are taken.
        chosen: numbers of those to take; None takes each from the first on.
        in_array: whether they are elements.
    """

    file: str
    first: int
    offset: int
    num_rows: int
    chosen: tuple[int, ...] | None = None
    in_array: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """One unit of work: a stretch of the source's rows. Which rows depends on source and settings alone.

    Attributes:
        number: of the slice, from 0.
        pieces: stretches of files, in order.
    """

    number: int
    pieces: tuple[RowGroups | Lines, ...]

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
class SourceFile:
    """A file of a source, so that another conversion can tell whether it is still the same.

    Attributes:
        name: path relative to the source's root.
        bytes: its size.
        digest: of its content, `xxh3_128:` and 32 hexadecimal digits: of a parquet file's footer, of a whole JSONL.
        version: what `storage.version` told before it was read; None of a file that a record tells of. It says nothing of the
            content, so it is not compared.
    """

    name: str
    bytes: int
    digest: str
    version: tuple[int, int | str | None] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """A source cut into slices of work.

    Attributes:
        files: that it was cut from, in order.
        slices: in order, numbered from 0.
        notes: what a person should know before the first row is read, such as columns that differ between files.
    """

    files: tuple[SourceFile, ...]
    slices: tuple[Slice, ...]
    notes: tuple[str, ...] = ()


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
    """An image as the source has it.

    Attributes:
        data: its encoded bytes.
        header: what they say of it.
        original: header of the image that this one was made from, where a conversion scaled it down.
    """

    data: bytes
    header: ImageHeader
    original: ImageHeader | None = None


def read_source_image(data: bytes | None, name: str, verify: Verify) -> SourceImage:
    """An image with its header.

    Args:
        data: the encoded bytes; null is an image of zero bytes.
        name: of the image in its row, for the verdict.
        verify: how far to look.

    Raises:
        BadSample: `image_empty`, `image_unreadable`, `image_too_large`, or `image_truncated` where that was looked for.
    """
    data = data or b""
    try:
        if verify is Verify.FULL:
            return SourceImage(data, verify_pixels(data))
        if verify is Verify.HEADER:
            return SourceImage(data, verify_end(data))
        return SourceImage(data, read_header(data))
    except BadSample as bad:
        raise BadSample(bad.reason, f"{name}: {bad.detail}") from bad


@dataclass(frozen=True, slots=True)
class SourceClip:
    """A clip that is a file, as the source has it.

    Attributes:
        data: its bytes.
        header: what is known of it.
    """

    data: bytes
    header: ClipHeader


def read_source_clip(data: bytes, name: str, verify: Verify) -> SourceClip:
    """A clip's file with its header.

    Args:
        data: its bytes.
        name: of the clip in its row, for the verdict.
        verify: how far to look: at every frame, at the end and the claims of the file, or at what is needed.

    Raises:
        BadSample: `video_...`, see `docs/reasons.md`.
    """
    try:
        return SourceClip(
            data,
            read_clip_header(data, check_end=verify is not Verify.NONE, check_frames=verify is Verify.FULL),
        )
    except BadSample as bad:
        raise BadSample(bad.reason, f"{name}: {bad.detail}") from bad


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of a row.

    Attributes:
        images: one, or the frames of a clip in order; none of a clip that is a file.
        is_clip: whether it is a clip.
        clip: the file, of a clip that is one.
    """

    images: tuple[SourceImage, ...]
    is_clip: bool = False
    clip: SourceClip | None = None

    @property
    def files(self) -> tuple[SourceImage | SourceClip, ...]:
        """What it is made of, in order."""
        return self.images if self.clip is None else (self.clip,)


@dataclass(frozen=True, slots=True)
class SourceSample:
    """A row that can be used.

    Attributes:
        key: unique in the source, safe in a tar.
        fields: the row's fields, without the columns that hold the media themselves.
        media: in order.
        place: where the row came from.
        repaired: what was mended in its fields, such as "placeholders".
    """

    key: str
    fields: Mapping[str, Any]
    media: tuple[Medium, ...]
    place: Place
    repaired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be used, and why."""

    place: Place
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """What a kind's `parse_row` finds in a row: see `SourceSample`."""

    fields: Mapping[str, Any]
    media: tuple[Medium, ...]
    repaired: tuple[str, ...] = ()


ParseRow = Callable[[Mapping[str, Any], Source], ParsedRow]
"""What each kind of source offers: a row to its fields and media, or BadSample."""


def list_files(source: Source) -> list[str]:
    """The files of a source, relative to its root, in byte order.

    Raises:
        ConfigError: for a place that names no file, or one that the kind is not read from; see `places`.
    """
    root = source.root
    with naming(source):
        return find_files(source.path, source.kind, root, source.options)
