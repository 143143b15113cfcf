"""Shards kept on the local disk: shared, bounded, never stale, and nobody waits for anybody."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fault_proxy import Answer, FaultProxy, FileServer, Rule
from filelock import FileLock
from shard_factory import write_tar

from bagel_wds import objects, urls
from bagel_wds.cache import FOLDER, MARKER, ShardCache, cache_of
from bagel_wds.errors import ConfigError
from bagel_wds.prefetch import Lane, ReadAhead
from bagel_wds.reader import fetch, walk_shard
from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDS, SAMPLES = 10, 6
LIMIT = 60
"""Seconds for a process that reads all; more is a hang, whatever else the machine does."""
KEY, OTHER = "a" * 32, "b" * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten shards of half a megabyte."""
    root = tmp_path_factory.mktemp("shards")
    noise = random.Random(0)
    for number in range(SHARDS):
        samples = [{"__key__": f"{number}-{it}", "jpg": noise.randbytes(80_000)} for it in range(SAMPLES)]
        write_tar(root / f"{number}.tar", samples)
    return root


@pytest.fixture
def proxy(folder: Path) -> Iterator[FaultProxy]:
    with FileServer(folder) as server, FaultProxy(server.address) as between:
        yield between


@pytest.fixture
def options(tmp_path: Path) -> StorageOptions:
    return StorageOptions(cache_dir=str(tmp_path / "cache"), cache_bytes=1 << 30, retries=2)


def kept(options: StorageOptions, ending: str = ".shard") -> list[Path]:
    return sorted(Path(options.cache_dir or "", FOLDER).glob(f"*{ending}"))


def read(root: str, options: StorageOptions, numbers: range = range(SHARDS)) -> Iterator[dict[str, Any]]:
    with Lane(ReadAhead(2 << 20), options) as lane:
        for number in numbers:
            following = f"{root}/{number + 1}.tar" if number + 1 in numbers else None
            yield from walk_shard(f"{root}/{number}.tar", options=options, lane=lane, next_url=following)


