"""What the rows of a kind look like in parquet, and whether a file's columns will do."""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow.types import is_timestamp

from bagel_wds.errors import ConfigError
from bagel_wds.sources.columns import json_type, plain, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bagel_wds.sources.rows import ParseRow, Source

    Shape = tuple[tuple[str, str], ...]
    """(name, type) of each column of a file."""


@dataclass(frozen=True)
class ColumnRule:
    """What a column that a kind knows must be.

    Attributes:
        accepts: whether a type will do.
        wanted: how an error names what would.
        is_media: it may hold encoded media, whose bytes are left as they are.
        map_is_object: a map in it is an object, not the array of pairs that other columns make of it.
    """

    accepts: Callable[[pa.DataType], bool]
    wanted: str
    is_media: bool = False
    map_is_object: bool = False


@dataclass(frozen=True)
class ParquetLayout:
    """What the rows of a kind look like in parquet.

    Attributes:
        columns: those that the kind knows, by our name.
        required: of each of these, a file must have one at least.
        parse: fields and media of a row, or BadSample. Its row has our names.
    """

    columns: Mapping[str, ColumnRule]
    required: tuple[tuple[str, ...], ...]
    parse: ParseRow

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a row: its columns that hold no media."""
        return {
            name: value
            for name, value in row.items()
            if name not in self.columns or not self.columns[name].is_media
        }


def check_given_columns(source: Source, layout: ParquetLayout) -> None:
    """Refuse column names that were given for what the kind does not know, or for two things at once.

    Raises:
        ConfigError: naming the dataset and what there is.
    """
    for name in source.columns:
        if name not in layout.columns:
            raise ConfigError(
                f"dataset {source.name!r}: a column is given for {name!r}, which {source.kind} rows do not have; "
                f"they have {', '.join(layout.columns)}"
            )
    theirs, times = next(iter(Counter(source.columns.values()).most_common(1)), ("", 0))
    if times > 1:
        raise ConfigError(f"dataset {source.name!r}: column {theirs!r} is given for {times} things")


def our_names(names: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """What this package calls the columns of a file.

    Args:
        names: of the columns.
        given: the file's names by ours, where they differ. A column that bears a name of ours which another column
            was given for is `source_NAME`.
    """
    ours = {theirs: name for name, theirs in given.items()}
    return [ours.get(name, f"source_{name}" if name in given else name) for name in names]


def check_schema(schema: pa.Schema, file: str, layout: ParquetLayout, given: Mapping[str, str]) -> None:
    """Refuse a file whose rows could not be read.

    Args:
        schema: of the file.
        file: how an error names it.
        layout: that it must have.
        given: names of its columns by ours, where they differ.

    Raises:
        ConfigError: naming the file, the column and its type.
    """
    by_name = _by_our_name(schema, file, given)
    _check_there(by_name, schema.names, file, layout, given)
    for name, field in by_name.items():
        rule = layout.columns.get(name)
        if rule and not rule.accepts(plain(field.type)):
            raise ConfigError(
                f"{file}: column {field.name!r} is {plain(field.type)}; it must be {rule.wanted}"
            )
        if not (rule and rule.is_media):
            _check_json(field, file)


def _by_our_name(schema: pa.Schema, file: str, given: Mapping[str, str]) -> dict[str, pa.Field]:
    for name, count in Counter(schema.names).items():
        if count > 1:
            raise ConfigError(f"{file}: {count} columns are named {name!r}")
    by_name: dict[str, pa.Field] = {}
    for name, field in zip(our_names(schema.names, given), schema, strict=True):
        if name in by_name:
            raise ConfigError(
                f"{file}: another column is given for {name.removeprefix('source_')!r}, so the one of that name is "
                f"kept as {name!r}, which is there too; rename one of them"
            )
        by_name[name] = field
    return by_name


def _check_there(
    by_name: Mapping[str, pa.Field],
    names: Sequence[str],
    file: str,
    layout: ParquetLayout,
    given: Mapping[str, str],
) -> None:
    for ours, theirs in given.items():
        if ours not in by_name:
            raise ConfigError(
                f"{file}: no column {theirs!r}, which was given for {ours!r}{_nearest(theirs, names)}"
            )
    for either in layout.required:
        if not set(either) & set(by_name):
            raise ConfigError(
                f"{file}: no column {' or '.join(map(repr, either))}{_nearest(either[0], names)}"
                f"{_options(either)}"
            )


_OPTIONS = {
    "image": "--image-column",
    "image_list": "--image-column",
    "captions": "--captions-column",
    "instruction_list": "--instructions-column",
    "conversations": "--conversations-column",
}
"""What a person gives where a source calls a column otherwise."""


def _options(either: Sequence[str]) -> str:
    return "".join(
        f" (if it is called otherwise, give {_OPTIONS[name]}, or `columns: {{{name}: ...}}` in a dataset info)"
        for name in either
        if name in _OPTIONS
    )


def _check_json(field: pa.Field, file: str) -> None:
    try:
        # Of a time zone nobody hears before there is a value.
        values = (
            pa.array([0], pa.int64()).cast(field.type)
            if is_timestamp(field.type)
            else pa.nulls(0, field.type)
        )
        values.cast(json_type(field.type))
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"{file}: column {field.name!r} is {field.type}, which has no form in JSON; drop the column or cast it"
        ) from error


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names)}"


def shape_of(schema: pa.Schema) -> Shape:
    """The columns of a file as `drift_notes` compares them."""
    return tuple((field.name, type_name(field.type)) for field in schema)


def drift_notes(shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    """What differs between the columns of some files, a sentence a column.

    Args:
        shapes: of each file, in order.
    """
    tables = {shape: dict(shape) for shape in shapes.values()}
    columns = dict.fromkeys(name for table in tables.values() for name in table)
    notes = []
    for column in columns:
        files: dict[str | None, list[str]] = {}
        for file, shape in shapes.items():
            files.setdefault(tables[shape].get(column), []).append(file)
        if len(files) > 1:
            kinds = sorted(files, key=lambda kind: (kind is None, -len(files[kind])))
            notes.append(f"column {column!r} is " + ", ".join(_in_files(kind, files[kind]) for kind in kinds))
    return tuple(notes)


def _in_files(kind: str | None, files: Sequence[str]) -> str:
    return f"{kind or 'missing'} in {files[0] if len(files) == 1 else f'{len(files)} files'}"
