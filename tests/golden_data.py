"""Reads the golden vectors in `tests/golden`, and makes this project's values out of them."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bagel_wds.config import FrameConfig, TransformConfig
from bagel_wds.rng import CallOrderDraws
from bagel_wds.tokens import add_special_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

GOLDEN = Path(__file__).parent / "golden"


def load_json(name: str) -> Any:
    """A JSON file of the golden set."""
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


@cache
def load_arrays(name: str) -> Any:
    """The arrays of an npz file of the golden set."""
    return np.load(GOLDEN / name)


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The golden tokenizer, with BAGEL's tokens added; one for all tests."""
    return add_special_tokens(plain_tokenizer())[0]


def plain_tokenizer() -> PreTrainedTokenizerBase:
    """The golden tokenizer as it is on disk."""
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(GOLDEN / "tokenizer"))
    return loaded


def transform_config(args: dict[str, Any]) -> TransformConfig:
    """A transform as a golden file names it."""
    return TransformConfig(**args)


def frame_config(args: dict[str, Any]) -> FrameConfig:
    """A frame sampler as a golden file names it."""
    return FrameConfig(**args)


def assert_bits(got: torch.Tensor, want: Any) -> None:
    """The tensors are equal in dtype, shape and every bit."""
    array = got.numpy()
    assert array.dtype == want.dtype
    assert array.shape == want.shape
    assert array.tobytes() == np.ascontiguousarray(want).tobytes()


def sha256(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes in C order."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def draws_made(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A golden draw log without the choices that were tried on nothing, which draw nothing."""
    return [entry for entry in log if entry.get("n") != 0]


class LoggedDraws(CallOrderDraws):
    """Draws in call order, with the log that the golden files hold."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.log: list[dict[str, Any]] = []

    def random(self, purpose: str) -> float:
        """Log a float of Python's generator."""
        value = super().random(purpose)
        self.log.append({"fn": "random.random", "value": value})
        return value

    def choice(self, n: int, purpose: str) -> int:
        """Log a choice."""
        index = super().choice(n, purpose)
        self.log.append({"fn": "random.choice", "n": n, "index": index})
        return index

    def randint(self, low: int, high: int, purpose: str) -> int:
        """Log an integer of NumPy's generator."""
        value = super().randint(low, high, purpose)
        self.log.append({"fn": "np.random.randint", "low": low, "high": high, "value": value})
        return value

    def normal(self, purpose: str) -> float:
        """Log a normal number of NumPy's generator."""
        value = super().normal(purpose)
        self.log.append({"fn": "np.random.randn", "value": value})
        return value

    def permutation(self, n: int, purpose: str) -> Sequence[int]:
        """Log a permutation of NumPy's generator."""
        value = super().permutation(n, purpose)
        self.log.append({"fn": "np.random.permutation", "n": n, "value": list(value)})
        return value

    def take_log(self) -> list[dict[str, Any]]:
        """The log since the last time."""
        log, self.log = self.log, []
        return log

    def peek(self) -> dict[str, float]:
        """What both generators would give next, without consuming."""
        python, numpy = self.python.getstate(), self.numpy.get_state()
        following = {
            "python_next_random": self.python.random(),
            "numpy_next_randn": float(self.numpy.randn()),
        }
        self.python.setstate(python)
        self.numpy.set_state(numpy)
        return following
