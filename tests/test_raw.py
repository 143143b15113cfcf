"""Raw files in place of shards: the same samples under the same keys, each once an epoch, and bad rows counted."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset as wds
import yaml
from golden_data import tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_shards, small_config
from source_factory import (
    captions,
    encode_image,
    talk,
    write_corpus,
    write_edit,
    write_jsonl,
    write_parquet,
    write_t2i,
)
from test_datasets import digest
from torch.utils.data import DataLoader

from bagel_wds import (
    ConfigError,
    NoUsableSampleError,
    PackedLoader,
    ShardError,
    collate_wrapper,
    stages,
    storage,
)
from bagel_wds.config import load_mapping
from bagel_wds.converters.mixture import convert_mixture
from bagel_wds.errors import Tally
from bagel_wds.groups import find_shards
from bagel_wds.plan.run import plan_run
from bagel_wds.plan.text import plan_lines
from bagel_wds.raw import UNIT_ROWS, RawUnit
from bagel_wds.schema import REJECTED, make_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from s3_store import S3Store

    from bagel_wds.records import SamplePlan

REAL = Path(__file__).parent / "data" / "real"
GROUPS = list(MIXTURE)
PLACE = ("__url__", "__ref__", "__data_indexes__", "__ordinal__")
"""What tells where a sample was read, which differs between a shard and a raw file."""


def raw_info(root: object) -> dict[str, Any]:
    return {
        "t2i_pretrain": {"t2i": {"data_dir": f"{root}/t2i"}},
        "unified_edit": {"seed": {"data_dir": f"{root}/edit"}},
        "vlm_sft": {"vlm": {"data_dir": f"{root}/vlm/media", "jsonl_path": f"{root}/vlm/train.jsonl"}},
    }


def convert(root: Path, info: dict[str, Any], mixture: dict[str, Any] = MIXTURE) -> dict[str, Any]:
    """The dataset info of a conversion of raw files."""
    (root / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    (root / "info.yaml").write_text(yaml.safe_dump(info))
    done = convert_mixture(str(root / "mixture.yaml"), str(root / "info.yaml"), str(root / "shards"))
    return load_mapping(done.info_path)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of all three groups, with rows of several kinds that cannot be used."""
    root = tmp_path_factory.mktemp("raw")
    write_corpus(root)
    cut = encode_image((30, 40), seed=7, codec="JPEG")[:-40]
    write_t2i(root / "t2i" / "part-5.parquet", [(cut, captions(5)), (None, captions(6)), (b"GIF8", "{}")])
    write_edit(root / "edit" / "odd.parquet", [([encode_image(), encode_image()], [["a"], ["b"]])])
    with (root / "vlm" / "train.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(
            '\n[1]\n{"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}]}\n'
        )
    return root


@pytest.fixture(scope="module")
def converted(root: Path) -> dict[str, Any]:
    return convert(root, raw_info(root))


def read(info: dict[str, Any], group: str, num_streams: int = 1, stream: int = 0) -> Iterator[dict[str, Any]]:
    """The samples of one pass."""
    config = small_config(dataset_info=info, grouped_datasets={group: MIXTURE[group]})
    shards = stages.shards(
        find_shards(config)[group], group=group, num_streams=num_streams, stream=stream, epochs=1
    )
    return iter(wds.DataPipeline(shards, stages.read(config)))


