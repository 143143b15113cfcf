"""Worker processes that end when the process that started them does."""

from __future__ import annotations

import os
from multiprocessing import parent_process
from multiprocessing.connection import wait
from threading import Thread


def end_with_parent() -> None:
    """Have this process end when the one that started it ends, however that ends; does nothing in a main process.

    The system's own parent is another one under forkserver, which outlives a trainer or a conversion that is killed; its
    workers would wait for work for ever.
    """
    parent = parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
