"""Paths, row groups and rows that upstream's classes read, or leave out and say so."""

from __future__ import annotations

import json
import logging
import pickle
from itertools import islice
from multiprocessing.context import set_spawning_popen
from typing import TYPE_CHECKING, Any

import pytest
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS
from source_factory import encode_image, talk, write_edit, write_jsonl

from bagel_wds import (
    BagelDatasetConfig,
    ConfigError,
    ImageTransform,
    PackedDataset,
    ParquetStandardIterableDataset,
    SftJSONLIterableDataset,
    UnifiedEditIterableDataset,
)
from bagel_wds.parquet_info import match_files
from bagel_wds.upstream.interleave import ParquetRow, parquet_rows, read_row_group
from bagel_wds.upstream.lines import place_lines
from bagel_wds.upstream.registry import class_arguments, row_groups_of

if TYPE_CHECKING:
    from pathlib import Path

VAE, VIT = ImageTransform(64, 32, 16), ImageTransform(56, 28, 14)


class Numbers(ParquetStandardIterableDataset):
    """Gives the instruction of a row."""

    def parse_row(self, row: Any) -> dict[str, Any]:
        return {"said": row["instruction_list"][0][0]}


def write_files(folder: Path, files: int = 2) -> list[str]:
    """Edit files with two row groups of two rows; row n says n."""
    for file in range(files):
        rows: list[Any] = [
            ([encode_image((8, 8), i) for i in range(2)], [[str(4 * file + row)]]) for row in range(4)
        ]
        write_edit(folder / f"{file}.parquet", rows)
    return [str(folder / f"{file}.parquet") for file in range(files)]


def numbers(folder: Path, info: dict[str, Any] | None, **more: Any) -> Numbers:
    return Numbers("d", VAE, tokenizer(), VIT, [str(folder)], [None], info, **more)


def test_files_that_parquet_info_does_not_name_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = write_files(tmp_path)

    dataset = numbers(tmp_path, {first: {"num_row_groups": 1}})

    assert dataset.data_paths == [(first, 0)]
    assert f"1 files are left out, since parquet_info does not name them, such as {second}" in caplog.text
    with pytest.raises(ConfigError, match="parquet_info names none of the 2 files"):
        numbers(tmp_path, {"elsewhere.parquet": {"num_row_groups": 1}})


def test_row_groups_are_counted_where_there_is_no_parquet_info(tmp_path: Path) -> None:
    first, second = write_files(tmp_path)

    dataset = numbers(tmp_path, None)

    assert sorted(dataset.data_paths or ()) == [(first, 0), (first, 1), (second, 0), (second, 1)]
    said = [sample["said"] for sample in islice(iter(dataset), 8)]
    assert sorted(said, key=int) == [str(number) for number in range(8)]


def test_row_group_that_cannot_be_read_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [first] = write_files(tmp_path, 1)
    # The list promises a third row group; where it is met, the next one begins at its start.
    dataset = numbers(tmp_path, {first: {"num_row_groups": 3}}, data_status=None)
    dataset.data_paths_per_rank = [(first, 2), (first, 0), (first, 1)]
    dataset.set_data_status([[0, 0]])

    with caplog.at_level(logging.WARNING):
        said = [sample["said"] for sample in islice(iter(dataset), 8)]

    assert said == ["0", "1", "2", "3"] * 2
    assert "there is no row group 2, it has 2" in caplog.text
    assert dataset.dropped_by_reason == {"parquet_row_group_parse": 2}


def test_rows_are_those_of_pandas(tmp_path: Path) -> None:
    [first] = write_files(tmp_path, 1)
    table = read_row_group(first, 1)

    [(number, row), (following, other)] = parquet_rows(table)

    assert (number, following) == (0, 1)
    assert row["instruction_list"].tolist()[0].tolist() == ["2"]
    assert row.image_list[0] == encode_image((8, 8), 0)
    assert other.to_dict().keys() == {"image_list", "instruction_list"}
    assert (other.name, len(other), "image_list" in other) == (1, 2, True)
    if isinstance(row, ParquetRow):
        with pytest.raises(AttributeError, match="no column 'colour'; it has image_list"):
            _ = row.colour


