"""Upstream's names have upstream's signatures; ours come after theirs."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pytest
import torch
from golden_data import load_json, plain_tokenizer, tokenizer
from PIL import Image
from shard_factory import SPECIAL_TOKENS
from upstream_corpus import BUDGETS as BUDGETS_OF_CORPUS
from upstream_corpus import THREE, mixture, write_corpus

import bagel_wds
from bagel_wds import BagelDatasetConfig, ConfigError

REQUIRED = inspect.Parameter.empty

CONFIG: dict[str, Any] = {
    "grouped_datasets": None,
    "grouped_datasets_path": None,
    "dataset_info": None,
    "dataset_info_path": None,
    "expected_num_tokens": 32768,
    "max_num_tokens_per_sample": 16384,
    "max_num_tokens": 36864,
    "prefer_buffer_before": 16384,
    "max_buffer_size": 50,
    "interpolate_pos": False,
    "use_flex": False,
    "data_seed": 42,
    "text_cond_dropout_prob": 0.1,
    "vit_cond_dropout_prob": 0.4,
    "vae_cond_dropout_prob": 0.1,
    "vae_image_downsample": 16,
    "max_latent_size": 32,
    "vit_patch_size": 14,
    "max_num_patch_per_side": 70,
}
_NAMES = list(CONFIG)
BUDGETS = {
    name: CONFIG[name] for name in _NAMES[_NAMES.index("expected_num_tokens") : _NAMES.index("data_seed")]
}
MODEL = {name: CONFIG[name] for name in _NAMES[_NAMES.index("data_seed") :]}

RANKS = {"local_rank": 0, "world_size": 1, "num_workers": 8}
PARQUET = {
    "dataset_name": REQUIRED,
    "transform": REQUIRED,
    "tokenizer": REQUIRED,
    "vit_transform": REQUIRED,
    "data_dir_list": REQUIRED,
    "num_used_data": REQUIRED,
    "parquet_info": REQUIRED,
    **RANKS,
    "data_status": None,
}

SIGNATURES: dict[str, dict[str, Any]] = {
    "DistributedIterableDataset": {"dataset_name": REQUIRED, **RANKS},
    "FrameSampler": {"max_num_frames": -1, "min_num_frames": 8, "sample": "rand"},
    "ParquetStandardIterableDataset": PARQUET,
    "UnifiedEditIterableDataset": PARQUET,
    "T2IIterableDataset": {
        "dataset_name": REQUIRED,
        "transform": REQUIRED,
        "tokenizer": REQUIRED,
        "data_dir_list": REQUIRED,
        "num_used_data": REQUIRED,
        **RANKS,
        "data_status": None,
    },
    "SftJSONLIterableDataset": {
        "dataset_name": REQUIRED,
        "transform": REQUIRED,
        "tokenizer": REQUIRED,
        "frame_sampler": REQUIRED,
        "jsonl_path_list": REQUIRED,
        "data_dir_list": REQUIRED,
        "num_used_data": REQUIRED,
        **RANKS,
        "data_status": None,
        "shuffle_lines": False,
        "shuffle_seed": 0,
    },
    "get_parquet_data_paths": {
        "data_dir_list": REQUIRED,
        "num_sampled_data_paths": REQUIRED,
        "rank": 0,
        "world_size": 1,
    },
    "init_arrow_pf_fs": {"parquet_file_path": REQUIRED},
    "PackedDataset": {
        "data_config": REQUIRED,
        "tokenizer": REQUIRED,
        "special_tokens": REQUIRED,
        "local_rank": REQUIRED,
        "world_size": REQUIRED,
        "num_workers": REQUIRED,
        **BUDGETS,
        "data_status": None,
        "dataset_info": None,
        "global_seed": None,
    },
    "make_bagel_multimodal_dataset": {
        "tokenizer": REQUIRED,
        "special_tokens": REQUIRED,
        "grouped_datasets": REQUIRED,
        "local_rank": 0,
        "world_size": 1,
        "num_workers": 4,
        **BUDGETS,
        "data_status": None,
        **MODEL,
        "dataset_info": None,
    },
    "ImageTransform": {
        "max_image_size": REQUIRED,
        "min_image_size": REQUIRED,
        "image_stride": REQUIRED,
        "max_pixels": 14 * 14 * 9 * 1024,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
    "MaxLongEdgeMinShortEdgeResize": {
        "max_size": REQUIRED,
        "min_size": REQUIRED,
        "stride": REQUIRED,
        "max_pixels": REQUIRED,
        "interpolation": None,
        "antialias": True,
    },
    "SimpleCustomBatch": {"batch": REQUIRED},
    "add_special_tokens": {"tokenizer": REQUIRED},
    "bagel_packed_collate_fn": {"batch": REQUIRED},
    "collate_wrapper": {},
    "get_flattened_position_ids_extrapolate": {
        "img_h": REQUIRED,
        "img_w": REQUIRED,
        "patch_size": REQUIRED,
        "max_num_patches_per_side": REQUIRED,
    },
    "get_flattened_position_ids_interpolate": {
        "img_h": REQUIRED,
        "img_w": REQUIRED,
        "patch_size": REQUIRED,
        "max_num_patches_per_side": REQUIRED,
    },
    "len2weight": {"x": REQUIRED, "loss_reduction": "square"},
    "patchify": {"image": REQUIRED, "patch_size": REQUIRED},
    "pil_img2rgb": {"image": REQUIRED},
    "prepare_attention_mask_per_sample": {"split_lens": REQUIRED, "attn_modes": REQUIRED, "device": "cpu"},
}


METHODS: dict[str, dict[str, Any]] = {
    "BagelDatasetConfig._resolve_mapping": {"inline": REQUIRED, "path": REQUIRED, "name": REQUIRED},
    "BagelDatasetConfig.build": {
        "self": REQUIRED,
        "tokenizer": REQUIRED,
        "special_tokens": REQUIRED,
        "rank": REQUIRED,
        "world_size": REQUIRED,
        "num_workers": REQUIRED,
        "global_seed": REQUIRED,
        "data_status": None,
    },
    "DistributedIterableDataset.__iter__": {"self": REQUIRED},
    "DistributedIterableDataset._get_worker_data_status": {"self": REQUIRED, "worker_id": REQUIRED},
    "DistributedIterableDataset._log_drop": {
        "self": REQUIRED,
        "reason": REQUIRED,
        "message": REQUIRED,
        "args": REQUIRED,
        "every": 100,
        "exc_info": False,
    },
    "DistributedIterableDataset._set_worker_resume_data_status": {
        "self": REQUIRED,
        "worker_id": REQUIRED,
        "status": REQUIRED,
    },
    "DistributedIterableDataset.get_data_paths": {"self": REQUIRED, "args": REQUIRED, "kwargs": REQUIRED},
    "DistributedIterableDataset.get_data_paths_per_worker": {"self": REQUIRED},
    "DistributedIterableDataset.load_state_dict": {"self": REQUIRED, "state_dict": REQUIRED},
    "DistributedIterableDataset.set_data_status": {"self": REQUIRED, "data_status": REQUIRED},
    "DistributedIterableDataset.set_epoch": {"self": REQUIRED, "seed": 42},
    "DistributedIterableDataset.state_dict": {"self": REQUIRED},
    "FrameSampler.__call__": {"self": REQUIRED, "file_name": REQUIRED},
    "ImageTransform.__call__": {"self": REQUIRED, "img": REQUIRED, "img_num": 1},
    "InterleavedBaseIterableDataset._add_image": {
        "self": REQUIRED,
        "data": REQUIRED,
        "image": REQUIRED,
        "need_loss": REQUIRED,
        "need_vae": REQUIRED,
        "need_vit": REQUIRED,
        "enable_cfg": True,
    },
    "InterleavedBaseIterableDataset._add_text": {
        "self": REQUIRED,
        "data": REQUIRED,
        "text": REQUIRED,
        "need_loss": REQUIRED,
        "enable_cfg": True,
    },
    "InterleavedBaseIterableDataset._add_video": {
        "self": REQUIRED,
        "data": REQUIRED,
        "frames": REQUIRED,
        "frame_indexes": REQUIRED,
        "need_loss": REQUIRED,
        "need_vae": REQUIRED,
        "enable_cfg": True,
    },
    "InterleavedBaseIterableDataset._init_data": {"self": REQUIRED},
    "MaxLongEdgeMinShortEdgeResize._apply_scale": {
        "self": REQUIRED,
        "width": REQUIRED,
        "height": REQUIRED,
        "scale": REQUIRED,
    },
    "MaxLongEdgeMinShortEdgeResize._make_divisible": {
        "self": REQUIRED,
        "value": REQUIRED,
        "stride": REQUIRED,
    },
    "MaxLongEdgeMinShortEdgeResize.forward": {"self": REQUIRED, "img": REQUIRED, "img_num": 1},
    "PackedDataset.__iter__": {"self": REQUIRED},
    "PackedDataset.build_datasets": {
        "self": REQUIRED,
        "datasets_metainfo": REQUIRED,
        "data_status": REQUIRED,
    },
    "PackedDataset.load_state_dict": {"self": REQUIRED, "state_dict": REQUIRED},
    "PackedDataset.pack_sequence": {"self": REQUIRED, "sample": REQUIRED, "sequence_status": REQUIRED},
    "PackedDataset.set_epoch": {"self": REQUIRED, "seed": REQUIRED},
    "PackedDataset.set_sequence_status": {"self": REQUIRED},
    "PackedDataset.state_dict": {"self": REQUIRED},
    "PackedDataset.to_tensor": {"self": REQUIRED, "sequence_status": REQUIRED},
    "ParquetStandardIterableDataset.__iter__": {"self": REQUIRED},
    "ParquetStandardIterableDataset.get_data_paths": {
        "self": REQUIRED,
        "data_dir_list": REQUIRED,
        "num_used_data": REQUIRED,
        "parquet_info": REQUIRED,
    },
    "ParquetStandardIterableDataset.parse_row": {"self": REQUIRED, "row": REQUIRED},
    "SftJSONLIterableDataset.__iter__": {"self": REQUIRED},
    "SftJSONLIterableDataset.change_format": {"self": REQUIRED, "data": REQUIRED, "num_images": REQUIRED},
    "SftJSONLIterableDataset.get_data_paths": {
        "self": REQUIRED,
        "jsonl_path_list": REQUIRED,
        "data_dir_list": REQUIRED,
        "num_used_data": REQUIRED,
        "shuffle_lines": REQUIRED,
        "shuffle_seed": REQUIRED,
    },
    "SimpleCustomBatch.cuda": {"self": REQUIRED},
    "SimpleCustomBatch.pin_memory": {"self": REQUIRED},
    "SimpleCustomBatch.to_dict": {"self": REQUIRED},
    "T2IIterableDataset.__iter__": {"self": REQUIRED},
    "T2IIterableDataset.get_data_paths": {
        "self": REQUIRED,
        "data_dir_list": REQUIRED,
        "num_used_data": REQUIRED,
    },
    "UnifiedEditIterableDataset.parse_row": {"self": REQUIRED, "row": REQUIRED},
}

BASES = {
    "InterleavedBaseIterableDataset": ["DistributedIterableDataset"],
    "ParquetStandardIterableDataset": ["DistributedIterableDataset"],
    "SftJSONLIterableDataset": ["DistributedIterableDataset"],
    "T2IIterableDataset": ["DistributedIterableDataset"],
    "UnifiedEditIterableDataset": ["InterleavedBaseIterableDataset", "ParquetStandardIterableDataset"],
}

DATA = ("DATASET_REGISTRY", "DEFAULT_DATASET_INFO", "DataConfig")

ABSENT = (
    "_grouped_dataset_state_dicts",
    "_load_grouped_dataset_state_dicts",
    "_load_rng_state_dict",
    "_log_drop",
    "_rng_state_dict",
    "_set_resume_point",
)
"""Of `PackedDataset`: names of upstream's own that have no meaning here; docs/divergence.md says why."""


