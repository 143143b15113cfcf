"""The rows of `tests/golden/samples` as the raw files that upstream's classes read, and the classes over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from golden_data import GOLDEN, load_json, tokenizer
from source_factory import write_jsonl, write_parquet

from bagel_wds import (
    FrameSampler,
    ImageTransform,
    SftJSONLIterableDataset,
    T2IIterableDataset,
    UnifiedEditIterableDataset,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMES = {"t2i": "t2i_pretrain", "edit": "unified_edit", "vlm": "vlm_sft"}


def golden_files(family: str) -> Path:
    """The folder of the files that the rows of a family name."""
    return GOLDEN / "samples" / family / "files"


def write_rows(family: str, numbers: Sequence[int], folder: Path) -> Path:
    """Some rows as one file with one row group, or as lines; gives the folder, or the file of lines."""
    rows = [load_json(f"samples/{family}/cases.json")["rows"][number] for number in numbers]
    files = golden_files(family)
    if family == "vlm":
        write_jsonl(folder / "rows.jsonl", [row["line"] for row in rows])
        return folder / "rows.jsonl"
    if family == "t2i":
        columns = {
            "image": pa.array([(files / row["image"]).read_bytes() for row in rows], pa.binary()),
            "captions": pa.array([row["captions"] for row in rows], pa.string()),
        }
    else:
        images = [[(files / path).read_bytes() for path in row["image_list"]] for row in rows]
        columns = {
            "image_list": pa.array(images, pa.list_(pa.binary())),
            "instruction_list": pa.array(
                [row["instruction_list"] for row in rows], pa.list_(pa.list_(pa.string()))
            ),
        }
    write_parquet(folder / "rows.parquet", pa.table(columns), group_rows=len(rows))
    return folder


def golden_dataset(family: str, numbers: Sequence[int], folder: Path) -> Any:
    """Some rows as upstream's class reads them, in their order."""
    cases = load_json(f"samples/{family}/cases.json")
    place = write_rows(family, numbers, folder)
    transform = ImageTransform(**cases["transform"])
    if family == "t2i":
        return T2IIterableDataset("t2i_pretrain", transform, tokenizer(), [str(place)], [1])
    if family == "edit":
        info = {str(place / "rows.parquet"): {"num_row_groups": 1}}
        vit = ImageTransform(**cases["vit_transform"])
        return UnifiedEditIterableDataset(
            "unified_edit", transform, tokenizer(), vit, [str(place)], [1], info
        )
    sampler = FrameSampler(**cases["frame_sampler"])
    files = f"{golden_files('vlm')}/"
    dataset = SftJSONLIterableDataset(
        "vlm_sft", transform, tokenizer(), sampler, [str(place)], [files], [len(numbers)]
    )
    keep_order(dataset, place, files)
    return dataset


def keep_order(dataset: Any, lines: Path, folder: str) -> None:
    """Undo the shuffle of lines."""
    dataset.data_paths_per_rank = [(line, folder) for line in lines.read_text().splitlines(keepends=True)]