def test_subclass_of_ours_may_change_a_part(tmp_path: Path) -> None:
    class Polite(UnifiedEditIterableDataset):
        """Asks kindly."""

        def _add_text(
            self, data: dict[str, Any], text: str, need_loss: bool, enable_cfg: bool = True
        ) -> dict[str, Any]:
            return super()._add_text(data, f"please, {text}", need_loss, enable_cfg)

    write_files(tmp_path)
    dataset = Polite("d", VAE, tokenizer(), VIT, [str(tmp_path)], [None], None)

    sample = next(iter(dataset))

    assert str(tokenizer().decode(sample["text_ids_list"][0])).startswith("please, ")
    assert sample["data_indexes"]["data_indexes"] == [0, 0]


def test_paths_of_an_info_file_are_looked_for_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "data" / "seed", 1)
    (tmp_path / "list.json").write_text(json.dumps({"seed/0.parquet": {"num_row_groups": 2}}))
    info = {"unified_edit": {"seed": {"data_dir": "data/seed", "parquet_info_path": "list.json"}}}
    entry = {
        "dataset_names": ["seed"],
        "image_transform_args": {"max_image_size": 64, "min_image_size": 32, "image_stride": 16},
        "weight": 1,
        "num_used_data": [1],
        "frame_sampler_args": {"max_num_frames": 4, "min_num_frames": 2},
    }
    monkeypatch.chdir(tmp_path.parent)

    arguments = class_arguments("unified_edit", entry, info, str(tmp_path))

    assert arguments["data_dir_list"] == [str(tmp_path / "data/seed")]
    assert arguments["parquet_info"][str(tmp_path / "data/seed/0.parquet")] == {"num_row_groups": 2}
    assert (arguments["transform"].stride, arguments["frame_sampler"].max_num_frames) == (16, 4)
    assert arguments["num_used_data"] == [1]
    assert {"weight", "dataset_names"}.isdisjoint(arguments)
    with pytest.raises(ConfigError, match=r"group 'unified_edit': image_transform_args: .*colour"):
        class_arguments("unified_edit", {**entry, "image_transform_args": {"colour": 1}}, info, str(tmp_path))


