"""A run goes on exactly where it was: after every batch, on any number of ranks and workers, over epochs' ends."""

from __future__ import annotations

import gc
import json
import shutil
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from golden_data import tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_factory import (
    MIXTURE,
    SPECIAL_TOKENS,
    VIT,
    foreign_shards,
    small_config,
    t2i_sample,
    vlm_sample,
    write_tar,
)
from test_datasets import digest
from test_reader import write_index

from bagel_wds import ConfigError, PackedLoader, collate_wrapper, merge_states, storage
from bagel_wds.state import LoaderState, batches_of

if TYPE_CHECKING:
    from bagel_wds import PackedDataset, SimpleCustomBatch

GROUPS = {"t2i_pretrain": MIXTURE["t2i_pretrain"], "vlm_sft": MIXTURE["vlm_sft"]}


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shards")
    # Two rows are dropped each time they are met: one when it is planned, one when its image is decoded.
    odd = [
        {**t2i_sample(90), "json": {"captions": 5}},
        t2i_sample(91),
        {**t2i_sample(92), "png": t2i_sample(92)["png"][:-30]},
    ]
    t2i = [*foreign_shards(folder, "t2i_pretrain", [5, 7, 4]), write_tar(folder / "odd.tar", odd)]
    return {
        "t2i_pretrain": {"t2i": {"shards": t2i}},
        "vlm_sft": {"vlm": {"shards": foreign_shards(folder, "vlm_sft", [6, 3])}},
    }


def build(info: dict[str, Any], *, rank: int = 0, world_size: int = 1, **more: Any) -> PackedDataset:
    base: dict[str, Any] = {
        "dataset_info": info,
        "grouped_datasets": GROUPS,
        "num_streams": 4,
        "shuffle_samples": 5,
    }
    config = small_config(**{**base, **more})
    return config.build(tokenizer(), SPECIAL_TOKENS, rank, world_size, 0, global_seed=3)


def load(
    info: dict[str, Any], state: dict[str, Any] | None = None, *, workers: int = 0, **more: Any
) -> PackedLoader:
    loader = PackedLoader(build(info, **more), workers, multiprocessing_context="fork")
    if state is not None:
        # What is saved is text.
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def take(loader: PackedLoader, count: int) -> list[str]:
    return [digest(batch.to_dict()) for batch in islice(loader, count)]


