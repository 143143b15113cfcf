"""Conversations as rows write them: who speaks, what is text and what a tag, and tags against media."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_factory import talk
from strategies import words

from bagel_wds.conversations import (
    NamedMedium,
    Tag,
    Turn,
    check_answers,
    check_placeholders,
    media_parts,
    named_media,
    read_turns,
    repair_placeholders,
    replace_values,
)
from bagel_wds.errors import BadSample, Reason

IMAGE, VIDEO = Tag.IMAGE, Tag.VIDEO


def shows(kind: str = "image", **medium: Any) -> dict[str, Any]:
    return {"type": kind, **medium}


def says(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def human(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}


def why(fields: dict[str, Any]) -> BadSample:
    with pytest.raises(BadSample) as refused:
        read_turns(fields)
    assert refused.value.reason is Reason.CONVERSATIONS_INVALID
    return refused.value


# Who speaks, and what


def test_llava_and_chat_turns_are_the_same_turns() -> None:
    turns = [Turn("system", ("be kind",)), Turn("human", (IMAGE, "\nq")), Turn("gpt", ("a",))]
    llava = [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "<image>\nq"},
        {"from": "gpt", "value": "a"},
    ]
    chat = [
        {"role": "system", "content": [says("be kind")]},
        {"role": "user", "content": [shows(), says("\nq")]},
        {"role": "assistant", "content": [says("a")]},
    ]

    assert read_turns({"conversations": llava}) == turns
    assert read_turns({"messages": chat}) == turns
    assert read_turns({"conversations": chat, "messages": None}) == turns
    assert read_turns({"messages": json.dumps(llava)}) == turns
    assert read_turns({"conversations": json.dumps(chat).encode(), "id": 3}) == turns
    # As a parquet file has them in which turns, or parts, of several forms share a struct.
    mixed = [{"from": None, "value": None, **turn} for turn in chat]
    assert read_turns({"conversations": mixed}) == turns


def test_every_name_of_a_speaker_is_known() -> None:
    names = ("human", "user", "gpt", "assistant", "system")

    turns = read_turns({"conversations": [{"from": name, "value": "x"} for name in names]})

    assert [turn.speaker for turn in turns] == ["human", "human", "gpt", "gpt", "system"]


def test_tags_are_those_of_human_strings_alone() -> None:
    fields = {
        "conversations": [
            {"from": "system", "value": "<image>"},
            {"from": "human", "value": "a<image><video> <Image>\n<image>"},
            {"from": "gpt", "value": "<video> b"},
        ]
    }

    assert [turn.pieces for turn in read_turns(fields)] == [
        ("<image>",),
        ("a", IMAGE, VIDEO, " <Image>\n", IMAGE),
        ("<video> b",),
    ]


def test_a_typed_text_is_text_to_the_letter_and_texts_side_by_side_are_one() -> None:
    content = [
        says("see "), says("<image>"), says(""), shows("image_url", image_url={"url": "a.png"}), shows("video"),
        says(""), shows("video_url"), says("?"),
    ]  # fmt: skip

    (turn, _) = read_turns(human(content))

    assert turn.pieces == ("see <image>", IMAGE, VIDEO, VIDEO, "?")
    assert turn.tags == [IMAGE, VIDEO, VIDEO]
    assert turn.text == "see <image><image><video><video>?"


@given(st.lists(st.one_of(words(5), st.sampled_from(["<image>", "<video>", "<imag", "e>", ">"])), max_size=9))
def test_the_text_of_a_turn_is_the_string_that_it_was_read_from(parts: list[str]) -> None:
    text = "".join(parts)

    for turn in read_turns({"conversations": talk(text, text)}):
        assert turn.text == text
        kinds = [isinstance(piece, str) for piece in turn.pieces]
        assert "" not in turn.pieces
        assert (True, True) not in pairwise(kinds)


def test_upstream_keeps_the_names_that_it_does_not_know_and_its_own_field() -> None:
    fields = {
        "messages": talk("other"),
        "conversations": [{"from": name, "value": "<image>"} for name in ("human", "user", "tool", "gpt")],
    }

    turns = read_turns(fields, upstream=True)

    assert [turn.speaker for turn in turns] == ["human", "user", "tool", "gpt"]
    assert [turn.text for turn in turns] == ["<image>"] * 4
    chat = read_turns({"messages": [{"role": "user", "content": "q"}]}, upstream=True)
    assert [turn.speaker for turn in chat] == ["human"]


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({}, "nothing in `conversations` or `messages`; the fields are none"),
        ({"id": 1, "conversations": None}, "the fields are 'id', 'conversations'"),
        ({"conversations": talk(), "messages": talk()}, "both `conversations` and `messages` hold something; keep"),
        ({"conversations": []}, "`conversations` is an empty list, not a list of turns"),
        ({"messages": {"role": "user"}}, "`messages` is dict"),
        ({"conversations": "[{]"}, "`conversations` is no JSON"),
        ({"conversations": "3"}, "`conversations` is int"),
        ({"conversations": [*talk(), "q"]}, "turn 2 has not both"),
        ({"conversations": [{"from": "human"}]}, "turn 0 has not both, `from` and `value` (or"),
        ({"messages": [{"role": "user", "content": None}]}, "turn 0 has not both"),
        ({"conversations": [{"from": "human", "value": 3}]}, "turn 0: `value` is int, neither a string nor"),
        ({"conversations": [{"from": "tool", "value": "x"}]}, "the speaker is 'tool', none of human, user, gpt"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "the speaker is ['human']"),
        (human([says("q"), {"type": "audio"}]), "turn 0, part 1: the type is 'audio', none of text, image, image_url"),
        (human([{"type": ["text"]}]), "turn 0, part 0: the type is ['text']"),
        (human(["q"]), "turn 0, part 0: the type is None"),
        (human([{"type": "text", "text": None}]), "turn 0, part 0: `text` is null, not a string"),
        ({"messages": [{"role": "assistant", "content": [shows()]}]}, "'image' stands in a turn that is not"),
        ({"messages": [{"role": "system", "content": [shows("video")]}]}, "'video' stands in a turn that is not"),
    ],
)  # fmt: skip
def test_a_conversation_of_another_form_says_what_is_wrong(fields: dict[str, Any], detail: str) -> None:
    assert detail in why(fields).detail


@pytest.mark.parametrize(
    ("turns", "learns"),
    [
        (talk("q", "a"), True),
        ([{"from": "gpt", "value": "a"}], True),
        (talk("q", " ", "q", "a"), True),
        (talk("q", " \n"), False),
        (talk("q", ""), False),
        (talk("q"), False),
        ([{"from": "system", "value": "a"}], False),
    ],
)
def test_a_conversation_needs_an_answer_that_is_not_blank(turns: list[dict[str, str]], learns: bool) -> None:
    read = read_turns({"conversations": turns})
    if learns:
        check_answers(read)
    else:
        with pytest.raises(BadSample) as refused:
            check_answers(read)
        assert refused.value.reason is Reason.EMPTY_TEXT


# Tags and media


@pytest.mark.parametrize(
    ("texts", "is_clip", "detail"),
    [
        (("q", "a"), [], None),
        (("<image>q", "a", "<video><image>", "a"), [False, True, False], None),
        (("<image>q", "<image>"), [False], None),
        (("<image>q", "<image>"), [False, False], "1 tags for 2 media"),
        (("<image>q", "a"), [], "1 tags for 0 media"),
        (("<image>q", "a", "<video>", "a"), [True, False], "tag 1 is <image>, medium 1 is a clip"),
        (("<image>q", "a", "<video>", "a"), [False, False], "tag 2 is <video>, medium 2 is an image"),
    ],
)
def test_the_kth_tag_stands_for_medium_k(
    texts: tuple[str, ...], is_clip: list[bool], detail: str | None
) -> None:
    turns = read_turns({"conversations": talk(*texts)})
    if detail is None:
        check_placeholders(turns, is_clip)
    else:
        with pytest.raises(BadSample, match=detail) as refused:
            check_placeholders(turns, is_clip)
        assert refused.value.reason is Reason.PLACEHOLDER_MISMATCH


def test_a_repair_puts_tags_before_the_first_human_text() -> None:
    llava = {"id": 1, "conversations": [{"from": "system", "value": "s"}, *talk("q", "a", "q", "a")]}
    chat = human([says("q")])
    text = {"conversations": json.dumps(talk("q", "a"))}
    before = copy.deepcopy((llava, chat, text))

    of_llava = repair_placeholders(llava, [False, True])
    of_chat = repair_placeholders(chat, [False, True])
    of_text = repair_placeholders(text, [False])

    assert of_llava["id"] == 1
    assert [turn.text for turn in read_turns(of_llava)] == ["s", "<image>\n<video>\nq", "a", "q", "a"]
    assert of_chat == human([{"type": "image"}, {"type": "video"}, says("q")])
    assert json.loads(str(of_text["conversations"])) == talk("<image>\nq", "a")
    assert (llava, chat, text) == before


def test_a_repair_needs_a_human_turn() -> None:
    with pytest.raises(BadSample, match="no tag for 1 media, and no human turn") as refused:
        repair_placeholders({"conversations": [{"from": "gpt", "value": "a"}]}, [False])

    assert refused.value.reason is Reason.PLACEHOLDER_MISMATCH


@given(
    st.lists(st.tuples(st.sampled_from(["human", "gpt", "system"]), words()), min_size=1),
    st.lists(st.booleans()),
)
def test_what_was_repaired_matches(turns: list[tuple[str, str]], is_clip: list[bool]) -> None:
    spoken = [{"from": speaker, "value": text.replace("<", "(")} for speaker, text in turns]
    if "human" in dict(turns):
        check_placeholders(read_turns(repair_placeholders({"conversations": spoken}, is_clip)), is_clip)


# What a row says of its media


@pytest.mark.parametrize("nothing", [None, "", "None", "none", "null", [], "absent"])
@pytest.mark.parametrize("field", ["image", "images", "video", "videos"])
def test_c34_null_and_its_like_name_no_medium(field: str, nothing: Any) -> None:
    assert named_media({} if nothing == "absent" else {field: nothing}) == {}


def test_media_are_named_by_a_value_or_a_list_of_any_values() -> None:
    named = named_media(
        {"videos": ["v"], "image": {"path": "a"}, "images": ["a", None, ""], "video": "None "}
    )

    assert {field: [medium.value for medium in media] for field, media in named.items()} == {
        "image": [{"path": "a"}],
        "images": ["a", None, ""],
        "video": ["None "],
        "videos": ["v"],
    }
    assert list(named) == ["image", "images", "video", "videos"]
    assert [str(medium) for medium in named["images"]] == ["`images[0]`", "`images[1]`", "`images[2]`"]
    assert [medium.tag for media in named.values() for medium in media] == [IMAGE] * 4 + [VIDEO] * 2


def test_typed_parts_name_a_medium_under_their_type_or_are_the_object_that_has_it() -> None:
    content = [
        shows(image="a.png"), shows("image_url", image_url={"url": "b.png"}), shows("image_url", image_url="c.png"),
        says("and"), shows(path="d.png", image=None), shows("video", url="clip"), shows(bytes="AA=="),
        shows(image=""), shows("video", path=None, bytes=None),
    ]  # fmt: skip
    fields = {"messages": [{"role": "system", "content": "s"}, *human(content)["messages"]]}

    parts = media_parts(fields)

    assert [(part.tag, part.value) for part in parts] == [
        (IMAGE, "a.png"), (IMAGE, {"url": "b.png"}), (IMAGE, "c.png"), (IMAGE, content[4]), (VIDEO, content[5]),
        (IMAGE, content[6]), (IMAGE, None), (VIDEO, None),
    ]  # fmt: skip
    assert str(parts[0]) == "`messages[1].content[0].image`"
    assert str(parts[3]) == "`messages[1].content[4]`"
    assert [part.tag for part in parts] == read_turns(fields)[1].tags


@pytest.mark.parametrize("as_text", [False, True])
def test_values_are_replaced_in_a_copy(as_text: bool) -> None:
    content = [shows(image="data:image/png;base64,AAAA"), says("q"), shows(image="b.png")]
    turns = human(content)["messages"]
    fields: dict[str, Any] = {"images": ["a", "b"], "messages": json.dumps(turns) if as_text else turns}
    before = copy.deepcopy(fields)
    first, last = media_parts(fields)

    changed = replace_values(fields, {first.place: "x", last.place: None, ("images", 1): 3})

    assert fields == before
    assert changed["images"] == ["a", 3]
    messages: Any = changed["messages"]
    messages = json.loads(messages) if as_text else messages
    assert messages == human([shows(image="x"), says("q"), shows(image=None)])["messages"]


def test_a_medium_says_where_it_stands() -> None:
    assert str(NamedMedium(IMAGE, "a", ("image",))) == "`image`"
