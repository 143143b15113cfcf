"""The stages inside a `wds.DataPipeline`, beside webdataset's own, over shards that webdataset wrote."""

from __future__ import annotations

import io
import pickle
import tarfile
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import webdataset as wds
from golden_data import tokenizer
from PIL import Image
from shard_factory import (
    MIXTURE,
    SPECIAL_TOKENS,
    VAE,
    foreign_shards,
    picture,
    small_config,
    t2i_sample,
    vlm_sample,
    write_tar,
)
from test_reader import write_index

from bagel_wds import SimpleCustomBatch, Tally, stages
from bagel_wds.bookmark import GroupBook
from bagel_wds.decode import decode_sample
from bagel_wds.errors import ConfigError, NoUsableSampleError, Reason, ShardError
from bagel_wds.pipeline import fetch_samples
from bagel_wds.planners import PLANNERS, PlanTools, plan_t2i
from bagel_wds.rng import CallOrderDraws, Draws
from bagel_wds.shards import list_shards
from bagel_wds.shuffle import ShuffleBuffer, is_reference
from bagel_wds.tokens import TextEncoder
from bagel_wds.transforms import ImageTransform

if TYPE_CHECKING:
    from pathlib import Path

    from bagel_wds.records import Cursor, RawSample, SamplePlan, SampleRef

GROUPS = list(MIXTURE)


def of_group(group: str, **more: Any) -> list[Any]:
    """Our stages from decode to materialize, for one group."""
    config = small_config(grouped_datasets={group: MIXTURE[group]}, **more)
    return [
        stages.decode(config, group),
        stages.plan(config, group, tokenizer()),
        stages.pack(config),
        stages.materialize(config, SPECIAL_TOKENS),
    ]


def names(batches: list[dict[str, Any]]) -> int:
    return sum(len(batch["batch_data_indexes"]) for batch in batches)


@pytest.mark.parametrize("group", GROUPS)
def test_webdataset_reads_shuffles_and_splits_and_we_do_the_rest(group: str, tmp_path: Path) -> None:
    urls = foreign_shards(tmp_path, group, [5, 7])

    batches = list(
        wds.DataPipeline(
            wds.SimpleShardList(urls),
            wds.split_by_node,
            wds.split_by_worker,
            wds.tarfile_to_samples(),
            wds.shuffle(4),
            *of_group(group),
        )
    )

    assert names(batches) == 12
    assert all(batch["sequence_length"] == sum(batch["sample_lens"]) for batch in batches)
    assert all(batch["sequence_length"] <= 260 for batch in batches)


def test_eager_decode_gives_the_same_batches_as_lazy_images(tmp_path: Path) -> None:
    urls = foreign_shards(tmp_path, "unified_edit", [15])
    source = [wds.SimpleShardList(urls), wds.tarfile_to_samples()]

    lazy = list(wds.DataPipeline(*source, *of_group("unified_edit")))
    eager = list(wds.DataPipeline(*source, wds.decode("pil"), *of_group("unified_edit")))

    assert len(lazy) == len(eager) > 1
    for one, other in zip(lazy, eager, strict=True):
        assert list(one) == list(other)
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[key]), key


def test_our_reader_and_shuffle_give_what_webdatasets_give(tmp_path: Path) -> None:
    urls = foreign_shards(tmp_path, "vlm_sft", [4, 3])

    theirs = list(wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples()))
    ours = list(wds.DataPipeline(wds.SimpleShardList(urls), stages.read()))
    shuffled = list(
        wds.DataPipeline(
            wds.SimpleShardList(urls), stages.read(), stages.shuffle(small_config(shuffle_samples=3))
        )
    )

    def plain(sample: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in sample.items() if not key.startswith("__") or key == "__key__"}

    assert [plain(sample) for sample in ours] == [plain(sample) for sample in theirs]
    assert sorted(sample["__key__"] for sample in shuffled) == sorted(sample["__key__"] for sample in theirs)
    assert [sample["__key__"] for sample in shuffled] != [sample["__key__"] for sample in ours]