def on_ranks(
    info: dict[str, Any], state: dict[str, Any] | None, ranks: int, steps: int, **more: Any
) -> tuple[list[str], dict[str, Any]]:
    """The next global batches as `ranks` ranks take them, and the merged state after them."""
    loaders = [load(info, state, rank=rank, world_size=ranks, **more) for rank in range(ranks)]
    taken = [take(loader, steps) for loader in loaders]
    merged = merge_states([json.loads(json.dumps(loader.state_dict())) for loader in loaders])
    return [batches[step] for step in range(steps) for batches in taken], merged


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"packing": "best_fit", "look_ahead": 7}, id="best_fit", marks=pytest.mark.slow),
    ],
)
def test_cut_after_every_batch_goes_on_as_the_unbroken_run(
    info: dict[str, Any], more: dict[str, Any]
) -> None:
    unbroken = take(load(info, **more), 34)
    loader = load(info, **more)
    states = [loader.state_dict()]
    states += [loader.state_dict() for _ in islice(loader, 30)]

    assert len(set(unbroken)) == 34
    for cut, state in enumerate(states):
        assert take(load(info, state, **more), 4) == unbroken[cut : cut + 4], cut
    # The run was long enough to cross epochs' ends.
    assert loader.stats["groups"]["t2i_pretrain"]["epochs"] >= 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_goes_on_on_another_number_of_ranks(info: dict[str, Any], ranks: int) -> None:
    unbroken = take(load(info), 36)
    for before_ranks, before_steps in [(2, 5), (4, 3), (1, 7)]:
        before, state = on_ranks(info, None, before_ranks, before_steps)
        after, _ = on_ranks(info, state, ranks, 12 // ranks)

        assert before + after == unbroken[: len(before) + 12]


def test_chain_of_resumes_on_changing_ranks_is_the_unbroken_run(info: dict[str, Any]) -> None:
    got: list[str] = []
    state: dict[str, Any] | None = None
    for ranks, steps in [(1, 3), (2, 4), (4, 2), (1, 1), (2, 3), (4, 3), (1, 6)]:
        batches, state = on_ranks(info, state, ranks, steps)
        got += batches

    assert state is not None
    assert got == take(load(info), len(got))
    assert LoaderState.from_json(state).next_batch == len(got) == 44


@pytest.mark.parametrize("workers", [1, 2])
def test_state_is_right_whatever_workers_had_prefetched(info: dict[str, Any], workers: int) -> None:
    unbroken = take(load(info), 16)
    first = load(info, workers=workers)
    got = take(first, 7)
    resumed = load(info, first.state_dict(), workers=2 // workers)

    assert got + take(resumed, 9) == unbroken
    # The same loader goes on, too, after its last consumed batch.
    assert take(first, 4) == unbroken[7:11]


def test_state_before_the_first_step_is_the_state_that_was_loaded(info: dict[str, Any]) -> None:
    fresh = load(info)
    assert fresh.state_dict()["streams"] == {}
    assert take(load(info, fresh.state_dict()), 3) == take(load(info), 3)

    _, state = on_ranks(info, None, 2, 3)
    again = load(info, state)
    assert again.state_dict() == state


def test_set_epoch_between_building_and_iterating_a_loader_counts(info: dict[str, Any]) -> None:
    early, late = build(info), build(info)
    early.set_epoch(7)
    loader = PackedLoader(late)
    late.set_epoch(7)

    assert take(loader, 3) == take(PackedLoader(early), 3) != take(load(info), 3)
    with pytest.raises(ConfigError, match="after iteration has begun"):
        late.set_epoch(8)


def test_plain_dataloader_user_resumes_from_the_states_on_the_batches(info: dict[str, Any]) -> None:
    from torch.utils.data import DataLoader

    dataset = build(info)
    template = dataset.state_dict()
    newest: dict[str, Any] = {}
    taken = 0
    for batch in islice(DataLoader(dataset, batch_size=1, collate_fn=collate_wrapper(), num_workers=2), 9):
        newest[str(batch.state.stream)] = batch.state.to_json()
        taken += 1
    state = {**template, "streams": newest, "next_batch": taken}

    assert take(load(info, state), 5) == take(load(info), 14)[9:]


def test_dataset_itself_keeps_a_state_for_loaders_that_ask_it(info: dict[str, Any]) -> None:
    dataset = build(info)
    unbroken = [digest(batch) for batch in islice(iter(build(info)), 12)]
    given = [digest(batch) for batch in islice(iter(dataset), 5)]
    other = build(info)
    other.load_state_dict(json.loads(json.dumps(dataset.state_dict())))

    assert given + [digest(batch) for batch in islice(iter(other), 7)] == unbroken


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_restores_with_the_same_workers(info: dict[str, Any], workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def new() -> Any:
        return stateful.StatefulDataLoader(
            build(info), batch_size=1, collate_fn=collate_wrapper(), num_workers=workers
        )

    unbroken = [digest(batch.to_dict()) for batch in islice(new(), 12)]
    first, other = new(), new()
    got = [digest(batch.to_dict()) for batch in islice(first, 5)]
    other.load_state_dict(first.state_dict())

    assert got + [digest(batch.to_dict()) for batch in islice(other, 7)] == unbroken


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_run_can_be_cut_anywhere(info: dict[str, Any], data: st.DataObject) -> None:
    streams = data.draw(st.sampled_from([1, 2, 3, 4, 6]), "streams")
    budget = data.draw(st.integers(160, 400), "budget")
    more: dict[str, Any] = {
        "num_streams": streams,
        "max_num_tokens": budget,
        "expected_num_tokens": data.draw(st.integers(60, budget), "expected"),
        "max_num_tokens_per_sample": 160,
        "prefer_buffer_before": data.draw(st.integers(0, budget), "prefer"),
        "max_buffer_size": data.draw(st.integers(0, 6), "buffer"),
        "shuffle_samples": data.draw(st.integers(1, 12), "shuffle"),
        "shuffle_bytes": data.draw(st.sampled_from([2000, 20_000, 1 << 20]), "bytes"),
        "packing": data.draw(st.sampled_from(["greedy", "best_fit"]), "packing"),
        "look_ahead": data.draw(st.integers(1, 12), "look_ahead"),
        "look_ahead_bytes": data.draw(st.sampled_from([2000, 20_000, 1 << 20]), "look_ahead_bytes"),
    }
    divisors = [ranks for ranks in range(1, streams + 1) if streams % ranks == 0]
    got: list[str] = []
    state = None
    for _ in range(data.draw(st.integers(1, 4), "cuts")):
        ranks = data.draw(st.sampled_from(divisors), "ranks")
        batches, state = on_ranks(info, state, ranks, data.draw(st.integers(1, 6), "steps"), **more)
        got += batches

    assert got == take(load(info, **more), len(got))


@pytest.fixture(scope="module")
def indexed(info: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same shards with an index each, so that shuffles begin with references."""
    folder = tmp_path_factory.mktemp("indexed")
    copied: dict[str, Any] = {}
    for group, datasets in info.items():
        [(name, entry)] = datasets.items()
        shards = [str(shutil.copy(shard, folder)) for shard in entry["shards"]]
        for shard in shards:
            write_index(shard)
        copied[group] = {name: {"shards": shards}}
    return copied


@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_batches_and_states_do_not_depend_on_memory_or_read_ahead(
    indexed: dict[str, Any], packing: str
) -> None:
    def run(**more: Any) -> list[tuple[str, Any]]:
        loader = load(indexed, num_streams=3, shuffle_samples=9, packing=packing, **more)
        return [(digest(batch.to_dict()), loader.state_dict()["streams"]) for batch in islice(loader, 12)]

    plenty = run()
    assert len({found for found, _ in plenty}) == 12
    for more in [{"memory_bytes": 0}, {"memory_bytes": 9000}, {"read_ahead_bytes": 0}]:
        assert run(**more) == plenty, more


@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_streams_of_a_worker_share_its_memory_and_give_it_back(indexed: dict[str, Any], packing: str) -> None:
    loader = load(indexed, num_streams=3, shuffle_samples=9, packing=packing, memory_bytes=9000)
    memory = loader._dataset._run.memory
    batches = iter(loader)
    for _ in range(9):
        next(batches)
        assert 0 < memory.held <= 9000

    del batches

    gc.collect()
    assert memory.held == 0


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_runs_over_indexed_shards_can_be_cut_anywhere(indexed: dict[str, Any], data: st.DataObject) -> None:
    def draw_memory() -> dict[str, Any]:
        return {"memory_bytes": data.draw(st.sampled_from([0, 6000, 30_000, 1 << 30]), "memory")}

    more: dict[str, Any] = {
        "num_streams": data.draw(st.sampled_from([1, 2, 4]), "streams"),
        "shuffle_samples": data.draw(st.integers(1, 25), "shuffle"),
        "shuffle_bytes": data.draw(st.sampled_from([2000, 20_000, 1 << 20]), "bytes"),
        "packing": data.draw(st.sampled_from(["greedy", "best_fit"]), "packing"),
    }
    got: list[str] = []
    state = None
    for _ in range(data.draw(st.integers(1, 3), "cuts")):
        batches, state = on_ranks(
            indexed, state, 1, data.draw(st.integers(1, 5), "steps"), **more, **draw_memory()
        )
        got += batches

    assert got == take(load(indexed, **more), len(got))


def refs_of(batch: SimpleCustomBatch) -> list[tuple[Any, ...]]:
    return [(origin["dataset_name"], *origin["data_indexes"]) for origin in batch.batch_data_indexes]


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8])
def test_c09_nothing_in_a_buffer_is_lost_or_comes_twice(info: dict[str, Any], stop: int) -> None:
    def run(state: dict[str, Any] | None, count: int) -> tuple[Counter[Any], dict[str, Any]]:
        loader = load(info, state, num_streams=1)
        seen = Counter(ref for batch in islice(loader, count) for ref in refs_of(batch))
        return seen, loader.state_dict()

    whole, _ = run(None, 20)
    first, state = run(None, stop)
    second, _ = run(state, 20 - stop)

    assert first + second == whole


def test_c08_restoring_reads_only_what_the_buffers_hold(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = load(info, num_streams=1)
    take(loader, 9)
    state = loader.state_dict()
    held = sum(len(group["shuffled"][0]) for group in state["streams"]["0"]["groups"].values()) + sum(
        len(state["streams"]["0"][name]["groups"]) for name in ("held", "buffer")
    )
    reads: list[int] = []
    real = storage.read_range

    def counted(url: str, offset: int, length: int, options: storage.StorageOptions | None = None) -> bytes:
        reads.append(length)
        return real(url, offset, length, options)

    monkeypatch.setattr(storage, "read_range", counted)
    take(load(info, state, num_streams=1), 1)

    assert held > 5
    assert 0 < len(reads) <= held


def test_c10_states_of_several_ranks_are_one_or_refused(info: dict[str, Any]) -> None:
    loaders = [load(info, rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        take(loader, 5)
    one, two = (loader.state_dict() for loader in loaders)

    with pytest.raises(ConfigError, match=r"lacks stream \d, which this worker hosts now; merge the states"):
        take(load(info, one), 1)
    take(loaders[1], 1)
    with pytest.raises(ConfigError, match="not of one step: their next batches are 10 and 12"):
        merge_states([one, loaders[1].state_dict()])
    with pytest.raises(
        ConfigError, match="stream 1 has given 0 batches where 3 belong to 10 in all; merge the states of"
    ):
        merge_states([one])
    assert merge_states([one, two])["next_batch"] == 10
    with pytest.raises(ConfigError, match="num_streams was 4 and is 3"):
        load(info, one, num_streams=3)


def test_state_decides_the_number_of_streams_where_the_settings_do_not(info: dict[str, Any]) -> None:
    _, state = on_ranks(info, None, 2, 3)
    loader = load(info, state, num_streams=None)

    assert loader.state_dict()["num_streams"] == 4
    assert take(loader, 4) == take(load(info), 10)[6:]


def test_state_of_another_run_is_refused_and_says_what_changed(info: dict[str, Any]) -> None:
    loader = load(info)
    take(loader, 3)
    state = loader.state_dict()
    heavier = {**GROUPS, "vlm_sft": {**GROUPS["vlm_sft"], "weight": 5}}
    finer = {
        **GROUPS,
        "vlm_sft": {**GROUPS["vlm_sft"], "image_transform_args": {**VIT, "min_image_size": 14}},
    }

    def refused(match: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            load(info, state, **more)

    refused(r"order_seed was 42 and is 7", data_seed=7)
    refused(r"shuffle was \[5, \d+\] and is \[6, \d+\]", shuffle_samples=6)
    refused(r"budget of 'max_num_tokens' was 260 and is 300", max_num_tokens=300)
    refused(r"budget of 'packing' was None and is best_fit", packing="best_fit")
    refused(r"weights of 'vlm_sft' was \[1.0, True\] and is \[5.0, True\]", grouped_datasets=heavier)
    refused(r"recipes of 'vlm_sft' was", grouped_datasets=finer)
    refused(
        r"the order of groups was t2i_pretrain, vlm_sft and is vlm_sft, t2i_pretrain",
        grouped_datasets=dict(reversed(GROUPS.items())),
    )
    refused(r"group 'vlm_sft' is gone", grouped_datasets={"t2i_pretrain": GROUPS["t2i_pretrain"]})
    fewer = {**info, "vlm_sft": {"vlm": {"shards": info["vlm_sft"]["vlm"]["shards"][:1]}}}
    with pytest.raises(ConfigError, match="the shards or raw files of group 'vlm_sft' changed"):
        load(fewer, state)
    with pytest.raises(ConfigError, match="version 0, and version 1 is read"):
        load(info, {**state, "version": 0})
    with pytest.raises(ConfigError, match="the state is broken"):
        load(info, {"version": 1})


def test_what_is_named_may_change_on_purpose(info: dict[str, Any], tmp_path: Any) -> None:
    loader = load(info)
    take(loader, 5)
    state = loader.state_dict()
    edits = {"unified_edit": {"seed": {"shards": foreign_shards(tmp_path, "unified_edit", [4])}}}
    changed: dict[str, Any] = {
        "max_num_tokens": 220,
        "grouped_datasets": {
            **GROUPS,
            "vlm_sft": {**GROUPS["vlm_sft"], "weight": 3},
            "unified_edit": {**MIXTURE["unified_edit"], "is_mandatory": True},
        },
    }
    other = PackedLoader(build({**info, **edits}, **changed))
    with pytest.raises(
        ConfigError, match="allow=\\['seed'\\]: only budget, groups, recipes, weights may change"
    ):
        other.load_state_dict(state, allow=["seed"])
    other.load_state_dict(state, allow=["budget", "weights", "groups"])

    batches = list(islice(other, 6))

    assert all(batch.sequence_length <= 220 for batch in batches)
    assert all("unified_edit" in {ref[0] for ref in refs_of(batch)} for batch in batches)
    assert other.state_dict()["next_batch"] == 11


def test_another_way_of_packing_takes_over_what_was_held(info: dict[str, Any]) -> None:
    def one_pass(**more: Any) -> PackedLoader:
        return PackedLoader(build(info, num_streams=1, **more), epochs=1)

    loader, other = one_pass(), one_pass(packing="best_fit", look_ahead=6)
    first = Counter(ref for batch in islice(loader, 3) for ref in refs_of(batch))
    other.load_state_dict(loader.state_dict(), allow=["budget"])
    second = Counter(ref for batch in other for ref in refs_of(batch))

    whole = Counter(ref for batch in one_pass() for ref in refs_of(batch))
    assert first + second == whole
    assert set(whole.values()) == {1}


@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_stats_add_up_over_streams_and_workers(info: dict[str, Any], packing: str) -> None:
    loader = load(info, workers=2, packing=packing)
    batches = list(islice(loader, 13))
    packed = Counter(ref[0] for batch in batches for ref in refs_of(batch))

    for name, counts in loader.stats["groups"].items():
        assert counts["packed"] == packed[name]
        assert counts["read"] == counts["packed"] + counts["waiting"] + sum(counts["dropped"].values())
    assert loader.stats["batches"] == loader.stats["packs"] == 13
    # The undecodable picture left its pack.
    in_batches = sum(batch.sequence_length for batch in batches)
    assert in_batches < loader.stats["tokens"] <= in_batches + 30 * len(batches)
    dropped = loader.stats["groups"]["t2i_pretrain"]["dropped"]
    assert dropped["captions_invalid"] > 1
    assert dropped["image_truncated"] >= 1
    resumed = load(info, loader.state_dict(), packing=packing)
    assert resumed.stats["groups"] == loader.stats["groups"]


@given(st.integers(1, 12), st.integers(0, 60))
def test_batches_of_a_stream_are_those_of_round_robin(streams: int, batches: int) -> None:
    for stream in range(streams):
        assert batches_of(stream, streams, batches) == sum(n % streams == stream for n in range(batches))


def test_state_is_small_and_plain(info: dict[str, Any]) -> None:
    loader = load(info)
    for batch in islice(loader, 6):
        assert batch.state is not None
        assert not any(isinstance(value, torch.Tensor) for value in batch.state.to_json().values())
    state = loader.state_dict()

    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state["streams"]["0"])) < 3000


def test_form_and_content_of_a_state_are_pinned(tmp_path: Any) -> None:
    # A change of any number here is another format: raise STATE_VERSION.
    url = write_tar(tmp_path / "text.tar", [vlm_sample(3 * n) for n in range(20)])
    loader = load(
        {"vlm_sft": {"vlm": {"shards": url}}},
        grouped_datasets={"vlm_sft": MIXTURE["vlm_sft"]},
        num_streams=2,
        expected_num_tokens=60,
        max_num_tokens=80,
        max_num_tokens_per_sample=80,
        prefer_buffer_before=0,
        max_buffer_size=1,
    )
    take(loader, 3)
    state = loader.state_dict()

    nothing: dict[str, Any] = {"groups": [], "refs": [[], [], [], []]}
    assert state.pop("streams")["0"] == {
        "batches": 2,
        "picks": 6,
        "overdue": False,
        "deferred": 0,
        "packs": 2,
        "tokens": 124,
        "ended": False,
        "held": nothing,
        "buffer": nothing,
        "groups": {
            "vlm_sft": {
                "cursor": [1, 0, 6, 12288],
                "taken": 8,
                "ended": False,
                "shuffled": [
                    [0, 0, 0, 0, 0],
                    [0, 10240, 6144, 12288, 16384],
                    [2048, 2048, 2048, 2048, 2048],
                    [0, 1, 1, 0, 0],
                ],
            }
        },
        "counts": {"vlm_sft": {"packed": 8, "read": 8, "dropped": {}}},
    }
    assert state == {
        "version": 1,
        "num_streams": 2,
        "next_batch": 3,
        "fingerprint": {
            "pass": None,
            "tokenizer": [423, 419, 420, 421, 422],
            "order": ["vlm_sft"],
            "draw_seed": 3,
            "order_seed": 42,
            "shuffle": [5, 64 << 20],
            "budget": {
                "expected_num_tokens": 60,
                "max_num_tokens_per_sample": 80,
                "max_num_tokens": 80,
                "prefer_buffer_before": 0,
                "max_buffer_size": 1,
            },
            "weights": {"vlm_sft": [1.0, True]},
            "recipes": {"vlm_sft": "02ca560200f564fc"},
            "groups": {"vlm_sft": "7f333d6088f6fb88"},
        },
    }