@pytest.mark.parametrize("group", GROUPS)
def test_a_row_is_the_sample_that_a_conversion_makes_of_it_and_bad_rows_are_those_of_its_quarantine(
    root: Path, converted: dict[str, Any], group: str
) -> None:
    [(dataset, entry)] = converted[group].items()
    from_shards = {sample["__key__"]: sample for sample in read(converted, group)}
    quarantined = {
        make_key(row["file"], row["row"], row.get("row_group")): (row["reason"], row["detail"])
        for row in map(
            json.loads, (Path(entry["shards"]).parent / "quarantine.jsonl").read_text().splitlines()
        )
    }

    from_raw = {sample["__key__"]: sample for sample in read(raw_info(root), group)}

    assert len(quarantined) >= 3
    rejected = {key: sample[REJECTED] for key, sample in from_raw.items() if REJECTED in sample}
    assert {key: bad.reason for key, bad in rejected.items()} == {
        key: reason for key, (reason, _) in quarantined.items()
    }
    for key, bad in rejected.items():
        # A conversion decodes what it takes, so it says of a cut file how far it came.
        assert bad.detail[:300] == quarantined[key][1] or bad.reason == "image_truncated"
    assert set(from_raw) == {*from_shards, *quarantined}
    for key, sample in from_shards.items():
        own, other = ({name: s[name] for name in s if name not in PLACE} for s in (from_raw[key], sample))
        assert list(own.items()) == list(other.items())
        assert own["__dataset__"] == dataset
        assert from_raw[key]["__ref__"].length == sample["__ref__"].length


def plans(info: dict[str, Any], group: str, tally: Tally | None = None, **more: Any) -> dict[str, SamplePlan]:
    config = small_config(dataset_info=info, **more)
    made = wds.DataPipeline(
        stages.shards(find_shards(config)[group], group=group, epochs=1),
        stages.read(config),
        stages.shuffle(config, group),
        stages.decode(config, group, tally=tally),
        stages.plan(config, group, tokenizer(), seed=5, tally=tally),
    )
    return {plan.key: plan for plan in made}


@pytest.mark.parametrize("group", GROUPS)
def test_plans_of_a_pass_are_those_of_a_pass_over_shards(
    root: Path, converted: dict[str, Any], group: str
) -> None:
    tally = Tally()
    raw, shards = plans(raw_info(root), group, tally), plans(converted, group)

    assert raw.keys() == shards.keys()
    for key, plan in raw.items():
        assert (plan.segments, plan.views, plan.estimate) == (
            shards[key].segments,
            shards[key].views,
            shards[key].estimate,
        )
    quarantine = Path(next(iter(converted[group].values()))["shards"]).parent / "quarantine.jsonl"
    reasons = Counter(json.loads(line)["reason"] for line in quarantine.read_text().splitlines())
    counts = tally.as_dict()[group]
    assert counts["dropped"] == reasons
    assert counts["read"] == len(raw) + reasons.total()


def test_batches_from_one_unit_are_bit_for_bit_those_from_one_shard(tmp_path: Path) -> None:
    write_t2i(
        tmp_path / "t2i" / "a.parquet",
        [(encode_image((20, 30 + i), seed=i), captions(i)) for i in range(9)],
        group_rows=9,
    )
    write_edit(
        tmp_path / "edit" / "a.parquet",
        [([encode_image(seed=9 * i + j) for j in range(3)], [["a", "b"], ["c"]]) for i in range(7)],
        group_rows=9,
    )
    (tmp_path / "vlm" / "media").mkdir(parents=True)
    (tmp_path / "vlm" / "media" / "a.png").write_bytes(encode_image(seed=77))
    write_jsonl(
        tmp_path / "vlm" / "train.jsonl",
        [{"image": "a.png", "conversations": talk(f"<image>what is {i}?", str(i))} for i in range(8)],
    )
    raw, shards = raw_info(tmp_path), convert(tmp_path, raw_info(tmp_path))

    def batches(info: dict[str, Any], **more: Any) -> list[str]:
        config = small_config(dataset_info=info, num_streams=2, **more)
        dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)
        found = []
        for batch in islice(PackedLoader(dataset), 10):
            content = batch.to_dict()
            for origin in content["batch_data_indexes"]:
                # Of a shard these are bytes.
                del origin["data_indexes"]
            found.append(digest(content))
        return found

    assert len(set(batches(raw))) == 10
    expected = batches(shards)
    for more in [{}, {"memory_bytes": 0}]:
        assert batches(raw, **more) == expected, more
    assert batches(raw, shuffle_samples=1) == batches(shards, shuffle_samples=1) != expected


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    num_streams=st.integers(1, 7),
)
def test_streams_read_each_row_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], num_streams: int
) -> None:
    folder = tmp_path_factory.mktemp("cover")
    total = sum(map(sum, files))
    schema = pa.schema([("image", pa.binary()), ("captions", pa.string())])
    for number, groups in enumerate(files):
        with pq.ParquetWriter(folder / f"{number}.parquet", schema) as writer:
            for rows in groups:
                writer.write_table(pa.table([[encode_image()] * rows, ["{}"] * rows], schema=schema))
    info = {"t2i_pretrain": {"t2i": {"data_dir": str(folder)}}}
    config = small_config(dataset_info=info, grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]})
    if total == 0:
        with pytest.raises(ConfigError, match="there is no row in the files"):
            find_shards(config)
        return
    listed = find_shards(config)["t2i_pretrain"]
    seen: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
    for stream in range(num_streams):
        samples = wds.DataPipeline(
            stages.shards(listed, num_streams=num_streams, stream=stream, epochs=2), stages.read(config)
        )
        for sample in samples:
            seen[sample["__ref__"].epoch][sample["__key__"]] += 1

    assert seen[0] == seen[1]
    assert set(seen[0].values()) == {1}
    assert len(seen[0]) == total


