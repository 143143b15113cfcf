"""Conversions that are killed on the way, for the tests of their restart."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from bagel_wds.converters import Mode, ShardSettings, convert_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bagel_wds.sources import Source

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
"""What Python tells an audit hook before it does it (`open` also for what is read)."""


def count_events(out: str, convert: Callable[[], Any]) -> int:
    """How many times a conversion opens, renames or removes something in its output."""
    count: int = _in_child(_count, out, convert)
    return count


def kill_at(event: int, out: str, convert: Callable[[], Any]) -> bool:
    """Run a conversion in a process that is killed right before it touches its output for the n-th time.

    Returns:
        whether it was killed, and had not ended before.
    """
    return _run(_kill_at_event, event, out, convert) == -signal.SIGKILL


def kill_once_there_are(shards: int, out: Path, convert: Callable[[], Any]) -> bool:
    """Run a conversion in a process that is killed as soon as so many shards are seen in its output.

    Returns:
        whether it was killed, and had not ended before.
    """
    process = get_context("forkserver").Process(target=convert)
    process.start()
    while process.is_alive() and sum(1 for _ in out.glob("[!.]*.tar")) < shards:
        time.sleep(0.0005)
    process.kill()
    process.join(120)
    return process.exitcode == -signal.SIGKILL


def run_with_small_files(most: int, convert: Callable[[], Any]) -> int | None:
    """Run a conversion in a process in which no file can be larger than `most` bytes; its exit status."""
    return _run(_limit_files, most, convert)


def _run(target: Callable[..., None], *args: Any) -> int | None:
    process = get_context("forkserver").Process(target=target, args=args)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


def _in_child(target: Callable[..., None], *args: Any) -> Any:
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(sender, *args))
    process.start()
    value = receiver.recv()
    process.join(120)
    return value


def _count(sender: Any, out: str, convert: Callable[[], Any]) -> None:
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        count += _touches(event, args, out)

    sys.addaudithook(hook)
    convert()
    sender.send(count)


def _kill_at_event(at: int, out: str, convert: Callable[[], Any]) -> None:
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if _touches(event, args, out):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    convert()


def _touches(event: str, args: tuple[Any, ...], out: str) -> bool:
    return event in _EVENTS and isinstance(args[0], str | os.PathLike) and os.fspath(args[0]).startswith(out)


def _limit_files(most: int, convert: Callable[[], Any]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    convert()


class Conversion:
    """A conversion with all its settings; a callable, so that it can be sent to another process."""

    def __init__(
        self, source: Source, out: str, settings: ShardSettings, processes: int = 1, mode: Mode = Mode.CONVERT
    ) -> None:
        self.source = source
        self.out = out
        self.settings = settings
        self.processes = processes
        self.mode = mode

    def __call__(self) -> None:
        """Convert."""
        convert_source(
            self.source, self.out, settings=self.settings, processes=self.processes, mode=self.mode
        )
