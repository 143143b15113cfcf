"""The texts of a row, one function a kind: what their fields must look like, and what is in them.

A converter checks rows with these before it writes them, and `show` counts with them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds.errors import BadSample, Reason, name_type

if TYPE_CHECKING:
    from collections.abc import Mapping

_BEGINS_AS_JSON = re.compile(r'\s*(\{|\[\s*")')


def read_captions(fields: Mapping[str, object], *, upstream: bool = False) -> list[str]:
    """The captions of a text-to-image row, in the order of the file.

    They are an object or a list of strings, JSON text of one, or a single plain string. Text that begins as an object
    or a list of strings does must be JSON, and the JSON text `null` is null. Nulls in an object or a list are left
    out; a blank string there is a caption, and an empty object or list has none.

    Args:
        fields: of the row.
        upstream: take what upstream does: an object of strings, or its JSON text.

    Raises:
        BadSample: `empty_text` where there is nothing but nulls, or a blank plain string; `captions_invalid` for
            anything else.
    """
    captions = _field(fields, "captions", Reason.CAPTIONS_INVALID)
    if isinstance(captions, str):
        captions = _parse_captions(captions)
    if captions is None or (isinstance(captions, str) and not captions.strip()):
        raise BadSample(Reason.EMPTY_TEXT, f"captions are {'null' if captions is None else 'blank'}")
    if isinstance(captions, str) and not upstream:
        return [captions]
    if not isinstance(captions, dict if upstream else dict | list):
        raise BadSample(
            Reason.CAPTIONS_INVALID,
            f"captions are {name_type(captions)}, not an object"
            + ("" if upstream else " or a list of strings, nor a plain string"),
        )
    named = captions if isinstance(captions, dict) else dict(enumerate(captions))
    for name, caption in named.items():
        if not isinstance(caption, str) and (upstream or caption is not None):
            raise BadSample(
                Reason.CAPTIONS_INVALID, f"caption {name!r} is {name_type(caption)}, not a string"
            )
    texts = [caption for caption in named.values() if caption is not None]
    if named and not texts:
        raise BadSample(Reason.EMPTY_TEXT, "every caption is null")
    return texts


def _parse_captions(text: str) -> object:
    """What a text stands for: the object, the list or the null that it is the JSON of, or itself."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if _BEGINS_AS_JSON.match(text):
            raise BadSample(Reason.CAPTIONS_INVALID, f"captions are no JSON: {error}") from error
        return text
    return value if value is None or isinstance(value, dict | list) else text


def read_instructions(
    fields: Mapping[str, object], num_steps: int, *, surplus_ok: bool = False
) -> list[list[str]]:
    """The phrasings of each step of an edit row.

    `instruction_list` has a step for each edit: a list of phrasings, or a plain string, which is the only one. As a
    whole it may be a plain string: one step with one phrasing.

    Args:
        fields: of the row.
        num_steps: how many edits the row has: one fewer than images.
        surplus_ok: leave out steps that the row has no edit for, as the recipe does.

    Raises:
        BadSample: `instruction_missing` for fewer steps than edits, or none at all; `instruction_surplus` for more;
            `instruction_empty` for a step with no phrasing, or with a null or blank one; `instruction_invalid` for
            anything that is no string.
    """
    steps = find_steps(fields)
    if len(steps) < num_steps:
        raise BadSample(
            Reason.INSTRUCTION_MISSING, f"instruction_list has {len(steps)} steps, the images {num_steps}"
        )
    if len(steps) > num_steps and not surplus_ok:
        raise BadSample(
            Reason.INSTRUCTION_SURPLUS,
            f"instruction_list has {len(steps)} steps, the images {num_steps}: which belong together cannot be known",
        )
    return [_read_step(step, number) for number, step in enumerate(steps[:num_steps])]


def find_steps(fields: Mapping[str, object]) -> list[object]:
    """The steps of an edit row as they are.

    Raises:
        BadSample: `instruction_missing` or `instruction_invalid` where there is no list of them.
    """
    steps = fields.get("instruction_list")
    if isinstance(steps, str):
        return [steps]
    if steps is None:
        raise BadSample(Reason.INSTRUCTION_MISSING, "instruction_list is null, or not there")
    if not isinstance(steps, list):
        raise BadSample(Reason.INSTRUCTION_INVALID, f"instruction_list is {name_type(steps)}, not a list")
    return steps


def _read_step(step: object, number: int) -> list[str]:
    phrasings = [check_phrasing(phrasing, number) for phrasing in find_phrasings(step, number)]
    if not all(phrasing.strip() for phrasing in phrasings):
        raise BadSample(Reason.INSTRUCTION_EMPTY, f"an instruction of edit {number} is blank")
    return phrasings


def find_phrasings(step: object, number: int) -> list[Any]:
    """The phrasings of a step as they are: one or more.

    Raises:
        BadSample: `instruction_empty` where there is none, `instruction_invalid` where it is no list of them.
    """
    if step is None or step in ([], ""):
        raise BadSample(Reason.INSTRUCTION_EMPTY, f"edit {number} has no instruction")
    if isinstance(step, str):
        return [step]
    if not isinstance(step, list):
        raise BadSample(
            Reason.INSTRUCTION_INVALID,
            f"the instruction of edit {number} is {name_type(step)}, neither a string nor a list of phrasings",
        )
    return step


def check_phrasing(phrasing: object, number: int) -> str:
    """A phrasing, if it is a text.

    Raises:
        BadSample: `instruction_empty` for null, `instruction_invalid` for anything else that is no string.
    """
    if not isinstance(phrasing, str):
        reason = Reason.INSTRUCTION_EMPTY if phrasing is None else Reason.INSTRUCTION_INVALID
        raise BadSample(reason, f"an instruction of edit {number} is {name_type(phrasing)}, not a string")
    return phrasing


def _field(fields: Mapping[str, object], name: str, reason: Reason) -> object:
    if name not in fields:
        raise BadSample(reason, f"no field {name!r}; there is {', '.join(map(repr, fields)) or 'none'}")
    return fields[name]