@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz", "parquet"])
def test_conversations_are_read_from_every_form_over_several_units(tmp_path: Path, form: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": i, "conversations": talk(f"what is {i}?", str(i))} for i in range(2 * UNIT_ROWS + 9)
    ]
    path = tmp_path / f"train.{form}"
    if form == "parquet":
        write_parquet(path, pa.Table.from_pylist(rows), 200)
    else:
        # Blank lines do not count as rows, and are in the numbers of those behind them.
        lines = "\n".join(json.dumps(row) + "\n" * (row["id"] % 50 == 0) for row in rows)
        text = (json.dumps(rows) if form == "json" else lines).encode()
        path.write_bytes(gzip.compress(text) if form.endswith("gz") else text)
    info = {"vlm_sft": {"vlm": {"jsonl_path": str(path)}}}
    config = small_config(dataset_info=info, grouped_datasets={"vlm_sft": MIXTURE["vlm_sft"]})
    listed = find_shards(config)["vlm_sft"]
    assert len(listed) == 3
    ids = []
    for stream in range(2):
        samples = wds.DataPipeline(
            stages.shards(listed, num_streams=2, stream=stream, epochs=1), stages.read(config)
        )
        for sample in samples:
            ids.append(json.loads(sample["json"])["id"])
            ref, unit = sample["__ref__"], listed[sample["__ref__"].shard].raw
            assert unit is not None
            if len(ids) % 97 == 0:
                (again,) = unit.fetch([ref.offset])
                assert {name: again[name] for name in again if name not in PLACE} == {
                    name: sample[name] for name in again if name not in PLACE
                }

    assert sorted(ids) == list(range(len(rows)))


def test_units_are_fetched_in_one_pass_whatever_their_order(root: Path) -> None:
    for group in GROUPS:
        config = small_config(dataset_info=raw_info(root))
        for shard in find_shards(config)[group]:
            assert shard.raw is not None
            assert shard.samples is not None
            walked = list(shard.raw.walk(0, shard.samples, 1))
            rows = [sample["__ref__"][0] for sample in walked]
            wanted = [*rows[::-1], rows[0]]

            found = shard.raw.fetch(wanted)

            assert [sample["__ref__"][0] for sample in found] == wanted
            for sample in walked:
                own = next(other for other in found if other["__key__"] == sample["__key__"])
                assert [own[name] for name in own if name != REJECTED] == [
                    sample[name] for name in own if name != REJECTED
                ]
                assert (REJECTED in own) == (REJECTED in sample)
            with pytest.raises(ShardError, match=r"#row.*there is no row 1000000000"):
                shard.raw.fetch([10**9])


