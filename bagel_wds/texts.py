"""The texts of a row, one function a kind: what their fields must look like, and what is in them.

A converter checks rows with these before it writes them, and `show` counts with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation."""

    speaker: str
    text: str


def read_captions(fields: Mapping[str, object]) -> list[str]:
    """The captions of a text-to-image row, in the order of the file: an object of strings, or its JSON text.

    There may be none, and a caption may be empty.

    Raises:
        BadSample: `captions_invalid` for anything else.
    """
    captions = _field(fields, "captions", Reason.CAPTIONS_INVALID)
    if isinstance(captions, str | bytes):
        try:
            captions = orjson.loads(captions)
        except orjson.JSONDecodeError as error:
            raise BadSample(Reason.CAPTIONS_INVALID, f"captions are no JSON: {error}") from error
    if not isinstance(captions, dict):
        raise BadSample(Reason.CAPTIONS_INVALID, f"captions are {_name(captions)}, not an object")
    for name, caption in captions.items():
        if not isinstance(caption, str):
            raise BadSample(Reason.CAPTIONS_INVALID, f"caption {name!r} is {_name(caption)}, not a string")
    return list(captions.values())


def read_turns(fields: Mapping[str, object]) -> list[Turn]:
    """The turns of a conversation in LLaVA's form: `conversations`, each with `from` and `value`.

    Raises:
        BadSample: `conversations_invalid` for anything else.
    """
    conversations = _field(fields, "conversations", Reason.CONVERSATIONS_INVALID)
    if not isinstance(conversations, list):
        raise BadSample(Reason.CONVERSATIONS_INVALID, f"conversations are {_name(conversations)}, not a list")
    turns = []
    for number, turn in enumerate(conversations):
        speaker, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise BadSample(Reason.CONVERSATIONS_INVALID, f"turn {number} has no `from` and `value` strings")
        turns.append(Turn(speaker, text))
    return turns


def read_instructions(fields: Mapping[str, object], num_steps: int) -> list[list[str]]:
    """The phrasings of each step of an edit row; a plain string is a step with one phrasing.

    `instruction_list` may have more steps than the row has edits; those are left out.

    Args:
        fields: of the row.
        num_steps: how many edits the row has: one fewer than images.

    Raises:
        BadSample: `instruction_missing` where a step has no phrasing, or one that is no string.
    """
    steps = fields.get("instruction_list")
    if not isinstance(steps, list):
        raise BadSample(Reason.INSTRUCTION_MISSING, f"instruction_list is {_name(steps)}, not a list")
    if len(steps) < num_steps:
        raise BadSample(
            Reason.INSTRUCTION_MISSING, f"instruction_list has {len(steps)} steps, the images {num_steps}"
        )
    return [_phrasings(step, number) for number, step in enumerate(steps[:num_steps])]


def _phrasings(step: object, number: int) -> list[str]:
    phrasings = [step] if isinstance(step, str) and step else step
    if not isinstance(phrasings, list) or not phrasings:
        raise BadSample(Reason.INSTRUCTION_MISSING, f"edit {number} has no instruction")
    for phrasing in phrasings:
        if not isinstance(phrasing, str):
            raise BadSample(
                Reason.INSTRUCTION_MISSING,
                f"an instruction of edit {number} is {_name(phrasing)}, not a string",
            )
    return phrasings


def _field(fields: Mapping[str, object], name: str, reason: Reason) -> object:
    if name not in fields:
        raise BadSample(reason, f"no field {name!r}; there is {', '.join(map(repr, fields)) or 'none'}")
    return fields[name]


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__
