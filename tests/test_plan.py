"""`plan`: the figures are those of the run that it speaks of, and what the run would refuse is refused with its words."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds
import yaml
from fault_proxy import FaultProxy
from golden_data import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_info, small_config
from typer.testing import CliRunner

from bagel_wds import storage
from bagel_wds.cli import app
from bagel_wds.config import BagelDatasetConfig
from bagel_wds.errors import ConfigError
from bagel_wds.mixture import MixGroup, Mixture
from bagel_wds.packer import GreedyPacker
from bagel_wds.plan.advice import divisors
from bagel_wds.plan.load import load_config, parse_tokens
from bagel_wds.plan.run import plan_run
from bagel_wds.plan.shares import divide
from bagel_wds.plan.text import plan_lines
from bagel_wds.prefetch import Lane, ReadAhead
from bagel_wds.reader import walk_shard, walk_slice
from bagel_wds.records import Kind, SamplePlan, Segment
from bagel_wds.rng import KeyedDraws
from bagel_wds.shards import Shard, list_shards, walk_epochs
from bagel_wds.wiring import pack_limits
from examples.corpus import draw_corpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from s3_store import S3Store

VAE = {"image_stride": 16, "max_image_size": 512, "min_image_size": 256}
T2I = {"t2i_pretrain": {"dataset_names": ["t2i"], "image_transform_args": VAE}}


def write_manifest(
    folder: Path, sizes: Sequence[int], sample_bytes: int | None = 1000, *, index: bool = False
) -> str:
    """A manifest of shards that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = [
        {
            "url": f"x-{number:06d}-000.tar",
            "nsamples": size,
            **({"filesize": size * sample_bytes} if sample_bytes is not None else {}),
            **({"index": f"x-{number:06d}-000.idx.parquet"} if index else {}),
        }
        for number, size in enumerate(sizes)
    ]
    (folder / "manifest.json").write_bytes(orjson.dumps({"format_version": 1, "shardlist": shards}))
    return str(folder / "manifest.json")


def t2i_config(folder: Path, sizes: Sequence[int] = (40, 30, 30), **more: Any) -> BagelDatasetConfig:
    info = {"t2i_pretrain": {"t2i": {"shards": write_manifest(folder, sizes)}}}
    return BagelDatasetConfig(**{"grouped_datasets": T2I, "dataset_info": info, **more})


sizes_of_shards = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


@settings(max_examples=150, deadline=None)
@given(sizes=sizes_of_shards, streams=st.integers(1, 30), seed=st.integers(0, 3))
def test_shares_are_those_that_the_streams_walk(sizes: list[int], streams: int, seed: int) -> None:
    table = [Shard(f"{number}.tar", samples=size) for number, size in enumerate(sizes)]
    walked = [
        list(walk_epochs(table, seed=seed, group="g", num_streams=streams, stream=stream, epochs=1))
        for stream in range(streams)
    ]
    readers = Counter(piece.shard for pieces in walked for piece in pieces)

    shares = divide(sizes, KeyedDraws(seed, "shards", "g").permutation(len(sizes), "epoch:0"), streams)

    assert shares.samples is not None
    assert shares.samples.tolist() == [
        sum((piece.stop or 0) - piece.start for piece in pieces) for pieces in walked
    ]
    assert int(shares.samples.sum()) == sum(sizes)
    assert shares.shards.tolist() == [len(pieces) for pieces in walked]
    assert shares.openings == sum(map(len, walked))
    assert shares.inside == sum(pieces[0].start > 0 for pieces in walked if pieces)
    assert shares.sharing == sum(any(readers[piece.shard] > 1 for piece in pieces) for pieces in walked)


