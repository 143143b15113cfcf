"""`python -m converters`: the command `bagel-wds convert` from a checkout."""

from __future__ import annotations

import typer

from .cli import convert

if __name__ == "__main__":
    typer.run(convert)
