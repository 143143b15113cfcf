"""The one home of the tokenizer: BAGEL's control tokens, and text that can never become one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bagel_wds.errors import ConfigError
from bagel_wds.pieces import PieceEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL_TOKENS = {
    "bos_token_id": "<|im_start|>",
    "eos_token_id": "<|im_end|>",
    "start_of_image": "<|vision_start|>",
    "end_of_image": "<|vision_end|>",
}
"""BAGEL's four, in the order in which they are added, by the names that the model's code uses."""

_PROBES = ("", " a  photo of\n1234 cats, né à 東京", "".join(CONTROL_TOKENS.values()))
"""Texts by which two ways of encoding are compared."""

_CONTROL = re.compile("|".join(map(re.escape, [*CONTROL_TOKENS.values(), "<|endoftext|>"])))


def add_special_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[PreTrainedTokenizerBase, dict[str, int], int]:
    """Add BAGEL's four control tokens to a Qwen2 tokenizer, those that it has not got.

    Returns:
        The tokenizer (changed in place), the ids under the names `bos_token_id`, `eos_token_id`, `start_of_image`
        and `end_of_image`, and how many tokens were new.
    """
    known = tokenizer.get_vocab()
    missing = [token for token in CONTROL_TOKENS.values() if token not in known]
    num_new = tokenizer.add_tokens(missing) if missing else 0
    ids = {name: _id_of(tokenizer, token) for name, token in CONTROL_TOKENS.items()}
    return tokenizer, ids, num_new


def control_ids(special_tokens: Mapping[str, object]) -> dict[str, int]:
    """The four ids out of what a user passes as `special_tokens`.

    Raises:
        ConfigError: if one is missing or no integer.
    """
    if not isinstance(special_tokens, Mapping):
        raise ConfigError(
            f"special_tokens is {type(special_tokens).__name__}; pass the ids, the second value that add_special_tokens returns"
        )
    ids = {}
    for name in CONTROL_TOKENS:
        token = special_tokens.get(name)
        if not isinstance(token, int):
            raise ConfigError(
                f"special_tokens[{name!r}] is {token!r}; pass the ids that add_special_tokens returns"
            )
        ids[name] = token
    return ids


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, ids: Mapping[str, int]) -> None:
    """Refuse ids that are not those of the tokenizer's control tokens: a model would be trained on other tokens.

    Raises:
        ConfigError: naming the token and both ids.
    """
    known = tokenizer.get_vocab()
    for name, token in CONTROL_TOKENS.items():
        if known.get(token) != ids[name]:
            raise ConfigError(
                f"special_tokens[{name!r}] is {ids[name]}, but {token} is {known.get(token, 'no token')} in the tokenizer; "
                "pass tokenizer and ids as add_special_tokens returns them"
            )


def _id_of(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(found, int):
        raise ConfigError(
            f"the tokenizer gives {found!r} for {token!r}; it must take added tokens, as Qwen2's does"
        )
    return found


@dataclass(frozen=True)
class TextEncoder:
    """Text to token ids. It keeps what it has met, so one is enough for all streams of a process.

    Attributes:
        tokenizer: one that `add_special_tokens` has seen, and that gets no further tokens.
        allow_control_tokens: encode a control string in the text to its id, as upstream does. By default it is
            cut behind its first character and both parts are encoded, so that it stays text however the token was
            added.
    """

    tokenizer: PreTrainedTokenizerBase
    allow_control_tokens: bool = False

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, without bos and eos."""
        cuts = [match.start() + 1 for match in _CONTROL.finditer(text)]
        if self.allow_control_tokens or not cuts:
            return self._encode(text)
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [token for part in parts for token in self._encode(part)]

    def has_id(self, token: int) -> bool:
        """Whether the tokenizer has a token id; of a slow one, which would take long to tell, any from 0 on."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return 0 <= token < 2**32 and (backend is None or backend.id_to_token(token) is not None)

    def _encode(self, text: str) -> list[int]:
        # These do not depend on what the tokenizer is set to do at the moment.
        by_pieces = None if self._pieces is None else self._pieces(text)
        if by_pieces is not None:
            return by_pieces
        backend = self._backend
        # Whoever else uses the tokenizer may have set these three, and its own `encode` sets them anew.
        if (
            backend is not None
            and backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self.tokenizer.split_special_tokens
        ):
            return list(backend.encode(text).ids)
        return list(self.tokenizer.encode(text))

    @cached_property
    def _pieces(self) -> PieceEncoder | None:
        return None if self._backend is None else PieceEncoder.of(self._backend)

    @cached_property
    def _backend(self) -> Any:
        """The library behind a fast tokenizer, asked directly: what lies between takes longer than the encoding.

        None where that would not be the same: for a slow tokenizer, or one that adds something of its own.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        same = all(list(self.tokenizer.encode(text)) == backend.encode(text).ids for text in _PROBES)
        return backend if same else None
