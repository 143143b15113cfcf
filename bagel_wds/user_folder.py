"""Where a user's caches lie."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's own folder for caches: `XDG_CACHE_HOME`, else `~/.cache`.

    Raises:
        RuntimeError: if the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
