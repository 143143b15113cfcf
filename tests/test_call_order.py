"""What a state of `fidelity="upstream"` says of samples that wait, and what becomes of it when the files have changed."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow.parquet as pq
import pytest
from test_upstream_resume import build
from upstream_corpus import write_corpus

from bagel_wds import ConfigError
from bagel_wds.call_order import plan_from_json, plan_to_json
from bagel_wds.errors import Tally
from bagel_wds.records import Kind, SamplePlan, SampleRef, Segment, View
from bagel_wds.rng import CallOrderDraws
from bagel_wds.upstream import interleave
from bagel_wds.upstream.sources import PlannedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FULL = Segment(
    kind=Kind.VAE_IMAGE,
    num_tokens=7,
    loss=True,
    enable_cfg=True,
    token_ids=(3, 5),
    view=2,
    special_token_loss=True,
    special_token_label=9,
    split_start=False,
    split_end=False,
    frame_delta=4,
    shares_dropout=True,
    dropped=True,
    timestep=0.25,
)


@pytest.mark.parametrize("dumps", [json.dumps, orjson.dumps])
def test_plan_comes_back_whole(dumps: Callable[[Any], str | bytes]) -> None:
    plan = SamplePlan(
        key="k",
        group="g",
        segments=(FULL, Segment(Kind.TEXT, 4, token_ids=(1, 2))),
        views=(View(1, 3, Kind.VIT_IMAGE, (28, 56)),),
        media=(),
        estimate=11,
        ref=SampleRef(1, 512, 1024, 3),
        indexes=(2, 0, 6),
        url="a.tar",
    )
    assert all(getattr(FULL, own.name) != own.default for own in fields(Segment))
    assert all(getattr(plan, own.name) != own.default for own in fields(SamplePlan))

    assert plan_from_json(json.loads(dumps(plan_to_json(plan)))) == plan


def state_with_waiting(info: dict[str, Any], group: str) -> dict[str, Any]:
    """A state in which a sample of a group with pictures waits."""
    dataset = build(info)
    for _ in zip(range(40), dataset, strict=False):
        state: dict[str, Any] = json.loads(json.dumps(dataset.state_dict()))
        waiting = state["streams"]["0"]["call_order"]["buffer"]
        if any(entry["group"] == group and entry["views"] for entry in waiting):
            return state
    raise AssertionError(f"no {group} ever waited")


def resume(info: dict[str, Any], state: dict[str, Any]) -> None:
    resumed = build(info)
    resumed.load_state_dict(state)
    next(iter(resumed))


@pytest.mark.parametrize("gone", ["picture", "rows"])
def test_files_that_changed_between_save_and_resume_are_named(tmp_path: Path, gone: str) -> None:
    info = write_corpus(tmp_path)
    group = "vlm_sft" if gone == "picture" else "unified_edit"
    state = state_with_waiting(info, group)
    if gone == "picture":
        for picture in (tmp_path / "media").rglob("*.*"):
            picture.unlink()
        match = r"group 'vlm_sft': the state speaks of row \d+ of worker 0, line \d+ .*cannot be used now: .*; have its files"
    else:
        for file in (tmp_path / "edit").iterdir():
            file.write_bytes(b"not parquet any more")
        match = r"group 'unified_edit': the state speaks of row \(\d+, \d\) of worker 0, which is not there; have its files"

    with pytest.raises(ConfigError, match=match):
        resume(info, state)


def test_picture_that_a_row_has_no_more_is_named(tmp_path: Path) -> None:
    info = write_corpus(tmp_path)
    state = state_with_waiting(info, "unified_edit")
    for entry in state["streams"]["0"]["call_order"]["buffer"]:
        if entry["group"] == "unified_edit":
            entry["views"][0][0] = 99

    with pytest.raises(
        ConfigError, match=r"state speaks of picture 0 of medium 99 of sample 'row .*have its files"
    ):
        resume(info, state)


@pytest.mark.parametrize("what", ["buffer", "generators"])
def test_broken_state_is_called_so(tmp_path: Path, what: str) -> None:
    info = write_corpus(tmp_path)
    state = state_with_waiting(info, "unified_edit")
    state["streams"]["0"]["call_order"][what] = [{"key": "k"}]

    with pytest.raises(ConfigError, match="the state of stream 0 is broken"):
        resume(info, state)


def test_row_groups_of_waiting_samples_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = build(write_corpus(tmp_path))
    rows = PlannedRows(
        dataset.class_datasets["unified_edit"],
        "unified_edit",
        dataset._run.config,
        dataset._run.encoder,
        CallOrderDraws(0),
        Tally(),
        worker=0,
        num_workers=0,
    )
    read = []
    plainly = interleave.read_row_group

    def told(path: str, group: int, columns: Any = None) -> Any:
        read.append((path, group, columns))
        return plainly(path, group, columns)

    monkeypatch.setattr(interleave, "read_row_group", told)

    found = rows.media([(1, 1), (4, 1), (1, 0), (1, 1)])

    paths = dataset.class_datasets["unified_edit"].data_paths_per_rank
    # Of what a file has beside, nothing is read.
    assert read == [(*paths[place], ("image_list", "instruction_list")) for place in (1, 4)]
    for (place, row), media in found.items():
        path, group = paths[place]
        images = pq.ParquetFile(path).read_row_group(group)["image_list"][row].as_py()
        assert [getattr(picture, "data", None) for [picture] in media] == images
    assert set(found) == {(1, 0), (1, 1), (4, 1)}


def test_what_waits_on_is_not_written_again(tmp_path: Path) -> None:
    batches: Iterator[Any] = islice(iter(build(write_corpus(tmp_path))), 12)
    buffers = [batch.state.call_order["buffer"] for batch in batches]

    stayed = 0
    for before, after in pairwise(buffers):
        for entry in after:
            same = [other for other in before if other == entry]
            assert all(other is entry for other in same)
            stayed += len(same)
    assert stayed > 3
