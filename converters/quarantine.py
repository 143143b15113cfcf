"""How many rows a conversion may leave out."""

from __future__ import annotations

from dataclasses import dataclass

from bagel_wds.errors import ConfigError


@dataclass(frozen=True)
class Limit:
    """A number of rows, or a share of them.

    Attributes:
        rows: at most so many.
        percent: at most this share of all rows.
    """

    rows: int | None = None
    percent: float | None = None

    def of(self, num_rows: int) -> float:
        """How many of so many rows may be left out."""
        return num_rows * self.percent / 100 if self.percent is not None else float(self.rows or 0)

    def __str__(self) -> str:
        return f"{self.percent:g} %" if self.percent is not None else str(self.rows)


def parse_limit(text: str) -> Limit:
    """A limit such as `1%`, `0.1%` or `100`.

    Raises:
        ConfigError: for anything else.
    """
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        if percent and 0 <= float(number) <= 100:
            return Limit(percent=float(number))
        if not percent and int(number) >= 0:
            return Limit(rows=int(number))
    except ValueError:
        pass
    raise ConfigError(f"{text!r} is no limit; write a share of the rows, for example 1%, or a number of them")
