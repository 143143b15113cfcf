"""A run from raw files goes on exactly where it was, as one from shards does: after every batch, on any ranks."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_factory import captions, encode_image, talk, write_jsonl, write_t2i
from test_resume import load, on_ranks, take

from bagel_wds import ConfigError, pipeline
from bagel_wds.raw import RawUnit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Parquet in several files and row groups, and lines; some rows are dropped each time they are met."""
    folder = tmp_path_factory.mktemp("raw")
    for file in range(3):
        write_t2i(
            folder / "t2i" / f"{file}.parquet",
            [
                (encode_image((24, 40), seed=10 * file + i) if i != 2 else b"", captions(i))
                for i in range(5 + file)
            ],
            group_rows=3,
        )
    (folder / "media").mkdir()
    for number in range(3):
        (folder / "media" / f"{number}.png").write_bytes(encode_image((40, 24), seed=90 + number))
    lines: list[Any] = [
        {
            "image": [f"{number}.png" for number in range(i % 3)],
            "conversations": talk("<image>" * (i % 3) + f"what is {i}?", f"it is {i}"),
        }
        for i in range(9)
    ]
    lines[4:4] = ["", "{broken"]
    write_jsonl(folder / "train.jsonl", lines)
    return {
        "t2i_pretrain": {"t2i": {"data_dir": str(folder / "t2i")}},
        "vlm_sft": {"vlm": {"jsonl_path": str(folder / "train.jsonl"), "data_dir": str(folder / "media")}},
    }


@pytest.mark.parametrize("more", [{}, {"packing": "best_fit", "look_ahead": 7}], ids=["greedy", "best_fit"])
def test_cut_after_every_batch_goes_on_as_the_unbroken_run(
    info: dict[str, Any], more: dict[str, Any]
) -> None:
    unbroken = take(load(info, **more), 15)
    loader = load(info, **more)
    states = [loader.state_dict()]
    states += [loader.state_dict() for _ in islice(loader, 13)]

    assert len(set(unbroken)) == 15
    for cut, state in enumerate(states):
        assert take(load(info, state, **more), 2) == unbroken[cut : cut + 2], cut
    # The run was long enough to cross epochs' ends, and to meet what it drops.
    counts = loader.stats["groups"]
    assert counts["t2i_pretrain"]["epochs"] >= 1
    assert counts["t2i_pretrain"]["dropped"]["image_empty"] >= 2
    assert counts["vlm_sft"]["dropped"]["row_invalid"] >= 1


def test_a_state_does_not_go_on_over_files_of_other_content(tmp_path: Path) -> None:
    rows = [(encode_image((24, 40), seed=i), captions(i)) for i in range(6)]
    lines = [{"conversations": talk(f"what is {i}?", str(i))} for i in range(9)]
    write_t2i(tmp_path / "t2i" / "a.parquet", rows, group_rows=3)
    write_jsonl(tmp_path / "a.jsonl", lines)
    info = {
        "t2i_pretrain": {"t2i": {"data_dir": str(tmp_path / "t2i")}},
        "vlm_sft": {"vlm": {"jsonl_path": str(tmp_path / "a.jsonl")}},
    }
    loader = load(info)
    take(loader, 3)
    state = json.loads(json.dumps(loader.state_dict()))

    for group, path in [("vlm_sft", tmp_path / "a.jsonl"), ("t2i_pretrain", tmp_path / "t2i" / "a.parquet")]:
        content = path.read_bytes()
        if group == "vlm_sft":
            write_jsonl(path, lines[::-1])
        else:
            write_t2i(path, rows[::-1], group_rows=3)
        with pytest.raises(ConfigError, match=group):
            load(info, state)
        # The same content at another time is the same file.
        path.write_bytes(content)
        assert len(take(load(info, state), 2)) == 2


def test_chain_of_resumes_on_changing_ranks_is_the_unbroken_run(info: dict[str, Any]) -> None:
    got: list[str] = []
    state: dict[str, Any] | None = None
    for ranks, steps in [(1, 2), (2, 3), (4, 1), (1, 1), (2, 2)]:
        batches, state = on_ranks(info, state, ranks, steps)
        got += batches

    assert got == take(load(info), len(got))


def test_state_is_right_whatever_workers_had_prefetched(info: dict[str, Any]) -> None:
    unbroken = take(load(info), 12)
    first = load(info, workers=2)
    got = take(first, 5)
    resumed = load(info, first.state_dict())

    assert got + take(resumed, 7) == unbroken


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_run_can_be_cut_anywhere(info: dict[str, Any], data: st.DataObject) -> None:
    more: dict[str, Any] = {
        "num_streams": data.draw(st.sampled_from([1, 2, 4]), "streams"),
        "shuffle_samples": data.draw(st.integers(1, 15), "shuffle"),
        "shuffle_bytes": data.draw(st.sampled_from([2000, 20_000, 1 << 20]), "bytes"),
        "packing": data.draw(st.sampled_from(["greedy", "best_fit"]), "packing"),
    }
    got: list[str] = []
    state = None
    for _ in range(data.draw(st.integers(1, 3), "cuts")):
        memory = data.draw(st.sampled_from([0, 8000, 1 << 30]), "memory")
        batches, state = on_ranks(
            info, state, 1, data.draw(st.integers(1, 5), "steps"), memory_bytes=memory, **more
        )
        got += batches

    assert got == take(load(info, **more), len(got))


def test_what_buffers_hold_is_fetched_in_one_pass_a_unit(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = load(info, num_streams=1, shuffle_samples=14)
    take(loader, 6)
    state = json.loads(json.dumps(loader.state_dict()))
    held = state["streams"]["0"]["groups"]
    units = {(name, unit) for name, group in held.items() for unit in group["shuffled"][0]}
    passes: list[str] = []
    real = RawUnit.fetch

    def counted(unit: RawUnit, rows: Sequence[int]) -> list[dict[str, Any]]:
        passes.append(unit.url)
        return real(unit, rows)

    monkeypatch.setattr(RawUnit, "fetch", counted)
    resumed = load(info, state, num_streams=1, shuffle_samples=14)
    waiting = sum(len(state["streams"]["0"][name]["groups"]) for name in ("held", "buffer"))
    take(resumed, 3)

    assert sum(len(group["shuffled"][0]) for group in held.values()) > len(units) > 3
    assert 0 < len(passes) <= len(units) + waiting
    assert pipeline.fetch_samples([], []) == []
