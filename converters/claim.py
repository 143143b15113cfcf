"""Being the one run that converts into a folder: two never write one shard.

On a disk a process holds a lock file, which the system takes from it when it ends. A bucket has no locks, so a run claims
the folder, and with it the name of every shard, by a small object that only one can create:

    OUT/.conversion/locks/000001    who holds it, and how often that was renewed

Why that is sound. A claim is the object of the highest number. To take over from a run that is dead, the next number is
created, which the store lets one run do alone; nobody but its creator writes to it. Dead is a run whose process is gone,
where that can be seen from this machine, and else one that did not renew its claim for `PATIENCE_SECONDS` while it was
looked at, by the clock of the one that looks: no clock is compared with another. A run that only seemed dead finds the
higher number: it, and each of its workers, looks before a shard or sidecar gets its name (`Claim.confirm`), and stops.
What is left is a request that was under way in the moment between. It gives a shard the bytes that the new run gives it
too, but for one that overwrites with other settings; that one compares all sizes at its end, and `bagel-wds verify` the
checksums.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import orjson
from filelock import FileLock, Timeout

from bagel_wds import storage
from bagel_wds.ahead import in_thread
from bagel_wds.errors import ConfigError

from .marks import LOCK_NAME, LOCKS_FOLDER, MARKS_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
"""A claim in a bucket is renewed so often."""

PATIENCE_SECONDS = 60.0
"""A claim that is not renewed for so long is that of a dead run."""


_THREAD = "bagel-claim-"

RELEASE_SECONDS = 10.0
"""So long may it take to give up a claim; one that stays is that of a dead run then."""


@dataclass(frozen=True)
class Claim:
    """That a run is the one that converts into a folder of a bucket; its workers have it too.

    Attributes:
        out: the folder.
        number: of the claim.
        run: who made it.
    """

    out: str
    number: int
    run: str

    def confirm(self) -> None:
        """Make sure that it still stands.

        Raises:
            ConfigError: if another run took over.
        """
        newest = _newest(self.out)
        if newest is None or (newest.number, newest.run) != (self.number, self.run):
            raise ConfigError(
                f"{self.out}: another run took over this folder, since this one gave no sign of life for "
                f"{PATIENCE_SECONDS:.0f} seconds; what is finished is kept, and the other one goes on with it"
            )


@dataclass(frozen=True)
class _Holder:
    """What a claim in a bucket says.

    Attributes:
        number: of the claim.
        run: who made it.
        renewed: how often it was renewed.
        process: of the run, see `_this_process`.
    """

    number: int
    run: str
    renewed: int
    process: tuple[str, ...] | None


@contextmanager
def hold_output(
    out: str, *, renew_seconds: float = RENEW_SECONDS, patience_seconds: float = PATIENCE_SECONDS
) -> Iterator[Claim | None]:
    """Be the one run that converts into a folder, inside the block; None is given where a lock on the disk holds it.

    Args:
        out: the folder.
        renew_seconds: how often a claim in a bucket is renewed.
        patience_seconds: how long one of another run may stay as it is before that run counts as dead.

    Raises:
        ConfigError: if another run is at it.
    """
    if storage.is_local(out):
        with _lock(out):
            yield None
        return
    run = secrets.token_hex(8)
    held: list[Claim] = []
    try:
        with _renewing(run, held, renew_seconds):
            held.append(_claim(out, run, renew_seconds, patience_seconds))
            yield held[0]
    finally:
        for claim in held:
            with suppress(OSError, TimeoutError):
                in_thread(partial(_release, claim)).result(RELEASE_SECONDS)


@contextmanager
def _lock(out: str) -> Iterator[None]:
    lock = storage.local_path(storage.join(out, f"{MARKS_FOLDER}/{LOCK_NAME}"))
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout as error:
        raise _busy(out, "another process") from error


def _busy(out: str, who: str) -> ConfigError:
    return ConfigError(f"{out}: {who} is converting into this folder; wait for it, or give another folder")


def _claim(out: str, run: str, renew_seconds: float, patience_seconds: float) -> Claim:
    held = _newest(out)
    if held is not None:
        held = _outlive(out, held, renew_seconds, patience_seconds)
    claim = Claim(out, 1 if held is None else held.number + 1, run)
    if not storage.create(_url(out, claim.number), _content(claim.run, 0)):
        raise _busy(out, "another run")
    newest = _newest(out)
    if newest is None or newest.run != claim.run:
        _release(claim)
        raise _busy(out, "another run")
    return claim


def _outlive(out: str, held: _Holder, renew_seconds: float, patience_seconds: float) -> _Holder | None:
    """The claim of a run that is dead; None if it was given up meanwhile.

    Raises:
        ConfigError: if the run lives.
    """
    alive = _is_alive(held.process)
    if alive and held.process == _this_process() and not _is_running(held.run):
        # It ended in this process, which could not reach the store then to say so.
        alive = False
    if alive and held.process is not None:
        raise _busy(out, f"another process (id {held.process[-2]})")
    if alive is not None:
        return held
    logger.warning(
        "%s: a run that converts into this folder was there before; it counts as dead if it gives no sign of life for %g "
        "seconds",
        out,
        patience_seconds,
    )
    deadline = time.monotonic() + patience_seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(renew_seconds, left))
        now = _newest(out)
        if now is None:
            return None
        if now != held:
            raise _busy(out, "another run")
    return held


def _is_running(run: str) -> bool:
    """Whether it is a run of this process that has not ended."""
    return any(thread.name == _THREAD + run for thread in threading.enumerate())


@contextmanager
def _renewing(run: str, held: list[Claim], seconds: float) -> Iterator[None]:
    """Show meanwhile that a run lives: by a thread, and by renewing its claim once it is held."""
    ended = Event()

    def renew() -> None:
        renewed = 0
        while not ended.wait(seconds):
            renewed += 1
            if not held:
                continue
            (claim,) = held
            # A store that cannot be reached now is tried again; who took over meanwhile is not to be disturbed.
            with suppress(OSError):
                try:
                    claim.confirm()
                except ConfigError:
                    return
                storage.write_bytes(_url(claim.out, claim.number), _content(claim.run, renewed))

    thread = Thread(target=renew, name=_THREAD + run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(RELEASE_SECONDS)


def _release(claim: Claim) -> None:
    """Give up a claim, and remove those before it; one of this number that another run made stays."""
    numbers = [number for number in _numbers(claim.out) if number < claim.number]
    holder = _read(claim.out, claim.number)
    if holder is None or holder.run != claim.run:
        return
    storage.remove_files(_folder(claim.out), [_name(number) for number in numbers])
    storage.remove(_url(claim.out, claim.number))


def _newest(out: str) -> _Holder | None:
    """The claim of the highest number; None if there is none."""
    number = max(_numbers(out), default=None)
    return None if number is None else _read(out, number)


def _numbers(out: str) -> list[int]:
    return [int(name) for name in storage.list_folder(_folder(out)) if re.fullmatch(r"\d{6,}", name)]


def _read(out: str, number: int) -> _Holder | None:
    url = _url(out, number)
    try:
        value: dict[str, Any] = orjson.loads(storage.read_bytes(url))
        process = value["process"]
        return _Holder(number, value["run"], value["renewed"], None if process is None else tuple(process))
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{url}: no claim that this version of bagel-wds makes ({type(error).__name__}: {error}); remove it if no run "
            "converts into this folder"
        ) from error


def _content(run: str, renewed: int) -> bytes:
    return orjson.dumps({"run": run, "renewed": renewed, "process": _this_process()})


def _folder(out: str) -> str:
    return storage.join(out, f"{MARKS_FOLDER}/{LOCKS_FOLDER}")


def _url(out: str, number: int) -> str:
    return storage.join(_folder(out), _name(number))


def _name(number: int) -> str:
    return f"{number:06d}"


def _this_process() -> tuple[str, ...] | None:
    """What tells this process from every other: boot and process namespace of its machine, user, id, when it was started.

    None where the system does not say.
    """
    pid = str(os.getpid())
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        started = _start_of(pid)
    except OSError:
        return None
    # Processes of other users may be hidden.
    return None if started is None else (boot, namespace, str(os.getuid()), pid, started)


def _is_alive(process: tuple[str, ...] | None) -> bool | None:
    """Whether a process runs on this machine; None if that cannot be told from here."""
    this = _this_process()
    if process is None or this is None or process[:3] != this[:3]:
        return None
    try:
        return _start_of(process[3]) == process[4]
    except OSError:
        return False


def _start_of(pid: str) -> str | None:
    """When a process was started, in the clock ticks of its machine; None for one that has ended.

    Raises:
        OSError: if there is none.
    """
    # The second field is the program's name in brackets, which may hold anything.
    fields = (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    )
    return None if fields[0] in "ZX" else fields[19]
