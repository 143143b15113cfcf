"""A run that goes on without a shard that cannot be read: what is lost is counted to the sample, and never much."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from golden_data import tokenizer
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_shards, small_config
from test_datasets import digest
from test_reader import write_index

from bagel_wds import ConfigError, PackedLoader, ShardError
from bagel_wds.reader import walk_shard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bagel_wds import SimpleCustomBatch

GROUP = "t2i_pretrain"
SIZES = (20, 20, 20)
BROKEN, LEFT = 1, 14
"""Which shard is cut, and how many of its samples are whole: 70 %."""


def corpus(folder: Path, *, index: bool) -> list[str]:
    """Three shards of twenty samples and a manifest."""
    shards = foreign_shards(folder, GROUP, SIZES)
    entries = [{"url": Path(shard).name, "nsamples": size} for shard, size in zip(shards, SIZES, strict=True)]
    if index:
        for entry, shard in zip(entries, shards, strict=True):
            entry["index"] = Path(write_index(shard)).name
    (folder / "manifest.json").write_text(json.dumps({"shardlist": entries}))
    return shards


def cut(shard: str) -> bytes:
    """Cut a shard inside its sample number `LEFT`; returns what it was."""
    whole = Path(shard).read_bytes()
    offset, length = list(walk_shard(shard))[LEFT]["__ref__"]
    Path(shard).write_bytes(whole[: offset + length // 2])
    return whole


def load(folder: Path, *, workers: int = 0, epochs: int | None = None, **more: Any) -> PackedLoader:
    settings = {
        "grouped_datasets": {GROUP: MIXTURE[GROUP]},
        "dataset_info": {GROUP: {"t2i": {"shards": str(folder / "manifest.json")}}},
        "num_streams": 2,
        "shuffle_samples": 5,
        "on_shard_error": "skip",
        "max_skipped": 0.2,
        "use_flex": True,
        **more,
    }
    config = small_config(**settings)
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, workers, global_seed=3)
    return PackedLoader(dataset, workers, epochs=epochs, multiprocessing_context="fork")


def seen(batches: Iterable[SimpleCustomBatch]) -> Counter[int]:
    """How often each shard's samples came."""
    return Counter(origin["data_indexes"][0] for batch in batches for origin in batch.batch_data_indexes)


def take(loader: PackedLoader, count: int) -> list[str]:
    return [digest(batch.to_dict()) for batch in islice(loader, count)]


