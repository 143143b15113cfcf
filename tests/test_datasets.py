"""The dataset inside a plain `torch.utils.data.DataLoader`."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import weakref
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import yaml
from golden_data import plain_tokenizer, tokenizer
from shard_factory import MIXTURE, SPECIAL_TOKENS, VAE, foreign_info, small_config
from torch.utils.data import DataLoader

import bagel_wds
from bagel_wds import (
    ConfigError,
    PackedDataset,
    SimpleCustomBatch,
    bagel_packed_collate_fn,
    collate_wrapper,
    make_bagel_multimodal_dataset,
)
from bagel_wds.batch import PackedBatch
from bagel_wds.layout import KEY_ORDER
from bagel_wds.pieces import PieceEncoder
from bagel_wds.state import StreamState

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def build(
    info: dict[str, Any],
    *,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    **settings: Any,
) -> PackedDataset:
    config = small_config(dataset_info=info, **settings)
    return config.build(tokenizer(), SPECIAL_TOKENS, rank, world_size, workers, global_seed=seed)


def digest(batch: dict[str, Any]) -> str:
    """Content of a batch: every tensor's bytes and every plain value."""
    content = hashlib.sha256()
    for key, value in batch.items():
        for item in value if key == "nested_attention_masks" else [value]:
            plain = isinstance(item, torch.Tensor)
            content.update(key.encode() + (item.numpy().tobytes() if plain else repr(item).encode()))
    return content.hexdigest()


def digests(batches: Iterable[SimpleCustomBatch], count: int) -> list[str]:
    return [digest(batch.to_dict()) for batch in islice(batches, count)]