def test_list_of_row_groups_means_the_same_files_in_both_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the current folder, from that of the list, from that of the files, by its end, and whole."""
    first, _ = write_files(tmp_path / "data" / "seed")
    (tmp_path / "lists").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    for path in ("seed/0.parquet", "../data/seed/./0.parquet", "0.parquet", "data/seed/0.parquet", first):
        listed = tmp_path / "lists" / "list.json"
        listed.write_text(json.dumps({path: {"num_row_groups": 2}, "other/1.parquet": {"num_row_groups": 7}}))

        assert row_groups_of(str(listed), str(tmp_path / "data/seed")).get(first) == {"num_row_groups": 2}
        assert str(tmp_path / "data/seed/1.parquet") not in row_groups_of(str(listed), "seed")
        assert match_files([path], "seed", ["0.parquet", "1.parquet"], str(listed)) == {path: "0.parquet"}


def talks(folder: Path, count: int = 200) -> PackedDataset:
    """Rank 3 of 4 of a run over conversations, of which each says its number."""
    write_jsonl(
        folder / "a.jsonl",
        [{"conversations": talk(f"say {number}", f"line {number}")} for number in range(count)],
    )
    transform = {"max_image_size": 56, "min_image_size": 28, "image_stride": 14}
    config = BagelDatasetConfig(
        grouped_datasets={"vlm_sft": {"dataset_names": ["a"], "image_transform_args": transform}},
        dataset_info={"vlm_sft": {"a": {"data_dir": str(folder), "jsonl_path": str(folder / "a.jsonl")}}},
        fidelity="upstream",
        expected_num_tokens=100,
        max_num_tokens=150,
    )
    return config.build(tokenizer(), SPECIAL_TOKENS, 3, 4, 2, 1)


def as_a_worker_gets_it(dataset: PackedDataset) -> tuple[bytes, Any]:
    starting: Any = object()
    set_spawning_popen(starting)
    try:
        sent = pickle.dumps(dataset)
    finally:
        set_spawning_popen(None)
    return sent, pickle.loads(sent).class_datasets["vlm_sft"]


def test_worker_is_sent_no_lines_but_where_those_of_its_rank_lie(tmp_path: Path) -> None:
    dataset = talks(tmp_path)
    here = dataset.class_datasets["vlm_sft"]

    sent, there = as_a_worker_gets_it(dataset)

    assert (sent.count(b"line "), pickle.dumps(dataset).count(b"line ")) == (0, 200)
    assert len(there.data_paths_per_rank) == 50
    for worker, num_workers in ((0, 2), (1, 2), (0, 0)):
        lines, number = there.share_of(worker, num_workers)
        assert (list(lines), number) == here.share_of(worker, num_workers)
    assert [row.value for row in there.rows(there.share_of(1, 2)[0], 20)] == here.share_of(1, 2)[0][21:]
    with pytest.raises(ConfigError, match="'vlm_sft': a worker has the paths of its rank alone"):
        there.set_epoch(3)


def test_what_is_pickled_otherwise_can_be_ordered_anew(tmp_path: Path) -> None:
    dataset = talks(tmp_path)
    as_a_worker_gets_it(dataset)
    copied = pickle.loads(pickle.dumps(dataset))

    for one in (dataset, copied):
        one.set_epoch(3)
    here, there = (one.class_datasets["vlm_sft"] for one in (dataset, copied))

    assert there.share_of(0, 2) == here.share_of(0, 2)
    # The places that were sent before are not sent again.
    assert list(as_a_worker_gets_it(dataset)[1].share_of(0, 2)[0]) == here.share_of(0, 2)[0]


def test_lines_that_are_others_by_the_time_they_are_read_are_told_of(tmp_path: Path) -> None:
    _, there = as_a_worker_gets_it(talks(tmp_path))
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes().replace(b"line", b"LINE"))

    with pytest.raises(ConfigError, match=r"a\.jsonl: the line at byte \d+ is another than when the dataset"):
        list(there.share_of(0, 2)[0])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl: cannot be read any more: No such file"):
        list(there.share_of(0, 2)[0])
    # Lines that are in no file are sent as they are.
    dataset = talks(tmp_path)
    dataset.class_datasets["vlm_sft"].data_paths_per_rank = [("one\n", "f"), ("two\n", "f")]
    assert as_a_worker_gets_it(dataset)[1].data_paths_per_rank == [("one\n", "f"), ("two\n", "f")]


@pytest.mark.parametrize("end", ["", "\n"])
def test_places_of_lines_are_those_of_text(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"\ufeffone\r\ntwo ä\rthree\u2028\x0b\n\n\rfive\r\n\r\ntwo ä\nlast{end}".encode())
    with path.open(encoding="utf-8") as file:
        lines = [(line, f"folder {number % 2}") for number, line in enumerate(file)]
    assert len(lines) == 9

    placed = place_lines(lines[::-1], [str(path)])

    assert placed is not None
    assert list(pickle.loads(pickle.dumps(placed))[1:-1]) == lines[::-1][1:-1]
    assert list(placed[::-1]) == lines


def test_lines_are_chosen_by_their_own_seed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"id": number} for number in range(20)])

    def chosen(**more: Any) -> list[int]:
        dataset = SftJSONLIterableDataset(
            "d", VIT, tokenizer(), lambda _: [], [str(tmp_path / "a.jsonl")], [str(tmp_path)], [5], **more
        )
        return sorted(json.loads(line)["id"] for line, _ in dataset.data_paths or ())

    assert chosen() == [0, 1, 2, 3, 4]
    assert chosen(shuffle_lines=True, shuffle_seed=1) not in (
        [0, 1, 2, 3, 4],
        chosen(shuffle_lines=True, shuffle_seed=2),
    )
    with pytest.raises(ConfigError, match=r"gone\.jsonl: cannot be read"):
        SftJSONLIterableDataset(
            "d", VIT, tokenizer(), lambda _: [], [str(tmp_path / "gone.jsonl")], [""], [1]
        )


@pytest.mark.parametrize("more", [{}, {"columns": {"image_list": "image_list"}}])
def test_raw_group_that_upstream_could_not_read_is_read_in_our_order(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """Deeper folders, named columns: the default way, under the same fidelity."""
    write_files(tmp_path / "deep" / "er")
    group = {
        "dataset_names": ["seed"],
        "image_transform_args": {"max_image_size": 64, "min_image_size": 32, "image_stride": 16},
        "vit_image_transform_args": {"max_image_size": 56, "min_image_size": 28, "image_stride": 14},
    }
    info = {"unified_edit": {"seed": {"data_dir": str(tmp_path / "deep"), **more}}}
    config = BagelDatasetConfig(
        grouped_datasets={"unified_edit": group}, dataset_info=info, fidelity="upstream",
        expected_num_tokens=100, max_num_tokens=150,
    )  # fmt: skip

    dataset = config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, 1)

    assert dataset.class_datasets == {}
    assert next(iter(dataset))["batch_data_indexes"][0]["dataset_name"] == "unified_edit"
