"""Real photographs, conversations and edits: converted, streamed, and nothing missing."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
import torch
import webdataset as wds
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS
from test_model import spans
from torch.utils.data import DataLoader

from bagel_wds import BagelDatasetConfig, collate_wrapper, stages
from bagel_wds.config import load_mapping
from bagel_wds.converters.mixture import convert_mixture
from bagel_wds.layout import KEY_ORDER
from bagel_wds.shards import list_shards

HERE = Path(__file__).parent
REAL = HERE / "data" / "real"
MIXTURE = str(HERE.parent / "configs" / "example_mixture.yaml")


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The converted dataset info of the real sources."""
    folder = tmp_path_factory.mktemp("real")
    sources = {
        "t2i_pretrain": {"t2i": {"data_dir": str(REAL / "t2i"), "num_files": 2, "num_total_samples": 8}},
        "unified_edit": {
            "seed": {
                "data_dir": str(REAL / "editing/seed"),
                "num_files": 1,
                "num_total_samples": 4,
                "parquet_info_path": str(REAL / "editing/parquet_info.json"),
            }
        },
        "vlm_sft": {
            "vlm": {
                "data_dir": str(REAL / "vlm/images"),
                "jsonl_path": str(REAL / "vlm/train.jsonl"),
                "num_total_samples": 8,
            }
        },
    }
    (folder / "info.json").write_text(json.dumps(sources))
    done = convert_mixture(MIXTURE, str(folder / "info.json"), str(folder / "shards"), processes=2)
    return str(done.info_path)


def config(info: str) -> BagelDatasetConfig:
    return BagelDatasetConfig(
        grouped_datasets_path=MIXTURE,
        dataset_info_path=info,
        expected_num_tokens=20480,
        max_num_tokens=24576,
        max_num_tokens_per_sample=10240,
        max_latent_size=64,
        use_flex=True,
    )


def shards_of(info: str, group: str, name: str) -> list[str]:
    return [shard.url for shard in list_shards(load_mapping(info)[group][name]["shards"])]


def members(urls: list[str]) -> dict[str, list[tuple[str, bytes]]]:
    """Key to its members, in order, by `tarfile` alone."""
    samples: dict[str, list[tuple[str, bytes]]] = {}
    for url in urls:
        with tarfile.open(url) as tar:
            for member in tar:
                key, _, ext = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                samples.setdefault(key, []).append((ext, content.read()))
    return samples


def test_media_bytes_in_the_tars_are_those_of_the_sources(info: str) -> None:
    images = [
        image
        for file in sorted((REAL / "t2i").glob("*.parquet"))
        for image in pq.read_table(file)["image"].to_pylist()
    ]
    chains = pq.read_table(REAL / "editing/seed/chunk_0.parquet")["image_list"].to_pylist()
    rows = [json.loads(line) for line in (REAL / "vlm/train.jsonl").read_text(encoding="utf-8").splitlines()]
    values = [row.get("image", row.get("video", [])) for row in rows]
    named = [[value] if isinstance(value, str) else value for value in values]

    t2i = members(shards_of(info, "t2i_pretrain", "t2i"))
    edit = members(shards_of(info, "unified_edit", "seed"))
    vlm = members(shards_of(info, "vlm_sft", "vlm"))

    assert all(content[0][0] == "json" for samples in (t2i, edit, vlm) for content in samples.values())
    assert [[data for _, data in content[1:]] for content in t2i.values()] == [[image] for image in images]
    assert [[data for _, data in content[1:]] for content in edit.values()] == chains
    assert [[data for _, data in content[1:]] for content in vlm.values()] == [
        [(REAL / "vlm/images" / name).read_bytes() for name in names] for names in named
    ]


def test_chinese_text_survives(info: str) -> None:
    vlm = members(shards_of(info, "vlm_sft", "vlm"))
    answers = [
        turn["value"] for content in vlm.values() for turn in orjson.loads(content[0][1])["conversations"]
    ]
    t2i = members(shards_of(info, "t2i_pretrain", "t2i"))
    captions = [orjson.loads(orjson.loads(content[0][1])["captions"]) for content in t2i.values()]

    assert "招牌上写着“曹记焖烤鸡腿”。" in answers
    assert "小心地滑 / Carefully slide" in answers
    expected = "绿色的海边农田，石头房子和一匹吃草的马。"  # noqa: RUF001 - Chinese has its own comma
    assert expected in [caption.get("zh") for caption in captions]