@settings(max_examples=100, deadline=None)
@given(num_shards=st.integers(1, 20), streams=st.integers(1, 30))
def test_shares_without_counts_are_those_that_the_streams_walk(num_shards: int, streams: int) -> None:
    table = [Shard(f"{number}.tar", samples=None if number else 3) for number in range(num_shards)]
    walked = [
        [*walk_epochs(table, seed=0, group="g", num_streams=streams, stream=stream, epochs=1)]
        for stream in range(streams)
    ]

    shares = divide([shard.samples for shard in table], range(num_shards), streams)

    if num_shards > 1:
        assert shares.samples is None
        assert shares.shards.tolist() == [len(pieces) for pieces in walked]


def test_samples_times_streams_may_need_more_than_64_bits() -> None:
    shares = divide([10**15] * 3, range(3), 10**4)

    assert shares.samples is not None
    assert int(shares.samples.sum()) == 3 * 10**15
    assert (int(shares.samples.min()), int(shares.samples.max())) == (3 * 10**11, 3 * 10**11)
    assert shares.openings == 10**4 + 2


def test_a_small_plan_literally(tmp_path: Path) -> None:
    config = t2i_config(tmp_path, num_streams=8, use_flex=True)

    plan = plan_run(config, 2, 2, tokens={"t2i_pretrain": 1088.0}, step_seconds=2)

    (group,) = plan.groups
    assert (plan.num_streams, plan.streams_per_worker, plan.world_sizes) == (8, 2, (1, 2, 4, 8))
    assert (group.datasets, group.shards, group.samples, group.bytes) == (1, 3, 100, 100_000)
    spread = group.samples_per_stream
    assert spread is not None
    assert (spread.least, spread.median, spread.most) == (12, 12.5, 13)
    assert spread.skew == pytest.approx(0.04)
    # 34 816 tokens are 32 samples; 100 samples are 3.125 packs, which two ranks make in 1.5625 steps.
    assert group.rates is not None
    assert (group.rates.samples_per_pack, group.rates.packs_per_epoch) == (32, 3.125)
    assert (group.rates.steps_per_epoch, group.rates.epochs_per_1000_steps) == (1.5625, 640)
    # 32 samples a second; 10 openings in 100 samples.
    assert group.openings == 10
    assert plan.traffic is not None
    assert (plan.traffic.openings, plan.traffic.bytes, plan.traffic.read_again) == (3.2, 32_000, 0)
    # 36 864 tokens of 16 x 16 x 3 floats and 64 bytes; 2 wait, 1 is made, and 1 is with the trainer; a quarter is added.
    assert plan.memory.batches == 5 * 36_864 * (3072 + 64)
    # Two streams with 1000 samples of 1000 bytes each, and 50 in the packer.
    assert (plan.memory.buffers, plan.memory.held) == (2_000_000, 100_000)
    assert [advice.partition(",")[0] for advice in plan.advice] == [
        "group 't2i_pretrain': a shard is opened 3.3 times an epoch"
    ]


def test_what_depends_on_unknown_lengths_is_left_out(tmp_path: Path) -> None:
    plan = plan_run(t2i_config(tmp_path, num_streams=4), 1, 1)

    assert plan.groups[0].rates is None
    assert plan.traffic is None
    assert any("--tokens-per-sample t2i_pretrain=N, or --sample-index" in advice for advice in plan.advice)


def plans_of(name: str, tokens: int) -> Iterator[SamplePlan]:
    while True:
        yield SamplePlan("key", name, (Segment(Kind.TEXT, tokens),), (), (), estimate=tokens)