def test_groups_are_mixed_and_mandatory_ones_open_every_pack(tmp_path: Path) -> None:
    config = small_config()
    groups = {
        group: wds.DataPipeline(
            stages.shards(foreign_shards(tmp_path, group, [5]), group=group),
            stages.read(),
            stages.decode(config, group),
            stages.plan(config, group, tokenizer()),
        )
        for group in GROUPS
    }

    batches = wds.DataPipeline(
        stages.mix(groups, config),
        stages.pack(config),
        stages.materialize(config, SPECIAL_TOKENS),
        stages.collate(),
    )

    seen: set[str] = set()
    for batch in islice(batches, 12):
        assert isinstance(batch, SimpleCustomBatch)
        order = [origin["dataset_name"] for origin in batch.batch_data_indexes]
        assert order[:2] == ["t2i_pretrain", "vlm_sft"]
        seen |= set(order)
    assert seen == set(GROUPS)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_samples_that_begin_as_references_are_those_that_are_read(tmp_path: Path, num_streams: int) -> None:
    urls = foreign_shards(tmp_path, "vlm_sft", [7, 5, 6])
    for url in urls:
        write_index(url)
    shards = stages.shards(urls, seed=3, num_streams=num_streams, epochs=2)
    listed = list_shards(urls)
    config = small_config(shuffle_samples=8)
    book = GroupBook(buffer=ShuffleBuffer(fetch=partial(fetch_samples, listed)))

    def cursors(step: Any, book: GroupBook) -> list[tuple[SampleRef, Cursor]]:
        return [(sample["__ref__"], book.cursor) for sample in step(shards())]

    whole = list(wds.DataPipeline(shards, stages.read(), stages.shuffle(config)))
    begun = list(wds.DataPipeline(shards, stages.read(config, book=book), stages.shuffle(config, book=book)))
    read = list(stages.read(config, book=GroupBook())(shards()))

    assert [is_reference(sample) for sample in read] == [True] * 8 + [False] * (len(read) - 8)
    assert begun == whole
    assert len(whole) > 8
    # The cursor of each sample is the same, too, so that a state says the same.
    one, other = GroupBook(), GroupBook()
    assert cursors(stages.read(config, book=one), one) == cursors(stages.read(book=other), other)


def test_reading_goes_on_by_reference_where_a_state_left_it(tmp_path: Path) -> None:
    urls = foreign_shards(tmp_path, "t2i_pretrain", [9, 9])
    for url in urls:
        write_index(url)
    shards = stages.shards(urls, seed=1)
    config = small_config(shuffle_samples=5)
    book = GroupBook()
    unbroken = [sample["__ref__"] for sample in islice(stages.read()(shards()), 30)]
    for cut in range(1, 20):
        list(islice(stages.read(book=book)(shards()), cut))
        on = GroupBook(book.cursor)
        rest = stages.read(config, book=on)(stages.shards(urls, seed=1, book=on)())
        assert [sample["__ref__"] for sample in islice(rest, 10)] == unbroken[cut : cut + 10], cut
        book = GroupBook()


def test_every_stage_pickles(tmp_path: Path) -> None:
    urls = foreign_shards(tmp_path, "t2i_pretrain", [3])
    pipeline = [
        stages.shards(urls),
        stages.read(),
        stages.shuffle(small_config()),
        *of_group("t2i_pretrain"),
        stages.collate(),
    ]

    copied = pickle.loads(pickle.dumps(pipeline))

    one, other = (next(iter(wds.DataPipeline(*steps))).to_dict() for steps in (pipeline, copied))
    assert torch.equal(one["padded_images"], other["padded_images"])
    assert one["batch_data_indexes"] == other["batch_data_indexes"]