def test_groups_of_raw_files_and_of_shards_are_mixed(root: Path, tmp_path: Path) -> None:
    mixture = {"t2i_pretrain": {**MIXTURE["t2i_pretrain"], "dataset_names": ["t2i", "tars"]}}
    datasets = {
        **raw_info(root)["t2i_pretrain"],
        "tars": {"shards": foreign_shards(tmp_path, "t2i_pretrain", [5, 3])},
    }
    config = small_config(grouped_datasets=mixture, dataset_info={"t2i_pretrain": datasets}, num_streams=2)
    loader = PackedLoader(config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3), epochs=1)
    listed = find_shards(config)["t2i_pretrain"]

    origins = Counter(
        listed[origin["data_indexes"][0]].dataset for batch in loader for origin in batch.batch_data_indexes
    )

    assert origins == {"t2i": 2 * 11, "tars": 8}
    assert loader.stats["groups"]["t2i_pretrain"]["dropped"] == {
        "image_empty": 3,
        "image_truncated": 1,
        "image_unreadable": 1,
    }


@pytest.mark.parametrize("fidelity", ["corrected", "upstream"])
def test_real_files_stream_raw_with_nothing_left_out(fidelity: str) -> None:
    info = {
        "t2i_pretrain": {"t2i": {"data_dir": str(REAL / "t2i"), "num_files": 2, "num_total_samples": 8}},
        "unified_edit": {
            "seed": {
                "data_dir": str(REAL / "editing/seed"),
                "parquet_info_path": str(REAL / "editing/parquet_info.json"),
            }
        },
        "vlm_sft": {
            "vlm": {"data_dir": str(REAL / "vlm/images"), "jsonl_path": str(REAL / "vlm/train.jsonl")}
        },
    }
    mixture = Path(__file__).parent.parent / "configs" / "example_mixture.yaml"
    config = small_config(
        grouped_datasets=None,
        grouped_datasets_path=str(mixture),
        dataset_info=info,
        expected_num_tokens=20480,
        max_num_tokens=24576,
        max_num_tokens_per_sample=10240,
        max_latent_size=64,
        use_flex=True,
        fidelity=fidelity,
    )
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)
    if fidelity == "upstream":
        first = next(iter(dataset))
        assert "t2i_pretrain" in {origin["dataset_name"] for origin in first["batch_data_indexes"]}
        return
    loader = PackedLoader(dataset, epochs=1)
    clips = 0
    for batch in loader:
        # The clip is the only sample of more than three pictures for the ViT.
        lengths = batch.to_dict().get("vit_token_seqlens", torch.zeros(0)).tolist()
        clips += max(Counter(lengths).values(), default=0) >= 8

    assert clips == 1
    for name, rows in [("t2i_pretrain", 8), ("unified_edit", 4), ("vlm_sft", 8)]:
        counts = loader.stats["groups"][name]
        assert (counts["read"], counts["packed"], counts["dropped"]) == (rows, rows, {})


@pytest.mark.parametrize("shuffle_lines", [False, True])
def test_a_cap_takes_files_and_lines_once(root: Path, shuffle_lines: bool) -> None:
    caps: dict[str, dict[str, Any]] = {
        "t2i_pretrain": {"num_used_data": [2]},
        "unified_edit": {},
        "vlm_sft": {"num_used_data": [5], "shuffle_lines": shuffle_lines, "shuffle_seed": 3},
    }
    mixture = {name: {**MIXTURE[name], **caps[name]} for name in MIXTURE}
    config = small_config(dataset_info=raw_info(root), grouped_datasets=mixture)
    listed = find_shards(config)

    files = sorted({shard.url.partition("#")[0] for shard in listed["t2i_pretrain"]})
    assert files == [f"{root}/t2i/part-{number}.parquet" for number in (0, 1)]
    samples = wds.DataPipeline(stages.shards(listed["vlm_sft"], epochs=1), stages.read(config))
    ids = [json.loads(sample["json"])["id"] for sample in samples if "json" in sample]
    assert sum(shard.samples or 0 for shard in listed["vlm_sft"]) == 5
    assert (ids == [0, 1, 2, 3, 4]) is not shuffle_lines
    assert ids == sorted(set(ids))
    other = {**mixture, "vlm_sft": {**mixture["vlm_sft"], "shuffle_seed": 4}}
    (again,) = find_shards(small_config(dataset_info=raw_info(root), grouped_datasets=other))["vlm_sft"]
    (unit,) = listed["vlm_sft"]
    assert unit.raw is not None
    assert again.raw is not None
    # A state of one choice is not that of another.
    assert (again.raw.identity == unit.raw.identity) is not shuffle_lines
    for wrong in (0, -1):
        refused = {**mixture, "t2i_pretrain": {**MIXTURE["t2i_pretrain"], "num_used_data": [wrong]}}
        with pytest.raises(ConfigError, match=f"num_used_data={wrong} must be at least 1"):
            find_shards(small_config(dataset_info=raw_info(root), grouped_datasets=refused))


