"""Captions and instructions: every form that rows come in, and a code for each that cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.errors import BadSample, Reason
from bagel_wds.texts import read_captions, read_instructions


def captions_of(value: Any, *, upstream: bool = False) -> list[str] | Reason:
    """The captions, or the code that a row with this field is left out under."""
    try:
        return read_captions({"captions": value}, upstream=upstream)
    except BadSample as bad:
        return bad.reason


def instructions_of(value: Any, num_steps: int, *, surplus_ok: bool = False) -> list[list[str]] | Reason:
    """The phrasings, or the code that a row with this field is left out under."""
    try:
        return read_instructions({"instruction_list": value}, num_steps, surplus_ok=surplus_ok)
    except BadSample as bad:
        return bad.reason


# Captions


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"b": "one", "a": "two"}', ["one", "two"]),
        ('  ["one", "two"] ', ["one", "two"]),
        ({"b": "one", "a": "two"}, ["one", "two"]),
        (["one", "two"], ["one", "two"]),
        ("a plain caption", ["a plain caption"]),
        (" spaces stay ", [" spaces stay "]),
        # JSON of anything but an object, a list or null is a text like any other.
        ("1984", ["1984"]),
        ('"quoted"', ['"quoted"']),
        ("true", ["true"]),
        # So is what merely begins with a bracket.
        ("[photo] a cat", ["[photo] a cat"]),
        # A blank string in an object or a list is a caption: upstream trains on it as an empty text.
        ({"a": "", "b": "x"}, ["", "x"]),
        ('["", " "]', ["", " "]),
        # Nulls are left out.
        ({"a": None, "b": "x"}, ["x"]),
        ('[null, "x"]', ["x"]),
        # No caption at all.
        ({}, []),
        ([], []),
        ("{}", []),
        ("[]", []),
    ],
)
def test_captions_come_in_every_form(value: Any, expected: list[str]) -> None:
    assert captions_of(value) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, Reason.EMPTY_TEXT),
        ("null", Reason.EMPTY_TEXT),
        ("", Reason.EMPTY_TEXT),
        (" \n", Reason.EMPTY_TEXT),
        ({"a": None}, Reason.EMPTY_TEXT),
        ("[null, null]", Reason.EMPTY_TEXT),
        (5, Reason.CAPTIONS_INVALID),
        (True, Reason.CAPTIONS_INVALID),
        ("[1]", Reason.CAPTIONS_INVALID),
        ({"a": ["x"]}, Reason.CAPTIONS_INVALID),
        (["x", {"text": "y"}], Reason.CAPTIONS_INVALID),
        ('{"a": "cut', Reason.CAPTIONS_INVALID),
        ("{'a': 'python'}", Reason.CAPTIONS_INVALID),
        (' ["a", ', Reason.CAPTIONS_INVALID),
        ('[ "a" "b"]', Reason.CAPTIONS_INVALID),
    ],
)
def test_captions_that_cannot_be_used_have_a_code(value: Any, reason: Reason) -> None:
    assert captions_of(value) is reason


def test_a_row_without_the_field_says_what_it_has() -> None:
    with pytest.raises(BadSample, match="no field 'captions'; there is 'text'") as bad:
        read_captions({"text": "x"})

    assert bad.value.reason is Reason.CAPTIONS_INVALID


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"a": "x", "b": ""}', ["x", ""]),
        ("{}", []),
        ("not json", Reason.CAPTIONS_INVALID),
        ('["a", "b"]', Reason.CAPTIONS_INVALID),
        ('{"a": null, "b": "x"}', Reason.CAPTIONS_INVALID),
        (None, Reason.EMPTY_TEXT),
    ],
)
def test_under_upstreams_fidelity_captions_are_what_upstream_can_read(value: Any, expected: Any) -> None:
    assert captions_of(value, upstream=True) == expected


@given(st.dictionaries(st.text(alphabet="abc"), st.text(), min_size=1) | st.lists(st.text(), min_size=1))
def test_a_container_and_its_json_text_give_the_same_captions(
    container: dict[str, str] | list[str],
) -> None:
    expected = list(container.values()) if isinstance(container, dict) else container

    assert captions_of(container) == expected
    assert captions_of(json.dumps(container)) == expected
    assert captions_of(json.dumps(container, ensure_ascii=False, indent=1)) == expected


@given(st.text())
def test_any_text_is_a_caption_or_has_a_code(text: str) -> None:
    found = captions_of(text)

    if isinstance(found, Reason):
        assert not text.strip() or text.strip() == "null" or text.lstrip()[0] in "{["
    elif found != [text]:
        assert found == list(json.loads(text))


# Instructions


@pytest.mark.parametrize(
    ("value", "num_steps", "expected"),
    [
        ([["a", "b"], ["c"]], 2, [["a", "b"], ["c"]]),
        (["a", "b"], 2, [["a"], ["b"]]),
        ([["a"], "b"], 2, [["a"], ["b"]]),
        ("make it red", 1, [["make it red"]]),
        # Text that looks like JSON is an instruction as it stands.
        ('["a"]', 1, [['["a"]']]),
        ([[" a "]], 1, [[" a "]]),
    ],
)
def test_instructions_come_in_every_form(value: Any, num_steps: int, expected: list[list[str]]) -> None:
    assert instructions_of(value, num_steps) == expected


@pytest.mark.parametrize(
    ("value", "num_steps", "reason"),
    [
        (None, 1, Reason.INSTRUCTION_MISSING),
        ([], 1, Reason.INSTRUCTION_MISSING),
        ([["a"]], 2, Reason.INSTRUCTION_MISSING),
        ("one for two edits", 2, Reason.INSTRUCTION_MISSING),
        ([None], 1, Reason.INSTRUCTION_EMPTY),
        ([[]], 1, Reason.INSTRUCTION_EMPTY),
        ([["a", None]], 1, Reason.INSTRUCTION_EMPTY),
        ([["a", " \t"]], 1, Reason.INSTRUCTION_EMPTY),
        ([""], 1, Reason.INSTRUCTION_EMPTY),
        ("  ", 1, Reason.INSTRUCTION_EMPTY),
        ([["a"], ["b"]], 1, Reason.INSTRUCTION_SURPLUS),
        (7, 1, Reason.INSTRUCTION_INVALID),
        ({"0": "a"}, 1, Reason.INSTRUCTION_INVALID),
        ([7], 1, Reason.INSTRUCTION_INVALID),
        ([{"text": "a"}], 1, Reason.INSTRUCTION_INVALID),
        ([["a", 7]], 1, Reason.INSTRUCTION_INVALID),
    ],
)
def test_c30_each_breach_of_the_row_contract_has_a_code_of_its_own(
    value: Any, num_steps: int, reason: Reason
) -> None:
    assert instructions_of(value, num_steps) is reason


def test_where_the_recipe_is_meant_surplus_steps_are_left_out() -> None:
    assert instructions_of([["a"], ["b"], [None]], 1, surplus_ok=True) == [["a"]]
    assert instructions_of([["a"]], 0, surplus_ok=True) == []