def test_pixels_are_those_of_the_image_in_the_tar(tmp_path: Path) -> None:
    sample = t2i_sample(200)
    url = write_tar(tmp_path / "one.tar", [sample])

    (batch,) = wds.DataPipeline(
        wds.SimpleShardList([url]), wds.tarfile_to_samples(), *of_group("t2i_pretrain")
    )

    image = Image.open(io.BytesIO(sample["png"]))
    expected = ImageTransform(**VAE)(image)
    assert torch.equal(batch["padded_images"], expected[None])
    assert batch["patchified_vae_latent_shapes"] == [(expected.shape[1] // 16, expected.shape[2] // 16)]
    assert np.isclose(batch["padded_images"][0, 0, 0, 0].item(), 200 / 255 * 2 - 1)


def test_no_image_is_decoded_that_the_pack_does_not_show(tmp_path: Path) -> None:
    # The picture's header is sound and its pixels are garbage: only decoding it fails.
    sample = vlm_sample(1)
    broken = sample["0.png"][:60] + b"\0" * 40
    edit = {
        "__key__": "e",
        "json": {"instruction_list": [["x"]]},
        "0.png": broken,
        "1.png": t2i_sample(1)["png"],
    }
    url = write_tar(tmp_path / "one.tar", [edit])
    source = [wds.SimpleShardList([url]), wds.tarfile_to_samples()]
    all_dropped = {"vae_cond_dropout_prob": 1.0, "vit_cond_dropout_prob": 1.0}

    shown = list(
        wds.DataPipeline(
            *source, *of_group("unified_edit", vae_cond_dropout_prob=0.0, vit_cond_dropout_prob=0.0)
        )
    )
    dropped = list(wds.DataPipeline(*source, *of_group("unified_edit", **all_dropped)))

    assert names(shown) == 0
    assert names(dropped) == 1


def test_drops_are_counted_by_reason_and_the_sums_add_up(tmp_path: Path) -> None:
    bad_json = {"__key__": "bad-json", "json": b"{nope", "png": t2i_sample(1)["png"]}
    no_captions = {**t2i_sample(2), "json": {"text": "x"}, "__key__": "no-captions"}
    no_image = {"__key__": "no-image", "json": t2i_sample(3)["json"]}
    not_an_image = {**t2i_sample(4), "png": b"<html>", "__key__": "html"}
    too_long = {**t2i_sample(5), "json": {"captions": {"a": "word " * 300}}, "__key__": "long"}
    truncated = {**t2i_sample(6), "png": t2i_sample(6)["png"][:-30], "__key__": "cut"}
    good = [t2i_sample(number) for number in range(10, 14)]
    url = write_tar(
        tmp_path / "one.tar",
        [
            bad_json,
            good[0],
            no_captions,
            good[1],
            no_image,
            not_an_image,
            good[2],
            too_long,
            truncated,
            good[3],
        ],
    )
    tally = Tally()
    config = small_config(grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]})

    batches = list(
        wds.DataPipeline(
            wds.SimpleShardList([url]),
            wds.tarfile_to_samples(),
            stages.decode(config, "t2i_pretrain", tally=tally),
            stages.plan(config, "t2i_pretrain", tokenizer(), tally=tally),
            stages.pack(config, tally=tally),
            stages.materialize(config, SPECIAL_TOKENS, tally=tally),
        )
    )

    assert names(batches) == 4
    assert tally.as_dict() == {
        "t2i_pretrain": {
            "packed": 4,
            "read": 10,
            "dropped": {
                "captions_invalid": 1,
                "image_missing": 1,
                "image_truncated": 1,
                "image_unreadable": 1,
                "over_length": 1,
                "row_invalid": 1,
            },
        }
    }


def test_sample_of_which_dropout_leaves_nothing_is_a_counted_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def condition_only(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
        plan = plan_t2i(sample, tools, draws)
        return plan.with_segments(plan.segments[:1])

    monkeypatch.setitem(PLANNERS, "t2i", condition_only)
    urls = foreign_shards(tmp_path, "t2i_pretrain", [40])
    config = small_config(
        grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]}, text_cond_dropout_prob=0.5
    )
    tally = Tally()

    plans = list(
        wds.DataPipeline(
            wds.SimpleShardList(urls),
            wds.tarfile_to_samples(),
            stages.decode(config, "t2i_pretrain"),
            stages.plan(config, "t2i_pretrain", tokenizer(), tally=tally),
        )
    )

    dropped = tally.drops("t2i_pretrain")[Reason.NO_TOKENS]
    assert 5 < dropped < 35
    assert len(plans) == 40 - dropped
    assert all(plan.length > 0 for plan in plans)


def test_group_without_a_usable_sample_stops_the_run_and_names_it(tmp_path: Path) -> None:
    # Three samples, of which not one is usable.
    url = write_tar(tmp_path / "bad.tar", [{**t2i_sample(n), "png": b"no image"} for n in range(3)])
    config = small_config(grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]})
    endless = [stages.shards(url), stages.read(), stages.decode(config, "t2i_pretrain")]

    for group_size in (3, None):
        pipeline = wds.DataPipeline(
            *endless, stages.plan(config, "t2i_pretrain", tokenizer(), group_size=group_size)
        )
        with pytest.raises(
            NoUsableSampleError, match=r"'t2i_pretrain': no usable sample in a whole epoch.*image_unreadable"
        ):
            next(iter(pipeline))