def test_columns_and_placeholders_of_an_entry_are_heeded(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "t2i" / "a.parquet",
        pa.table({"jpg": pa.array([encode_image()], pa.binary()), "txt": ["a picture"]}),
    )
    write_jsonl(tmp_path / "vlm.jsonl", [{"image": "a.png", "conversations": talk("what?", "this")}] * 2)
    (tmp_path / "a.png").write_bytes(encode_image())
    info: dict[str, Any] = {
        "t2i_pretrain": {
            "t2i": {"data_dir": str(tmp_path / "t2i"), "columns": {"image": "jpg", "captions": "txt"}}
        },
        "vlm_sft": {"vlm": {"jsonl_path": str(tmp_path / "vlm.jsonl"), "placeholders": "repair"}},
    }
    mixture = {name: MIXTURE[name] for name in info}

    assert len(plans(info, "t2i_pretrain", grouped_datasets=mixture)) == 1
    assert len(plans(info, "vlm_sft", grouped_datasets=mixture)) == 2
    # One definition: a conversion takes the same rows.
    done = convert(tmp_path, info, mixture)
    assert [
        done[group][name]["num_total_samples"]
        for group, name in [("t2i_pretrain", "t2i"), ("vlm_sft", "vlm")]
    ] == [1, 2]
    del info["vlm_sft"]["vlm"]["placeholders"]
    tally = Tally()
    assert plans(info, "vlm_sft", tally, grouped_datasets=mixture) == {}
    assert tally.as_dict()["vlm_sft"]["dropped"] == {"placeholder_mismatch": 2}


def load(info: dict[str, Any], workers: int, context: str | None = None) -> DataLoader[Any]:
    config = small_config(dataset_info=info, num_streams=4)
    return DataLoader(
        config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, workers, global_seed=3),
        batch_size=1,
        num_workers=workers,
        collate_fn=collate_wrapper(),
        multiprocessing_context=context,
    )


def test_workers_of_a_data_loader_give_the_batches_of_one_process(root: Path) -> None:
    alone = [digest(batch.to_dict()) for batch in islice(load(raw_info(root), 0), 8)]

    assert [digest(batch.to_dict()) for batch in islice(load(raw_info(root), 2, "forkserver"), 8)] == alone
    assert len(set(alone)) == 8


def test_raw_files_in_a_bucket_give_the_batches_of_the_disk(
    root: Path, s3_store: S3Store, s3_folder: str
) -> None:
    for folder in ("t2i", "edit", "vlm"):
        for name in storage.list_files(root / folder):
            storage.write_bytes(
                f"{s3_folder}/{folder}/{name}", (root / folder / name).read_bytes(), s3_store.options
            )

    def batches(info: dict[str, Any], **more: Any) -> list[str]:
        config = small_config(dataset_info=info, num_streams=2, memory_bytes=20_000, **more)
        dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)
        loader = PackedLoader(dataset)
        first = [digest(batch.to_dict()) for batch in islice(loader, 4)]
        again = PackedLoader(config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3))
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        return first + [digest(batch.to_dict()) for batch in islice(again, 3)]

    assert batches(raw_info(s3_folder), storage=s3_store.options) == batches(raw_info(root))


