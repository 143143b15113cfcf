"""Texts encoded by pieces that were met before: as the library encodes them, or not at all."""

from __future__ import annotations

import re
import sys
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from golden_data import plain_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from bagel_wds import pieces
from bagel_wds.pieces import PLAIN, PieceEncoder

if TYPE_CHECKING:
    from collections.abc import Callable

QWEN2 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(pieces._QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
PLAIN_CHARACTERS = [char for char in map(chr, range(sys.maxunicode + 1)) if PLAIN.fullmatch(char)]
TYPICAL = "aZ\u00e9\u00dfsS09\u00b2\u00bd '\u2019.,<|_\u2013\u00a0\t\n\r"
"""Characters of every class that a cut tells apart, and those of the contractions."""

TEXTS = """
I've seen what they're doing; we'll say it's fine, SHE'D say. 'twas 3.14% of 1,000,000 -- don't!!
   indented\n\n\n  and  broken \r\n lines\ttabs   \n
Gr\xf6\xdfe: 2\xbd m\xb2 \u2014 \u201equoted\u201c \u2018like\u2019 \u201cthis\u201d\u2026 na\xefve caf\xe9, \xbfqu\xe9?
<ref>the cat</ref> at (12, 34)-(56, 78) {"json": [true, null]}
"""


def trained(pre_tokenizer: Any) -> Tokenizer:
    """A byte-level BPE tokenizer with a few hundred merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXTS] * 4, trainer)
    return tokenizer


def golden() -> Tokenizer:
    """The golden tokenizer, which is of Qwen2's class."""
    backend: Tokenizer = plain_tokenizer().backend_tokenizer
    return backend


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "golden": golden,
    "qwen2": lambda: trained(QWEN2),
    "gpt2": lambda: trained(GPT2),
}


@cache
def tokenizer(name: str) -> Tokenizer:
    """One of the three."""
    return MAKERS[name]()


@cache
def encoder(name: str) -> PieceEncoder:
    """Its encoder, which all examples have in common, as the streams of a process do."""
    made = PieceEncoder.of(tokenizer(name))
    assert made is not None
    return made


def plain_texts() -> st.SearchStrategy[str]:
    """Plain text that meets every alternative of a cut."""
    words = st.sampled_from(
        ["the", "cat", "'s", "'LL", "don't", "12", " ", "  ", "\n", "\r\n", " \n ", "...", "\u2014"]
    )
    return st.lists(words | st.text(st.sampled_from(PLAIN_CHARACTERS), max_size=4), max_size=30).map("".join)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=200, deadline=None)
@given(text=plain_texts())
@example(TEXTS)
@example("")
def test_plain_text_is_encoded_as_the_library_does(name: str, text: str) -> None:
    assert encoder(name)(text) == tokenizer(name).encode(text).ids


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=200, deadline=None)
@given(text=st.lists(plain_texts() | st.text(max_size=4), max_size=4).map("".join))
@example("e\u0301 is no \u00e9")
@example("'\u017f and '\u212a")
@example("\u1100\u1161")
@example("a\x1cb\x0bc\x85d\u2028e")
@example("soft\u00adhyphen")
def test_other_text_is_left_to_the_library(name: str, text: str) -> None:
    ids = encoder(name)(text)

    assert ids == (tokenizer(name).encode(text).ids if PLAIN.fullmatch(text) else None)


@pytest.mark.parametrize(("name", "cut"), [("qwen2", pieces._QWEN2), ("gpt2", pieces._GPT2)])
def test_plain_text_is_cut_as_the_library_does(name: str, cut: str) -> None:
    ours = pieces._over_plain(cut)
    whole = pre_tokenizers.Split(Regex(cut), "isolated")
    assert len(PLAIN_CHARACTERS) == 3 + 95 + 95 + 12 + 2

    # Each two characters next to each other, and each four typical ones.
    rows = ["".join(f"{a}{b}x" for b in PLAIN_CHARACTERS) for a in PLAIN_CHARACTERS]
    rows += [f"{a}{b}{c}{d}" for a, b, c, d in product(TYPICAL, repeat=4)]
    for text in rows:
        assert ours.findall(text) == [piece for piece, _ in whole.pre_tokenize_str(text)]


