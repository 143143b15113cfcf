"""Entries of a dataset info that lead to raw files: what they may say, and what is said of those that will not do."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from shard_factory import MIXTURE, VAE, VIT, small_config
from source_factory import captions, encode_image, talk, write_edit, write_jsonl, write_t2i

from bagel_wds import ConfigError, storage
from bagel_wds.config import parse_groups
from bagel_wds.converters.mixture import RowRules, find_sources
from bagel_wds.groups import find_shards
from bagel_wds.schema import REJECTED
from bagel_wds.sources import Source, Verify
from examples.corpus import draw_corpus

if TYPE_CHECKING:
    from s3_store import S3Store

    from bagel_wds.shards import Shard

IMAGE = encode_image()
EDIT = {"unified_edit": MIXTURE["unified_edit"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two parquet files of edits, of 2 row groups and 1, three folders down, and conversations."""
    for name, rows in [("a", 3), ("b", 2)]:
        write_edit(tmp_path / "data/editing/seed" / f"{name}.parquet", [([IMAGE, IMAGE], [["x"]])] * rows)
    write_jsonl(tmp_path / "data/train.jsonl", [{"conversations": talk()}])
    return tmp_path / "data"


def units(entry: object, mixture: dict[str, Any] = EDIT, **more: Any) -> tuple[Shard, ...]:
    [(group, settings)] = mixture.items()
    info = {group: {settings["dataset_names"][0]: entry}}
    return find_shards(small_config(grouped_datasets=mixture, **{"dataset_info": info, **more}))[group]


def edits(data: Path, listed: object = None, **more: Any) -> tuple[Shard, ...]:
    """The units of the edits, with this list of row groups beside their folder."""
    entry: dict[str, Any] = {"data_dir": str(data / "editing/seed"), **more}
    if listed is not None:
        (data / "editing/info.json").write_text(json.dumps(listed))
        entry.setdefault("parquet_info_path", str(data / "editing/info.json"))
    return units(entry)


def test_each_row_group_is_a_unit_and_a_list_of_them_is_optional(data: Path) -> None:
    found = edits(data)

    folder = data / "editing/seed"
    assert [shard.url for shard in found] == [
        f"{folder}/a.parquet#row_group=0",
        f"{folder}/a.parquet#row_group=1",
        f"{folder}/b.parquet#row_group=0",
    ]
    assert [shard.samples for shard in found] == [2, 1, 2]


@pytest.mark.parametrize(
    "base",
    ["", "seed/", "editing/seed/", "data/editing/seed/", "./editing//seed/", "../editing/seed/", "ABSOLUTE"],
)
def test_paths_in_a_list_of_row_groups_are_resolved(data: Path, base: str) -> None:
    front = f"{data}/editing/seed/" if base == "ABSOLUTE" else base
    listed = {f"{front}a.parquet": {"num_row_groups": 2}, f"{front}b.parquet": {"num_row_groups": 1}}

    assert len(edits(data, listed)) == 3
    assert len(edits(data, {path: {} for path in listed})) == 3


def test_paths_are_looked_for_from_the_current_folder_and_that_of_the_info(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "editing/info.json").write_text(
        '{"data/editing/seed/a.parquet": {}, "data/editing/seed/b.parquet": {}}'
    )
    entry = {"data_dir": "editing/seed", "parquet_info_path": "editing/info.json"}
    (data / "info.yaml").write_text(yaml.safe_dump({"unified_edit": {"seed": entry}}))

    assert len(units(None, dataset_info=None, dataset_info_path=str(data / "info.yaml"))) == 3
    monkeypatch.chdir(data)
    assert len(units(entry)) == 3
    monkeypatch.chdir(data.parent)
    with pytest.raises(
        ConfigError, match=r"\['unified_edit'\]\['seed'\]: data_dir: there is no editing/seed"
    ):
        units(entry)