def test_files_that_change_while_they_are_read_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t2i" / "a.parquet"
    rows = [(encode_image(seed=i), captions(i)) for i in range(6)]
    write_t2i(path, rows, group_rows=6)
    info = {"t2i_pretrain": {"t2i": {"data_dir": str(tmp_path / "t2i")}}}
    only = {"t2i_pretrain": MIXTURE["t2i_pretrain"]}
    config = small_config(dataset_info=info, grouped_datasets=only)
    listed = find_shards(config)["t2i_pretrain"]

    def pass_over() -> list[Any]:
        return list(wds.DataPipeline(stages.shards(listed, epochs=1), stages.read(config)))

    assert len(pass_over()) == 6
    write_t2i(path, rows[:4], group_rows=6)
    with pytest.raises(
        ShardError, match=r"a\.parquet#row_group=0: the file has changed since the run was built"
    ):
        pass_over()
    path.unlink()
    with pytest.raises(ShardError, match=r"a\.parquet.*No such file"):
        pass_over()


def units_of(entry: dict[str, Any], group: str, **more: Any) -> list[RawUnit]:
    [dataset] = MIXTURE[group]["dataset_names"]
    config = small_config(
        dataset_info={group: {dataset: entry}}, grouped_datasets={group: MIXTURE[group]}, **more
    )
    return [shard.raw for shard in find_shards(config)[group] if isinstance(shard.raw, RawUnit)]


def questions(count: int, mark: str = "") -> list[dict[str, Any]]:
    return [{"id": i, "conversations": talk(f"{mark}what is {i}?", str(i))} for i in range(count)]


@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_file_that_is_rewritten_in_the_same_shape_is_told_before_a_row_is_lost(
    tmp_path: Path, form: str, same_size: bool
) -> None:
    path = tmp_path / f"a.{form}"
    rows = questions(2 * UNIT_ROWS if form == "jsonl" else 8)

    def write(rows: list[dict[str, Any]]) -> None:
        if form == "jsonl":
            write_jsonl(path, rows)
        else:
            pq.write_table(
                pa.Table.from_pylist(rows), path, row_group_size=4, compression="none", use_dictionary=False
            )

    write(rows)
    first, second = units_of({"jsonl_path": str(path)}, "vlm_sft")
    before = path.stat()
    begun = second.walk(0)
    next(begun)
    write(rows[::-1] if same_size else questions(len(rows), "so, "))
    # A clock need not have gone on in between.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert (path.stat().st_size == before.st_size) == same_size

    told = (
        "still, but another date or tag"
        if same_size
        else f"from {before.st_size} to {path.stat().st_size} bytes"
    )
    for unit in (first, second):
        with pytest.raises(
            ShardError, match=f"#row.*: the file has changed since the run was built: .*{told}"
        ):
            next(unit.walk(0))
        with pytest.raises(ShardError, match="the file has changed since the run was built"):
            unit.fetch([unit.piece.first + 1 if form == "jsonl" else 1])
    # A unit that was open by then says so at its end at the latest.
    with pytest.raises(ShardError, match=r"#row"):
        list(begun)


def test_a_file_that_changes_ends_a_run_or_is_skipped_and_counted(tmp_path: Path) -> None:
    def parquet(name: str, groups: int) -> None:
        rows = [(encode_image((24, 40), seed=i), captions(i)) for i in range(2 * groups)]
        write_t2i(tmp_path / "t2i" / name, rows, group_rows=2)

    def run(**more: Any) -> PackedLoader:
        parquet("a.parquet", 4)
        parquet("b.parquet", 4)
        config = small_config(
            dataset_info={"t2i_pretrain": {"t2i": {"data_dir": str(tmp_path / "t2i")}}},
            grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]},
            num_streams=1,
            **more,
        )
        loader = PackedLoader(config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3), epochs=1)
        parquet("b.parquet", 1)
        return loader

    with pytest.raises(ShardError, match=r"b\.parquet#row_group=\d: the file has changed"):
        list(run())
    skipping = run(on_shard_error="skip", max_skipped=0.5)
    list(skipping)
    assert skipping.stats["groups"]["t2i_pretrain"] | {"epochs": 1} == {
        "read": 16,
        "packed": 8,
        "dropped": {"shard_unreadable": 8},
        "waiting": 0,
        "epochs": 1,
    }


