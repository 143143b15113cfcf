"""Video decoded in a process of its own, so that a clip on which native code is stuck, or dies, costs that clip alone.

The process is started when the first clip needs it, answers one request after another, and ends with the process that
started it. One that did not answer in time is killed; the next clip gets a new one. It is started as a program, not by
`multiprocessing`: a DataLoader's worker may have no children of that kind.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bagel_wds.clip_messages import HEAD, dump
from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]

START_SECONDS = 120.0
"""A process that is not up by then will not come."""

_PIPE_BYTES = 1 << 20
"""What a pipe may hold, where the system lets that be set: a frame then passes in fewer steps."""


class ClipDecoder:
    """Asks processes about clips, as many at once as there are threads that ask.

    Args:
        command: what starts a process; None is `bagel_wds.video`.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = tuple(command or (sys.executable, "-P", "-m", "bagel_wds.video"))
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def probe(
        self, data: bytes, *, check_end: bool = False, check_frames: bool = False, seconds: float
    ) -> dict[str, Any]:
        """`video.probe`, which has the other arguments, within so many seconds.

        Raises:
            BadSample: as there, and `video_timeout`.
        """
        request = {"check_end": check_end, "check_frames": check_frames}
        for answer, _ in self._ask(request, data, seconds):
            return answer
        raise AssertionError("a request has an answer")

    def frames(
        self, data: bytes, numbers: Sequence[int], *, sequential: bool, seconds: float
    ) -> Iterator[tuple[int, Levels]]:
        """`video.decode_frames`; what is not taken ends the process.

        Args:
            data: the whole file.
            numbers: of the frames, strictly rising.
            sequential: as `probe` gave it.
            seconds: the limit for all of them.

        Raises:
            BadSample: as there, and `video_timeout`.
        """
        request = {"numbers": list(numbers), "sequential": sequential}
        for answer, pixels in self._ask(request, data, seconds):
            if "frame" in answer:
                yield answer["frame"], pixels.reshape(answer["shape"])

    def _ask(
        self, request: Mapping[str, Any], data: bytes, seconds: float
    ) -> Iterator[tuple[dict[str, Any], Levels]]:
        """The answers to a request, the last of them without `frame`.

        A process that was idle may be about to end, for no fault of the clip; then one that was just started is asked.
        """
        deadline = time.monotonic() + seconds
        process = self._take()
        answers = self._ask_one(process, request, data, seconds, deadline)
        try:
            first = next(answers)
        except _GoneError:
            if not process.was_asked_before:
                raise _ended(process) from None
            process = _Process(self._command)
            answers = self._ask_one(process, request, data, seconds, deadline)
            try:
                first = next(answers)
            except _GoneError:
                raise _ended(process) from None
        try:
            yield first
            yield from answers
        except _GoneError:
            raise _ended(process) from None
        finally:
            answers.close()

    def _ask_one(
        self, process: _Process, request: Mapping[str, Any], data: bytes, seconds: float, deadline: float
    ) -> Generator[tuple[dict[str, Any], Levels], None, None]:
        process.is_idle = False
        try:
            process.send(dump({**request, "seconds": seconds}, len(data)), deadline)
            process.send(data, deadline)
            while True:
                answer, pixels = process.receive(deadline)
                process.is_idle = "frame" not in answer
                process.was_asked_before |= process.is_idle
                if "bad" in answer:
                    raise BadSample(Reason(answer["bad"]), answer["detail"])
                yield answer, pixels
                if process.is_idle:
                    return
        except _TooLateError as late:
            raise BadSample(Reason.VIDEO_TIMEOUT, f"not decoded within {seconds:g} s, and ended") from late
        except BrokenPipeError as gone:
            raise _GoneError from gone
        finally:
            self._give_back(process)

    def _take(self) -> _Process:
        with self._lock:
            if self._pid != os.getpid():
                # A fork: those are its parent's.
                self._idle, self._pid = [], os.getpid()
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
        return _Process(self._command)

    def _give_back(self, process: _Process) -> None:
        if not process.is_idle:
            process.end()
            return
        with self._lock:
            self._idle.append(process)

    def close(self) -> None:
        """End the processes; the next request starts one."""
        with self._lock:
            while self._idle:
                self._idle.pop().end()


@cache
def clip_decoder() -> ClipDecoder:
    """The one that all clips of this process share."""
    return ClipDecoder()


class _TooLateError(Exception):
    """The limit has passed."""


class _GoneError(Exception):
    """The process has ended."""


def _ended(process: _Process) -> BadSample:
    return BadSample(Reason.VIDEO_UNREADABLE, f"the process that decodes it ended, {process.how_it_ended()}")


class _Process:
    """A process, and the pipes to and from it.

    Attributes:
        is_idle: it waits for a request.
        was_asked_before: it has answered one to its end.
    """

    def __init__(self, command: Sequence[str]) -> None:
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        self._popen = subprocess.Popen(  # noqa: S603 - our own module, and no shell
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self._popen.stdin is not None  # noqa: S101 - asked for above
        assert self._popen.stdout is not None  # noqa: S101
        self._to, self._from = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        for pipe in (self._to, self._from):
            os.set_blocking(pipe, False)
            _widen(pipe)
        self.end = weakref.finalize(self, _end, self._popen, os.getpid())
        self.is_idle = self.was_asked_before = False
        try:
            self.receive(time.monotonic() + START_SECONDS)
        except (_TooLateError, _GoneError) as error:
            self.end()
            raise RuntimeError(
                f"the process that decodes video did not start, {self.how_it_ended()}; "
                f"`{' '.join(command)}` on the command line shows why"
            ) from error
        self.is_idle = True

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def how_it_ended(self) -> str:
        """Its signal or exit status, once that is known."""
        try:
            status = self._popen.wait(1)
        except subprocess.TimeoutExpired:
            return "its pipe closed"
        return f"by signal {-status}" if status < 0 else f"with exit status {status}"

    def send(self, data: bytes, deadline: float) -> None:
        """Write all of it."""
        view = memoryview(data)
        while view:
            _wait(self._to, select.POLLOUT, deadline)
            view = view[os.write(self._to, view) :]

    def receive(self, deadline: float) -> tuple[dict[str, Any], Levels]:
        """The next message."""
        text_bytes, data_bytes = HEAD.unpack(self._read(HEAD.size, deadline).data)
        info: dict[str, Any] = json.loads(self._read(text_bytes, deadline).tobytes())
        return info, self._read(data_bytes, deadline)

    def _read(self, num_bytes: int, deadline: float) -> Levels:
        data = np.empty(num_bytes, np.uint8)
        view = data.data
        while view:
            _wait(self._from, select.POLLIN, deadline)
            count = os.readv(self._from, [view])
            if not count:
                raise _GoneError
            view = view[count:]
        return data


def _wait(pipe: int, event: int, deadline: float) -> None:
    """Wait until a pipe can be read or written; also returns when its other end is closed."""
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise _TooLateError


def _widen(pipe: int) -> None:
    # Only Linux has it, and there a user may have used up what is granted.
    try:
        import fcntl  # noqa: PLC0415 - not everywhere

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        return


def _end(popen: subprocess.Popen[bytes], pid: int) -> None:
    """End a process that this one started; of one that its parent started, a fork leaves its hands."""
    if pid != os.getpid():
        return
    popen.kill()
    for pipe in (popen.stdin, popen.stdout):
        if pipe:
            pipe.close()
    popen.wait()