def test_rates_are_those_of_the_packer(tmp_path: Path) -> None:
    tokens = {"t2i_pretrain": 90.0, "unified_edit": 41.0, "vlm_sft": 17.0}
    weights = {"t2i_pretrain": 1.0, "unified_edit": 0.5, "vlm_sft": 3.0}
    mixture = {name: {**MIXTURE[name], "weight": weights[name]} for name in MIXTURE}
    info = {
        name: {entry["dataset_names"][0]: {"shards": write_manifest(tmp_path / name, [100])}}
        for name, entry in mixture.items()
    }
    config = small_config(
        grouped_datasets=mixture, dataset_info=info, expected_num_tokens=3900, max_num_tokens=4000
    )
    supply = Mixture(
        [
            MixGroup(
                name,
                plans_of(name, int(tokens[name])),
                weights[name],
                bool(mixture[name].get("is_mandatory")),
            )
            for name in mixture
        ],
        KeyedDraws(0, "mix"),
    )
    packer = GreedyPacker(pack_limits(config))
    counted: Counter[str] = Counter()
    for _ in range(300):
        counted.update(plan.group for plan in packer.next_pack(supply) or ())

    plan = plan_run(config, 1, 1, tokens=tokens)

    for group in plan.groups:
        assert group.rates is not None
        assert group.rates.samples_per_pack == pytest.approx(counted[group.name] / 300, rel=0.03)
        assert group.rates.packs_per_epoch == pytest.approx(100 / group.rates.samples_per_pack)
    assert sum(group.rates.token_share for group in plan.groups if group.rates) == pytest.approx(1)


@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_state_and_buffers_are_no_larger_than_planned_and_not_much_smaller(
    tmp_path: Path, packing: str
) -> None:
    info: dict[str, Any] = foreign_info(tmp_path)
    for group, datasets in info.items():
        for name, entry in datasets.items():
            shards = [
                {"url": url, "nsamples": size, "filesize": Path(url).stat().st_size}
                for url, size in zip(entry["shards"], (5, 7, 4), strict=True)
            ]
            manifest = tmp_path / f"{group}-{name}.json"
            manifest.write_text(json.dumps({"shardlist": shards}))
            entry["shards"] = str(manifest)
    config = small_config(
        dataset_info=info, shuffle_samples=100, packing=packing, look_ahead=40, max_latent_size=64
    )
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=0)
    sizes, held = [], []
    for _, batch in zip(range(12), dataset, strict=False):
        sizes.append(len(orjson.dumps({"0": batch.state.to_json()})))  # type: ignore[attr-defined]
        held.append(dataset._run.memory.held)

    plan = plan_run(config, 1, 0)

    assert 0.7 * plan.state_bytes < max(sizes) <= plan.state_bytes
    assert 0.5 * plan.memory.buffers < max(held) <= plan.memory.buffers


def test_memory_has_its_parts(tmp_path: Path) -> None:
    plain = plan_run(t2i_config(tmp_path, num_streams=8, use_flex=True), 1, 1).memory
    levels = plan_run(t2i_config(tmp_path, num_streams=8, use_flex=True, transport="uint8"), 1, 1).memory
    short = plan_run(t2i_config(tmp_path, num_streams=8, use_flex=True, memory_bytes=1_000_000), 1, 1)
    alone = plan_run(t2i_config(tmp_path, num_streams=8, use_flex=True), 1, 0).memory
    dense = plan_run(t2i_config(tmp_path, num_streams=8), 1, 1, tokens={"t2i_pretrain": 1088.0}).memory

    assert plain.total == (
        plain.libraries + plain.table + plain.buffers + plain.held + plain.read_ahead + plain.batches
    )
    assert plain.batches - levels.batches == 5 * 36_864 * 3 * 768
    assert (short.memory.buffers, short.memory.buffers_wanted) == (1_000_000, 8_000_000)
    assert any(
        "memory_bytes=1000000 keeps 1.0 MB: the rest is read a second time" in it for it in short.advice
    )
    assert alone.batches * 5 == plain.batches
    # 32 masks of 1088 x 1088 floats.
    assert dense.batches - plain.batches == 5 * 32 * 4 * 1088**2


