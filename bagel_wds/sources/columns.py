"""Parquet columns as JSON values, and the checks of a file's schema.

| Arrow type | in `KEY.json` |
| --- | --- |
| null, bool, integers, strings | the same |
| float | the same; NaN and the infinities are null |
| decimal | its digits as a string |
| timestamp, date, time | a string such as `2024-05-01 12:30:00.000000+0200`, with as many digits as the unit has |
| duration | a whole number of its unit |
| binary | `{"base64": "..."}` |
| list, struct | array, object |
| map | array of [key, value] pairs |
| dictionary, extension | as the type that it stands for |

Any other type is refused, with the file, the column and the type, before the first row is read.
"""

from __future__ import annotations

import base64
import difflib
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import types

from bagel_wds.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    ColumnRule = tuple[Callable[[pa.DataType], bool], str]
    """Whether a required column's type will do, and how an error names what would."""


def check_schema(schema: pa.Schema, file: str, required: Mapping[str, ColumnRule]) -> None:
    """Refuse a file whose rows could not be read.

    Raises:
        ConfigError: naming the file, the column and its type.
    """
    for name, (accepts, wanted) in required.items():
        if name not in schema.names:
            raise ConfigError(f"{file}: no column {name!r}{_nearest(name, schema.names)}")
        kind = plain(schema.field(name).type)
        if not accepts(kind):
            raise ConfigError(f"{file}: column {name!r} is {kind}; it must be {wanted}")
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise ConfigError(f"{file}: {schema.names.count(field.name)} columns are named {field.name!r}")
        try:
            pa.nulls(0, field.type).cast(json_type(field.type))
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise ConfigError(
                f"{file}: column {field.name!r} is {field.type}, which has no form in JSON; drop the column or cast it"
            ) from error


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names)}"


def is_image(kind: pa.DataType) -> bool:
    """Whether a column holds encoded images."""
    return str(kind) in ("binary", "large_binary", "binary_view")


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings."""
    return str(kind) in ("string", "large_string", "string_view")


def is_list_of(kind: pa.DataType, accepts: Callable[[pa.DataType], bool]) -> bool:
    """Whether a column holds lists whose items are of a type that `accepts`."""
    return _is_list(kind) and accepts(plain(kind.value_type))


def _is_list(kind: pa.DataType) -> bool:
    return any(matches(kind) for matches in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def plain(kind: pa.DataType) -> pa.DataType:
    """The type that a dictionary or extension type stands for."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def json_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type to cast a column to, so that its Python values are JSON values (but for bytes)."""
    kind = plain(kind)
    for matches, target in _AS_OTHER_TYPE:
        if matches(kind):
            return target
    if _is_list(kind):
        return pa.large_list(json_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(json_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(json_type(kind.key_type), json_type(kind.item_type))
    if types.is_interval(kind) or types.is_union(kind):
        raise pa.ArrowNotImplementedError(f"{kind} has no form in JSON")
    return kind


_AS_OTHER_TYPE = (
    (types.is_decimal, pa.string()),
    (types.is_timestamp, pa.string()),
    (types.is_date, pa.string()),
    (types.is_time, pa.string()),
    (types.is_duration, pa.int64()),
    (types.is_float16, pa.float32()),
)


def json_value(value: Any) -> Any:
    """A Python value of a column of a `json_type`, with bytes as `{"base64": ...}`, at any depth."""
    match value:
        case bytes():
            return {"base64": base64.b64encode(value).decode()}
        case list() | tuple():
            return [json_value(item) for item in value]
        case dict():
            return {name: json_value(item) for name, item in value.items()}
        case _:
            return value
