"""Raw sources of the three groups, and of a user's own, as upstream reads them: bad rows, cut images and a clip among them."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from source_factory import encode_image, talk, write_jsonl, write_parquet
from upstream_subclass import GROUP

if TYPE_CHECKING:
    from pathlib import Path

THREE = ("t2i_pretrain", "unified_edit", "vlm_sft")
VAE = {"max_image_size": 96, "min_image_size": 32, "image_stride": 16}
VIT = {"max_image_size": 98, "min_image_size": 28, "image_stride": 14, "max_pixels": 7840}
BUDGETS: dict[str, Any] = {
    "expected_num_tokens": 420,
    "max_num_tokens": 520,
    "max_num_tokens_per_sample": 360,
    "prefer_buffer_before": 200,
    "max_buffer_size": 4,
}


def image(number: int) -> bytes:
    """One of a few kinds: PNG, JPEG, with alpha, cut short."""
    size = (24 + 11 * (number % 7), 40 + 13 * (number % 5))
    if number % 9 == 8:
        return encode_image(size, number, "JPEG")[:-40]
    return encode_image(size, number, *(("PNG",) if number % 3 else ("JPEG",)))


def write_corpus(root: Path) -> dict[str, Any]:
    """Enough files for two ranks of two workers, and one left over; gives the dataset info."""
    for file in range(5):
        rows = [10 * file + row for row in range(7)]
        captions = [
            json.dumps({"a": f"one {n}", "b": f"another picture, {n}"}) if n % 10 != 3 else "{broken"
            for n in rows
        ]
        table = {
            "image": pa.array([image(n) if n % 10 != 5 else b"no image" for n in rows], pa.binary()),
            "captions": pa.array(captions, pa.string()),
        }
        write_parquet(root / "t2i" / f"part-{file}.parquet", pa.table(table), group_rows=3)
    listed = {}
    for file in range(3):
        rows = [100 + 10 * file + row for row in range(6)]
        counts = [2 + n % 3 if n % 10 != 4 else 1 for n in rows]
        table = {
            "image_list": pa.array(
                [[image(10 * n + i) for i in range(c)] for n, c in zip(rows, counts, strict=True)],
                pa.list_(pa.binary()),
            ),
            "instruction_list": pa.array(
                [
                    [[f"edit {n} {i}", f"change {n} {i}"] for i in range(c - (n % 10 == 2))]
                    for n, c in zip(rows, counts, strict=True)
                ],
                pa.list_(pa.list_(pa.string())),
            ),
            "number": pa.array(rows),
        }
        path = root / "edit" / f"part-{file}.parquet"
        write_parquet(path, pa.table(table), group_rows=2)
        listed[str(path)] = {"num_row_groups": 3}
    (root / "edit.json").write_text(json.dumps(listed))
    frames = root / "media" / "clip"
    frames.mkdir(parents=True)
    for number in range(12):
        (frames / f"frame_{number}.jpg").write_bytes(encode_image((30, 40), number, "JPEG"))
    for number in range(6):
        (root / "media" / f"{number}.png").write_bytes(image(number))
    write_jsonl(root / "vlm.jsonl", [conversation(number) for number in range(31)])
    return {
        "t2i_pretrain": {"t2i": {"data_dir": str(root / "t2i"), "num_files": 5, "num_total_samples": 35}},
        "unified_edit": {
            "edit": {"data_dir": str(root / "edit"), "parquet_info_path": str(root / "edit.json")}
        },
        "vlm_sft": {"vlm": {"data_dir": str(root / "media"), "jsonl_path": str(root / "vlm.jsonl")}},
        GROUP: {"edit": {"data_dir": str(root / "edit"), "parquet_info_path": str(root / "edit.json")}},
    }


def conversation(number: int) -> dict[str, Any] | str:
    """A line of each kind in turn."""
    match number % 6:
        case 0:
            return {"conversations": talk(f"say {number}", f"said {number}", "and?", "that is all")}
        case 1:
            return {
                "image": f"{number % 5}.png",
                "conversations": talk(f"<image>\nwhat is {number}?", f"a picture, {number}"),
            }
        case 2:
            images = [f"{number % 3}.png", "3.png"]
            return {
                "image": images,
                "conversations": talk(f"first <image> then <image> {number}", "two of them"),
            }
        case 3:
            return {
                "video": "clip/",
                "conversations": talk(f"<video>\nwhat happens in {number}?", "nothing at all"),
            }
        case 4:
            return {"image": "nowhere.png", "conversations": talk("<image>", f"lost {number}")}
        case _:
            return f"{{broken {number}"


def mixture(*groups: str) -> dict[str, Any]:
    """Settings of some of the groups, made anew: upstream empties what it is given."""
    everything = {
        "t2i_pretrain": {
            "dataset_names": ["t2i"],
            "image_transform_args": VAE,
            "is_mandatory": True,
            "num_used_data": [5],
            "weight": 1.0,
        },
        "unified_edit": {
            "dataset_names": ["edit"],
            "image_transform_args": VAE,
            "vit_image_transform_args": VIT,
            "is_mandatory": False,
            "num_used_data": [5],
            "weight": 2.0,
        },
        "vlm_sft": {
            "dataset_names": ["vlm"],
            "image_transform_args": VIT,
            "frame_sampler_args": {"max_num_frames": 6, "min_num_frames": 3},
            "is_mandatory": True,
            "num_used_data": [29],
            "shuffle_lines": True,
            "shuffle_seed": 3,
            "weight": 1.0,
        },
        GROUP: {
            "dataset_names": ["edit"],
            "image_transform_args": VAE,
            "vit_image_transform_args": VIT,
            "num_used_data": [3],
            "weight": 2.0,
        },
    }
    return copy.deepcopy({name: everything[name] for name in groups})
