"""Finite passes: every sample once, the same number of steps on every rank, and an end that all agree on."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from golden_data import tokenizer
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_shards, small_config, vlm_sample, write_tar

from bagel_wds import ConfigError, PackedLoader

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bagel_wds import SimpleCustomBatch

SIZES = (5, 7, 11)
GROUPS = {"vlm_sft": MIXTURE["vlm_sft"]}


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shards")
    return {
        "vlm_sft": {"vlm": {"shards": foreign_shards(folder, "vlm_sft", SIZES)}},
        "t2i_pretrain": {"t2i": {"shards": foreign_shards(folder, "t2i_pretrain", (9, 2))}},
    }


def load(
    info: dict[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    groups: dict[str, Any] = GROUPS,
    streams: int = 4,
    **options: Any,
) -> PackedLoader:
    config = small_config(
        dataset_info=info,
        grouped_datasets=groups,
        num_streams=streams,
        shuffle_samples=4,
        expected_num_tokens=60,
        max_num_tokens=100,
        max_num_tokens_per_sample=100,
    )
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, rank, world_size, workers, global_seed=0)
    return PackedLoader(dataset, workers, **{"epochs": 1, "multiprocessing_context": "fork", **options})


def samples(batches: Iterable[SimpleCustomBatch]) -> Counter[tuple[Any, ...]]:
    return Counter(
        (origin["dataset_name"], *origin["data_indexes"])
        for batch in batches
        for origin in batch.batch_data_indexes
    )


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_sample_comes_once_and_the_pass_ends(info: dict[str, Any], workers: int) -> None:
    loader = load(info, workers=workers)
    batches = list(loader)

    seen = samples(batches)
    assert len(seen) == sum(SIZES)
    assert set(seen.values()) == {1}
    assert len(batches) % 4 == 0
    # Padding comes in the last rounds alone, and there is never a whole round of it.
    rounds = [batches[i : i + 4] for i in range(0, len(batches), 4)]
    assert all(not all(batch.is_padding for batch in one) for one in rounds)
    assert loader.stats["groups"]["vlm_sft"]["packed"] == sum(SIZES)


def test_all_groups_of_a_mixture_come_whole(info: dict[str, Any]) -> None:
    groups = {**GROUPS, "t2i_pretrain": {**MIXTURE["t2i_pretrain"], "weight": 0.2}}
    seen = samples(load(info, groups=groups, epochs=2))

    assert len(seen) == sum(SIZES) + 11
    assert set(seen.values()) == {2}


def test_padding_has_no_loss_and_is_marked(info: dict[str, Any]) -> None:
    batches = list(load(info, streams=40))
    padding = [batch for batch in batches if batch.is_padding]

    assert len(batches) % 40 == 0
    assert len(padding) >= len(batches) - sum(SIZES)
    for batch in padding:
        assert batch.batch_data_indexes == []
        assert (batch.sequence_length, batch.sample_lens) == (2, [2])
        assert torch.equal(batch.ce_loss_weights, torch.zeros(1))
        assert not hasattr(batch, "padded_images")
    assert samples(batches) == Counter(dict.fromkeys(samples(batches), 1))
    assert len(samples(batches)) == sum(SIZES)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_c02_ranks_make_equal_steps_and_the_count_reconciles(info: dict[str, Any], workers: int) -> None:
    for remainder in ("pad", "drop", "repeat"):
        steps, seen = [], Counter[tuple[Any, ...]]()
        # The pass of one rank alone says how many steps the two make together.
        alone = list(load(info, streams=12, remainder=remainder))
        for rank in range(2):
            loader = load(
                info,
                rank=rank,
                world_size=2,
                workers=workers,
                streams=12,
                remainder=remainder,
                steps=len(alone) // 2,
            )
            batches = list(loader)
            steps.append(len(batches))
            seen += samples(batches)

        assert steps == [len(alone) // 2] * 2
        assert seen == samples(alone)
        emitted, repeated = len(seen), sum(seen.values()) - len(seen)
        dropped = sum(SIZES) - emitted
        assert emitted + dropped == 23
        assert (dropped == 0, repeated == 0) == {
            "pad": (True, True),
            "drop": (dropped == 0, True),
            "repeat": (True, repeated == 0),
        }[remainder]
        if remainder == "drop":
            assert not any(batch.is_padding for batch in alone)


def test_drop_ends_with_the_last_round_that_all_streams_fill(info: dict[str, Any]) -> None:
    padded, dropped = list(load(info, streams=3)), list(load(info, streams=3, remainder="drop"))

    first_padding = next(number for number, batch in enumerate(padded) if batch.is_padding)
    assert len(dropped) == first_padding // 3 * 3
    assert samples(dropped) == samples(padded[: len(dropped)])


def test_repeat_goes_on_with_real_samples(info: dict[str, Any]) -> None:
    batches = list(load(info, streams=3, remainder="repeat"))

    assert not any(batch.is_padding for batch in batches)
    assert len(samples(batches)) == sum(SIZES)
    assert sum(samples(batches).values()) >= sum(SIZES)


def test_next_iteration_is_another_pass_and_a_broken_one_goes_on(info: dict[str, Any]) -> None:
    loader = load(info)
    whole = samples(loader)

    assert samples(loader) == whole
    first = list(islice(loader, 3))
    assert samples(first) + samples(loader) == whole


def test_finite_pass_resumes_where_it_was(info: dict[str, Any]) -> None:
    batches = list(load(info, streams=1))
    assert len(batches) > 4
    for cut in range(len(batches)):
        loader = load(info, streams=1)
        first = list(islice(loader, cut))
        other = load(info, streams=1)
        other.load_state_dict(loader.state_dict())
        assert samples(first) + samples(other) == samples(batches)


@pytest.mark.parametrize("remainder", ["pad", "drop", pytest.param("repeat", marks=pytest.mark.slow)])
def test_pass_cut_in_the_middle_of_a_round_ends_where_the_unbroken_one_does(
    info: dict[str, Any], remainder: str
) -> None:
    whole = list(load(info, remainder=remainder))
    for cut in range(len(whole)):
        loader = load(info, remainder=remainder)
        first = list(islice(loader, cut))
        other = load(info, remainder=remainder)
        other.load_state_dict(loader.state_dict())
        rest = list(other)

        assert [b.is_padding for b in first + rest] == [b.is_padding for b in whole], cut
        assert samples(first) + samples(rest) == samples(whole)


def test_state_of_a_pass_is_of_no_use_to_another_kind_of_run(info: dict[str, Any]) -> None:
    loader = load(info)
    list(islice(loader, 3))
    for other in (load(info, epochs=None), load(info, epochs=2), load(info, remainder="repeat")):
        with pytest.raises(ConfigError, match=r"pass was \[1, 'end'\] and is"):
            other.load_state_dict(loader.state_dict())


def test_drops_behind_the_last_batch_are_counted(tmp_path: Path) -> None:
    bad = {**vlm_sample(1), "json": {"conversations": 5}}
    urls = [*foreign_shards(tmp_path, "vlm_sft", [3]), write_tar(tmp_path / "bad.tar", [bad])]
    loader = load({"vlm_sft": {"vlm": {"shards": urls}}}, streams=1)
    assert len(samples(loader)) == 3
    counts = loader.stats["groups"]["vlm_sft"]

    assert counts == {
        "read": 4,
        "packed": 3,
        "waiting": 0,
        "epochs": 1,
        "dropped": {"conversations_invalid": 1},
    }


def test_group_that_would_never_come_is_refused(info: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="'vlm_sft' has weight 0 and is not mandatory, so none of its samples would come"
    ):
        load(
            info,
            groups={
                **GROUPS,
                "vlm_sft": {**GROUPS["vlm_sft"], "weight": 0, "is_mandatory": False},
                "t2i_pretrain": MIXTURE["t2i_pretrain"],
            },
        )


@pytest.mark.parametrize("option", ["batch_size", "in_order", "collate_fn"])
def test_options_that_change_batches_are_refused(info: dict[str, Any], option: str) -> None:
    changed: dict[str, Any] = {option: None}
    with pytest.raises(ConfigError, match=f"{option}= is not for PackedLoader"):
        load(info, **changed)
    with pytest.raises(ConfigError, match="steps=-1 must not be negative"):
        load(info, steps=-1)


def test_pass_of_so_many_steps_resumes_to_that_number_and_begins_again(info: dict[str, Any]) -> None:
    loader = load(info, steps=6)
    whole = samples(loader)
    first = list(islice(loader, 4))
    other = load(info, steps=6)
    other.load_state_dict(loader.state_dict())
    rest = list(other)

    assert len(rest) == 2
    assert samples(first) + samples(rest) == whole
    # Over: the next iteration is another pass.
    assert samples(other) == whole


def test_ranks_without_a_process_group_are_told_what_is_missing(info: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="call init_process_group, or give steps="):
        list(load(info, rank=0, world_size=2))
    with pytest.raises(ConfigError, match="remainder='skip' is none of pad, drop, repeat"):
        load(info, remainder="skip")
    with pytest.raises(ConfigError, match="epochs=0 must be at least 1"):
        load(info, epochs=0)


def test_group_smaller_than_the_streams_is_seen_once(tmp_path: Path) -> None:
    info = {"vlm_sft": {"vlm": {"shards": foreign_shards(tmp_path, "vlm_sft", [3])}}}

    assert samples(load(info, streams=8)) == Counter(
        {("vlm_sft", 0, offset): 1 for _, _, offset in samples(load(info, streams=8))}
    )
    assert len(samples(load(info, streams=8))) == 3
