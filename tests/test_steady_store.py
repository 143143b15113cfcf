"""Training from a real store that fails: the batches of the disk, or an exact account of what is missing."""

from __future__ import annotations

import io
import json
import logging
import random
import threading
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fault_proxy import Answer, Cut, FaultProxy, Rule, Slow
from golden_data import tokenizer
from PIL import Image
from s3_store import BUCKET, S3Store
from shard_factory import MIXTURE, SPECIAL_TOKENS, small_config, t2i_sample, write_tar
from test_datasets import digest
from test_reader import write_index

from bagel_wds import PackedLoader, ShardError, storage
from bagel_wds.reader import walk_shard
from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "t2i_pretrain"
SHARDS, SAMPLES = 3, 10
TIMEOUT = 180
"""Seconds for a batch, after which a worker that hangs is an error."""


def noisy_sample(number: int, noise: random.Random, side: int) -> dict[str, Any]:
    """A sample whose picture is as large as its pixels."""
    out = io.BytesIO()
    Image.frombytes("RGB", (side, side), noise.randbytes(3 * side * side)).save(out, "PNG", compress_level=0)
    return {**t2i_sample(number), "png": out.getvalue()}


def corpus(folder: Path, shards: int, samples: int, side: int) -> list[Path]:
    """Shards with an index and a manifest."""
    noise = random.Random(0)
    paths, entries = [], []
    for number in range(shards):
        some = range(number * samples, (number + 1) * samples)
        path = write_tar(folder / f"{number}.tar", [noisy_sample(i, noise, side) for i in some])
        index = Path(write_index(path)).name
        entries.append({"url": f"{number}.tar", "nsamples": samples, "index": index})
        paths.append(Path(path))
    (folder / "manifest.json").write_text(json.dumps({"shardlist": entries}))
    return paths


def upload(folder: Path, name: str, store: S3Store) -> str:
    for file in storage.list_files(folder):
        storage.write_bytes(f"s3://{BUCKET}/{name}/{file}", (folder / file).read_bytes(), store.options)
    return f"s3://{BUCKET}/{name}"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of ten samples, 0.3 MB each."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus(folder, SHARDS, SAMPLES, side=100)
    return folder


@pytest.fixture(scope="module")
def bucket(disk: Path, s3_store: S3Store) -> str:
    return upload(disk, "steady", s3_store)


@pytest.fixture
def proxy(s3_store: S3Store) -> Iterator[FaultProxy]:
    with FaultProxy(s3_store.endpoint) as between:
        yield between


def through(proxy: FaultProxy, **more: Any) -> StorageOptions:
    return StorageOptions(endpoint=proxy.url, allow_http=True, **more)


def load(
    root: object,
    options: StorageOptions | None = None,
    *,
    workers: int = 0,
    epochs: int | None = 1,
    **more: Any,
) -> PackedLoader:
    settings = {
        "grouped_datasets": {GROUP: MIXTURE[GROUP]},
        "dataset_info": {GROUP: {"t2i": {"shards": f"{root}/manifest.json"}}},
        "num_streams": 2,
        "shuffle_samples": 4,
        "use_flex": True,
        "storage": options,
        **more,
    }
    dataset = small_config(**settings).build(tokenizer(), SPECIAL_TOKENS, 0, 1, workers, global_seed=3)
    watched: dict[str, Any] = {"timeout": TIMEOUT} if workers else {}
    return PackedLoader(dataset, workers, epochs=epochs, **watched)


