"""A clip that native code is stuck on, or dies of, costs that clip alone; what decodes ends with what asked."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from video_factory import clip, seen

from bagel_wds import video
from bagel_wds.clip_process import ClipDecoder, clip_decoder
from bagel_wds.clips import ClipHeader, EncodedClip
from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STUCK = "import bagel_wds.video as video, threading; video.{} = lambda *a, **k: threading.Event().wait(); video.main()"
"""A process like the real one, in which one function never returns."""


@pytest.fixture
def decoder() -> Iterator[ClipDecoder]:
    made = ClipDecoder()
    yield made
    made.close()


def stuck_in(function: str) -> ClipDecoder:
    return ClipDecoder([sys.executable, "-c", STUCK.format(function)])


def pids_of(decoder: ClipDecoder) -> list[int]:
    return [process._popen.pid for process in decoder._idle]


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def frames(decoder: ClipDecoder, data: bytes, numbers: list[int], seconds: float = 60) -> list[int]:
    return seen([pixels for _, pixels in decoder.frames(data, numbers, sequential=False, seconds=seconds)])


def test_a_process_answers_as_the_functions_do_and_is_used_again(decoder: ClipDecoder) -> None:
    data = clip()

    assert decoder.probe(data, check_end=True, check_frames=True, seconds=60) == video.probe(data)
    (pid,) = pids_of(decoder)
    assert frames(decoder, data, [0, 7, 29]) == [0, 7, 29]
    with pytest.raises(BadSample, match="neither mp4, mov, mkv, webm nor avi") as bad:
        decoder.probe(b"<html>", seconds=60)
    assert bad.value.reason is Reason.VIDEO_UNREADABLE
    # A verdict costs no process.
    assert frames(decoder, data, [3]) == [3]
    assert pids_of(decoder) == [pid]


@pytest.mark.parametrize("function", ["probe", "decode_frames"])
def test_c45_a_decoder_that_never_returns_is_ended_and_the_next_clip_is_decoded(function: str) -> None:
    decoder = stuck_in(function)
    ask = partial(decoder.probe, clip()) if function == "probe" else partial(frames, decoder, clip(), [1])
    with pytest.raises(BadSample, match=r"not decoded within 0\.3 s") as bad:
        ask(seconds=0.3)

    assert bad.value.reason is Reason.VIDEO_TIMEOUT
    assert pids_of(decoder) == []
    # The other function is whole, in a process of its own.
    assert video.probe(clip())["frames"] == 30
    if function == "probe":
        assert frames(decoder, clip(), [4]) == [4]
    else:
        assert decoder.probe(clip(), seconds=60)["frames"] == 30
    decoder.close()


def test_a_process_that_reads_nothing_does_not_hang_the_one_that_writes() -> None:
    # More than a pipe holds; only the greeting is answered.
    script = (
        "import sys, threading; from bagel_wds.clip_messages import dump; "
        "sys.stdout.buffer.write(dump({'ready': True})); sys.stdout.flush(); threading.Event().wait()"
    )
    with pytest.raises(BadSample) as bad:
        ClipDecoder([sys.executable, "-c", script]).probe(bytes(8 << 20), seconds=0.3)

    assert bad.value.reason is Reason.VIDEO_TIMEOUT


def test_a_process_that_dies_is_a_bad_sample_and_is_replaced() -> None:
    script = "import bagel_wds.video as v, os; v.probe = lambda *a, **k: os.kill(os.getpid(), 11); v.main()"
    decoder = ClipDecoder([sys.executable, "-c", script])
    with pytest.raises(BadSample, match="ended, by signal 11") as bad:
        decoder.probe(clip(), seconds=60)

    assert bad.value.reason is Reason.VIDEO_UNREADABLE
    assert frames(decoder, clip(), [4]) == [4]
    decoder.close()


def test_a_process_that_ended_while_it_was_idle_costs_no_clip(decoder: ClipDecoder) -> None:
    decoder.probe(clip(), seconds=60)
    (pid,) = pids_of(decoder)
    os.kill(pid, 9)
    wait_until(lambda: is_gone(pid))

    assert frames(decoder, clip(), [4]) == [4]


def test_a_process_that_does_not_start_is_an_error_that_says_so() -> None:
    with pytest.raises(RuntimeError, match="did not start, with exit status 3"):
        ClipDecoder([sys.executable, "-c", "raise SystemExit(3)"]).probe(clip(), seconds=60)


def test_frames_that_are_not_taken_end_the_process(decoder: ClipDecoder) -> None:
    answers = decoder.frames(clip(), [0, 1, 2], sequential=False, seconds=60)
    next(answers)
    answers.close()  # type: ignore[attr-defined]

    assert pids_of(decoder) == []
    assert frames(decoder, clip(), [4]) == [4]


def test_threads_have_a_process_each_and_their_own_answers(decoder: ClipDecoder) -> None:
    before = threading.active_count()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda number: frames(decoder, clip(), [number]), range(24)))

    assert found == [[number] for number in range(24)]
    assert 1 <= len(pids_of(decoder)) <= 3
    assert threading.active_count() <= before


def _in_a_fork(decoder: ClipDecoder, parents: list[int]) -> tuple[list[int], bool]:
    found = frames(decoder, clip(), [4])
    apart = not set(pids_of(decoder)) & set(parents)
    decoder.close()
    return found, apart


def test_a_fork_starts_its_own_and_leaves_its_parents_alone(decoder: ClipDecoder) -> None:
    decoder.probe(clip(), seconds=60)
    before = pids_of(decoder)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        # Its decoder is the copy that the fork made.
        assert pool.apply(_in_a_fork_of, (before,)) == ([4], True)

    assert pids_of(decoder) == before
    assert frames(decoder, clip(), [5]) == [5]
    assert pids_of(decoder) == before


def _in_a_fork_of(parents: list[int]) -> tuple[list[int], bool]:
    return _in_a_fork(clip_decoder(), parents)


def test_it_ends_with_the_process_that_started_it_however_that_ends(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip())
    script = (
        "import sys, threading; from bagel_wds.clip_process import clip_decoder\n"
        "clip_decoder().probe(open(sys.argv[1], 'rb').read(), seconds=60)\n"
        "print(clip_decoder()._idle[0]._popen.pid, flush=True); threading.Event().wait()"
    )
    for signal in (9, 15):
        started = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "clip.mp4")], stdout=subprocess.PIPE, text=True
        )
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert not is_gone(pid)
        started.send_signal(signal)
        started.wait()
        started.stdout.close()
        wait_until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]


# Clips


def test_a_clip_is_a_sequence_of_frames_without_being_decoded() -> None:
    header = ClipHeader("mp4", (48, 64), 30, 10.0, 3.0)
    known = EncodedClip(b"not looked at", header)

    assert (len(known), known.fps) == (30, 10.0)
    assert [frame.size_hw for frame in known] == [(48, 64)] * 30
    assert sum(frame.num_bytes for frame in known) == 13
    assert [frame.number for frame in known[28:]] == [28, 29]
    with pytest.raises(IndexError):
        known[30]
    assert ClipHeader.of_json(header.as_json()) == header
    assert pickle.loads(pickle.dumps(known)) == known


def test_a_clip_of_which_nothing_is_known_looks_at_its_bytes() -> None:
    assert EncodedClip(clip()).header == ClipHeader("mp4", (48, 64), 30, 10.0, 3.0)
    with pytest.raises(BadSample):
        len(EncodedClip(b"video"))


def test_frames_of_another_size_than_planned_are_a_bad_sample() -> None:
    lied = EncodedClip(clip(), ClipHeader("mp4", (64, 64), 30, 10.0, 3.0))
    with pytest.raises(BadSample, match=r"frame 2 decoded to \(48, 64\), planned as \(64, 64\)"):
        list(lied.levels([2], 60))


@pytest.mark.parametrize(
    "wrong",
    [{"frames": 0}, {"width": 0}, {"fps": 0}, {"fps": "fast"}, {"fps": float("inf")}, {"frames": None}],
)
def test_a_broken_header_is_refused(wrong: dict[str, object]) -> None:
    entry = {**ClipHeader("mp4", (48, 64), 30, 10.0, 3.0).as_json(), **wrong}
    with pytest.raises((ValueError, TypeError)):
        ClipHeader.of_json(entry)