@pytest.mark.parametrize("index", [False, True], ids=["counted", "indexed"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_what_a_cut_shard_loses_is_counted_to_the_sample(
    tmp_path: Path, index: bool, streams: int, caplog: pytest.LogCaptureFixture
) -> None:
    shards = corpus(tmp_path, index=index)
    cut(shards[BROKEN])
    loader = load(tmp_path, num_streams=streams, epochs=1)
    with caplog.at_level(logging.WARNING, "bagel_wds"):
        got = seen(loader)

    # An index leads a stream past a cut only where its part begins behind it; the file has ended there.
    assert got == {0: 20, BROKEN: LEFT, 2: 20}
    stats = loader.stats["groups"][GROUP]
    assert stats["dropped"] == {"shard_unreadable": 20 - LEFT}
    assert stats["read"] == stats["packed"] + sum(stats["dropped"].values()) + stats["waiting"] == 60
    told = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert sum(int(re.findall(r"skipped (\d+) samples", line)[0]) for line in told) == 20 - LEFT
    assert all(shards[BROKEN] in line and "it was cut short" in line for line in told)


def test_c14_a_shard_that_fails_at_70_percent_loses_what_is_behind_and_stops_above_the_allowed_share(
    tmp_path: Path,
) -> None:
    shards = corpus(tmp_path, index=True)
    cut(shards[BROKEN])

    with pytest.raises(ShardError, match="it was cut short"):
        list(load(tmp_path, on_shard_error="raise", epochs=1))
    for streams in (1, 2):
        got = seen(load(tmp_path, max_skipped=0.1, epochs=1, num_streams=streams))
        assert got == {0: 20, BROKEN: LEFT, 2: 20}
    cut(shards[2])
    with pytest.raises(
        ShardError, match=r"12 of its 60 samples were skipped in epoch 0, 20.00%, and max_skipped=0.1"
    ):
        list(load(tmp_path, max_skipped=0.1, epochs=1, num_streams=1))


def test_what_the_streams_of_a_process_skip_is_added_up(tmp_path: Path) -> None:
    shards = corpus(tmp_path, index=True)
    for shard in shards[1:]:
        cut(shard)
    # Each stream alone loses at most 6 of 60.
    allowed = seen(load(tmp_path, max_skipped=0.2, epochs=1, num_streams=4))
    with pytest.raises(
        ShardError,
        match=r"1[0-2] of its 60 samples .* in epoch 0, .*=0.15 allows 15.00%.*The last: see the log",
    ):
        list(load(tmp_path, max_skipped=0.15, epochs=1, num_streams=4))

    assert allowed == {0: 20, 1: LEFT, 2: LEFT}


def test_cut_around_a_skip_and_anywhere_a_run_goes_on_as_the_run_that_skipped(tmp_path: Path) -> None:
    shards = corpus(tmp_path, index=True)
    cut(shards[BROKEN])
    more = {"memory_bytes": 3000}
    unbroken = take(load(tmp_path, **more), 24)
    loader = load(tmp_path, **more)
    states = [loader.state_dict(), *(loader.state_dict() for _ in islice(loader, 20))]

    skipped = [
        any(own["groups"][GROUP].get("skipped") for own in state["streams"].values()) for state in states
    ]
    first = skipped.index(True)
    for at, state in enumerate(states):
        if abs(at - first) > 2 and at % 5:
            continue
        other = load(tmp_path, **more)
        other.load_state_dict(json.loads(json.dumps(state)))
        assert take(other, 4) == unbroken[at : at + 4], at
    # Each epoch that was read to its end lost the same.
    stats = loader.stats["groups"][GROUP]
    assert stats["epochs"] >= 2
    assert stats["dropped"]["shard_unreadable"] >= 2 * (20 - LEFT)


def test_what_was_skipped_stays_skipped_after_the_shard_is_mended(tmp_path: Path) -> None:
    shards = corpus(tmp_path, index=True)
    whole = cut(shards[BROKEN])
    unbroken = take(load(tmp_path, epochs=1), 100)
    loader = load(tmp_path, epochs=1)
    states = [loader.state_dict() for _ in loader]
    skipped = [
        sum(lost[2] for own in state["streams"].values() for lost in own["groups"][GROUP].get("skipped", []))
        for state in states
    ]
    Path(shards[BROKEN]).write_bytes(whole)
    at = skipped.index(20 - LEFT)
    other = load(tmp_path, epochs=1)
    other.load_state_dict(json.loads(json.dumps(states[at])))

    assert 0 < at < len(unbroken) - 3
    assert take(other, 100) == unbroken[at + 1 :]
    assert other.stats == loader.stats


@pytest.mark.parametrize("more", [{}, {"packing": "best_fit", "look_ahead": 12}], ids=["greedy", "best_fit"])
def test_samples_whose_shard_goes_while_they_wait_are_lost_and_counted(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    shards = corpus(tmp_path, index=True)
    loader = load(
        tmp_path, epochs=1, max_skipped=1.0, memory_bytes=0, shuffle_samples=30, num_streams=1, **more
    )
    running = iter(loader)
    got = seen(islice(running, 2))
    Path(shards[0]).unlink()
    got += seen(running)

    stats = loader.stats["groups"][GROUP]
    assert got[1] == got[2] == 20
    assert 0 < got[0] < 20
    assert stats["dropped"] == {"shard_unreadable": 20 - got[0]}
    assert stats["read"] == stats["packed"] + 20 - got[0] == 60


def test_a_state_whose_samples_are_gone_is_restored_without_them(tmp_path: Path) -> None:
    shards = corpus(tmp_path, index=True)
    loader = load(tmp_path, epochs=1, num_streams=1, max_skipped=1.0)
    before = seen(islice(loader, 3))
    Path(shards[0]).unlink()
    other = load_again(tmp_path, loader)
    got = seen(other)

    stats = other.stats["groups"][GROUP]
    assert before[1] + got[1] == before[2] + got[2] == 20
    assert stats["dropped"] == {"shard_unreadable": 20 - before[0] - got[0]}


def load_again(folder: Path, loader: PackedLoader) -> PackedLoader:
    """Another loader that goes on where one is, with shards that may be gone since."""
    # The shard is missing, so that a list made now would refuse it: the dataset was built before.
    other = PackedLoader(loader._dataset, 0, epochs=1)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return other


@pytest.mark.parametrize("index", [False, True], ids=["counted", "indexed"])
def test_when_nothing_can_be_read_the_run_stops(tmp_path: Path, index: bool) -> None:
    shards = corpus(tmp_path, index=index)
    loader = load(tmp_path, max_skipped=1.0)
    for shard in shards:
        Path(shard).unlink()

    with pytest.raises(
        ShardError, match=r"a stream skipped all of its 30 samples of epoch \d; is the store there"
    ):
        next(iter(loader))


def test_a_shard_without_a_count_is_refused_when_its_losses_should_be_counted(tmp_path: Path) -> None:
    shards = foreign_shards(tmp_path, GROUP, (3, 2))
    info = {GROUP: {"t2i": {"shards": shards}}}

    with pytest.raises(ConfigError, match=r"how many samples 2 shards of group 't2i_pretrain' hold"):
        load(tmp_path, dataset_info=info)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_shard_error": "ignore"}, "on_shard_error='ignore' is none of 'raise', 'skip'"),
        ({"on_shard_error": "skip", "fidelity": "upstream"}, 'fidelity="upstream" draws in call order'),
        ({"max_skipped": 1.5}, "max_skipped=1.5 is no share"),
        ({"max_skipped": -0.1}, "max_skipped=-0.1 is no share"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        small_config(**settings)


@pytest.mark.parametrize("workers", [0, 2])
def test_stopping_early_says_nothing(
    tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus(tmp_path, index=True)
    with caplog.at_level(logging.WARNING):
        running = iter(load(tmp_path, workers=workers))
        next(running)
        running.close()  # type: ignore[attr-defined]
        del running

    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