def test_no_plain_character_is_changed_or_combines() -> None:
    nfc = normalizers.NFC()
    for first in PLAIN_CHARACTERS:
        text = "".join(f"{first}{second}" for second in PLAIN_CHARACTERS)
        assert nfc.normalize_str(text) == text


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("<obj>", normalized=False),
        AddedToken("<obj>", special=True),
        AddedToken("<obj>", lstrip=True, rstrip=True),
        AddedToken("obj", single_word=True, normalized=False),
    ],
)
def test_text_that_may_have_an_added_token_in_it_is_left_to_the_library(added: AddedToken) -> None:
    one = trained(QWEN2)
    one.add_tokens([added])
    encode = PieceEncoder.of(one)

    assert encode is not None
    assert encode("an <obj> here") is None
    assert encode("an <object") is None
    assert encode("an <o j> or <b>") == (
        None if added.content == "<obj>" else one.encode("an <o j> or <b>").ids
    )
    assert encode("a < b, o > b") == one.encode("a < b, o > b").ids


def test_an_added_token_that_is_normalized_is_found_in_normal_text() -> None:
    one = trained(QWEN2)
    one.normalizer = normalizers.NFC()
    one.add_tokens([AddedToken("cafe\u0301", normalized=True)])
    encode = PieceEncoder.of(one)

    assert encode is not None
    assert one.encode("a caf\u00e9").ids[-1] == one.token_to_id("cafe\u0301")
    assert encode("a caf\u00e9") is None


def changed(**parts: Any) -> Tokenizer:
    """A tokenizer with other parts."""
    one = trained(QWEN2)
    for name, part in parts.items():
        setattr(one, name, part)
    return one


def with_prefix() -> Tokenizer:
    return changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))


def with_another_cut() -> Tokenizer:
    cut = pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), "isolated")
    return changed(
        pre_tokenizer=pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    )


def with_dropout() -> Tokenizer:
    one = trained(QWEN2)
    one.model.dropout = 0.5
    return one


def with_a_token_of_its_own() -> Tokenizer:
    one = trained(QWEN2)
    one.add_special_tokens(["<s>"])
    one.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", one.token_to_id("<s>"))]
    )
    return one


def written_in_python() -> Tokenizer:
    class Splitter:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, piece: piece.split(" ", "removed"))

    return changed(pre_tokenizer=pre_tokenizers.PreTokenizer.custom(Splitter()))


def of_words() -> Tokenizer:
    one = Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?"))
    one.pre_tokenizer = QWEN2
    return one


@pytest.mark.parametrize(
    "make",
    [
        with_prefix,
        with_another_cut,
        with_dropout,
        with_a_token_of_its_own,
        of_words,
        written_in_python,
        lambda: changed(post_processor=processors.TemplateProcessing("$A $A")),
        lambda: changed(
            post_processor=processors.Sequence(
                [processors.ByteLevel(), processors.TemplateProcessing("$A $A")]
            )
        ),
        lambda: changed(normalizer=normalizers.NFKC()),
        lambda: changed(normalizer=normalizers.Lowercase()),
        lambda: changed(pre_tokenizer=pre_tokenizers.Sequence([GPT2, GPT2])),
        lambda: Tokenizer(models.BPE()),
    ],
)
def test_a_tokenizer_whose_texts_cannot_be_encoded_so_has_no_encoder(make: Callable[[], Tokenizer]) -> None:
    assert PieceEncoder.of(make()) is None


@pytest.mark.parametrize(
    "post_processor",
    [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing("$A"),
        processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing("$A")]),
    ],
)
def test_a_post_processor_that_adds_nothing_is_no_hindrance(post_processor: Any) -> None:
    one = changed(post_processor=post_processor)
    encode = PieceEncoder.of(one)

    assert encode is not None
    assert encode(TEXTS) == one.encode(TEXTS).ids


def test_pieces_that_are_met_while_another_truncates_and_pads_are_whole() -> None:
    one = trained(QWEN2)
    encode = PieceEncoder.of(one)
    expected = one.encode(TEXTS).ids
    one.enable_truncation(1)
    one.enable_padding(length=50)

    assert encode is not None
    assert len(one.encode(TEXTS).ids) == 50
    assert encode(TEXTS) == expected


def test_pieces_are_kept_up_to_a_number_and_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECES", 3)
    one = trained(QWEN2)
    encode = PieceEncoder(one, re.compile(pieces._over_plain(pieces._QWEN2)))
    long = "x" * (pieces.LONGEST_PIECE + 1)
    for text in ("a b c", "a b c d e f", f"a {long} b", long, "a b c d e f"):
        assert encode(text) == one.encode(text).ids
        assert len(encode._known) <= 3
        assert max(map(len, encode._known)) <= pieces.LONGEST_PIECE
    assert list(encode._known) == [" d", " e", " f"]


def test_what_was_given_out_can_be_changed() -> None:
    one = trained(QWEN2)
    encode = PieceEncoder.of(one)
    assert encode is not None
    for _ in range(3):
        ids = encode("word")
        assert ids == one.encode("word").ids
        ids.append(7)
