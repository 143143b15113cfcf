"""Reads of remote shards finish with what the disk gives, or with one error that says why; never with less."""

from __future__ import annotations

import logging
import os
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fault_proxy import Answer, Cut, FaultProxy, FileServer, Rule, Slow, Stall, WrongLength
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_factory import t2i_sample, write_tar

from bagel_wds import ShardError, steady, storage
from bagel_wds.reader import fetch, walk_shard
from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_proxy import Fault

OPTIONS = StorageOptions(allow_http=True, retries=3, timeout_seconds=1)
PICTURE_BYTES = 50_000


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve samples, 1.2 MB: several windows."""
    noise = random.Random(0)
    samples = [{**t2i_sample(i), "bin": noise.randbytes(2 * PICTURE_BYTES + i)} for i in range(12)]
    return Path(write_tar(tmp_path_factory.mktemp("shards") / "a.tar", samples))


@pytest.fixture
def proxy(shard: Path) -> Iterator[FaultProxy]:
    with FileServer(shard.parent) as server, FaultProxy(server.address) as between:
        yield between


def read(proxy: FaultProxy, options: StorageOptions = OPTIONS) -> list[dict[str, Any]]:
    """The samples of the shard, as they come through the proxy."""
    return [plain(sample) for sample in walk_shard(f"{proxy.url}/a.tar", options=options)]


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "__url__"}


def from_disk(shard: Path) -> list[dict[str, Any]]:
    return [plain(sample) for sample in walk_shard(str(shard))]


def places(shard: Path) -> dict[str, int]:
    """Where a shard can be cut: offsets in the sixth sample, and at the end."""
    offset, length = from_disk(shard)[5]["__ref__"]
    size = shard.stat().st_size
    return {
        "the very start": 0,
        "inside a header": offset + 100,
        "inside a payload": offset + length // 2 + 33,
        "between two members of a sample": offset + 1024,
        "between two samples": offset,
        "before the end marker": sum(from_disk(shard)[-1]["__ref__"]),
        "the very end": size - 1,
    }


PLACES = [
    "the very start",
    "inside a header",
    "inside a payload",
    "between two members of a sample",
    "between two samples",
    "before the end marker",
    "the very end",
]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_c13_a_connection_that_is_cut_is_continued_from_the_byte_reached(
    shard: Path, proxy: FaultProxy, place: str, times: int
) -> None:
    at = places(shard)[place]
    proxy.rules.append(rule := Rule(Cut(at), times=times))

    assert read(proxy) == from_disk(shard)
    assert rule.met == times
    # What had come whole is not asked for again.
    again = [seen.start for seen in proxy.of() if at - 2 * 65536 <= seen.start <= at]
    assert len(again) >= times
    assert proxy.sent() <= shard.stat().st_size + times * 2 * 65536


@pytest.mark.parametrize("place", PLACES)
def test_c13_a_connection_that_is_always_cut_is_one_error_with_shard_offset_tries_and_cause(
    shard: Path, proxy: FaultProxy, place: str
) -> None:
    at = places(shard)[place]
    proxy.rules.append(Rule(Cut(at), times=None))
    got: list[dict[str, Any]] = []
    with pytest.raises(ShardError) as caught:
        got.extend(plain(sample) for sample in walk_shard(f"{proxy.url}/a.tar", options=OPTIONS))

    message = str(caught.value)
    found = re.search(
        r"/a\.tar: the shard cannot be read on from byte (\d+): .*reading stopped at byte (\d+); 4 tries brought no "
        "more, the last: the connection was closed",
        message,
    )
    assert found, message
    assert int(found[1]) <= at
    assert at - 65536 <= int(found[2]) <= at
    # What was whole before it has been given out, and nothing else.
    assert got == from_disk(shard)[: len(got)]
    assert int(found[1]) == (sum(got[-1]["__ref__"]) if got else 0)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408])
def test_a_store_that_is_busy_is_asked_again(shard: Path, proxy: FaultProxy, status: int) -> None:
    busy = Answer(status, b"<Error><Code>SlowDown</Code></Error>", {"Retry-After": "1"})
    proxy.rules.append(Rule(busy, after=1, times=2))

    assert read(proxy) == from_disk(shard)

    proxy.rules.append(Rule(busy, times=None))
    with pytest.raises(
        ShardError,
        match=rf"byte 0; 4 tries brought no more, the last: the store answered {status}.*\(SlowDown\)",
    ):
        read(proxy)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "there is no such object"),
        (403, "access is refused (403 Forbidden (AccessDenied)); check the credentials"),
        (401, "access is refused (401 Unauthorized (AccessDenied)); check the credentials"),
        (
            416,
            "the object ends before the first byte that was asked for (416 Range Not Satisfiable (AccessDenied))",
        ),
        (400, "the store refuses the request (400 Bad Request (AccessDenied)); check its endpoint"),
    ],
)
def test_what_will_not_pass_is_not_asked_for_again(proxy: FaultProxy, status: int, message: str) -> None:
    proxy.rules.append(Rule(Answer(status, b"<Error><Code>AccessDenied</Code></Error>"), after=1, times=None))
    with pytest.raises(ShardError, match=re.escape(message)):
        read(proxy)

    assert proxy.count() == 2


def test_a_shard_that_is_not_there_is_asked_for_once(proxy: FaultProxy) -> None:
    with pytest.raises(ShardError, match=r"gone\.tar.*there is no such object \(404 Not Found\)"):
        list(walk_shard(f"{proxy.url}/gone.tar", options=OPTIONS))

    assert proxy.count() == 1


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b"<!DOCTYPE html><html><body>Please log in</body></html>", "an HTML page"),
        (b"\n <HTML>moved</HTML>", "an HTML page"),
        (b'<?xml version="1.0"?><Error><Code>InternalError</Code></Error>', "an XML document"),
        (b"<Error><Code>InternalError</Code></Error>", "an XML document"),
    ],
)
def test_a_page_in_place_of_a_shard_is_named(shard: Path, proxy: FaultProxy, body: bytes, name: str) -> None:
    proxy.rules.append(Rule(Answer(200, body), times=4))
    assert read(proxy) == from_disk(shard)

    proxy.rules.append(Rule(Answer(200, body), times=None))
    with pytest.raises(
        ShardError, match=f"4 tries brought no more, the last: got {name} instead of the object"
    ):
        read(proxy)


@pytest.mark.parametrize("long", [False, True])
def test_a_page_that_was_saved_as_a_shard_is_named(shard: Path, proxy: FaultProxy, long: bool) -> None:
    page = shard.with_name("page.tar")
    page.write_bytes(b"<html><title>Sign in</title>" + b" " * 5000 * long)
    for url in (str(page), f"{proxy.url}/page.tar"):
        with pytest.raises(ShardError, match="no tar header at byte 0 but an HTML page"):
            list(walk_shard(url, options=OPTIONS))


def test_a_server_without_ranges_is_named(shard: Path, proxy: FaultProxy) -> None:
    proxy.rules.append(Rule(Answer(200, shard.read_bytes()), times=None))
    with pytest.raises(ShardError, match="gives the whole file where a range of it is asked for"):
        read(proxy)


@pytest.mark.parametrize("by", [-100_000, -1, 1, 1000])
def test_a_length_that_is_wrong_loses_nothing(shard: Path, proxy: FaultProxy, by: int) -> None:
    proxy.rules.append(Rule(WrongLength(by), times=3))

    assert read(proxy) == from_disk(shard)
    assert proxy.rules[0].met == 3


def test_a_store_that_falls_silent_is_given_up_and_asked_again(shard: Path, proxy: FaultProxy) -> None:
    proxy.rules.append(Rule(Stall(600_000)))
    assert read(proxy) == from_disk(shard)

    proxy.rules.append(Rule(Stall(600_000), times=None))
    once = StorageOptions(allow_http=True, retries=1, timeout_seconds=0.2)
    with pytest.raises(ShardError, match="2 tries brought no more, the last: no answer in time"):
        read(proxy, once)


def test_a_slow_answer_is_not_given_up_as_long_as_bytes_come(shard: Path, proxy: FaultProxy) -> None:
    proxy.rules.append(Rule(Slow(bytes_per_second=500_000), times=None))
    impatient = StorageOptions(allow_http=True, retries=0, timeout_seconds=0.5)

    # 1.2 MB in 2.4 s, the largest window in more than a second.
    assert read(proxy, impatient) == from_disk(shard)


def test_a_store_that_is_not_there_is_named_with_its_cause() -> None:
    for url, cause in [
        ("http://127.0.0.1:1/a.tar", "Connection refused"),
        ("http://nowhere.invalid/a.tar", "failed to lookup address information"),
    ]:
        with pytest.raises(ShardError, match=f"2 tries brought no more, the last: {cause}"):
            list(walk_shard(url, options=StorageOptions(allow_http=True, retries=1)))


@pytest.mark.parametrize("fault", [None, Cut(400_000)])
def test_an_object_that_is_replaced_meanwhile_is_never_joined_to_the_old_one(
    shard: Path, tmp_path: Path, fault: Fault | None
) -> None:
    copy = tmp_path / "a.tar"
    copy.write_bytes(shard.read_bytes())
    with FileServer(tmp_path) as server, FaultProxy(server.address) as between:
        between.rules += [Rule(fault)] if fault else []
        samples = walk_shard(f"{between.url}/a.tar", options=OPTIONS)
        first = next(samples)
        copy.write_bytes(shard.read_bytes()[::-1])
        os.utime(copy, (1, 1))
        with pytest.raises(ShardError, match="the object was replaced while it was being read"):
            list(samples)

    assert plain(first) == from_disk(shard)[0]


def test_every_part_of_a_shard_is_an_error_and_never_fewer_samples(shard: Path, proxy: FaultProxy) -> None:
    whole = shard.read_bytes()
    marker = sum(from_disk(shard)[-1]["__ref__"])
    # At each edge of a block around the members of a sample, and just beside it.
    edges = [offset + beside for offset in range(0, 3072, 512) for beside in (-1, 0, 1)]
    part = shard.with_name("part.tar")
    for length in [*(edge for edge in edges if edge >= 0), marker - 512, marker, marker + 511]:
        part.write_bytes(whole[:length])
        for url in (str(part), f"{proxy.url}/part.tar"):
            with pytest.raises(ShardError, match=r"part\.tar"):
                list(walk_shard(url, options=OPTIONS))


def test_samples_fetched_by_reference_go_on_too(shard: Path, proxy: FaultProxy) -> None:
    wanted = [sample["__ref__"] for sample in from_disk(shard)[4:7]]
    url = f"{proxy.url}/a.tar"
    proxy.rules += [Rule(Cut(wanted[1][0] + 700), times=2), Rule(Answer(503))]

    assert [plain(sample) for sample in fetch([(url, *ref) for ref in wanted], OPTIONS)] == from_disk(shard)[
        4:7
    ]

    proxy.rules.append(Rule(Cut(wanted[1][0] + 700), times=None))
    with pytest.raises(ShardError, match=rf"from byte {wanted[0][0]}: .*4 tries brought no more"):
        fetch([(url, *ref) for ref in wanted], OPTIONS)


def test_no_secret_of_a_signed_url_is_told(proxy: FaultProxy) -> None:
    proxy.rules.append(Rule(Answer(503), times=None))
    url = f"{proxy.url}/a.tar?X-Amz-Signature=verysecret&X-Amz-Credential=alsosecret"
    with pytest.raises(ShardError) as caught:
        list(walk_shard(url, options=OPTIONS))

    told: BaseException | None = caught.value
    while told is not None:
        assert "verysecret" not in str(told)
        assert "alsosecret" not in str(told)
        told = told.__cause__ or told.__context__


def test_stopping_early_says_nothing_and_asks_for_no_more(
    shard: Path, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "bagel_wds"):
        samples = walk_shard(f"{proxy.url}/a.tar", options=OPTIONS)
        next(samples)
        samples.close()  # type: ignore[attr-defined]

    assert proxy.count() == 1
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_waits_are_drawn_from_no_shared_generator(proxy: FaultProxy) -> None:
    before = random.getstate()
    proxy.rules.append(Rule(Answer(503), times=2))
    read(proxy)

    assert random.getstate() == before


class Flaky:
    """A store that gives so many bytes of each answer, and fails after them."""

    def __init__(self, data: bytes, lengths: list[int]) -> None:
        self.data = data
        self.lengths = lengths
        self.asked: list[tuple[int, int, str | None]] = []

    def ask(self, start: int, end: int, tag: str | None) -> steady.Answer:
        self.asked.append((start, end, tag))
        return steady.Answer(len(self.data), "tag", self.pieces(start, end))

    def pieces(self, start: int, end: int) -> Iterator[bytes]:
        length = self.lengths.pop(0) if self.lengths else end - start
        stop = min(start + length, end, len(self.data))
        for at in range(start, stop, 7):
            yield self.data[at : min(at + 7, stop)]
        if stop < min(end, len(self.data)):
            raise steady.TransientError("cut")


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=200),
    lengths=st.lists(st.integers(0, 60), max_size=30),
    ends=st.tuples(st.integers(0, 250), st.integers(0, 250)),
    tries=st.integers(1, 5),
)
def test_whatever_is_cut_a_read_gives_its_bytes_or_counts_its_tries(
    data: bytes, lengths: list[int], ends: tuple[int, int], tries: int
) -> None:
    start, end = min(ends), max(ends)
    flaky, waits = Flaky(data, list(lengths)), list[float]()
    patience = steady.Patience(tries=tries, first_wait=1.0, longest_wait=3.0)
    remote = steady.SteadyObject("a", flaky.ask, patience, wait=waits.append)
    got = b""
    with suppress(OSError):
        for piece in remote.pieces(start, end):
            got += piece

    if got != data[start:end]:
        # It gave up: the first of its last tries ended where the others began.
        assert got == data[start : start + len(got)]
        assert [asked[0] for asked in flaky.asked[len(flaky.asked) - tries + 1 :]] == [start + len(got)] * (
            tries - 1
        )
    # In one version of the object, each wait within its bounds and none before a try that brought something.
    assert {asked[2] for asked in flaky.asked[1:]} <= {"tag"}
    assert all(0.5 <= wait <= 3.0 for wait in waits)


def test_waits_double_up_to_the_longest() -> None:
    flaky, waits = Flaky(bytes(10), [0] * 9), list[float]()
    patience = steady.Patience(tries=10, first_wait=0.1, longest_wait=2.0)
    steady.SteadyObject("a", flaky.ask, patience, wait=waits.append).read(0, 10)

    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    assert len({wait / most for wait, most in zip(waits, longest, strict=True)}) == 9


def test_a_manifest_is_read_through_faults_too(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b'{"shardlist": []}')
    with FileServer(tmp_path) as server, FaultProxy(server.address) as between:
        between.rules += [Rule(Answer(503)), Rule(Cut(5)), Rule(WrongLength(-3))]
        assert storage.read_bytes(f"{between.url}/manifest.json", OPTIONS) == b'{"shardlist": []}'
