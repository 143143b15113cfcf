"""Upstream's samples and batches, bit for bit, from rows that lie in raw parquet and JSONL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import test_golden_pipeline
import webdataset as wds
from golden_data import GOLDEN, LoggedDraws, draws_made, load_json
from shard_factory import MIXTURE, small_config
from source_factory import BINARY_LIST, PHRASINGS, write_parquet
from test_golden_samples import FAMILIES, TOOLS, as_upstream, expected

from bagel_wds import stages
from bagel_wds.decode import decode_sample
from bagel_wds.errors import BadSample
from bagel_wds.groups import find_shards
from bagel_wds.planners import PLANNERS

if TYPE_CHECKING:
    from pathlib import Path

    from bagel_wds.records import SamplePlan

GROUPS = {"t2i": "t2i_pretrain", "edit": "unified_edit", "vlm": "vlm_sft"}


def write_rows(family: str, folder: Path) -> dict[str, Any]:
    """The rows of a family as a raw file, and what an info says of it."""
    files = GOLDEN / "samples" / family / "files"
    rows = load_json(f"samples/{family}/cases.json")["rows"]
    if family == "vlm":
        (folder / "train.jsonl").write_text("".join(f"{row['line']}\n" for row in rows), encoding="utf-8")
        return {"jsonl_path": str(folder / "train.jsonl"), "data_dir": str(files)}
    if family == "t2i":
        columns = {
            "image": pa.array([(files / row["image"]).read_bytes() for row in rows], pa.binary()),
            "captions": pa.array([row["captions"] for row in rows], pa.string()),
        }
    else:
        images = [[(files / name).read_bytes() for name in row["image_list"]] for row in rows]
        columns = {
            "image_list": pa.array(images, BINARY_LIST),
            "instruction_list": pa.array([row["instruction_list"] for row in rows], PHRASINGS),
        }
    write_parquet(folder / "rows.parquet", pa.table(columns), 1000)
    return {"data_dir": str(folder)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The samples of each family as a run with upstream's fidelity reads them, by the number of their row."""
    read: dict[str, list[dict[str, Any]]] = {}
    for family, group in GROUPS.items():
        entry = write_rows(family, tmp_path_factory.mktemp(family))
        mixture = {group: {**MIXTURE[group], "dataset_names": ["rows"]}}
        config = small_config(
            grouped_datasets=mixture, dataset_info={group: {"rows": entry}}, fidelity="upstream"
        )
        source = stages.shards(find_shards(config)[group], epochs=1)
        read[family] = list(wds.DataPipeline(source, stages.read(config)))
    return read


def plan_row(sample: dict[str, Any], family: str, draws: LoggedDraws) -> SamplePlan:
    return PLANNERS[family](decode_sample(sample, upright=False), TOOLS[family], draws)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_rows_on_their_own(rows: dict[str, list[dict[str, Any]]], family: str) -> None:
    kept = 0
    for run in FAMILIES[family]["runs"]:
        sample, draws = rows[family][run["row"]], LoggedDraws(run["seed"])
        if run["result"] != "sample":
            with pytest.raises(BadSample):
                plan_row(sample, family, draws)
            continue
        plan = plan_row(sample, family, draws)
        kept += 1

        assert as_upstream(family, plan) == expected(run["sample"]), run["row"]
        assert draws.log == draws_made(run["draws"]), run["row"]
    assert kept > 10


@pytest.mark.parametrize("family", list(FAMILIES))
def test_streams_of_rows(rows: dict[str, list[dict[str, Any]]], family: str) -> None:
    for stream in FAMILIES[family]["streams"]:
        draws = LoggedDraws(stream["seed"])
        order, place = stream["row_order"], 0
        for sample in stream["samples"]:
            plan = None
            while plan is None:
                row = order[place % len(order)]
                place += 1
                try:
                    plan = plan_row(rows[family][row], family, draws)
                except BadSample:
                    continue
            assert row == sample["row"]
            assert draws.take_log() == draws_made(sample["draws"])
            assert as_upstream(family, plan) == expected(sample["sample"])
        assert draws.peek().items() <= stream["rng_after"].items()


@pytest.mark.parametrize("case", ["train_like", "flex_tight"])
def test_batches(rows: dict[str, list[dict[str, Any]]], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def rows_of(family: str) -> list[dict[str, Any]]:
        asked.add(family)
        return rows[family]

    monkeypatch.setattr(test_golden_pipeline, "rows_of", rows_of)

    test_golden_pipeline.test_batches(case)
    assert asked == set(GROUPS)