def content(samples: Iterator[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(sample["__key__"], sample["jpg"], sample["__ref__"]) for sample in samples]


def on_disk(folder: Path, numbers: range = range(SHARDS)) -> list[tuple[Any, ...]]:
    return [it for number in numbers for it in content(walk_shard(str(folder / f"{number}.tar")))]


def test_a_folder_of_the_home_is_found_there_and_one_that_cannot_be_is_refused(
    folder: Path, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    content(read(proxy.url, StorageOptions(cache_bytes=1 << 30, cache_dir="~/x"), range(1)))

    assert len(list((tmp_path / "home" / "x" / FOLDER).glob("*.shard"))) == 1
    for wrong in ("", "x\0y"):
        with pytest.raises(ConfigError, match="is no folder's path"):
            StorageOptions(cache_bytes=1, cache_dir=wrong)


def test_a_file_system_without_locks_keeps_nothing(
    folder: Path, proxy: FaultProxy, options: StorageOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    content(read(proxy.url, options, range(1)))
    monkeypatch.setattr(fcntl, "flock", refuse)

    assert content(read(proxy.url, options)) == on_disk(folder)
    assert len(kept(options)) == 1


def test_what_was_read_once_comes_from_the_disk_and_is_the_same(
    folder: Path, proxy: FaultProxy, options: StorageOptions
) -> None:
    assert content(read(proxy.url, options)) == on_disk(folder)
    assert sorted(path.read_bytes() for path in kept(options)) == sorted(
        path.read_bytes() for path in folder.iterdir()
    )
    before = proxy.sent()
    assert content(read(proxy.url, options)) == on_disk(folder)

    # Whether it is still the same is asked each time: a byte.
    assert proxy.sent() - before == SHARDS
    assert kept(options, ".partial") == []


def test_samples_by_their_places_come_from_the_disk_too(
    folder: Path, proxy: FaultProxy, options: StorageOptions
) -> None:
    samples = list(read(proxy.url, options, range(2)))
    places = [(sample["__url__"], *sample["__ref__"]) for sample in samples]
    before = proxy.count()
    assert content(iter(fetch(places, options))) == on_disk(folder, range(2))
    assert proxy.count() == before
    # What is not there comes from the store.
    other = next(walk_shard(str(folder / "5.tar")))
    (found,) = fetch([(f"{proxy.url}/5.tar", *other["__ref__"])], options)

    assert found["jpg"] == other["jpg"]
    assert proxy.count() == before + 1


def test_another_process_asks_once_whether_what_is_kept_is_good(
    folder: Path, proxy: FaultProxy, options: StorageOptions
) -> None:
    list(read(proxy.url, options, range(1)))
    before = proxy.sent()
    cache = ShardCache(Path(options.cache_dir or "", FOLDER), 1 << 30)
    (path,) = kept(options)
    key, data = path.name[:32], (folder / "0.tar").read_bytes()
    found = objects.head(urls.split(f"{proxy.url}/0.tar"), options)
    calls = []

    def head() -> tuple[int, str | None]:
        calls.append(1)
        return found

    assert cache.read_range(key, 5, 100, head) == data[5:105]
    assert cache.read_range(key, 500, 100, head) == data[500:600]
    assert cache.read_range(OTHER, 0, 10, head) is None
    assert len(calls) == 1
    assert proxy.sent() - before == 1


def test_an_object_that_was_replaced_is_not_served_stale(
    folder: Path, tmp_path: Path, options: StorageOptions
) -> None:
    (tmp_path / "shards").mkdir()
    shutil.copy(folder / "0.tar", tmp_path / "shards" / "0.tar")
    with FileServer(tmp_path / "shards") as server:
        root = f"http://{server.address}"
        assert content(read(root, options, range(1))) == on_disk(folder, range(1))
        # As long as the other.
        (tmp_path / "shards" / "0.tar").write_bytes((folder / "1.tar").read_bytes())
        assert content(read(root, options, range(1))) == on_disk(folder, range(1, 2))

    assert [path.read_bytes() for path in kept(options)] == [(folder / "1.tar").read_bytes()]


def test_a_walk_that_is_given_up_keeps_whole_shards_alone(
    folder: Path, proxy: FaultProxy, options: StorageOptions
) -> None:
    samples = read(proxy.url, options)
    for _ in range(SAMPLES + 1):
        next(samples)
    del samples

    assert [path.read_bytes() for path in kept(options)] == [(folder / "0.tar").read_bytes()]
    assert kept(options, ".partial") == []


def sizes(root: Path, stop: threading.Event) -> int:
    """The most bytes that the files of a cache had while it was looked at, under the lock in which it makes room.

    The last look is after it was told to stop.
    """
    most, is_last = 0, False
    while not is_last:
        is_last = stop.wait(0.005)
        if not root.exists():
            continue
        # By inode: one that is renamed meanwhile may be met under both names.
        found: dict[int, int] = {}
        with FileLock(root.with_name(f".{FOLDER}.lock"), mode=0o600):
            for path in root.glob("*.shard*"):
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue
                found[stat.st_ino] = stat.st_size
        most = max(most, sum(found.values()))
    return most


def test_c17_the_cap_of_the_cache_holds(folder: Path, proxy: FaultProxy, options: StorageOptions) -> None:
    shard = (folder / "0.tar").stat().st_size
    options = replace(options, cache_bytes=3 * shard)
    stop, seen = threading.Event(), []
    looking = threading.Thread(target=lambda: seen.append(sizes(Path(options.cache_dir or "", FOLDER), stop)))
    looking.start()
    try:
        readers = [threading.Thread(target=lambda: content(read(proxy.url, options))) for _ in range(2)]
        for reader in readers:
            reader.start()
        assert content(read(proxy.url, options)) == on_disk(folder)
        for reader in readers:
            reader.join()
    finally:
        stop.set()
        looking.join()

    assert 2 * shard <= seen[0] <= 3 * shard
    assert 2 <= len(kept(options)) <= 3
    assert kept(options, ".partial") == []


def entry(cache: ShardCache, key: str, data: bytes, tag: str = '"t"') -> Path | None:
    new = cache.begin(key, len(data), tag)
    if new is None:
        return None
    new.write(memoryview(data))
    new.finish()
    return new._path


def test_those_who_begin_at_once_make_the_folder_together(tmp_path: Path) -> None:
    # Each is as a process of its own; one that found a half-made folder would keep nothing from then on.
    for number in range(20):
        caches = [ShardCache(tmp_path / str(number) / FOLDER, 1 << 20) for _ in range(8)]
        start = threading.Barrier(len(caches))

        def begin(place: int, cache: ShardCache, start: threading.Barrier = start) -> None:
            start.wait()
            entry(cache, f"{place:032x}", bytes(100))

        threads = [threading.Thread(target=begin, args=it) for it in enumerate(caches)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = list((tmp_path / str(number) / FOLDER).glob("*.shard"))
        assert len(kept) == len(caches)


def test_a_folder_that_is_removed_under_those_who_write_costs_no_more_than_what_was_in_it(
    tmp_path: Path,
) -> None:
    one, two = (ShardCache(tmp_path / FOLDER, 1000) for _ in range(2))
    old = one.begin(KEY, 100, '"t"')
    assert old is not None
    old.write(memoryview(b"a" * 100))
    shutil.rmtree(tmp_path / FOLDER)
    new = two.begin(KEY, 100, '"t"')
    assert new is not None
    new.write(memoryview(b"b" * 50))

    # Its name is another's now, who has not written all of it, and gives up.
    old.finish()
    new.drop()
    assert one.find(KEY, 100, '"t"') is None

    new = two.begin(KEY, 100, '"t"')
    late = two.begin(OTHER, 100, '"t"')
    assert late is not None
    assert new is not None
    new.write(memoryview(b"b" * 100))
    new.finish()
    kept = one.find(KEY, 100, '"t"')
    assert kept is not None
    assert kept.read() == b"b" * 100
    kept.close()

    shutil.rmtree(tmp_path / FOLDER)
    late.write(memoryview(bytes(100)))
    late.finish()
    assert two.find(OTHER, 100, '"t"') is None
    # Both keep on, in a folder with its mark.
    assert entry(one, KEY, bytes(100)) is not None
    assert entry(two, OTHER, bytes(100)) is not None
    assert len(list((tmp_path / FOLDER).glob("*.shard"))) == 2
    assert (tmp_path / FOLDER / MARKER).exists()


def test_one_who_gives_up_removes_nothing_of_another(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / FOLDER, 1000)
    old = cache.begin(KEY, 100, '"t"')
    assert old is not None
    shutil.rmtree(tmp_path / FOLDER)
    new = cache.begin(KEY, 100, '"t"')
    assert new is not None
    old.drop()
    new.write(memoryview(bytes(100)))
    new.finish()

    assert cache.has(KEY)


def test_a_file_that_was_damaged_is_kept_anew(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / FOLDER, 1000)
    path = entry(cache, KEY, b"a" * 100)
    assert path is not None
    os.truncate(path, 10)

    assert cache.find(KEY, 100, '"t"') is None
    assert entry(cache, KEY, b"a" * 100) == path
    kept = cache.find(KEY, 100, '"t"')
    assert kept is not None
    assert kept.read() == b"a" * 100
    kept.close()


def test_what_one_who_died_left_of_the_folder_is_made_anew(tmp_path: Path) -> None:
    half = tmp_path / f".{FOLDER}.new"
    half.mkdir()
    (half / "x").touch()

    assert entry(ShardCache(tmp_path / FOLDER, 1000), KEY, bytes(100)) is not None
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir() if path.suffix != ".shard") == [MARKER]
    assert not half.exists()


def test_too_many_open_files_are_no_reason_to_keep_nothing_from_then_on(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / FOLDER, 1000)
    assert entry(cache, KEY, bytes(100)) is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        assert cache.begin(OTHER, 100, '"t"') is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert entry(cache, OTHER, bytes(100)) is not None


def test_while_another_counts_what_there_is_nothing_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever lists the folder meanwhile could meet it under neither of its names, and keep too much.
    monkeypatch.setattr("bagel_wds.cache.NAME_SECONDS", 0.05)
    cache = ShardCache(tmp_path / FOLDER, 300)
    assert entry(cache, KEY, bytes(100)) is not None
    new = cache.begin(OTHER, 100, '"t"')
    assert new is not None
    new.write(memoryview(bytes(100)))
    with FileLock(tmp_path / f".{FOLDER}.lock", mode=0o600):
        new.finish()

    assert not cache.has(OTHER)
    assert list((tmp_path / FOLDER).glob("*.partial")) == []
    again = entry(cache, OTHER, bytes(100))
    assert again is not None
    assert again.stat().st_size == 100


def test_the_one_used_longest_ago_goes_first_and_never_one_in_use(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / FOLDER, 300)
    paths = [entry(cache, f"{number:032x}", bytes(100)) for number in range(3)]
    for number, path in enumerate(paths):
        assert path is not None
        os.utime(path, ns=(number, number))
    in_use = cache.find(f"{0:032x}", 100, '"t"')
    assert in_use is not None

    entry(cache, f"{3:032x}", bytes(100))
    assert [path is not None and path.exists() for path in paths] == [True, False, True]
    in_use.close()
    entry(cache, f"{4:032x}", bytes(100))
    # The first was used when it was closed.
    assert [path is not None and path.exists() for path in paths] == [True, False, False]


def test_what_finds_no_room_is_not_kept(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / FOLDER, 300)
    assert entry(cache, KEY, bytes(301)) is None
    assert entry(cache, KEY, bytes(200)) is not None
    with cache.find(KEY, 200, '"t"') or pytest.fail("it is there"):
        assert entry(cache, OTHER, bytes(200)) is None
    writing = cache.begin(OTHER, 200, '"t"')
    assert writing is not None
    # It takes its place from the start, and only one writes it.
    assert cache.begin(KEY, 200, '"t"') is None
    assert cache.begin(OTHER, 200, '"t"') is None
    writing.drop()
    assert entry(cache, KEY, bytes(200)) is not None


@pytest.mark.parametrize("tag", [None, 'W/"1"', ""])
def test_what_cannot_be_told_from_another_version_is_not_kept(tmp_path: Path, tag: str | None) -> None:
    cache = ShardCache(tmp_path / FOLDER, 300)

    assert cache.begin(KEY, 100, tag) is None
    assert cache.find(KEY, 100, tag) is None


def test_nothing_is_removed_that_is_not_its_own(
    tmp_path: Path, folder: Path, proxy: FaultProxy, options: StorageOptions
) -> None:
    beside = tmp_path / "cache" / "precious"
    beside.parent.mkdir()
    beside.write_text("mine")
    options = replace(options, cache_bytes=600_000)
    assert len(list(read(proxy.url, options, range(1)))) == SAMPLES
    inside = [tmp_path / "cache" / FOLDER / name for name in ("notes.txt", "x.shard", "x.shard.partial")]
    for path in inside:
        path.write_text("mine")
    old = tmp_path / "cache" / FOLDER / f"{'c' * 32}-{'d' * 32}.shard"
    old.symlink_to(beside)

    assert len(list(read(proxy.url, options))) == SHARDS * SAMPLES
    assert [path.read_text() for path in (beside, *inside)] == 4 * ["mine"]


def test_a_folder_that_another_made_is_left_alone(
    folder: Path, proxy: FaultProxy, options: StorageOptions, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = Path(options.cache_dir or "", FOLDER)
    theirs.mkdir(parents=True)
    (theirs / f"{'c' * 32}-{'d' * 32}.shard").write_text("mine")

    assert content(read(proxy.url, options)) == on_disk(folder)
    assert [path.name for path in theirs.iterdir()] == [f"{'c' * 32}-{'d' * 32}.shard"]
    assert [MARKER in it.getMessage() for it in caplog.records] == [True]


def test_a_full_disk_means_reading_from_the_store_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ShardCache(tmp_path / FOLDER, 1000)
    new = cache.begin(KEY, 100, '"t"')
    assert new is not None
    os.close(new._file)
    new._file = os.open("/dev/full", os.O_WRONLY)
    new.write(memoryview(bytes(100)))
    new.finish()

    assert cache.begin(OTHER, 100, '"t"') is None
    assert list((tmp_path / FOLDER).glob("*.shard")) == []
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


READER = """
import logging, resource, sys
from bagel_wds.prefetch import Lane, ReadAhead
from bagel_wds.reader import walk_shard
from bagel_wds.storage import StorageOptions

url, folder, stop_after, largest = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
options = StorageOptions(cache_dir=folder, cache_bytes=1 << 30)
with Lane(ReadAhead(0), options) as lane:
    for shard in range(3):
        for number, sample in enumerate(walk_shard(f"{url}/{shard}.tar", options=options, lane=lane)):
            print(sample["__key__"], flush=True)
            if number == stop_after:
                sys.stdin.read()
"""
UNLIMITED = 1 << 40


def start(root: str, options: StorageOptions, stop_after: int = -1, largest: int = UNLIMITED) -> Any:
    """A process that reads three shards, or stops behind a sample."""
    return subprocess.Popen(
        [sys.executable, "-c", READER, root, options.cache_dir or "", str(stop_after), str(largest)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


KEYS = [f"{shard}-{number}" for shard in range(3) for number in range(SAMPLES)]


def test_c16_three_readers_of_one_cache_of_which_one_is_killed(
    folder: Path, proxy: FaultProxy, options: StorageOptions
) -> None:
    with start(proxy.url, options, stop_after=1) as killed:
        assert [killed.stdout.readline().strip() for _ in range(2)] == KEYS[:2]
        # In the middle of its download, whose lock it has.
        (partial,) = kept(options, ".partial")
        with start(proxy.url, options) as second:
            assert second.communicate(timeout=LIMIT) == ("\n".join(KEYS) + "\n", "")
        assert len(kept(options)) == 2
        assert kept(options, ".partial") == [partial]
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    with start(proxy.url, options) as third:
        assert third.communicate(timeout=LIMIT) == ("\n".join(KEYS) + "\n", "")

    assert kept(options, ".partial") == []
    assert sorted(path.read_bytes() for path in kept(options)) == sorted(
        (folder / f"{number}.tar").read_bytes() for number in range(3)
    )


def test_what_the_dead_left_takes_no_room(folder: Path, proxy: FaultProxy, options: StorageOptions) -> None:
    with start(proxy.url, options, stop_after=1) as killed:
        killed.stdout.readline()
        killed.stdout.readline()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert len(kept(options, ".partial")) == 1
    shard = (folder / "0.tar").stat().st_size
    list(read(proxy.url, replace(options, cache_bytes=shard + 1000), range(5, 6)))

    assert kept(options, ".partial") == []
    assert len(kept(options)) == 1


def test_a_disk_that_takes_no_more_is_no_end_of_a_run(proxy: FaultProxy, options: StorageOptions) -> None:
    with start(proxy.url, options, largest=100_000) as reader:
        out, said = reader.communicate(timeout=LIMIT)

    assert out.split() == KEYS
    assert len(said.splitlines()) == 1
    assert "cannot be written" in said
    assert kept(options, "") == kept(options, MARKER) + kept(options, "lock")


def test_what_fails_is_told_as_without_a_cache(proxy: FaultProxy, options: StorageOptions) -> None:
    list(read(proxy.url, options, range(1)))
    proxy.rules.append(Rule(Answer(403), times=None))

    with pytest.raises(Exception, match="access is refused"):
        list(read(proxy.url, options, range(1)))


def test_where_it_is_follows_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cache_of(StorageOptions(cache_bytes=5))
    assert found is not None
    assert found._folder == tmp_path / FOLDER
    assert cache_of(StorageOptions()) is None
    assert cache_of(None) is None
    with pytest.raises(ConfigError, match="cache_bytes does not say how much"):
        StorageOptions(cache_dir="/somewhere")
    with pytest.raises(ConfigError, match="cache_bytes=-1 must not be negative"):
        StorageOptions(cache_bytes=-1)