def test_requests_are_those_that_the_store_sees(tmp_path: Path, s3_store: S3Store, s3_folder: str) -> None:
    # Little ahead: what is fetched in vain where a stream stops inside a shard is not planned.
    sizes, sample_bytes, streams, ahead = (30, 50), 100_000, 3, 1 << 20
    entries = []
    for number, size in enumerate(sizes):
        path = tmp_path / f"x-{number}.tar"
        with wds.TarWriter(str(path)) as tar:
            for sample in range(size):
                tar.write({"__key__": f"{number}-{sample}", "jpg": bytes(sample_bytes)})
        places = [sample["__ref__"] for sample in walk_shard(str(path))]
        columns = {"offset": [place[0] for place in places], "length": [place[1] for place in places]}
        pq.write_table(pa.table(columns), tmp_path / f"x-{number}.idx.parquet")
        entries.append(
            {
                "url": path.name,
                "nsamples": size,
                "filesize": path.stat().st_size,
                "index": f"x-{number}.idx.parquet",
            }
        )
    (tmp_path / "manifest.json").write_text(json.dumps({"shardlist": entries}))
    for path in tmp_path.iterdir():
        storage.write_bytes(storage.join(s3_folder, path.name), path.read_bytes(), s3_store.options)
    manifest = storage.join(s3_folder, "manifest.json")

    with FaultProxy(s3_store.endpoint) as proxy:
        options = replace(s3_store.options, endpoint=proxy.url)
        table = list_shards(manifest, options=options)
        before = proxy.count()
        for stream in range(streams):
            # The share of each where they read at the same time.
            with Lane(ReadAhead(ahead // streams), options) as lane:
                for piece in walk_epochs(
                    table, seed=42, group="t2i_pretrain", num_streams=streams, stream=stream, epochs=1
                ):
                    bounds = (piece.start, piece.stop, piece.step, piece.index_url)
                    assert list(walk_slice(piece.url, *bounds, options=options, lane=lane))
        seen = proxy.count() - before
    config = BagelDatasetConfig(
        grouped_datasets=T2I,
        dataset_info={"t2i_pretrain": {"t2i": {"shards": manifest}}},
        storage=s3_store.options,
        num_streams=streams,
        read_ahead_bytes=ahead,
    )
    plan = plan_run(config, 1, 1, tokens={"t2i_pretrain": 1088.0})

    assert plan.traffic is not None
    rates = plan.groups[0].rates
    assert rates is not None
    assert plan.traffic.requests * rates.steps_per_epoch == pytest.approx(seen, rel=0.15)
    assert plan.memory.read_ahead == ahead + streams * 256 * 1024


def write_index(path: Path, media: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    pq.write_table(pa.table({"media": [list(row) for row in media]}), path)


def picture(height: int, width: int, frames: int | None = None) -> dict[str, Any]:
    return {"ext": "jpg", "height": height, "width": width, "frames": frames, "bytes": 1}


NO_DROPOUT: dict[str, Any] = {
    "text_cond_dropout_prob": 0,
    "vit_cond_dropout_prob": 0,
    "vae_cond_dropout_prob": 0,
}


@pytest.mark.parametrize(
    ("group", "media", "tokens"),
    [
        # 32 x 32 patches and two marks; a text of 10 and its two.
        ("t2i_pretrain", [[picture(512, 512)]], 1026 + 12),
        ("t2i_pretrain", [[picture(512, 512)], [picture(256, 512)]], (1026 + 514) / 2 + 12),
        # The condition twice, as VAE and as ViT picture, a text, the target.
        ("unified_edit", [[picture(512, 512), picture(512, 512)]], 1026 + (16 * 16 + 2) + 12 + 1026),
        # Question and answer, and two pictures.
        ("vlm_sft", [[picture(224, 224), picture(224, 112)]], 258 + (16 * 8 + 2) + 12 + 12),
        ("vlm_sft", [[]], 24),
        ("vlm_sft", [[picture(224, 224, frames=3)]], 3 * 258 + 24),
    ],
)
def test_an_index_gives_the_tokens_of_its_samples(
    tmp_path: Path, group: str, media: list[list[dict[str, Any]]], tokens: float
) -> None:
    vit = {"image_stride": 14, "max_image_size": 224, "min_image_size": 112}
    mixture = {
        group: {
            "dataset_names": ["one"],
            "image_transform_args": vit if group == "vlm_sft" else VAE,
            **({"vit_image_transform_args": vit} if group == "unified_edit" else {}),
        }
    }
    write_index(tmp_path / "x-000000-000.idx.parquet", media)
    info = {group: {"one": {"shards": write_manifest(tmp_path, [len(media), 5], index=True)}}}
    config = BagelDatasetConfig(grouped_datasets=mixture, dataset_info=info, num_streams=1, **NO_DROPOUT)

    (found,) = plan_run(config, 1, 1, sample_index=True, text_tokens=10).groups

    assert (found.mean_tokens, found.tokens_from, found.over_length) == (tokens, "sampled", 0)


def test_sampled_pictures_tell_of_padding_and_masks(tmp_path: Path) -> None:
    sizes = [picture(512, 256), picture(256, 512), picture(512, 512)]
    write_index(tmp_path / "x-000000-000.idx.parquet", [[size] for size in sizes])
    info = {"t2i_pretrain": {"t2i": {"shards": write_manifest(tmp_path, [3], index=True)}}}
    config = BagelDatasetConfig(grouped_datasets=T2I, dataset_info=info, num_streams=1, **NO_DROPOUT)

    plan = plan_run(config, 1, 0, sample_index=True, text_tokens=10)

    (group,) = plan.groups
    assert group.padding == pytest.approx(512 * 512 / ((2 * 256 * 512 + 512 * 512) / 3))
    assert group.mean_square == pytest.approx((2 * 526**2 + 1038**2) / 3)
    assert group.rates is not None
    assert group.mean_square is not None
    assert plan.memory.batches == pytest.approx(
        36_864 * (3072 * group.padding + 64) + 4 * group.rates.samples_per_pack * group.mean_square
    )


def test_dropout_shortens_sampled_lengths_and_long_ones_are_told(tmp_path: Path) -> None:
    write_index(
        tmp_path / "x-000000-000.idx.parquet", [[picture(512, 512)]] * 900 + [[picture(256, 256)]] * 100
    )
    info = {"t2i_pretrain": {"t2i": {"shards": write_manifest(tmp_path, [1000], index=True)}}}
    config = BagelDatasetConfig(grouped_datasets=T2I, dataset_info=info, text_cond_dropout_prob=0.5)

    (all_,) = plan_run(config, 1, 1, sample_index=True, text_tokens=98).groups
    short = plan_run(replace(config, max_num_tokens_per_sample=1000), 1, 1, sample_index=True, text_tokens=98)

    assert all_.mean_tokens == pytest.approx(0.9 * 1026 + 0.1 * 258 + 50, abs=5)
    assert short.groups[0].over_length == 0.9
    assert any("90% of the sampled samples are longer than any may be" in advice for advice in short.advice)


def test_sampling_without_an_index_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset 't2i' has no index to sample; give .* --tokens-per-sample t2i_pretrain=N"
    ):
        plan_run(t2i_config(tmp_path), 1, 1, sample_index=True)


@pytest.mark.parametrize(
    ("more", "ranks", "workers", "says"),
    [
        (
            {"num_streams": 10},
            4,
            1,
            "num_streams=10 must be a multiple of world_size=4; the nearest are 8 and 12",
        ),
        ({"num_streams": 12}, 2, 4, "num_workers=4 must divide the 6 streams of a rank"),
        ({"max_latent_size": 16}, 1, 1, "set max_latent_size to 32 or more"),
        (
            {"grouped_datasets": {**T2I, "more": {**T2I["t2i_pretrain"], "recipe": "t2i", "weight": 0}}},
            1,
            1,
            "group 'more' has weight 0 and is not mandatory",
        ),
        (
            {"dataset_info": {"t2i_pretrain": {"t2i": {"shards": "nowhere/manifest.json"}}}},
            1,
            1,
            "nowhere/manifest.json: ",
        ),
        (
            {"dataset_info": {"t2i_pretrain": {"t2i": {"data_dir": "x"}}}},
            1,
            1,
            "data_dir: there is no x",
        ),
        ({"fidelity": "upstream", "num_streams": 4}, 1, 1, "leave num_streams=4 out"),
    ],
)
def test_what_the_build_refuses_is_refused_with_its_words(
    tmp_path: Path, more: dict[str, Any], ranks: int, workers: int, says: str
) -> None:
    config = t2i_config(tmp_path, **more)
    for number in range(3):
        (tmp_path / f"x-{number:06d}-000.tar").touch()

    with pytest.raises(ConfigError) as planned:
        plan_run(config, ranks, workers)
    with pytest.raises(ConfigError) as built:
        config.build(tokenizer(), SPECIAL_TOKENS, 0, ranks, workers, global_seed=0)

    assert says in str(planned.value)
    assert str(planned.value) == str(built.value)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ({"t2i": 10.0}, "the mixture has no such group; it has t2i_pretrain"),
        ({"t2i_pretrain": 20_000.0}, "20000 must be above 0 and at most 16384"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tmp_path: Path, tokens: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_run(t2i_config(tmp_path), 1, 1, tokens=tokens)


@pytest.mark.parametrize(
    ("sizes", "more", "ranks", "says"),
    [
        (
            [3, 3],
            {"num_streams": 8},
            1,
            "6 samples are fewer than the 8 streams, so 2 streams have none in an epoch",
        ),
        ([9], {"num_streams": 8}, 1, "streams have 1 to 2 samples an epoch, a skew of 78%"),
        (
            [400],
            {"num_streams": 8},
            1,
            "a shard is opened 8.0 times an epoch, .* at most 50 samples, here of 50.0 KB",
        ),
        ([400], {}, 8, "num_streams is not set: the first start fixes it at 8"),
        ([4000], {"num_streams": 26}, 2, "num_streams=26 has 4 divisors, .*; num_streams=48 has 10"),
    ],
)
def test_what_is_legal_and_may_hurt_is_told(
    tmp_path: Path, sizes: list[int], more: dict[str, Any], ranks: int, says: str
) -> None:
    config = t2i_config(tmp_path, sizes, use_flex=True, **more)

    advice = plan_run(config, ranks, 1, tokens={"t2i_pretrain": 99.0}).advice

    assert any(re.search(says, sentence) for sentence in advice), advice
    assert len(advice) <= 2


def test_too_little_memory_names_the_part_that_takes_most(tmp_path: Path) -> None:
    config = t2i_config(tmp_path, num_streams=4)

    enough, little = (plan_run(config, 1, 1, memory_limit=limit) for limit in (10**12, 10**9))

    assert not any("--memory" in advice for advice in enough.advice)
    assert any(
        "a worker takes about" in advice and "is batches" in advice and "use_flex=True" in advice
        for advice in little.advice
    )


def test_mandatory_samples_over_a_pack_are_told(tmp_path: Path) -> None:
    mixture = {
        name: {**T2I["t2i_pretrain"], "recipe": "t2i", "is_mandatory": True} for name in ("a", "b", "c")
    }
    shards = write_manifest(tmp_path, [50])
    info = {name: {"t2i": {"shards": shards}} for name in mixture}
    config = BagelDatasetConfig(grouped_datasets=mixture, dataset_info=info, num_streams=1)

    plan = plan_run(config, 1, 1, tokens=dict.fromkeys(mixture, 12_000.0))

    assert any(
        "has 36000 tokens in the mean, more than the 34816 of a pack" in advice for advice in plan.advice
    )


def test_shards_without_counts_are_told(tmp_path: Path) -> None:
    config = small_config(dataset_info=foreign_info(tmp_path), num_streams=6)

    plan = plan_run(config, 2, 1)

    assert all(group.samples is None and group.bytes is None for group in plan.groups)
    assert any(
        "each of the 6 streams reads all 3 shards and keeps every 6th sample" in it for it in plan.advice
    )
    assert any("samples unknown, bytes unknown" in line for line in plan_lines(plan))


@given(number=st.integers(1, 3000))
def test_divisors_are_all_that_divide(number: int) -> None:
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


def test_settings_come_from_a_mixture_or_a_file_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(T2I))
    (tmp_path / "info.yaml").write_text(
        yaml.safe_dump({"t2i_pretrain": {"t2i": {"shards": "s/manifest.json"}}})
    )
    (tmp_path / "run.yaml").write_text(
        "{grouped_datasets_path: mixture.yaml, dataset_info_path: info.yaml, num_streams: 4, max_latent_size: 64}"
    )
    write_manifest(tmp_path / "s", [10])

    of_mixture = load_config(
        str(tmp_path / "mixture.yaml"), str(tmp_path / "info.yaml"), ["num_streams=4", "max_latent_size=64"]
    )
    of_settings = load_config(str(tmp_path / "run.yaml"), None)

    assert of_settings.num_streams == of_mixture.num_streams == 4
    assert of_settings.max_latent_size == of_mixture.max_latent_size == 64
    assert plan_run(of_mixture, 2, 2) == plan_run(of_settings, 2, 2)
    monkeypatch.chdir(tmp_path)
    assert load_config("run.yaml", None).dataset_info_path == "info.yaml"


@pytest.mark.parametrize(
    ("settings_", "changes", "says"),
    [
        (T2I, [], "does not say where its datasets lie; give the dataset info with --info"),
        ({"grouped_datasets": T2I, "dataset_info": {}, "num_stream": 4}, [], "did you mean 'num_streams'"),
        ({"grouped_datasets": T2I, "dataset_info": {}}, ["num_streams"], "write NAME=VALUE"),
        (
            {"grouped_datasets": T2I, "dataset_info": {}},
            ["num_streams=many"],
            "num_streams='many' must be an integer",
        ),
        ({"grouped_datasets": T2I, "dataset_info": {}}, ["num_streams=[1"], "the value is no YAML"),
        ({"grouped_datasets": T2I, "dataset_info": {}}, ["vit_cond_dropout_prob=x"], "has the wrong type"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, settings_: dict[str, Any], changes: list[str], says: str
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings_))

    with pytest.raises(ConfigError, match=says):
        load_config(str(tmp_path / "run.yaml"), None, changes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--world-size", "100000000000000000000"], "world_size=100000000000000000000, .* at most 4194304"),
        (["--world-size", "1", "--workers", "5000000"], "num_workers=5000000 .* at most 4194304"),
        (
            ["--world-size", "1", "--num-streams", "1000000000"],
            "num_streams=1000000000 make 1000000000 streams",
        ),
        (["--world-size", "1", "--step-seconds", "nan"], "step_seconds=nan"),
        (["--world-size", "1", "--step-seconds", "inf"], "step_seconds=inf"),
        (
            ["--world-size", "1", "--text-tokens", "999999999999"],
            "text_tokens=999999999999 must be .* at most",
        ),
    ],
)
def test_figures_out_of_bounds_are_refused_at_once(tmp_path: Path, options: list[str], says: str) -> None:
    done = command(tmp_path, *options, *([] if "--workers" in options else ["--workers", "0"]))

    assert done.exit_code == 2
    assert re.search(says, done.stderr)


def test_tokens_are_read_by_group() -> None:
    assert parse_tokens(["a=1", "b=2.5"]) == {"a": 1, "b": 2.5}
    for wrong in (["a"], ["=1"], ["a=x"], ["a=0"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="--tokens-per-sample"):
            parse_tokens(wrong)


def command(folder: Path, *options: str) -> Any:
    (folder / "mixture.yaml").write_text(yaml.safe_dump(T2I))
    info = {"t2i_pretrain": {"t2i": {"shards": write_manifest(folder, [40, 30, 30])}}}
    (folder / "info.yaml").write_text(yaml.safe_dump(info))
    paths = [str(folder / "mixture.yaml"), "--info", str(folder / "info.yaml")]
    return CliRunner().invoke(app, ["plan", *paths, *options])


def test_the_command_prints_a_plan_as_lines_and_as_json(tmp_path: Path) -> None:
    options = [
        "--world-size",
        "2",
        "--workers",
        "2",
        "--tokens-per-sample",
        "t2i_pretrain=1088",
        "--memory",
        "1GB",
    ]

    lines = command(tmp_path, *options)
    value = json.loads(command(tmp_path, *options, "--json").stdout)

    assert lines.exit_code == 0
    assert "  data         1 dataset, 3 shards, 100 samples, 100 KB\n" in lines.stdout
    assert "  a pack       32.00 samples, 100.0% of its tokens\n" in lines.stdout
    assert "advice: a worker takes about" in lines.stdout
    assert list(value) == [
        "world_size",
        "num_workers",
        "num_streams",
        "streams_per_worker",
        "pack_tokens",
        "text_tokens",
        "groups",
        "state_bytes",
        "rank_state_bytes",
        "run_state_bytes",
        "memory",
        "traffic",
        "world_sizes",
        "advice",
    ]
    assert value["groups"][0]["rates"]["steps_per_epoch"] == 1.5625
    assert value["memory"]["total"] > value["memory"]["batches"] > 0


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    done = command(tmp_path, "--world-size", "3", "--workers", "1", "--num-streams", "4")

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: num_streams=4 must be a multiple of world_size=3; the nearest are 3 and 6\n"


def test_the_command_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent.parent
    (block,) = re.findall(r"```bash\n(.*?)```", (root / "docs" / "planning.md").read_text(), flags=re.DOTALL)
    sources, converted = tmp_path / "demo-data" / "sources", tmp_path / "demo-data" / "converted"
    draw_corpus(sources)
    mixture, info = sources / "mixture.yaml", sources / "dataset_info.yaml"
    options = ["--config", str(mixture), "--info", str(info), "--processes", "1", str(converted)]
    assert CliRunner().invoke(app, ["convert", *options]).exit_code == 0

    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(block.replace("\\\n", " "))
    done = CliRunner().invoke(app, words)

    assert program == "bagel-wds"
    assert done.exit_code == 0, done.stderr
    assert len(re.findall(r"a sample, sampled, taking each text for 64", done.stdout)) == 3
    assert len(re.findall(r"an epoch +\d+ packs, [0-9.]+ steps\n", done.stdout)) == 3


AT_SCALE = """
import json, resource, sys
from bagel_wds.cli import app
try:
    app(sys.argv[1:])
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Not `ru_maxrss`, which begins at the peak of the parent.
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
    figures = [used.ru_utime + used.ru_stime, peak / 1024, "torch" in sys.modules]
    print(json.dumps(figures), file=sys.stderr)
"""


def test_a_plan_for_a_hundred_thousand_shards_and_4096_ranks_is_quick_and_small(tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(T2I))
    info = {
        "t2i_pretrain": {"t2i": {"shards": write_manifest(tmp_path, [10_000] * 100_000, 420_000, index=True)}}
    }
    (tmp_path / "info.yaml").write_text(yaml.safe_dump(info))
    command_ = ["plan", str(tmp_path / "mixture.yaml"), "--info", str(tmp_path / "info.yaml"), "--json"]
    options = ["--world-size", "4096", "--workers", "4", "--tokens-per-sample", "t2i_pretrain=1100"]

    done = subprocess.run(
        [sys.executable, "-c", AT_SCALE, *command_, *options], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    seconds, mebibytes, has_torch = json.loads(done.stderr)
    # Of the processor's time, so that others on the machine do not count.
    assert seconds < 10
    assert mebibytes < 2048
    assert not has_torch
    value = json.loads(done.stdout)
    (group,) = value["groups"]
    assert (value["num_streams"], group["shards"], group["samples"]) == (16_384, 100_000, 10**9)
    assert [group["samples_per_stream"][name] for name in ("least", "most")] == [61_035, 61_036]
    assert group["bytes"] == 420_000 * 10**9
