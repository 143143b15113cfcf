"""What the commands share: errors in one line, and sizes as people write them."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bagel_wds.errors import ConfigError, QuarantineLimitError, ShardError

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


@contextmanager
def clean_errors() -> Iterator[None]:
    """End the command with one line on standard error, and status 2, where settings, shards or the disk will not do."""
    try:
        yield
    except (ConfigError, QuarantineLimitError, ShardError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader of a pipe has gone, as `head` does; typer knows how to end then.
            raise
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)  # noqa: T201 - this is the console
        raise SystemExit(2) from None


def parse_size(text: str) -> int:
    """Bytes of a size such as `256MB` (256 million), `256MiB` or `1048576`.

    Raises:
        ConfigError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match.group(2) not in _UNITS:
        raise ConfigError(
            f"{text!r} is no size; write bytes, or a number with KB, MB, GB, KiB, MiB or GiB, for example 256MB"
        )
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def format_size(num_bytes: int) -> str:
    """A size for people: three digits and a unit of thousands.

    >>> format_size(4_097_024)
    '4.1 MB'
    """
    size = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
