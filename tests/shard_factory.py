"""Small shards as other people's tools write them, and settings to match: JSON and images, no sidecars."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import webdataset as wds
from golden_data import tokenizer
from PIL import Image

from bagel_wds.config import BagelDatasetConfig
from bagel_wds.tokens import CONTROL_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VAE: dict[str, Any] = {"image_stride": 16, "max_image_size": 64, "min_image_size": 32}
VIT: dict[str, Any] = {"image_stride": 14, "max_image_size": 56, "min_image_size": 28}

MIXTURE: dict[str, Any] = {
    "t2i_pretrain": {
        "dataset_names": ["t2i"],
        "image_transform_args": VAE,
        "is_mandatory": True,
        "weight": 1,
    },
    "unified_edit": {
        "dataset_names": ["seed"],
        "image_transform_args": VAE,
        "vit_image_transform_args": VIT,
        "weight": 1,
    },
    "vlm_sft": {"dataset_names": ["vlm"], "image_transform_args": VIT, "is_mandatory": True, "weight": 1},
}

SPECIAL_TOKENS = {name: tokenizer().convert_tokens_to_ids(token) for name, token in CONTROL_TOKENS.items()}


def small_config(**settings: Any) -> BagelDatasetConfig:
    """Settings for tiny images and packs; anything may be given anew."""
    small: dict[str, Any] = {
        "grouped_datasets": MIXTURE,
        "expected_num_tokens": 200,
        "max_num_tokens": 260,
        "max_num_tokens_per_sample": 200,
        "prefer_buffer_before": 100,
        "max_buffer_size": 5,
        "shuffle_samples": 8,
    }
    return BagelDatasetConfig(**{**small, **settings})


def picture(number: int, ext: str = "png", size: tuple[int, int] = (40, 24)) -> bytes:
    """An encoded image whose colour tells its number."""
    out = io.BytesIO()
    colour = (number % 256, number // 256 % 256, 77)
    Image.new("RGB", size, colour).save(out, {"jpg": "JPEG", "png": "PNG"}[ext], quality=95)
    return out.getvalue()


def t2i_sample(number: int) -> dict[str, Any]:
    """A text-to-image sample."""
    return {
        "__key__": f"t2i-{number}",
        "json": {"captions": {"short": f"picture {number}", "long": f"this is the picture number {number}"}},
        "png": picture(number),
    }


def edit_sample(number: int) -> dict[str, Any]:
    """An edit sample with three images."""
    return {
        "__key__": f"edit-{number}",
        "json": {"instruction_list": [["make it red", "redden it"], ["make it blue"]]},
        **{f"{i}.jpg": picture(3 * number + i, "jpg") for i in range(3)},
    }


def vlm_sample(number: int) -> dict[str, Any]:
    """A conversation: every third about no image, the others about one or two."""
    images = number % 3
    tags = "<image>" * images
    turns = [
        {"from": "human", "value": f"{tags}what is {number}?"},
        {"from": "gpt", "value": f"it is {number}"},
    ]
    return {
        "__key__": f"vlm-{number}",
        "json": {"id": number, "conversations": turns},
        **{f"{i}.png": picture(number + i) for i in range(images)},
    }


SAMPLES = {"t2i_pretrain": t2i_sample, "unified_edit": edit_sample, "vlm_sft": vlm_sample}


def write_tar(path: Path, samples: Iterable[dict[str, Any]]) -> str:
    """Write samples with webdataset's own writer."""
    with wds.TarWriter(str(path)) as tar:
        for sample in samples:
            tar.write(sample)
    return str(path)


def foreign_shards(folder: Path, group: str, sizes: Iterable[int]) -> list[str]:
    """Shards of a group with so many samples each, numbered on."""
    paths, start = [], 0
    for shard, size in enumerate(sizes):
        samples = [SAMPLES[group](number) for number in range(start, start + size)]
        paths.append(write_tar(folder / f"{group}-{shard}.tar", samples))
        start += size
    return paths


def foreign_info(folder: Path, sizes: Iterable[int] = (5, 7, 4)) -> dict[str, Any]:
    """Shards of all three groups, and the dataset info that names them."""
    sizes = list(sizes)
    return {
        group: {settings["dataset_names"][0]: {"shards": foreign_shards(folder, group, sizes)}}
        for group, settings in MIXTURE.items()
    }