def test_an_object_that_is_replaced_is_told(s3_store: S3Store, s3_folder: str) -> None:
    def put(rows: list[dict[str, Any]]) -> None:
        lines = "\n".join(map(json.dumps, rows))
        storage.write_bytes(f"{s3_folder}/a.jsonl", lines.encode(), s3_store.options)

    rows = questions(5)
    put(rows)
    [unit] = units_of({"jsonl_path": f"{s3_folder}/a.jsonl"}, "vlm_sft", storage=s3_store.options)
    assert len(list(unit.walk(0))) == 5
    put(rows)
    assert len(unit.fetch([0, 4])) == 2
    put(rows[::-1])
    with pytest.raises(
        ShardError, match=r"a\.jsonl#row=0: the file has changed since .* another date or tag"
    ):
        next(unit.walk(0))


def test_relative_paths_are_those_of_the_folder_where_the_run_was_built(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    relative = small_config(dataset_info=raw_info("."), num_streams=1)
    built = relative.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)
    absolute = small_config(dataset_info=raw_info(root), num_streams=1)
    wanted = absolute.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)
    monkeypatch.chdir(tmp_path)

    found, expected = PackedLoader(built, epochs=1), PackedLoader(wanted, epochs=1)

    assert [digest(batch.to_dict()) for batch in found] == [digest(batch.to_dict()) for batch in expected]
    assert found.stats == expected.stats
    assert found.stats["groups"]["vlm_sft"]["packed"] > 5
    # A state goes on from either.
    assert found.state_dict() == expected.state_dict()


def test_a_pass_in_which_every_row_is_dropped_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{broken\n" * 7 + '{"conversations": 3}\n')
    config = small_config(
        dataset_info={"vlm_sft": {"vlm": {"jsonl_path": str(tmp_path / "a.jsonl")}}},
        grouped_datasets={"vlm_sft": MIXTURE["vlm_sft"]},
        num_streams=3,
    )
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)

    with pytest.raises(
        NoUsableSampleError, match=r"whole pass.* 'vlm_sft': conversations_invalid 1, row_invalid 7;"
    ):
        list(PackedLoader(dataset, epochs=1))


def test_a_unit_that_cannot_be_read_is_skipped_where_the_settings_say_so(tmp_path: Path) -> None:
    for number in range(3):
        write_t2i(
            tmp_path / "t2i" / f"{number}.parquet",
            [(encode_image(seed=10 * number + i), captions(i)) for i in range(5)],
            group_rows=5,
        )
    config = small_config(
        dataset_info={"t2i_pretrain": {"t2i": {"data_dir": str(tmp_path / "t2i")}}},
        grouped_datasets={"t2i_pretrain": MIXTURE["t2i_pretrain"]},
        num_streams=1,
        on_shard_error="skip",
        max_skipped=0.5,
    )
    loader = PackedLoader(config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3), epochs=1)
    (tmp_path / "t2i" / "1.parquet").unlink()

    for _ in loader:
        pass

    counts = loader.stats["groups"]["t2i_pretrain"]
    assert (counts["read"], counts["packed"], counts["dropped"]) == (15, 10, {"shard_unreadable": 5})