def digests(loader: PackedLoader) -> list[str]:
    return [digest(batch.to_dict()) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_over_a_failing_connection_are_those_of_the_disk(
    disk: Path, bucket: str, proxy: FaultProxy, workers: int
) -> None:
    noise = random.Random(1)
    for number in range(SHARDS):
        size = (disk / f"{number}.tar").stat().st_size
        proxy.rules += [Rule(Cut(noise.randrange(size)), rf"/{number}\.tar") for _ in range(3)]
        proxy.rules.append(Rule(Answer(503), rf"/{number}\.tar", after=1))
    from_disk = digests(load(disk))

    assert digests(load(bucket, through(proxy), workers=workers)) == from_disk
    assert len(set(from_disk)) == len(from_disk) >= 6
    assert sum(rule.met for rule in proxy.rules) >= 2 * SHARDS


def test_c14_a_shard_that_fails_at_70_percent_of_every_try_loses_exactly_what_is_behind(
    disk: Path, bucket: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [sample["__ref__"] for sample in walk_shard(str(disk / "1.tar"))]
    at = (disk / "1.tar").stat().st_size * 7 // 10
    lost = sum(offset + length > at for offset, length in whole)
    proxy.rules.append(Rule(Cut(at), r"/1\.tar", times=None))
    options = through(proxy, retries=1)
    # In one stream, without references: the shard is read from its start to where it fails.
    more: dict[str, Any] = {"num_streams": 1, "shuffle_samples": 1, "on_shard_error": "skip"}
    loader = load(bucket, options, **more, max_skipped=0.2)
    with caplog.at_level(logging.WARNING, "bagel_wds"):
        seen = [origin["data_indexes"][0] for batch in loader for origin in batch.batch_data_indexes]

    assert lost == 3
    assert [seen.count(number) for number in range(SHARDS)] == [SAMPLES, SAMPLES - lost, SAMPLES]
    stats = loader.stats["groups"][GROUP]
    assert stats["dropped"] == {"shard_unreadable": lost}
    assert stats["read"] == stats["packed"] + lost == SHARDS * SAMPLES
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert f"group 't2i_pretrain': skipped {lost} samples of {bucket}/1.tar in epoch 0" in told
    assert "2 tries brought no more, the last: the connection was closed before the end" in told

    with pytest.raises(
        ShardError, match=rf"{lost} of its 30 samples were skipped in epoch 0, .*max_skipped=0.05"
    ):
        digests(load(bucket, options, **more, max_skipped=0.05))
    with pytest.raises(ShardError, match=r"1\.tar: the shard cannot be read on from byte"):
        digests(load(bucket, options, num_streams=1))


def test_a_resume_from_a_failing_store_is_the_unbroken_run(
    disk: Path, bucket: str, proxy: FaultProxy
) -> None:
    unbroken = digests(load(disk))
    loader = load(bucket, through(proxy))
    first = [digest(batch.to_dict()) for batch in islice(loader, 4)]
    state = json.loads(json.dumps(loader.state_dict()))
    proxy.rules += [
        Rule(Answer(503), r"\.tar", times=3),
        Rule(Cut(50_000), r"\.tar"),
        Rule(Cut(200_000), r"\.tar"),
    ]
    other = load(bucket, through(proxy))
    other.load_state_dict(state)

    assert first + digests(other) == unbroken


def test_stopping_early_says_nothing(
    bucket: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    proxy.rules.append(Rule(Slow(bytes_per_second=3e6), r"\.tar", times=None))
    with caplog.at_level(logging.WARNING):
        running = iter(load(bucket, through(proxy), workers=2, epochs=None))
        next(running)
        running.close()  # type: ignore[attr-defined]
        del running

    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_writing_listing_and_looking_are_tried_again(s3_folder: str, proxy: FaultProxy) -> None:
    options = through(proxy)
    for method in ("PUT", "HEAD", "POST"):
        proxy.rules.append(Rule(Answer(503), method=method))
    proxy.rules.append(Rule(Answer(503), r"list-type=2"))
    storage.write_bytes(f"{s3_folder}/a", b"0123", options)
    with storage.open_write(f"{s3_folder}/b", options) as file:
        file.write(bytes(9 << 20))

    assert storage.list_files(s3_folder, options) == ["a", "b"]
    assert storage.size(f"{s3_folder}/b", options) == 9 << 20
    assert storage.read_bytes(f"{s3_folder}/a", options) == b"0123"
    assert [rule.met for rule in proxy.rules] == [1, 1, 1, 1]


def kill_when_reading(store: S3Store, proxy: FaultProxy, done: threading.Event) -> None:
    """SIGKILL the store while a large read of a shard is under way, and start it again."""
    while not done.wait(0.005):
        if any(seen.start > 2 << 20 and seen.sent for seen in proxy.of(r"\.tar")):
            store.kill()
            assert store.start()
            return


def test_a_store_that_is_killed_while_it_is_read_and_started_again_gives_the_batches_of_the_disk(
    tmp_path: Path, s3_store: S3Store, proxy: FaultProxy
) -> None:
    # 8 samples of 3 MB: windows that are larger than what sockets hold.
    corpus(tmp_path, 1, 8, side=1000)
    root = upload(tmp_path, "killed", s3_store)
    more: dict[str, Any] = {"num_streams": 1, "shuffle_samples": 1}
    from_disk = digests(load(tmp_path, **more))
    loader = load(root, through(proxy), **more)
    proxy.rules.append(Rule(Slow(bytes_per_second=20e6), r"\.tar", times=None))
    done = threading.Event()
    killer = threading.Thread(target=kill_when_reading, args=(s3_store, proxy, done))
    killer.start()
    try:
        began = time.monotonic()
        got = digests(loader)
    finally:
        done.set()
        killer.join()

    assert got == from_disk
    assert any(seen.broken for seen in proxy.of(r"\.tar"))
    assert time.monotonic() - began < TIMEOUT
