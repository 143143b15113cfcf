"""Parquet columns as JSON values, and what may hold images and texts.

| Arrow type | in `KEY.json` |
| --- | --- |
| null, bool, integers, strings | the same |
| float | the same; NaN and the infinities are null |
| decimal | its digits as a string |
| timestamp, date, time | a string such as `2024-05-01 12:30:00.000000+0200`, with as many digits as the unit has |
| duration | a whole number of its unit |
| binary | `{"base64": "..."}` |
| list, struct | array, object |
| map | array of [key, value] pairs; captions: object |
| dictionary, extension | as the type that it stands for |

Any other type is refused, with the file, the column and the type, before the first row is read.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import types

from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Callable


def is_image(kind: pa.DataType) -> bool:
    """Whether a column holds encoded images: their bytes, or Hugging Face's struct of bytes and path."""
    kind = plain(kind)
    if types.is_struct(kind):
        members = {field.name: plain(field.type) for field in kind}
        data = members.pop("bytes", None)
        return (
            data is not None
            and (is_bytes(data) or types.is_null(data))
            and set(members) <= {"path"}
            and all(map(is_text_or_null, members.values()))
        )
    return is_bytes(kind)


def is_images(kind: pa.DataType) -> bool:
    """Whether a column holds lists of encoded images."""
    return is_list_of(kind, is_image)


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column holds strings of bytes, of any length."""
    return str(plain(kind)) in ("binary", "large_binary", "binary_view")


def may_hold_bytes(kind: pa.DataType) -> bool:
    """Whether Python values of a column are bytes, or hold others."""
    kind = plain(kind)
    return is_bytes(kind) or types.is_fixed_size_binary(kind) or types.is_nested(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings."""
    return str(plain(kind)) in ("string", "large_string", "string_view")


def is_text_or_null(kind: pa.DataType) -> bool:
    """Whether a column holds strings, or nothing at all: such a column of a file has no other type."""
    return is_text(kind) or types.is_null(plain(kind))


def is_list_of(kind: pa.DataType, accepts: Callable[[pa.DataType], bool]) -> bool:
    """Whether a column holds lists whose items are of a type that `accepts`."""
    kind = plain(kind)
    return _is_list(kind) and accepts(plain(kind.value_type))


def is_texts_by_name(kind: pa.DataType) -> bool:
    """Whether a column holds structs or maps of strings."""
    kind = plain(kind)
    if is_map(kind):
        return is_text(kind.key_type) and is_text(kind.item_type)
    return types.is_struct(kind) and all(is_text_or_null(field.type) for field in kind)


def is_map(kind: pa.DataType) -> bool:
    """Whether a column holds maps."""
    return bool(types.is_map(plain(kind)))


def _is_list(kind: pa.DataType) -> bool:
    return str(kind).startswith(
        ("list<", "large_list<", "fixed_size_list<", "list_view<", "large_list_view<")
    )


def plain(kind: pa.DataType) -> pa.DataType:
    """The type that a dictionary or extension type stands for."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def type_name(kind: pa.DataType) -> str:
    """A type as it matters to a reader of rows: the same for forms that give the same values."""
    kind = plain(kind)
    if _is_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {type_name(field.type)}' for field in kind)}>"
    if types.is_map(kind):
        return f"map<{type_name(kind.key_type)}, {type_name(kind.item_type)}>"
    return str(kind).removeprefix("large_").removesuffix("_view")


def json_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type to cast a column to, so that its Python values are JSON values (but for bytes)."""
    kind = plain(kind)
    for matches, target in _AS_OTHER_TYPE:
        if matches(kind):
            return target
    if _is_list(kind):
        return pa.large_list(json_type(kind.value_type))
    if types.is_struct(kind):
        if len({field.name for field in kind}) < kind.num_fields:
            raise pa.ArrowNotImplementedError(f"two fields of {kind} have one name")
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


def object_value(value: Any) -> Any:
    """A Python value of a map column as an object.

    Raises:
        BadSample: if a key comes twice: one of its values would be lost.
    """
    if value is None:
        return None
    pairs = json_value(value)
    named = dict(pairs)
    if len(named) < len(pairs):
        raise BadSample(
            Reason.ROW_INVALID, f"a key comes twice in a map with keys {[key for key, _ in pairs]}"
        )
    return named