@pytest.mark.parametrize("fault", [{"png": b"no image"}, {"json": {"captions": 5}}, "truncated"])
def test_small_group_with_one_bad_sample_goes_on_for_many_epochs(tmp_path: Path, fault: Any) -> None:
    samples = [t2i_sample(n) for n in range(4)]
    samples[2] |= {"png": samples[2]["png"][:-30]} if fault == "truncated" else fault
    url = write_tar(tmp_path / "small.tar", samples)
    # The buffer holds each sample many times over, so the bad one comes several times in a row.
    config = small_config(grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]}, shuffle_samples=200)
    tally = Tally()
    pipeline = wds.DataPipeline(
        stages.shards(url),
        stages.read(),
        stages.shuffle(config),
        stages.decode(config, "t2i_pretrain", tally=tally),
        stages.plan(config, "t2i_pretrain", tokenizer(), tally=tally),
        stages.pack(config),
        stages.materialize(config, SPECIAL_TOKENS, tally=tally),
    )

    assert names(list(islice(pipeline, 120))) > 500
    assert sum(tally.drops("t2i_pretrain").values()) > 100


@pytest.mark.parametrize("members", [[], [("README", b"nothing")]])
def test_shards_without_a_sample_end_the_run(tmp_path: Path, members: list[tuple[str, bytes]]) -> None:
    path = tmp_path / "empty.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))

    with pytest.raises(ShardError, match=r"empty.tar: no sample in it, nor in the \d+ shards before"):
        next(iter(wds.DataPipeline(stages.shards(str(path)), stages.read())))


def test_group_that_the_mixture_lacks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no group 't2i'; it has t2i_pretrain, unified_edit, vlm_sft"):
        stages.plan(small_config(), "t2i", tokenizer())


def test_an_encoder_that_treats_control_tokens_otherwise_than_the_settings_say_is_refused() -> None:
    text = "a<|im_end|>b"
    for allows in (False, True):
        config = small_config(allow_control_tokens=allows)
        encoder = TextEncoder(tokenizer(), allow_control_tokens=allows)
        raw = decode_sample({"__key__": "k", "json": {"captions": [text]}, "png": picture(1)})
        (plan,) = stages.plan(replace(config, text_cond_dropout_prob=0), "t2i_pretrain", encoder)([raw])
        assert list(plan.segments[0].token_ids) == encoder(text)
        with pytest.raises(
            ConfigError, match=f"allow_control_tokens={allows}, and by the settings it is {not allows}"
        ):
            stages.plan(small_config(allow_control_tokens=not allows), "t2i_pretrain", encoder)
    with pytest.raises(ConfigError, match="by the settings it is True"):
        stages.plan(
            small_config(fidelity="upstream"),
            "t2i_pretrain",
            TextEncoder(tokenizer()),
            draws=CallOrderDraws(1),
        )


def test_upstream_fidelity_asks_for_shared_draws() -> None:
    config = small_config(fidelity="upstream")
    with pytest.raises(ConfigError, match="CallOrderDraws"):
        stages.pack(config)
    assert callable(stages.pack(config, draws=CallOrderDraws(0)))


def test_draws_of_a_sample_do_not_depend_on_what_comes_before(tmp_path: Path) -> None:
    url = write_tar(tmp_path / "a.tar", [t2i_sample(n) for n in range(20)])
    config = small_config(grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]})
    plan = [
        stages.read(),
        stages.decode(config, "t2i_pretrain"),
        stages.plan(config, "t2i_pretrain", tokenizer(), seed=5),
    ]

    in_order = {p.key: p.segments for p in wds.DataPipeline(wds.SimpleShardList([url]), *plan)}
    shuffled = wds.DataPipeline(
        wds.SimpleShardList([url]), plan[0], stages.shuffle(config, seed=1), *plan[1:]
    )

    assert {p.key: p.segments for p in shuffled} == in_order
    other_seed = wds.DataPipeline(
        wds.SimpleShardList([url]), *plan[:2], stages.plan(config, "t2i_pretrain", tokenizer(), seed=6)
    )
    assert {p.key: p.segments for p in other_seed} != in_order


def test_reasons_are_documented_one_by_one() -> None:
    assert len(Reason) == len(set(Reason)) >= 15