def test_a_state_is_refused_when_the_raw_files_or_how_they_are_read_changed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"conversations": talk(f"what is {i}?", "it")} for i in range(30)])
    only = {"vlm_sft": MIXTURE["vlm_sft"]}

    def dataset(**entry: Any) -> Any:
        info = {"vlm_sft": {"vlm": {"jsonl_path": str(tmp_path / "a.jsonl"), **entry}}}
        config = small_config(dataset_info=info, grouped_datasets=only, num_streams=2)
        return config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)

    loader = PackedLoader(dataset())
    next(iter(loader))
    state = loader.state_dict()
    dataset().load_state_dict(state)
    with pytest.raises(ConfigError, match="the shards or raw files of group 'vlm_sft' changed"):
        dataset(placeholders="upstream").load_state_dict(state)
    with (tmp_path / "a.jsonl").open("a", encoding="utf-8") as lines:
        lines.write('{"conversations": []}\n')
    with pytest.raises(ConfigError, match="the shards or raw files of group 'vlm_sft' changed"):
        dataset().load_state_dict(state)


def test_a_group_whose_raw_rows_are_all_bad_is_an_error_and_no_endless_search(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["{broken"] * 300)
    config = small_config(
        dataset_info={"vlm_sft": {"vlm": {"jsonl_path": str(tmp_path / "a.jsonl")}}},
        grouped_datasets={"vlm_sft": MIXTURE["vlm_sft"]},
    )
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)

    with pytest.raises(
        RuntimeError, match=r"group 'vlm_sft': no usable sample .* row_invalid \d+; the last was a=2Ejsonl-"
    ):
        next(iter(dataset))


def test_a_run_from_raw_files_can_be_planned(root: Path) -> None:
    plan = plan_run(small_config(dataset_info=raw_info(root)), 1, 2, tokens=dict.fromkeys(MIXTURE, 50.0))

    assert [(group.shards, group.samples) for group in plan.groups] == [(10, 27), (7, 13), (1, 16)]


def test_a_frame_folder_is_a_clip_and_an_exif_turn_is_kept(tmp_path: Path) -> None:
    frames = tmp_path / "media" / "clip"
    frames.mkdir(parents=True)
    for number in range(12):
        (frames / f"f_{number}.png").write_bytes(encode_image((30, 40), seed=number))
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(turned, "JPEG", exif=exif)
    (tmp_path / "media" / "turned.jpg").write_bytes(turned.getvalue())
    write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"video": "clip/", "conversations": talk("<video>what?", "this")},
            {"image": "turned.jpg", "conversations": talk("<image>what?", "this")},
        ],
    )
    info = {
        "vlm_sft": {"vlm": {"jsonl_path": str(tmp_path / "a.jsonl"), "data_dir": str(tmp_path / "media")}}
    }
    clip, image = read(info, "vlm_sft")

    assert [name for name in clip if name.endswith(".png")] == [f"0.{number:03d}.png" for number in range(12)]
    assert json.loads(clip["json"])["_bagel"] == {
        "kind": "vlm",
        "media": [{"ext": "png", "width": 40, "height": 30, "frames": 12}],
        "source": {"file": "a.jsonl", "row": 0},
    }
    assert json.loads(image["json"])["_bagel"]["media"] == [
        {"ext": "jpg", "width": 40, "height": 20, "orientation": 6}
    ]


def test_a_plan_of_a_run_from_raw_files_speaks_of_row_groups(tmp_path: Path) -> None:
    rows = [(encode_image(seed=i), captions(i)) for i in range(12)]
    write_t2i(tmp_path / "t2i" / "a.parquet", rows, group_rows=12)
    info = {"t2i_pretrain": {"t2i": {"data_dir": str(tmp_path / "t2i")}}}
    only = {"t2i_pretrain": MIXTURE["t2i_pretrain"]}

    plan = plan_run(small_config(dataset_info=info, grouped_datasets=only, num_streams=4), 1, 0)

    assert plan.groups[0].raw_units == 1
    [advice] = [text for text in plan.advice if "row group" in text]
    assert "is opened 4.0 times an epoch" in advice
    assert "row groups of at most 3 rows" in advice
    assert "index" not in advice
    assert "1 shard (1 unit of raw files), 12 samples" in "\n".join(plan_lines(plan))
