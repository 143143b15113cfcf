"""Text to token ids by pieces that were met before.

A byte-level BPE tokenizer cuts a text into pieces by a regular expression (words with the space before them, digits,
punctuation) and encodes each for itself. So the ids of a piece can be kept, and most of a text is found there: Python's `re`
and a dict take a fifth of the time of the library's Rust, which keeps the place of every token in the text as well.

That is done only where it cannot differ. The cut is one of two that are known, Qwen2's and GPT-2's, and the characters are
those of `PLAIN`, whose classes do not depend on a version of Unicode, and which no normalization changes. Any other text
is the library's.
"""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import chain
from typing import Any

MAX_PIECES = 1 << 15
"""Pieces are forgotten when there are so many; as words they take some 8 MB."""
LONGEST_PIECE = 24
"""Characters; a longer one will hardly be met again."""

_LETTERS, _NUMBERS, _SPACES = "A-Za-zªµºÀ-ÖØ-öø-ÿ", "0-9²³¹¼½¾", r" \t\n\r\xa0"
PLAIN = re.compile(r"[\t\n\r -~\xa0-\xac\xae-\xff\u2013-\u201e\u2022\u2026]*")
"""ASCII, Latin-1, dashes, quotes, bullet and ellipsis; no control characters. None of them combines with another."""

_QWEN2 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
_GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""As their tokenizers have them: https://huggingface.co/Qwen/Qwen2-7B/raw/main/tokenizer.json, and GPT-2's encoder.py,
https://github.com/openai/gpt-2/blob/master/src/encoder.py. They leave out no character."""


def _over_plain(pattern: str) -> re.Pattern[str]:
    """The same cut of plain text, without the classes that `re` does not know."""
    for wide, plain in {
        r"[^\r\n\p{L}\p{N}]": rf"[^\r\n{_LETTERS}{_NUMBERS}]",
        r"[^\s\p{L}\p{N}]": f"[^{_SPACES}{_LETTERS}{_NUMBERS}]",
        r"\p{L}": f"[{_LETTERS}]",
        r"\p{N}": f"[{_NUMBERS}]",
        r"\s": f"[{_SPACES}]",
        r"\S": f"[^{_SPACES}]",
    }.items():
        pattern = pattern.replace(wide, plain)
    return re.compile(pattern)


class PieceEncoder:
    """Encodes plain text as a tokenizer does.

    Args:
        backend: a `tokenizers.Tokenizer`, which does not change any more.
        cut: gives the pieces of plain text.
    """

    def __init__(self, backend: Any, cut: re.Pattern[str]) -> None:
        self._backend = backend
        self._cut = cut
        # The library looks for these before it cuts; there may be thousands, so their beginnings have to do. What is not
        # normalized is not in plain text.
        added = (unicodedata.normalize("NFC", str(it)) for it in backend.get_added_tokens_decoder().values())
        beginnings = sorted({re.escape(content[:2]) for content in added})
        self._added = re.compile("|".join(beginnings) or r"(?!)")
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of(cls, backend: Any) -> PieceEncoder | None:
        """That of a tokenizer; None where its texts cannot be encoded so."""
        cut = _cut_of(backend)
        # By its name: this module runs without the library.
        is_bpe = type(backend.model).__name__ == "BPE" and not backend.model.dropout
        is_nfc = backend.normalizer is None or _state(backend.normalizer) == {"type": "NFC"}
        is_all = _adds_nothing(_state(backend.post_processor))
        return cls(backend, cut) if cut is not None and is_bpe and is_nfc and is_all else None

    def __call__(self, text: str) -> list[int] | None:
        """The ids of a text; None where it is not plain, or may have one of the tokenizer's added tokens in it."""
        if self._added.search(text):
            return None
        pieces = self._cut.findall(text)
        try:
            return list(chain.from_iterable(map(self._known.__getitem__, pieces)))
        except KeyError:
            # Pieces that are kept are plain, so a text that is not comes here every time.
            return self._learn(pieces) if PLAIN.fullmatch(text) else None

    def _learn(self, pieces: list[str]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            known = self._known.get(piece)
            if known is None:
                known = self._encode(piece)
                if len(self._known) >= MAX_PIECES:
                    self._known.clear()
                if len(piece) <= LONGEST_PIECE:
                    self._known[piece] = known
            ids += known
        return ids

    def _encode(self, piece: str) -> list[int]:
        # Not by the tokenizer's `encode`: whoever else uses it may just have it truncate.
        [(in_bytes, _)] = self._backend.pre_tokenizer.pre_tokenize_str(piece)
        return [token.id for token in self._backend.model.tokenize(in_bytes)]


def _cut_of(backend: Any) -> re.Pattern[str] | None:
    """How a tokenizer cuts plain text, if that is known."""
    state = _state(backend.pre_tokenizer)
    match state:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _over_plain(_GPT2)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in (_QWEN2, _GPT2):
            return _over_plain(pattern)
    return None


def _adds_nothing(state: Any) -> bool:
    """Whether a post-processor leaves the ids of a text as they are."""
    match state:
        case None | {"type": "ByteLevel"} | {"type": "TemplateProcessing", "single": [{"Sequence": _}]}:
            return True
        case {"type": "Sequence", "processors": parts}:
            return all(map(_adds_nothing, parts))
    return False


def _state(part: Any) -> Any:
    """What a part of a tokenizer is, as its JSON says; False for one that is written in Python."""
    try:
        return None if part is None else json.loads(part.__getstate__())
    except Exception:  # noqa: BLE001 - the library knows no other
        return False
