"""Rows of docs/divergence.md that no other test holds."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from golden_data import tokenizer
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_info, small_config
from source_factory import encode_image, write_edit, write_jsonl
from test_datasets import digest
from test_planners import sample, talk, tools

from bagel_wds import (
    BadSample,
    ConfigError,
    ImageTransform,
    SftJSONLIterableDataset,
    UnifiedEditIterableDataset,
    stages,
)
from bagel_wds.frames import FrameRule
from bagel_wds.groups import find_shards
from bagel_wds.images import EncodedImage
from bagel_wds.planners.edit import plan_edit
from bagel_wds.planners.vlm import plan_vlm
from bagel_wds.records import RawSample
from bagel_wds.rng import CallOrderDraws, KeyedDraws
from bagel_wds.upstream.frame_sampler import open_clip

if TYPE_CHECKING:
    from pathlib import Path

    from bagel_wds import PackedDataset


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return foreign_info(tmp_path_factory.mktemp("shards"))


def build(info: dict[str, Any], seed: int = 1, **settings: Any) -> PackedDataset:
    return small_config(dataset_info=info, **settings).build(
        tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=seed
    )


def first(dataset: PackedDataset, count: int = 3) -> list[str]:
    return [digest(batch) for batch in islice(dataset, count)]


def test_seed_of_0_is_a_seed_and_under_upstream_fidelity_the_data_seed(info: dict[str, Any]) -> None:
    def batches(fidelity: str, seed: int) -> list[str]:
        return first(build(info, seed, fidelity=fidelity, data_seed=42))

    assert batches("corrected", 0) != batches("corrected", 42)
    assert batches("upstream", 0) == batches("upstream", 42) != batches("upstream", 1)


@pytest.mark.parametrize("fidelity", ["corrected", "upstream"])
def test_iterating_again_gives_the_same_batches_again(info: dict[str, Any], fidelity: str) -> None:
    dataset = build(info, fidelity=fidelity)

    assert first(dataset) == first(dataset)


@pytest.mark.parametrize("fidelity", ["corrected", "upstream"])
def test_config_is_frozen_and_building_leaves_the_mixture_as_it_is(
    info: dict[str, Any], fidelity: str
) -> None:
    mixture, places = copy.deepcopy(MIXTURE), copy.deepcopy(info)
    config = small_config(dataset_info=places, grouped_datasets=mixture, fidelity=fidelity)

    both = [first(config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=1)) for _ in range(2)]

    assert both[0] == both[1]
    assert (mixture, places) == (MIXTURE, info)
    name = "data_seed"
    with pytest.raises(FrozenInstanceError):
        setattr(config, name, 1)


def test_picture_beyond_the_table_is_an_error_at_its_batch_under_upstream_fidelity(
    info: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = build(
        info,
        fidelity="upstream",
        grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]},
        max_latent_size=1,
    )

    assert "set max_latent_size to" in caplog.text
    with pytest.raises(ConfigError, match="beyond the model's table of positions, max_latent_size=1"):
        next(iter(dataset))


def test_what_the_default_refuses_is_taken_under_upstream_fidelity(info: dict[str, Any]) -> None:
    never = {**MIXTURE["vlm_sft"], "weight": 0, "is_mandatory": False}
    odd: dict[str, Any] = {
        "expected_num_tokens": 400,
        "max_num_tokens": 300,
        "grouped_datasets": {"t2i_pretrain": MIXTURE["t2i_pretrain"], "vlm_sft": never},
    }
    with pytest.raises(ConfigError, match="a pack would never be full"):
        build(info, **odd)

    batch = next(iter(build(info, fidelity="upstream", **odd)))

    assert {origin["dataset_name"] for origin in batch["batch_data_indexes"]} == {"t2i_pretrain"}
    with pytest.raises(ConfigError, match='on_shard_error="skip": fidelity="upstream" draws in call order'):
        build(info, fidelity="upstream", on_shard_error="skip")


def test_image_is_decoded_once_for_all_its_views(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[EncodedImage] = []
    levels = EncodedImage.levels

    def noted(image: EncodedImage, *arguments: Any) -> Any:
        decoded.append(image)
        return levels(image, *arguments)

    monkeypatch.setattr(EncodedImage, "levels", noted)
    edits = {"unified_edit": {**MIXTURE["unified_edit"], "weight": 1}}
    never: dict[str, Any] = {f"{kind}_cond_dropout_prob": 0.0 for kind in ("text", "vit", "vae")}

    batch = next(iter(build(info, grouped_datasets=edits, **never)))

    views = len(batch["padded_images"]) + len(batch["vit_token_seqlens"])
    assert len({id(image) for image in decoded}) == len(decoded)
    assert 2 <= len(decoded) < views


@pytest.mark.parametrize("upstream", [False, True])
def test_frame_that_is_not_chosen_may_be_broken(tmp_path: Path, *, upstream: bool) -> None:
    # Of eight frames, the middles of four intervals are the even ones.
    for number in range(8):
        data = b"no picture" if number % 2 else encode_image((32, 32), number, "JPEG")
        (tmp_path / f"f_{number}.jpg").write_bytes(data)
    rule = FrameRule(max_num_frames=4, min_num_frames=4, sample="middle", any_frame=not upstream)
    told = replace(tools(upstream=upstream), frames=rule)

    def planned() -> list[int]:
        raw = RawSample("k", "", talk("<video>what?", "a"), (open_clip(str(tmp_path)),), (True,))
        return [view.frame for view in plan_vlm(raw, told, KeyedDraws(0)).views]

    assert planned() == [0, 2, 4, 6]
    (tmp_path / "f_4.jpg").write_bytes(b"no picture")
    with pytest.raises(BadSample, match="image_unreadable"):
        planned()


def test_clip_without_a_conversation_spends_no_draws_and_one_without_its_tag_does() -> None:
    for fields, spends in (({"video": "clip"}, False), (talk("hello", "hi"), True)):
        draws, fresh = CallOrderDraws(3), CallOrderDraws(3)
        with pytest.raises(BadSample):
            plan_vlm(sample(fields, clips=(30,)), tools(upstream=True), draws)

        assert (draws.python.getstate() != fresh.python.getstate()) is spends
        assert (draws.randint(0, 1 << 30, "") != fresh.randint(0, 1 << 30, "")) is spends


def test_more_tags_than_images_are_a_counted_drop_under_upstream_fidelity(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode_image((32, 32)))
    odd = {"image": "a.png", **talk("<image>q", "a", "<image>and?", "b")}
    write_jsonl(tmp_path / "a.jsonl", [odd, {"image": "a.png", **talk("<image>q", "a")}])
    [name] = MIXTURE["vlm_sft"]["dataset_names"]
    place = {"jsonl_path": str(tmp_path / "a.jsonl"), "data_dir": str(tmp_path)}
    dataset = build(
        {"vlm_sft": {name: place}}, grouped_datasets={"vlm_sft": MIXTURE["vlm_sft"]}, fidelity="upstream"
    )

    next(iter(dataset))

    assert set(dataset.stats()["groups"]["vlm_sft"]["dropped"]) <= {"placeholder_mismatch", "lost"}
    assert dataset.stats()["groups"]["vlm_sft"]["dropped"]["placeholder_mismatch"] > 0


def test_surplus_instructions_are_left_unread_under_upstream_fidelity(tmp_path: Path) -> None:
    picture = encode_image((32, 32))
    write_edit(tmp_path / "a.parquet", [([picture, picture], [["red"], ["blue"]])])
    edits = {"unified_edit": MIXTURE["unified_edit"]}
    [name] = MIXTURE["unified_edit"]["dataset_names"]
    config = small_config(
        dataset_info={"unified_edit": {name: {"data_dir": str(tmp_path)}}},
        grouped_datasets=edits,
        fidelity="upstream",
    )

    batch = next(iter(config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=1)))

    assert batch["batch_data_indexes"][0]["dataset_name"] == "unified_edit"
    both = {"instruction_list": [["red"], ["blue"]]}
    assert plan_edit(sample(both, 2), tools(upstream=True), KeyedDraws(0)).length > 0


def test_lines_keep_the_order_of_the_file_and_under_upstream_fidelity_that_of_their_text(
    tmp_path: Path,
) -> None:
    lines = [{"id": number, **talk("q", "a")} for number in (5, 2, 9, 0)]
    orders = {}
    for name, rows in (("down", lines), ("up", lines[::-1])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        [dataset] = MIXTURE["vlm_sft"]["dataset_names"]
        place = {"jsonl_path": str(tmp_path / f"{name}.jsonl"), "data_dir": str(tmp_path)}
        mixture = {"vlm_sft": MIXTURE["vlm_sft"]}
        settings: dict[str, Any] = {
            "dataset_info": {"vlm_sft": {dataset: place}},
            "grouped_datasets": mixture,
        }
        config = small_config(**settings)
        read = list(islice(stages.read(config)(stages.shards(find_shards(config)["vlm_sft"], epochs=1)()), 4))
        by_text = build(settings["dataset_info"], grouped_datasets=mixture, fidelity="upstream")
        shared, _ = by_text.class_datasets["vlm_sft"].share_of(0, 0)
        orders[name] = [stages.decode(config, "vlm_sft")(iter(read))], [line for line, _ in shared]

    ids = {name: [raw.fields["id"] for raw in found[0]] for name, (found, _) in orders.items()}
    assert ids["down"] == [5, 2, 9, 0] == ids["up"][::-1]
    assert orders["down"][1] == orders["up"][1]


def interrupt(_: str) -> Any:
    raise KeyboardInterrupt


class Interrupted(UnifiedEditIterableDataset):
    """The user presses Ctrl-C while a row is parsed."""

    def parse_row(self, row: Any) -> dict[str, Any]:
        raise KeyboardInterrupt


def test_an_interrupt_is_no_bad_row(tmp_path: Path) -> None:
    transform, picture = ImageTransform(98, 28, 14), encode_image((32, 32))
    write_jsonl(tmp_path / "a.jsonl", [{"video": "clip", **talk("<video>", "a")}])
    write_edit(tmp_path / "a.parquet", [([picture, picture], [["red"]])])
    talks = SftJSONLIterableDataset(
        "d", transform, tokenizer(), interrupt, [str(tmp_path / "a.jsonl")], [str(tmp_path)], [None]
    )
    edits = Interrupted("d", transform, tokenizer(), transform, [str(tmp_path)], [None], None)

    for dataset in (talks, edits):
        with pytest.raises(KeyboardInterrupt):
            next(iter(dataset))