def test_nothing_is_left_out(info: str) -> None:
    for group, name, written in [
        ("t2i_pretrain", "t2i", 8),
        ("unified_edit", "seed", 4),
        ("vlm_sft", "vlm", 8),
    ]:
        folder = Path(load_mapping(info)[group][name]["shards"]).parent
        assert (folder / "quarantine.jsonl").read_text() == ""
        assert len(members(shards_of(info, group, name))) == written


def test_the_real_clip_is_described_and_its_frames_arrive(info: str) -> None:
    settings = config(info)
    vlm = members(shards_of(info, "vlm_sft", "vlm"))
    (header,) = [
        orjson.loads(content[0][1])["_bagel"] for content in vlm.values() if content[-1][0] == "0.mkv"
    ]
    plans = wds.DataPipeline(
        stages.shards(list_shards(shards_of(info, "vlm_sft", "vlm")), group="vlm_sft", epochs=1),
        stages.read(),
        stages.decode(settings, "vlm_sft"),
        stages.plan(settings, "vlm_sft", tokenizer()),
        stages.pack(settings),
        stages.materialize(settings, SPECIAL_TOKENS),
    )
    lengths = Counter(length for batch in plans for length in batch["vit_token_seqlens"].tolist())

    # As an independent look at the file, by its container's own tools, has it: 426x240, 30 a second, 10.3 s.
    assert header["media"] == [
        {"ext": "mkv", "width": 426, "height": 240, "frames": 310, "fps": 30.000968, "duration": 10.333}
    ]
    assert 8 <= max(lengths.values()) <= 12


@pytest.mark.parametrize(
    ("group", "name", "rows"),
    [("t2i_pretrain", "t2i", 8), ("unified_edit", "seed", 4), ("vlm_sft", "vlm", 8)],
)
@pytest.mark.parametrize("num_streams", [1, 2, 5])
def test_every_row_arrives_once_an_epoch(
    info: str, group: str, name: str, rows: int, num_streams: int
) -> None:
    settings = config(info)
    listed = list_shards(load_mapping(info)[group][name]["shards"])
    seen: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
    for stream in range(num_streams):
        plans = wds.DataPipeline(
            stages.shards(listed, group=group, num_streams=num_streams, stream=stream),
            stages.read(),
            stages.decode(settings, group),
            stages.plan(settings, group, tokenizer()),
        )
        for plan in takewhile(lambda plan: plan.ref.epoch < 2, plans):
            seen[plan.ref.epoch][plan.key] += 1

    assert seen[0] == seen[1] == Counter(members([shard.url for shard in listed]).keys())
    assert len(seen[0]) == rows


def test_batches_of_real_data_have_the_schema_and_stay_in_range(info: str) -> None:
    dataset = config(info).build(
        tokenizer(), SPECIAL_TOKENS, rank=0, world_size=1, num_workers=2, global_seed=1
    )
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=1, num_workers=2, collate_fn=collate_wrapper())

    groups: set[str] = set()
    for batch in islice(loader, 4):
        data = batch.to_dict()
        assert list(data) == [key for key in KEY_ORDER if key in data]
        assert sum(batch.sample_lens) == 24576
        assert batch.padded_images.dtype == torch.float32
        assert -1 <= float(batch.padded_images.min()) < float(batch.padded_images.max()) <= 1
        assert int(batch.packed_latent_position_ids.max()) < 64**2
        assert all(rows <= 64 and columns <= 64 for rows, columns in batch.patchified_vae_latent_shapes)
        owners = [number for number, span in enumerate(spans(batch)) for _ in span]
        for index in batch.ce_loss_indexes.tolist():
            assert owners[index] == owners[index + 1]
        groups |= {origin["dataset_name"] for origin in batch.batch_data_indexes}
    assert groups == {"t2i_pretrain", "unified_edit", "vlm_sft"}


def test_plain_webdataset_reads_the_shards_and_their_images_open(info: str) -> None:
    from PIL import Image

    urls = shards_of(info, "unified_edit", "seed")
    samples = list(wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), wds.decode("pil")))

    assert [len(sample["json"]["_bagel"]["media"]) for sample in samples] == [4, 2, 3, 3]
    for sample in samples:
        for number, medium in enumerate(sample["json"]["_bagel"]["media"]):
            image = sample[f"{number}.{medium['ext']}"]
            assert isinstance(image, Image.Image)
            assert image.size == (medium["width"], medium["height"])
