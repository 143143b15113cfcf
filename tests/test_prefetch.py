"""Reading ahead from a store: the same samples, sooner, within a bound, and nothing left behind."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from fault_proxy import Answer, Cut, FaultProxy, FileServer, Rule, Slow
from shard_factory import write_tar
from test_reader import write_index

from bagel_wds import stages
from bagel_wds.config import BagelDatasetConfig
from bagel_wds.errors import ShardError
from bagel_wds.object_file import FIRST_WINDOW
from bagel_wds.prefetch import Lane, ReadAhead
from bagel_wds.reader import read_offsets, walk_shard, walk_slice
from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHARDS, SAMPLES, BYTES = 3, 40, 60_000
QUICK = StorageOptions(retries=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 2.4 MB with their indexes, one of 60 kB, and an empty file."""
    root = tmp_path_factory.mktemp("shards")
    noise = random.Random(0)
    for number in range(SHARDS):
        samples = [{"__key__": f"{number}-{it}", "jpg": noise.randbytes(BYTES)} for it in range(SAMPLES)]
        write_index(write_tar(root / f"{number}.tar", samples))
    for number in range(6):
        write_tar(root / f"small-{number}.tar", [{"__key__": "one", "jpg": noise.randbytes(BYTES)}])
    (root / "empty.tar").touch()
    return root


@pytest.fixture
def proxy(folder: Path) -> Iterator[FaultProxy]:
    with FileServer(folder) as server, FaultProxy(server.address) as between:
        yield between


def content(samples: Iterator[dict[str, Any]]) -> list[tuple[str, bytes, Any]]:
    return [(sample["__key__"], sample["jpg"], sample["__ref__"]) for sample in samples]


def walk(
    lane: Lane, root: str, numbers: range = range(SHARDS), options: StorageOptions = QUICK
) -> Iterator[dict[str, Any]]:
    for number in numbers:
        following = f"{root}/{number + 1}.tar" if number + 1 in numbers else None
        yield from walk_shard(f"{root}/{number}.tar", options=options, lane=lane, next_url=following)


def on_disk(folder: Path) -> list[tuple[str, bytes, Any]]:
    return [it for number in range(SHARDS) for it in content(walk_shard(str(folder / f"{number}.tar")))]


def threads() -> list[str]:
    return [it.name for it in threading.enumerate() if it.name.startswith("bagel-read-ahead")]


@pytest.mark.parametrize("num_bytes", [1, 300_000, 1 << 20, 8 << 20])
def test_samples_are_those_of_the_disk_with_any_bound(
    folder: Path, proxy: FaultProxy, num_bytes: int
) -> None:
    with Lane(ReadAhead(num_bytes), QUICK) as lane:
        assert content(walk(lane, proxy.url)) == on_disk(folder)


@pytest.mark.parametrize("num_bytes", [1, 8 << 20])
def test_slices_bookmarks_and_wrong_guesses_of_the_next_shard_change_nothing(
    folder: Path, proxy: FaultProxy, num_bytes: int
) -> None:
    index = str(folder / "1.idx.parquet")
    offset = read_offsets(index)[33]
    with Lane(ReadAhead(num_bytes), QUICK) as lane:
        for start, stop, at, guess in [
            (5, 20, None, "2.tar"),
            (5, 20, None, "none.tar"),
            (0, 40, (33, offset), "1.tar"),
            (39, None, None, None),
        ]:
            url = guess and f"{proxy.url}/{guess}"
            read = walk_slice(
                f"{proxy.url}/1.tar", start, stop, 1, index, at, next_url=url, options=QUICK, lane=lane
            )
            assert content(read) == content(walk_slice(str(folder / "1.tar"), start, stop, 1, index, at))


def test_a_slice_of_a_shard_asks_for_nothing_behind_it(folder: Path, proxy: FaultProxy) -> None:
    index = str(folder / "1.idx.parquet")
    with Lane(ReadAhead(8 << 20), QUICK) as lane:
        list(walk_slice(f"{proxy.url}/1.tar", 10, 15, 1, index, options=QUICK, lane=lane))

    assert proxy.sent("1.tar") == read_offsets(index)[15] - read_offsets(index)[10]


def test_what_is_ahead_stays_within_its_bound_whatever_the_number_of_streams(
    folder: Path, proxy: FaultProxy
) -> None:
    lanes, bound = 4, 2_000_000
    ahead = ReadAhead(bound)
    most = 0
    with ExitStack() as stack:
        streams = [walk(stack.enter_context(Lane(ahead, QUICK)), proxy.url) for _ in range(lanes)]
        used = 0
        for _ in range(SHARDS * SAMPLES):
            used += sum(sum(next(stream)["__ref__"][1:]) for stream in streams)
            most = max(most, proxy.sent() - used)
        # What is under way is counted too, and what a buffer in between has taken is not.
        assert ahead.most <= bound + lanes * FIRST_WINDOW
        assert bound / 2 < most <= bound + 2 * lanes * FIRST_WINDOW
        for stream in streams:
            assert next(stream, None) is None

    assert ahead.held == 0


def test_one_stream_that_has_it_all_to_itself_uses_it(proxy: FaultProxy) -> None:
    ahead = ReadAhead(2 << 20)
    with Lane(ahead, QUICK) as lane:
        list(walk(lane, proxy.url))

    assert 1.5 * 2**20 < ahead.most <= 2 << 20