def parameters(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method_has_upstreams_signature(name: str) -> None:
    owner, method = name.split(".")
    got = parameters(getattr(getattr(bagel_wds, owner), method))
    want = METHODS[name]

    assert list(got.items())[: len(want)] == list(want.items())
    # What is ours comes last and has a default.
    assert REQUIRED not in list(got.values())[len(want) :]


@pytest.mark.parametrize("name", sorted(BASES))
def test_class_stands_on_upstreams_bases(name: str) -> None:
    assert [base.__name__ for base in getattr(bagel_wds, name).__bases__] == BASES[name]


def test_every_name_of_upstream_is_there() -> None:
    classes = {name.partition(".")[0] for name in METHODS}

    assert {*SIGNATURES, *classes, *BASES, *DATA} <= set(bagel_wds.__all__)
    assert len({*SIGNATURES, *classes, *DATA}) == 27
    told = (Path(__file__).parents[1] / "docs" / "divergence.md").read_text(encoding="utf-8")
    for name in ABSENT:
        assert not hasattr(bagel_wds.PackedDataset, name)
        assert f"`{name}`" in told


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature_is_upstreams(name: str) -> None:
    got = parameters(getattr(bagel_wds, name))
    want = SIGNATURES[name]

    assert list(got.items())[: len(want)] == list(want.items())
    # What is ours comes last and has a default.
    assert set(list(got)[len(want) :]) <= {"fidelity"}


def test_config_has_upstreams_fields_and_defaults_first() -> None:
    got = [(field.name, field.default) for field in fields(BagelDatasetConfig)]

    assert got[: len(CONFIG)] == list(CONFIG.items())
    assert all(default is not MISSING for _, default in got)
    assert list(parameters(BagelDatasetConfig.build)) == [
        "self", "tokenizer", "special_tokens", "rank", "world_size", "num_workers", "global_seed", "data_status",
    ]  # fmt: skip
    assert bagel_wds.DataConfig is BagelDatasetConfig


def test_inline_mappings_are_resolved_without_being_shared() -> None:
    inline: dict[str, object] = {"t2i_pretrain": {"t2i": "x"}}
    resolved = BagelDatasetConfig._resolve_mapping(inline, None, "dataset_info")

    assert resolved == inline
    assert resolved is not inline


# One behaviour of each name, with values that can be worked out by hand.


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_corpus(tmp_path_factory.mktemp("raw"))


VAE_TRANSFORM = bagel_wds.ImageTransform(64, 32, 16)
VIT_TRANSFORM = bagel_wds.ImageTransform(56, 28, 14)


def test_behaviour_of_functions_and_data(tmp_path: Path) -> None:
    tokenizer, ids, num_new = bagel_wds.add_special_tokens(plain_tokenizer())
    assert (len(tokenizer), num_new, sorted(ids.values())) == (423, 4, [419, 420, 421, 422])
    batch = {"sequence_length": 3, "nested_attention_masks": []}
    assert bagel_wds.bagel_packed_collate_fn([batch]).to_dict() == batch
    wrapped = bagel_wds.collate_wrapper()([batch])
    assert (type(wrapped), wrapped.sequence_length, wrapped.use_flex) == (
        bagel_wds.SimpleCustomBatch,
        3,
        False,
    )
    assert bagel_wds.get_flattened_position_ids_extrapolate(28, 42, 14, 70).tolist() == [0, 1, 2, 70, 71, 72]
    assert bagel_wds.get_flattened_position_ids_interpolate(28, 28, 14, 4).tolist() == [0, 2, 8, 10]
    assert (bagel_wds.len2weight(4), bagel_wds.len2weight(4, "sample")) == (0.5, 0.25)
    assert bagel_wds.patchify(torch.arange(12.0).view(3, 2, 2), 2).tolist() == [
        [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    ]
    clear = Image.new("RGBA", (1, 1), (10, 20, 30, 0))
    assert bagel_wds.pil_img2rgb(clear).getpixel((0, 0)) == (255, 255, 255)
    mask = bagel_wds.prepare_attention_mask_per_sample([1, 1], ["noise", "causal"])
    assert mask.tolist() == [[0, -math.inf], [-math.inf, 0]]
    assert bagel_wds.DataConfig is BagelDatasetConfig
    assert bagel_wds.DEFAULT_DATASET_INFO == {}
    assert {
        "t2i_pretrain": bagel_wds.T2IIterableDataset,
        "vlm_sft": bagel_wds.SftJSONLIterableDataset,
        "unified_edit": bagel_wds.UnifiedEditIterableDataset,
    } == bagel_wds.DATASET_REGISTRY


def test_behaviour_of_parquet_paths(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "notes.txt"):
        (tmp_path / name).touch()
    a, b = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")

    found = bagel_wds.get_parquet_data_paths([str(tmp_path), str(tmp_path)], [5, 1])

    assert len(found) == 6
    assert sorted(found[:2]) == [a, b]
    assert found[2:] == [*found[:2], found[0], found[0]]
    assert type(bagel_wds.init_arrow_pf_fs(a)) is pa.fs.LocalFileSystem
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, match in (
        (empty, "no parquet file among its 0 entries"),
        (tmp_path / "gone", "cannot be listed"),
    ):
        with pytest.raises(ConfigError, match=match):
            bagel_wds.get_parquet_data_paths([str(path)], [1])
    with pytest.raises(ConfigError, match="a bucket is read by a run with the default fidelity"):
        bagel_wds.init_arrow_pf_fs("s3://bucket/a.parquet")
    with pytest.raises(ConfigError, match="init_process_group"):
        bagel_wds.get_parquet_data_paths([str(tmp_path)], [1], 0, 2)


def test_behaviour_of_transforms() -> None:
    picture = Image.new("RGB", (80, 40), (255, 0, 51))
    assert bagel_wds.MaxLongEdgeMinShortEdgeResize(64, 32, 16, 10**9)(picture).size == (64, 32)
    tensor = VAE_TRANSFORM(picture)
    assert (tensor.shape, VAE_TRANSFORM.stride) == ((3, 32, 64), 16)
    assert tensor[:, 0, 0].tolist() == [1.0, -1.0, pytest.approx(-0.6)]
    for attribute in ("resize_transform", "to_tensor_transform", "normalize_transform"):
        assert callable(getattr(VAE_TRANSFORM, attribute))


class Paths(bagel_wds.DistributedIterableDataset):
    """Nothing but paths."""


def test_behaviour_of_the_distributed_dataset(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    golden = load_json("ops/sharding.json")
    seen = set()
    for row in golden["rows"]:
        dataset = Paths("d", row["rank"], row["world_size"], row["num_workers"])
        assert (dataset.data_paths, dataset.data_paths_per_rank, dataset.num_files_per_rank) == (None, [], 0)
        dataset.set_epoch()
        assert dataset.get_data_paths_per_worker() is None
        dataset.data_paths = [
            path if row["list"] == "names" else tuple(path) for path in golden["lists"][row["list"]]
        ]
        worker = SimpleNamespace(id=row["worker_id"], num_workers=row["num_workers"])
        monkeypatch.setattr(
            "bagel_wds.upstream.distributed.get_worker_info", lambda w=worker: None if w.id is None else w
        )
        seen.add(row["result"] == "ValueError")
        if row["result"] == "ValueError":
            with pytest.raises(ValueError, match=r"paths (for world_size|on rank)"):  # noqa: PT012 - either may refuse
                dataset.set_epoch(row["seed"])
                dataset.get_data_paths_per_worker()
            continue
        dataset.set_epoch(row["seed"])
        share = dataset.get_data_paths_per_worker()
        assert share is not None
        paths, number = share
        assert [list(path) if isinstance(path, tuple) else path for path in paths] == row["result"]
        assert number == (row["worker_id"] or 0)
    assert len(golden["rows"]) == 14
    assert "paths are left out" in caplog.text
    for method in (dataset.get_data_paths, dataset.__iter__):
        with pytest.raises(NotImplementedError):
            method()


def test_behaviour_of_data_status(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Paths("d", num_workers=2)
    assert dataset.state_dict() == {"data_status": None}
    dataset._set_worker_resume_data_status(1, [3, 4])
    assert dataset.state_dict() == {"data_status": [None, [3, 4]]}
    other = Paths("d", num_workers=2)
    other.load_state_dict(dataset.state_dict())
    assert (other._get_worker_data_status(0), other._get_worker_data_status(1)) == (None, [3, 4])
    with pytest.raises(ConfigError, match="as many workers as saved it"):
        other._get_worker_data_status(2)
    other.set_data_status(None)
    assert other._get_worker_data_status(0) is None
    for number in range(8):
        other._log_drop("why", "row %d", number, every=4)
    assert other._drop_counters == {"why": 8}
    assert [record.getMessage() for record in caplog.records] == [
        "d drop[why]=1: row 0", "d drop[why]=2: row 1", "d drop[why]=3: row 2", "d drop[why]=4: row 3", "d drop[why]=8: row 7",
    ]  # fmt: skip


class Builder(bagel_wds.InterleavedBaseIterableDataset):
    """Has what the builder needs."""

    transform, vit_transform, tokenizer = VAE_TRANSFORM, VIT_TRANSFORM, tokenizer()


def entry(kind: str, cfg: int, loss: int, **split: Any) -> dict[str, Any]:
    more = {"special_token_loss": 0, "special_token_label": None}
    return {"type": kind, "enable_cfg": cfg, "loss": loss, **more, **split}


def test_behaviour_of_the_interleaved_builder() -> None:
    builder, picture = Builder("d"), Image.new("RGB", (64, 32))
    ids = tokenizer().encode("a cat")

    data = builder._add_text(builder._init_data(), "a cat", need_loss=True, enable_cfg=False)
    data = builder._add_image(data, picture, need_loss=True, need_vae=True, need_vit=True)
    data = builder._add_image(data, picture, need_loss=False, need_vae=True, need_vit=False, enable_cfg=False)

    assert data["sequence_plan"] == [
        entry("text", 0, 1),
        entry("vae_image", 0, 1),
        entry("vae_image", 1, 0),
        entry("vit_image", 1, 0),
        entry("vae_image", 0, 0),
    ]
    assert data["text_ids_list"] == [ids]
    # 64 x 32 pixels are 4 x 2 patches of 16, and 56 x 28 are 4 x 2 of 14.
    assert [tuple(image.shape) for image in data["image_tensor_list"]] == [
        (3, 32, 64),
        (3, 32, 64),
        (3, 28, 56),
        (3, 32, 64),
    ]
    assert data["num_tokens"] == len(ids) + 4 * 8
    with pytest.raises(AssertionError, match="added for nothing"):
        builder._add_image(data, picture, False, False, False)


@pytest.mark.parametrize("loss", [True, False])
def test_behaviour_of_the_builders_clip(*, loss: bool) -> None:
    builder, picture = Builder("d"), Image.new("RGB", (64, 32))

    data = builder._add_video(builder._init_data(), [picture] * 3, [0, 4, 6], loss, not loss)

    cfg = int(not loss)
    assert data["sequence_plan"] == [
        entry("vae_image", cfg, int(loss), split_start=True, split_end=False, frame_delta=4),
        entry("vae_image", cfg, int(loss), split_start=False, split_end=False, frame_delta=2),
        entry("vae_image", cfg, int(loss), split_start=False, split_end=True),
    ]
    assert (len(data["image_tensor_list"]), data["num_tokens"]) == (3, 24)
    with pytest.raises(AssertionError, match="either noised or clean"):
        builder._add_video(data, [picture], [0], loss, loss)


def red(frame: Image.Image) -> int:
    pixel: Any = frame.getpixel((0, 0))
    return int(pixel[0])


def test_behaviour_of_the_frame_sampler(tmp_path: Path) -> None:
    for number in range(40):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / f"f_{number}.png")
        (tmp_path / f"f_{number}.png").rename(tmp_path / f"f_{number}.jpg")
    folder, clip = f"{tmp_path}/", Path(__file__).parent / "data" / "real" / "vlm" / "images" / "pancake.mkv"

    # Upstream's default settings choose nothing; a path without the slash is a folder, too.
    for name in (folder, str(tmp_path)):
        frames = bagel_wds.FrameSampler()(name)
        shown = [red(frame) for frame in frames]
        assert 8 <= len(shown) <= 16
        assert shown == sorted(set(shown))
    middle = bagel_wds.FrameSampler(4, 4, "middle")(folder)
    assert [red(frame) for frame in middle] == [4, 14, 24, 34]
    of_file = bagel_wds.FrameSampler(3, 3, "middle")(str(clip))
    assert [(frame.mode, frame.size) for frame in of_file] == [("RGB", of_file[0].size)] * 3
    assert len({frame.tobytes() for frame in of_file}) == 3
    with pytest.raises(ConfigError, match="at most max_num_frames=4"):
        bagel_wds.FrameSampler(4)
    with pytest.raises(bagel_wds.BadSample, match="video_missing"):
        bagel_wds.FrameSampler()(str(tmp_path / "gone.mp4"))


def common(name: str) -> dict[str, Any]:
    return {"dataset_name": name, "transform": VAE_TRANSFORM, "tokenizer": tokenizer()}


def test_behaviour_of_the_three_datasets(info: dict[str, Any]) -> None:
    t2i_dir = info["t2i_pretrain"]["t2i"]["data_dir"]
    edit, vlm = info["unified_edit"]["edit"], info["vlm_sft"]["vlm"]
    t2i = bagel_wds.T2IIterableDataset(**common("t2i"), data_dir_list=[t2i_dir], num_used_data=[5])
    row_groups = json.loads(Path(edit["parquet_info_path"]).read_text())
    edits = bagel_wds.UnifiedEditIterableDataset(
        **common("edit"),
        vit_transform=VIT_TRANSFORM,
        data_dir_list=[edit["data_dir"]],
        num_used_data=[3],
        parquet_info=row_groups,
    )
    talks = bagel_wds.SftJSONLIterableDataset(
        **{**common("vlm"), "transform": VIT_TRANSFORM},
        frame_sampler=bagel_wds.FrameSampler(4, 2),
        jsonl_path_list=[vlm["jsonl_path"]],
        data_dir_list=[vlm["data_dir"]],
        num_used_data=[31],
    )

    assert [len(dataset.data_paths or ()) for dataset in (t2i, edits, talks)] == [5, 9, 31]
    kinds = {}
    for dataset in (t2i, edits, talks):
        sample = next(iter(dataset))
        assert sample["data_indexes"]["dataset_name"] == dataset.dataset_name
        ids = sum(map(len, sample["text_ids_list"]))
        pixels = [image.shape[1] * image.shape[2] for image in sample["image_tensor_list"]]
        kinds[dataset.dataset_name] = [entry["type"] for entry in sample["sequence_plan"]]
        strides = [
            16 if kind == "vae_image" else 14 for kind in kinds[dataset.dataset_name] if kind != "text"
        ]
        assert sample["num_tokens"] == ids + sum(p // s**2 for p, s in zip(pixels, strides, strict=True))
    assert kinds["t2i"] == ["text", "vae_image"]
    assert kinds["edit"][:3] == ["vae_image", "vit_image", "text"]
    assert kinds["edit"][-1] == "vae_image"
    assert "text" in kinds["vlm"]
    elements = talks.change_format(
        {"conversations": [{"from": "human", "value": "a <image> b<image>"}, {"from": "gpt", "value": "c"}]},
        1,
    )
    assert elements == [
        {"type": "text", "has_loss": 0, "text": "a"},
        {"type": "image"},
        {"type": "text", "has_loss": 0, "text": "b"},
        {"type": "text", "has_loss": 1, "text": "c"},
    ]
    with pytest.raises(NotImplementedError):
        bagel_wds.ParquetStandardIterableDataset.parse_row(edits, {})


def test_behaviour_of_the_packed_dataset_and_its_builders(info: dict[str, Any]) -> None:
    groups = mixture(*THREE)
    config = BagelDatasetConfig(
        grouped_datasets=groups, dataset_info=info, **BUDGETS_OF_CORPUS, fidelity="upstream"
    )
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, 3)
    same = bagel_wds.make_bagel_multimodal_dataset(
        tokenizer(), SPECIAL_TOKENS, mixture(*THREE), num_workers=0, dataset_info=info, data_seed=42,
        fidelity="upstream", **BUDGETS_OF_CORPUS,
    )  # fmt: skip

    datasets, is_mandatory, weights = dataset.build_datasets(groups, None)

    assert [type(own).__name__ for own in datasets] == [
        "T2IIterableDataset", "UnifiedEditIterableDataset", "SftJSONLIterableDataset",
    ]  # fmt: skip
    assert (is_mandatory, weights) == ([True, False, True], [1.0, 2.0, 1.0])
    assert groups == mixture(*THREE)
    status = dataset.set_sequence_status()
    assert (status.pop("curr"), set(map(tuple, status.values()))) == (0, {()})
    sample = next(iter(datasets[0]))
    status = dataset.pack_sequence(sample, dataset.set_sequence_status())
    batch = dataset.to_tensor(status)
    assert batch["sequence_length"] == status["curr"] == sum(batch["sample_lens"])
    before = [own.data_paths_per_rank for own in same.class_datasets.values()]
    same.set_epoch(43)
    assert [own.data_paths_per_rank for own in same.class_datasets.values()] != before
    assert next(iter(dataset))["batch_data_indexes"] != next(iter(same))["batch_data_indexes"]