BOTH = {"seed/a.parquet": {"num_row_groups": 2}, "seed/b.parquet": {"num_row_groups": 1}}


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        (
            {**BOTH, "seed/c.parquet": {}},
            "do not agree: 1 of 3 entries (such as seed/c.parquet) match no file, and 0 of 2 files are in no entry",
        ),
        (
            {"seed/a.parquet": {}},
            "do not agree: 0 of 1 entries match no file, and 1 of 2 files (such as b.parquet) are in no entry",
        ),
        (
            {"/elsewhere/seed/a.parquet": {}, "x/b.parquet": {}},
            "2 of 2 entries (such as /elsewhere/seed/a.parquet) match no file, and 2 of 2 files (such as a.parquet)",
        ),
        ({}, "0 of 0 entries match no file, and 2 of 2 files (such as a.parquet) are in no entry"),
        (
            {**BOTH, "seed/a.parquet": {"num_row_groups": 3}},
            "gives seed/a.parquet 3 row groups, and DATA/editing/seed/a.parquet has 2; write it anew, or leave it out",
        ),
        (["seed/a.parquet"], "info.json: a list of row groups is a JSON object such as"),
        ({"seed/a.parquet": 3}, "is a JSON object such as"),
        ({"seed/a.parquet": {"num_row_groups": "3"}}, "is a JSON object such as"),
    ],
)
def test_a_list_of_row_groups_that_does_not_agree_with_the_files_is_refused(
    data: Path, listed: object, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        edits(data, listed)

    assert says.replace("DATA", str(data)) in str(refused.value)
    assert str(refused.value).startswith("dataset_info['unified_edit']['seed']: ")
    assert f"{data}/editing/info.json" in str(refused.value)


def test_paths_in_a_list_of_a_bucket_are_resolved_as_on_the_disk(s3_store: S3Store, s3_folder: str) -> None:
    def put(name: str, data: bytes) -> None:
        storage.write_bytes(f"{s3_folder}/editing/{name}", data, s3_store.options)

    with io.BytesIO() as file:
        pq.write_table(pa.table({"image_list": [[IMAGE, IMAGE]], "instruction_list": [[["x"]]]}), file)
        put("seed/a.parquet", file.getvalue())
    entry = {"data_dir": f"{s3_folder}/editing/seed", "parquet_info_path": f"{s3_folder}/editing/info.json"}

    for path in [
        "a.parquet",
        "seed/a.parquet",
        "../editing/seed/a.parquet",
        f"{s3_folder}/editing/seed/a.parquet",
    ]:
        put("info.json", json.dumps({path: {"num_row_groups": 1}}).encode())
        assert len(units(entry, storage=s3_store.options)) == 1
    for path in ["/seed/a.parquet", "hdfs://x/seed/a.parquet", "../../../../../a.parquet"]:
        put("info.json", json.dumps({path: {}}).encode())
        with pytest.raises(
            ConfigError, match=f"1 of 1 entries \\(such as {re.escape(path)}\\) match no file"
        ):
            units(entry, storage=s3_store.options)


def test_a_path_that_may_mean_two_files_means_none(data: Path) -> None:
    for folder in ("x", "y"):
        write_edit(data / "editing/seed" / folder / "c.parquet", [([IMAGE, IMAGE], [["x"]])])
    rest: dict[str, dict[str, int]] = {f"seed/{folder}/c.parquet": {} for folder in "xy"}

    assert len(edits(data, {**BOTH, **rest})) == 5
    with pytest.raises(
        ConfigError, match=r"1 of 3 entries \(such as c.parquet\) match no file, and 2 of 4 files"
    ):
        edits(data, {**BOTH, "c.parquet": {}})


T2I = {"t2i_pretrain": MIXTURE["t2i_pretrain"]}
VLM = {"vlm_sft": MIXTURE["vlm_sft"]}


@pytest.mark.parametrize(
    ("mixture", "entry", "says"),
    [
        (EDIT, {"data_dir": "DATA/gone"}, "data_dir: there is no DATA/gone"),
        (EDIT, {"data_dir": "DATA/empty"}, "DATA/empty: no .parquet file in this folder"),
        (EDIT, {"data_dir": "DATA/broken"}, "broken/x.parquet: cannot be read as parquet"),
        (
            EDIT,
            {"data_dir": "DATA/pictures"},
            "did you mean 'image'? (if it is called otherwise, give --image-column, or `columns: {image_list: ...}` in",
        ),
        (EDIT, {"data_dir": "DATA/none"}, "there is no row in the files of DATA/none"),
        (EDIT, {"jsonl_path": "DATA/train.jsonl"}, "data_dir is missing; edit rows are found by it"),
        (VLM, {"data_dir": "DATA"}, "jsonl_path is missing; vlm rows are found by it"),
        (VLM, {"jsonl_path": "DATA/empty.jsonl"}, "there is no row in the files of DATA/empty.jsonl"),
        (VLM, {"jsonl_path": "DATA/train.jsonl", "data_dir": "DATA/gone"}, "data_dir: there is no DATA/gone"),
        (
            VLM,
            {"jsonl_path": "DATA/train.jsonl", "parquet_info_path": "DATA/info.json"},
            "parquet_info_path speaks of parquet, and its rows are JSON; leave it out",
        ),
        (
            EDIT,
            {"data_dir": "DATA/editing/seed", "parquet_info_path": "DATA/gone.json"},
            "there is no DATA/gone.json",
        ),
        (
            EDIT,
            {"data_dir": "DATA/editing/seed", "parquet_info_path": "DATA/train.jsonl"},
            "list of row groups",
        ),
        (
            EDIT,
            {"data_dirs": "DATA"},
            "names no shards, but data_dirs; name its `shards:`, or its raw files by",
        ),
        (EDIT, {"data_dir": "DATA", "colums": {}}, "unknown key 'colums'; did you mean 'columns'?"),
        (EDIT, {"data_dir": 3}, "data_dir: Input should be a valid string"),
        (
            EDIT,
            {"data_dir": "DATA/editing/seed", "columns": {"images": "x"}},
            "a column is given for 'images'",
        ),
        (
            T2I,
            {"data_dir": "DATA/pictures", "columns": {"image": "jpg"}},
            "no column 'jpg', which was given for 'image'",
        ),
    ],
)
def test_an_entry_that_will_not_do_is_refused_by_its_name(
    data: Path, mixture: dict[str, Any], entry: dict[str, Any], says: str
) -> None:
    for folder in ("empty", "broken"):
        (data / folder).mkdir()
    (data / "broken/x.parquet").write_bytes(b"no parquet at all")
    (data / "info.json").write_text("{}")
    (data / "empty.jsonl").write_text("\n\n")
    write_t2i(data / "pictures/a.parquet", [(IMAGE, captions(0))])
    write_edit(data / "none/a.parquet", [])

    with pytest.raises(ConfigError) as refused:
        units(
            {
                key: value.replace("DATA", str(data)) if isinstance(value, str) else value
                for key, value in entry.items()
            },
            mixture,
        )

    [(group, settings)] = mixture.items()
    assert says.replace("DATA", str(data)) in str(refused.value)
    assert str(refused.value).startswith(f"dataset_info[{group!r}][{settings['dataset_names'][0]!r}]")


def test_a_dataset_that_is_named_twice_is_refused_where_upstreams_way_is_not_asked_for(data: Path) -> None:
    entry = {"data_dir": str(data / "editing/seed")}
    twice = {"unified_edit": {**MIXTURE["unified_edit"], "dataset_names": ["seed", "seed"]}}

    with pytest.raises(ConfigError, match=r"'unified_edit': dataset_names has 'seed' 2 times.*name it once"):
        units(entry, twice)
    assert len(units(entry, twice, fidelity="upstream")) == 6


def test_media_outside_of_their_folder_are_taken_where_the_entry_says_so(data: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(IMAGE)
    (data / "media").mkdir()
    write_jsonl(
        data / "train.jsonl",
        [
            {"image": path, "conversations": talk("<image>q", "a")}
            for path in (str(tmp_path / "a.png"), "../../a.png")
        ],
    )
    entry = {"jsonl_path": str(data / "train.jsonl"), "data_dir": str(data / "media")}

    def reasons(**more: Any) -> list[str]:
        [shard] = units(entry | more.pop("entry", {}), VLM, **more)
        assert shard.raw is not None
        return [str(row[REJECTED].reason) if REJECTED in row else "" for row in shard.raw.walk(0, None, 1)]

    assert reasons() == ["path_outside"] * 2
    assert reasons(entry={"allow_outside": True}) == reasons(fidelity="upstream") == [""] * 2
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(VLM))
    for allowed in (False, True):
        info = {"vlm_sft": {"vlm": {**entry, "allow_outside": allowed}}}
        (tmp_path / "info.yaml").write_text(yaml.safe_dump(info))
        [(_, _, source)] = find_sources(
            parse_groups(VLM), str(tmp_path / "info.yaml"), RowRules(verify=Verify.HEADER)
        )
        assert isinstance(source, Source)
        assert source.allow_outside is allowed


def test_a_group_whose_recipe_reads_no_raw_rows_is_told_so(data: Path) -> None:
    mine = {
        "mine": {"dataset_names": ["x"], "image_transform_args": VAE, "recipe": "shard_factory:t2i_sample"}
    }

    with pytest.raises(
        ConfigError, match=r"\['mine'\]\['x'\]: raw rows are read for the recipes t2i, vlm, edit"
    ):
        units({"data_dir": str(data / "editing/seed")}, mine)


def test_interleaved_rows_are_found_by_either_key(data: Path) -> None:
    group = {"dataset_names": ["x"], "image_transform_args": VAE, "vit_image_transform_args": VIT}
    mine = {"talks": {**group, "recipe": "interleaved"}}
    write_jsonl(data / "items.jsonl", [{"items": [{"text": "a"}, {"text": "b", "loss": True}]}] * 3)

    assert [shard.samples for shard in units({"jsonl_path": str(data / "items.jsonl")}, mine)] == [3]
    with pytest.raises(ConfigError, match="data_dir is missing; interleaved rows are found by it"):
        units({"num_files": 3, "parquet_info_path": "x"}, mine)


def test_the_program_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parent.parent
    draw_corpus(tmp_path / "demo-data" / "sources", t2i_rows=4, vlm_rows=4, edit_rows=2)
    (tmp_path / "tests").symlink_to(root / "tests")
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", (root / "docs/raw-sources.md").read_text(), flags=re.DOTALL)

    exec(compile(block, "raw-sources.md", "exec"), {})

    told = capsys.readouterr().out
    assert [f"'packed': {count}, 'dropped': {{}}" in told for count in (4, 2)] == [True, True]