def test_c17_the_next_shard_is_fetched_while_this_one_is_used(folder: Path, proxy: FaultProxy) -> None:
    shards, seconds = 6, 0.4
    proxy.rules.append(Rule(Slow(latency=seconds), times=None))
    urls = [f"{proxy.url}/small-{number}.tar" for number in range(shards)]
    begun = time.monotonic()
    read = []
    with Lane(ReadAhead(8 << 20), QUICK) as lane:
        for url, following in zip(urls, [*urls[1:], None], strict=True):
            for sample in walk_shard(url, options=QUICK, lane=lane, next_url=following):
                read.append(sample["jpg"])
                # The use of it.
                time.sleep(seconds)
    took = time.monotonic() - begun

    assert read == [next(walk_shard(str(folder / f"small-{it}.tar")))["jpg"] for it in range(shards)]
    # The first has to be waited for; with the others it would be twice as long.
    assert took < (shards + 1) * seconds + 0.75 * (shards - 1) * seconds


def test_ranges_of_a_shard_come_at_the_same_time(proxy: FaultProxy) -> None:
    proxy.rules.append(Rule(Slow(latency=0.3), times=None))
    begun = time.monotonic()
    with Lane(ReadAhead(2 << 20), QUICK) as lane:
        list(walk(lane, proxy.url, range(1)))
    requests = proxy.count()

    assert requests >= 5
    assert time.monotonic() - begun < 0.3 * (requests - 1)


@pytest.mark.parametrize("after", [1, 7, SAMPLES + 1])
def test_a_walk_that_is_given_up_leaves_no_thread_and_no_bytes(proxy: FaultProxy, after: int) -> None:
    config = BagelDatasetConfig(read_ahead_bytes=4 << 20)
    ahead = ReadAhead(config.read_ahead_bytes)
    read = stages.read(config, ahead=ahead)
    samples = read({"url": f"{proxy.url}/{number}.tar"} for number in range(SHARDS))
    for _ in range(after):
        next(samples)
    assert threads()
    assert ahead.held > 0
    del samples

    assert threads() == []
    assert ahead.held == 0


def test_threads_end_with_the_last_stream(proxy: FaultProxy) -> None:
    ahead = ReadAhead(4 << 20)
    read = stages.read(BagelDatasetConfig(), ahead=ahead)
    one, two = (read(iter([{"url": f"{proxy.url}/0.tar"}])) for _ in range(2))
    next(one)
    next(two)
    del one
    assert threads()
    assert len(list(two)) == SAMPLES - 1

    assert threads() == []
    assert ahead.held == 0


def test_shards_on_the_disk_take_no_threads(folder: Path) -> None:
    samples = stages.read(BagelDatasetConfig())(iter([{"url": str(folder / "0.tar")}]))
    next(samples)

    assert threads() == []


SCRIPT = """
import sys
from bagel_wds import stages
from bagel_wds.config import BagelDatasetConfig
config = BagelDatasetConfig(storage={"retries": 100})
samples = stages.read(config)(iter([{"url": sys.argv[1]}]))
print(next(samples)["__key__"])
"""


def test_a_program_that_ends_in_the_middle_ends_at_once_and_silently(proxy: FaultProxy) -> None:
    # What is read ahead fails, and would be tried again for minutes.
    proxy.rules.append(Rule(Answer(503), after=1, times=None))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"{proxy.url}/0.tar"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "0-0\n", "")


def test_a_range_that_is_cut_goes_on_from_the_byte_reached(folder: Path, proxy: FaultProxy) -> None:
    proxy.rules += [Rule(Cut(at), path="/0.tar") for at in (1000, 300_000, 1_000_001, 2_000_000)]
    with Lane(ReadAhead(2 << 20), QUICK) as lane:
        assert content(walk(lane, proxy.url)) == on_disk(folder)

    assert all(rule.met == 1 for rule in proxy.rules)


def test_an_error_is_told_in_its_turn(folder: Path, proxy: FaultProxy) -> None:
    with Lane(ReadAhead(8 << 20), QUICK) as lane:
        samples = walk(lane, proxy.url, range(SHARDS + 1))
        read = list(islice(samples, SHARDS * SAMPLES))
        with pytest.raises(ShardError, match=r"3\.tar.*no such object"):
            next(samples)

    assert content(iter(read)) == on_disk(folder)
    assert threads() == []


def test_a_shard_replaced_while_it_is_read_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes((folder / "0.tar").read_bytes())
    with FileServer(tmp_path) as server, Lane(ReadAhead(1), QUICK) as lane:
        samples = walk_shard(f"http://{server.address}/a.tar", options=QUICK, lane=lane)
        next(samples)
        (tmp_path / "a.tar").write_bytes((folder / "1.tar").read_bytes())
        with pytest.raises(ShardError, match="was replaced"):
            list(samples)


def test_an_empty_shard_is_no_tar(folder: Path, proxy: FaultProxy) -> None:
    with Lane(ReadAhead(8 << 20), QUICK) as lane, pytest.raises(ShardError, match="ends at or after byte 0"):
        list(walk_shard(f"{proxy.url}/empty.tar", options=QUICK, lane=lane))
