"""Text out of data stays text: no control string in it ever becomes a control token, however that was added."""

from __future__ import annotations

import pickle
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

import pytest
from golden_data import plain_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import CONTROL_STRINGS, texts_with_control_strings, words
from transformers import AddedToken

from bagel_wds.errors import ConfigError
from bagel_wds.tokens import CONTROL_TOKENS, TextEncoder, add_special_tokens, control_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

FOUR = list(CONTROL_TOKENS.values())

WAYS: dict[str, Callable[[PreTrainedTokenizerBase], object]] = {
    "add_special_tokens of ours": add_special_tokens,
    "add_tokens": lambda tokenizer: tokenizer.add_tokens(FOUR),
    "add_tokens as special": lambda tokenizer: tokenizer.add_tokens(FOUR, special_tokens=True),
    "add_special_tokens of the tokenizer": lambda tokenizer: tokenizer.add_special_tokens(
        {"additional_special_tokens": FOUR}
    ),
    "not normalized": lambda tokenizer: tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in FOUR]
    ),
    "special and normalized": lambda tokenizer: tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=True) for token in FOUR]
    ),
    "stripping": lambda tokenizer: tokenizer.add_tokens(
        [AddedToken(token, lstrip=True, rstrip=True) for token in FOUR]
    ),
}
"""How people bring the four into a tokenizer; the fifth, <|endoftext|>, it has as a special token."""


@cache
def tokenizer_with(way: str) -> PreTrainedTokenizerBase:
    """The golden tokenizer with its control tokens added in one of these ways."""
    tokenizer = plain_tokenizer()
    WAYS[way](tokenizer)
    return tokenizer


def control_tokens_of(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all five."""
    ids = {tokenizer.convert_tokens_to_ids(token) for token in CONTROL_STRINGS}
    assert all(isinstance(token, int) for token in ids)
    return {int(str(token)) for token in ids}


@settings(max_examples=300, deadline=None)
@given(way=st.sampled_from(sorted(WAYS)), text=texts_with_control_strings())
@example("add_tokens", "<|im_end|>")
@example("add_tokens as special", "<|im_end|><|im_end|>")
@example("stripping", " <|im_end|> ")
@example("not normalized", "<|im_<|im_end|>end|>")
@example("special and normalized", "<|endoftext|>\u0338<<|vision_start|>>")
@example("add_special_tokens of the tokenizer", "<|im_start|>system<|vision_end|>")
def test_no_text_becomes_a_control_token_and_all_of_it_is_encoded(way: str, text: str) -> None:
    tokenizer = tokenizer_with(way)
    ids = TextEncoder(tokenizer)(text)

    assert not control_tokens_of(tokenizer) & set(ids)
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert decoded == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("token", CONTROL_STRINGS)
def test_without_our_care_each_control_string_would_become_its_token(way: str, token: str) -> None:
    tokenizer = tokenizer_with(way)
    [control] = tokenizer.encode(token)

    assert control in control_tokens_of(tokenizer)
    assert control not in TextEncoder(tokenizer)(token)
    assert TextEncoder(tokenizer, allow_control_tokens=True)(token) == [control]


@settings(max_examples=200, deadline=None)
@given(words(40).filter(lambda text: not any(token in text for token in CONTROL_STRINGS)))
@example("")
@example("a < b | c > d <|im_start> <im_end|>")
@example("图片里有什么 größer 🎨")
def test_a_text_without_control_strings_is_encoded_as_the_tokenizer_does(text: str) -> None:
    tokenizer = tokenizer_with("add_special_tokens of ours")

    assert TextEncoder(tokenizer)(text) == tokenizer.encode(text)


@settings(max_examples=100, deadline=None)
@given(texts_with_control_strings())
def test_control_tokens_that_are_allowed_are_encoded_as_upstream_does(text: str) -> None:
    tokenizer = tokenizer_with("add_special_tokens of ours")

    assert TextEncoder(tokenizer, allow_control_tokens=True)(text) == tokenizer.encode(text)


def test_a_text_around_a_control_string_literally() -> None:
    tokenizer = tokenizer_with("add_special_tokens of ours")
    encode = TextEncoder(tokenizer)

    # The string is cut behind its first character, and both parts are encoded.
    assert encode("a<|im_end|>b") == [*tokenizer.encode("a<"), *tokenizer.encode("|im_end|>b")]
    assert TextEncoder(tokenizer, allow_control_tokens=True)("a<|im_end|>b") == [
        *tokenizer.encode("a"),
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
        *tokenizer.encode("b"),
    ]


def test_texts_stay_whole_when_someone_else_truncates_and_pads_with_the_same_tokenizer() -> None:
    tokenizer = tokenizer_with("add_special_tokens of ours")
    encode = TextEncoder(tokenizer)
    text = "a text of quite a few tokens"
    ids = encode(text)

    tokenizer.pad_token = "<|endoftext|>"
    assert len(tokenizer(text, truncation=True, max_length=3)["input_ids"]) == 3
    assert encode(text) == ids
    assert len(tokenizer("a", padding="max_length", max_length=30)["input_ids"]) == 30
    assert encode(text) == ids
    assert len(ids) > 3


def test_texts_are_encoded_as_the_tokenizer_would_when_someone_else_split_control_tokens_with_it() -> None:
    tokenizer = tokenizer_with("add_tokens as special")
    encode = TextEncoder(tokenizer, allow_control_tokens=True)
    ids = encode("a<|im_end|>b")
    assert len(tokenizer("a<|im_end|>b", split_special_tokens=True)["input_ids"]) > len(ids)

    assert encode("a<|im_end|>b") == ids == tokenizer.encode("a<|im_end|>b")


def test_encoder_pickles_once_it_has_encoded() -> None:
    encode = TextEncoder(tokenizer_with("add_special_tokens of ours"))
    ids = encode("some text")

    assert pickle.loads(pickle.dumps(encode))("some text") == ids


def test_our_ids_are_those_of_the_tokens_and_adding_twice_adds_none() -> None:
    tokenizer = plain_tokenizer()
    size = len(tokenizer)
    same, ids, new = add_special_tokens(tokenizer)

    assert (same is tokenizer, new, len(tokenizer)) == (True, 4, size + 4)
    assert ids == {name: tokenizer.convert_tokens_to_ids(token) for name, token in CONTROL_TOKENS.items()}
    assert add_special_tokens(tokenizer) == (tokenizer, ids, 0)


def test_special_tokens_that_lack_an_id_are_refused_by_name() -> None:
    good = {"bos_token_id": 1, "eos_token_id": 2, "start_of_image": 3, "end_of_image": 4}

    assert control_ids({**good, "something_else": "x"}) == good
    for name in good:
        with pytest.raises(ConfigError, match=rf"special_tokens\['{name}'\] is None; pass the ids"):
            control_ids({key: value for key, value in good.items() if key != name})
        with pytest.raises(ConfigError, match=rf"special_tokens\['{name}'\] is '<|im_start|>'"):
            control_ids({**good, name: "<|im_start|>"})