def loader(dataset: PackedDataset, workers: int, context: str | None = None) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=1,
        num_workers=workers,
        collate_fn=collate_wrapper(),
        multiprocessing_context=context if workers else None,
    )


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return foreign_info(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("use_flex", [False, True])
def test_batch_has_upstreams_keys_shapes_and_dtypes(info: dict[str, Any], *, use_flex: bool) -> None:
    for batch in islice(loader(build(info, use_flex=use_flex), 0), 6):
        data = batch.to_dict()
        assert list(data) == [key for key in KEY_ORDER if key in data]
        assert batch.use_flex is use_flex
        assert ("split_lens" in data, "nested_attention_masks" in data) == (use_flex, not use_flex)
        length, text = batch.sequence_length, len(batch.packed_text_ids)
        assert batch.packed_position_ids.shape == (length,)
        assert batch.packed_text_indexes.shape == (text,)
        if use_flex:
            assert sum(batch.sample_lens) == sum(batch.split_lens) == 260
            assert len(batch.split_lens) == len(batch.attn_modes)
        else:
            assert sum(batch.sample_lens) == length
            assert [mask.shape for mask in batch.nested_attention_masks] == [
                (n, n) for n in batch.sample_lens
            ]
        latents = len(batch.packed_vae_token_indexes)
        assert sum(h * w for h, w in batch.patchified_vae_latent_shapes) == latents
        assert batch.packed_latent_position_ids.shape == batch.packed_timesteps.shape == (latents,)
        count, channels, height, width = batch.padded_images.shape
        assert (count, channels) == (len(batch.patchified_vae_latent_shapes), 3)
        assert (height, width) == tuple(
            16 * max(side) for side in zip(*batch.patchified_vae_latent_shapes, strict=True)
        )
        if "packed_vit_tokens" in data:
            patches = int(batch.vit_token_seqlens.sum())
            assert batch.packed_vit_tokens.shape == (patches, 14 * 14 * 3)
            assert batch.packed_vit_position_ids.shape == batch.packed_vit_token_indexes.shape == (patches,)
            assert length == text + latents + patches
        labels = len(batch.packed_label_ids)
        assert batch.ce_loss_indexes.shape == batch.ce_loss_weights.shape == (labels,)
        floats = {"padded_images", "packed_vit_tokens", "packed_timesteps", "ce_loss_weights"}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == (torch.float32 if key in floats else torch.int64), key


# A worker that torch stops while it still gives batches may abort at its own exit; that is no fault of the order.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("workers", [1, 2])
def test_order_does_not_depend_on_workers_or_how_they_start(
    info: dict[str, Any], workers: int, context: str
) -> None:
    alone = digests(loader(build(info, num_streams=2), 0), 8)

    dataset = build(info, workers=workers, num_streams=2)

    assert digests(loader(dataset, workers, context), 8) == alone
    assert len(set(alone)) == 8


def test_ranks_take_the_global_batches_in_turn(info: dict[str, Any]) -> None:
    alone = digests(loader(build(info, num_streams=4), 0), 8)

    for rank in range(2):
        dataset = build(info, rank=rank, world_size=2, workers=2, num_streams=4)
        assert digests(loader(dataset, 2), 4) == alone[rank::2]


@pytest.mark.parametrize("num_streams", [1, 3, 40])
def test_every_sample_comes_once_an_epoch(tmp_path: Path, num_streams: int) -> None:
    info = foreign_info(tmp_path, sizes=[5, 4])
    mixture = {"vlm_sft": MIXTURE["vlm_sft"]}
    dataset = build(info, num_streams=num_streams, grouped_datasets=mixture, shuffle_samples=1)

    # Where each sample came from, and how often by the time the slowest is there once.
    seen: Counter[tuple[int, ...]] = Counter()
    for batch in loader(dataset, 0):
        seen.update(tuple(origin["data_indexes"]) for origin in batch.batch_data_indexes)
        if len(seen) == 9 or sum(seen.values()) > 40 * 9:
            break

    # By shard and byte offset: five in the one, four in the other.
    assert Counter(shard for shard, _ in seen) == {0: 5, 1: 4}
    assert max(seen.values()) <= num_streams + 2


def test_another_seed_gives_other_batches_and_the_same_seed_the_same(info: dict[str, Any]) -> None:
    first, again, other = (digests(loader(build(info, seed=seed), 0), 4) for seed in (0, 0, 1))

    assert first == again
    assert first != other


def test_reordering_by_set_epoch_changes_the_batches(info: dict[str, Any]) -> None:
    dataset, other = build(info), build(info)
    other.set_epoch(7)
    before = digests(loader(dataset, 0), 4)

    assert digests(loader(other, 0), 4) != before
    with pytest.raises(ConfigError, match="set_epoch after iteration has begun"):
        dataset.set_epoch(7)


def test_upstream_fidelity_runs_in_a_loader_and_is_deterministic(info: dict[str, Any]) -> None:
    runs = [digests(loader(build(info, workers=2, fidelity="upstream"), 2), 6) for _ in range(2)]

    assert runs[0] == runs[1]
    workers = [
        batch.batch_data_indexes[0]["worker_id"]
        for batch in islice(loader(build(info, workers=2, fidelity="upstream"), 2), 4)
    ]
    assert workers == [0, 1, 0, 1]


def test_dataset_pickles_and_leaves_no_trace_in_process_wide_generators(info: dict[str, Any]) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()

    before = states()
    dataset = pickle.loads(pickle.dumps(build(info)))
    batches = list(islice(dataset, 3))

    assert [digest(batch) for batch in batches] == [digest(batch) for batch in islice(build(info), 3)]
    assert states() == before


def test_one_call_builds_what_the_config_builds(info: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "expected_num_tokens": 200,
        "max_num_tokens": 260,
        "max_num_tokens_per_sample": 200,
        "prefer_buffer_before": 100,
        "max_buffer_size": 5,
        "dataset_info": info,
    }
    dataset = make_bagel_multimodal_dataset(tokenizer(), SPECIAL_TOKENS, MIXTURE, num_workers=0, **arguments)
    same = build(info, seed=42, shuffle_samples=1000)

    assert digests(loader(dataset, 0), 3) == digests(loader(same, 0), 3)


def test_mixture_and_info_come_from_files_too(info: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(MIXTURE))
    (tmp_path / "info.json").write_text(json.dumps(info))
    dataset = build(
        None,  # type: ignore[arg-type] # the files take their place
        grouped_datasets=None,
        grouped_datasets_path=str(tmp_path / "mixture.yaml"),
        dataset_info_path=str(tmp_path / "info.json"),
    )

    assert digests(loader(dataset, 0), 3) == digests(loader(build(info), 0), 3)


@pytest.mark.parametrize(
    "groups", [["t2i_pretrain"], ["vlm_sft"], ["unified_edit"], ["vlm_sft", "unified_edit"]]
)
def test_c34_any_subset_of_the_groups_can_be_trained_alone(info: dict[str, Any], groups: list[str]) -> None:
    dataset = build(info, grouped_datasets={group: MIXTURE[group] for group in groups})

    batches = list(islice(loader(dataset, 0), 3))

    names = {origin["dataset_name"] for batch in batches for origin in batch.batch_data_indexes}
    assert names == set(groups)


def test_user_named_group_names_its_recipe(info: dict[str, Any]) -> None:
    mixture = {"pictures": {"dataset_names": ["t2i"], "image_transform_args": VAE, "recipe": "t2i"}}
    dataset = build({"pictures": info["t2i_pretrain"]}, grouped_datasets=mixture)

    assert next(iter(dataset))["batch_data_indexes"][0]["dataset_name"] == "pictures"


def refused(info: Any, match: str, **arguments: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        build(info, **arguments)


def test_c01_settings_that_cannot_work_are_refused_before_any_worker_starts(
    info: dict[str, Any], tmp_path: Path
) -> None:
    refused(
        info,
        r"num_streams=3 must be a multiple of world_size=2; the nearest are 2 and 4",
        num_streams=3,
        world_size=2,
    )
    refused(
        info,
        r"num_workers=3 must divide the 4 streams of a rank .* the nearest is 2",
        num_streams=4,
        workers=3,
    )
    refused(info, r"rank 2 is not in 0..1", rank=2, world_size=2)
    nowhere = {**info, "vlm_sft": {"vlm": {"shards": str(tmp_path / "vlm-{00..03}.tar")}}}
    refused(nowhere, r"vlm-\{00..03\}.tar: 4 of 4 shards are not there, the first is .*vlm-00.tar")
    refused(
        {**info, "vlm_sft": {"vml": {"shards": "x"}}},
        r"\['vlm_sft'\]\['vlm'\] is missing; did you mean 'vml'",
    )
    refused(
        {**info, "vlm_sft": {"vlm": {"data_dir": "x", "jsonl_path": "y"}}},
        r"\['vlm_sft'\]\['vlm'\]: jsonl_path: there is no y",
    )
    refused({"t2i_pretrain": info["t2i_pretrain"]}, "dataset_info has no group 'unified_edit'")
    with pytest.raises(ConfigError, match="upstream's resume state"):
        small_config(dataset_info=info).build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, 0, data_status={"x": 1})
    with pytest.raises(ConfigError, match="pass the ids that add_special_tokens returns"):
        small_config(dataset_info=info).build(tokenizer(), {}, 0, 1, 0, 0)


def test_ids_that_are_not_the_tokenizers_are_refused(info: dict[str, Any]) -> None:
    def refused_with(match: str, text: Any, ids: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            small_config(dataset_info=info).build(text, ids, 0, 1, 0, 0)

    refused_with(
        r"\['bos_token_id'\] is 419, but <\|im_start\|> is no token in the tokenizer",
        plain_tokenizer(),
        SPECIAL_TOKENS,
    )
    refused_with(
        r"\['eos_token_id'\] is 1, but <\|im_end\|> is 420",
        tokenizer(),
        {**SPECIAL_TOKENS, "eos_token_id": 1},
    )
    refused_with(
        "special_tokens is tuple; pass the ids, the second value",
        tokenizer(),
        (tokenizer(), SPECIAL_TOKENS, 4),
    )


def test_relative_shards_are_looked_for_beside_the_info_file(info: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    group = {"vlm_sft": MIXTURE["vlm_sft"]}
    (folder / "info.yaml").write_text(yaml.safe_dump({"vlm_sft": {"vlm": {"shards": "vlm_sft-{0..1}.tar"}}}))
    for path in info["vlm_sft"]["vlm"]["shards"][:2]:
        (folder / path.rpartition("/")[2]).symlink_to(path)
    config = small_config(grouped_datasets=group, dataset_info_path=str(folder / "info.yaml"))

    assert next(iter(config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, 0)))["sequence_length"] > 0
    (folder / "vlm_sft-1.tar").unlink()
    with pytest.raises(
        ConfigError, match=r"\['vlm_sft'\]\['vlm'\]: vlm_sft-\{0..1\}.tar: 2 of 2 shards are not there"
    ):
        config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, 0)


def test_loader_with_other_workers_than_the_dataset_says_so(info: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="built for num_workers=2, and the DataLoader has 3: num_workers=3 must divide"
    ):
        next(iter(loader(build(info, workers=2), 3, "fork")))


def test_more_workers_than_shards_share_them(info: dict[str, Any]) -> None:
    dataset = build(info, workers=2, num_streams=16)

    assert len(set(digests(loader(dataset, 2), 16))) == 16


def test_c49_latents_beyond_the_table_are_refused_with_the_value_that_works(info: dict[str, Any]) -> None:
    large = {
        **MIXTURE["t2i_pretrain"],
        "image_transform_args": {"image_stride": 16, "max_image_size": 1024, "min_image_size": 512},
    }
    mixture = {"t2i_pretrain": large}
    refused(
        info,
        r"'t2i_pretrain': max_image_size=1024 gives 64 patches.*max_latent_size=32; set max_latent_size to 64",
        grouped_datasets=mixture,
    )

    assert build(info, grouped_datasets=mixture, max_latent_size=64)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_streams": 6, "transport": "float32"},
        {"num_streams": 6, "transport": "uint8"},
        {"fidelity": "upstream"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_streams_that_wait_for_their_turn_keep_nothing_of_batches_that_were_dropped(
    info: dict[str, Any], settings: dict[str, Any]
) -> None:
    places = set()
    iterator = iter(build(info, **settings))
    for _ in range(24):
        batch = next(iterator)
        values: list[Any] = [*batch.values(), *batch.get("nested_attention_masks", [])]
        if "pixels" in batch:
            values += [batch["pixels"], batch["pixels"].levels]
            places.add(batch["pixels"].levels.data_ptr())
        if "padded_images" in batch:
            places.add(batch["padded_images"].data_ptr())
        alive = [
            weakref.ref(value)
            for value in values
            if isinstance(value, torch.Tensor) or type(value).__name__ == "PackedPixels"
        ]
        assert len(alive) > 5
        del batch, values
        assert {one() for one in alive} == {None}

    # Where there are six streams, each was asked four times, and all have their pixels from one memory, a few times outgrown.
    assert 0 < len(places) < 6


def test_all_streams_and_groups_of_a_process_keep_the_words_that_they_met_in_one_place(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PieceEncoder | None] = []
    of = PieceEncoder.of

    def counted(backend: Any) -> PieceEncoder | None:
        made.append(of(backend))
        return made[-1]

    monkeypatch.setattr(PieceEncoder, "of", counted)
    list(islice(build(info, num_streams=6), 12))

    [one] = made
    assert one is not None
    assert one._known


def test_a_batch_that_was_moved_is_all_in_the_new_one(info: dict[str, Any]) -> None:
    state = StreamState(3)
    batch = PackedBatch({"packed_text_ids": torch.arange(3), "sequence_length": 3}, state, is_padding=True)
    ids = batch["packed_text_ids"]

    moved = batch.move()

    assert batch == {}
    assert list(moved) == ["packed_text_ids", "sequence_length"]
    assert moved["packed_text_ids"] is ids
    assert moved.state is state
    assert moved.is_padding


def test_batch_wrapper_moves_pins_and_gives_its_dict_back(info: dict[str, Any]) -> None:
    data = next(iter(build(info)))
    batch = bagel_packed_collate_fn([data])

    assert batch.to_dict() is not data
    assert batch.to_dict() == data
    assert batch.pin_memory() is batch
    assert batch.to("meta") is batch
    assert {value.device.type for value in batch.to_dict().values() if isinstance(value, torch.Tensor)} == {
        "meta"
    }
    assert all(mask.device.type == "meta" for mask in batch.nested_attention_masks)
    with pytest.raises(ValueError, match="set batch_size=1"):
        collate_wrapper()([data, data])
    if torch.cuda.is_available():
        assert bagel_packed_collate_fn([data]).cuda().packed_text_ids.is_cuda


def test_public_names_are_there() -> None:
    for name in bagel_wds.__all__:
        assert getattr(bagel_wds, name) is not None
    assert set(dir(bagel_wds)) == set(bagel_wds.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = bagel_wds.nonesuch
