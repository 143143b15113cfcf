"""What a process and the one that decodes video for it say to each other: JSON and bytes, each with its length."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = struct.Struct("<IQ")
"""Bytes of the JSON, bytes behind it."""


def dump(info: Mapping[str, Any], num_bytes: int = 0) -> bytes:
    """A message without the bytes that follow it."""
    text = orjson.dumps(info)
    return HEAD.pack(len(text), num_bytes) + text
