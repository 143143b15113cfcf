"""`show`: what a shard or a dataset holds, ours or another tool's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import webdataset as wds
import yaml
from source_factory import Corpus, captions, encode_image, talk, write_corpus
from typer.testing import CliRunner

from bagel_wds.cli import app
from bagel_wds.converters import ShardSettings, convert_source
from bagel_wds.errors import ConfigError
from bagel_wds.show import find_holdings, find_sample, look_into

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ShardSettings(shard_bytes=20_480, shard_samples=4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def out(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    info: dict[str, Any] = {}
    for source in corpus.sources:
        convert_source(source, str(folder / source.kind), settings=SMALL)
        info[f"group_{source.kind}"] = {source.name: {"shards": str(folder / source.kind / "manifest.json")}}
    (folder / "dataset_info.yaml").write_text(yaml.safe_dump(info))
    return folder


def write_tar(path: Path, samples: list[dict[str, Any]]) -> str:
    with wds.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return str(path)


def test_a_dataset_is_found_by_its_folder_manifest_or_info(out: Path) -> None:
    by_folder, by_manifest = (
        find_holdings(str(out / "t2i")),
        find_holdings(str(out / "t2i" / "manifest.json")),
    )
    by_info = find_holdings(str(out / "dataset_info.yaml"))

    assert by_folder == by_manifest
    assert [holding.name for holding in by_info] == [
        "group_edit.edits",
        "group_t2i.pictures",
        "group_vlm.talks",
    ]
    assert find_holdings(str(out)) == by_info
    assert by_info[1].shards == by_folder[0].shards
    assert all(holding.manifest is not None for holding in by_info)


def test_contents_of_our_datasets_are_counted(out: Path) -> None:
    contents = {holding.name: look_into(holding) for holding in find_holdings(str(out))}

    pictures = contents["group_t2i.pictures"]
    assert (pictures.samples, pictures.kinds, pictures.files) == (22, {"t2i": 22}, {"png": 22})
    assert pictures.texts == {"captions": 44}
    assert (pictures.smallest_hw, pictures.largest_hw) == ((8, 12), (19, 12))
    edits = contents["group_edit.edits"]
    assert edits.media == {2: 3, 3: 3, 4: 3}
    assert edits.texts == {"instructions": 2 * (3 * 1 + 3 * 2 + 3 * 3)}
    talks = contents["group_vlm.talks"]
    assert talks.media == {0: 4, 1: 4, 2: 4}
    assert talks.texts == {"turns": 24}
    assert not any(found.faults for found in contents.values())


def test_looking_stops_where_it_is_told_to(out: Path) -> None:
    (holding,) = find_holdings(str(out / "t2i"))

    assert look_into(holding, 5).samples == 5
    assert look_into(holding, 1000).samples == 22


def test_a_single_tar_and_a_folder_of_tars_are_looked_into(out: Path, tmp_path: Path) -> None:
    tar = out / "vlm" / "talks-000000-000.tar"
    for name in ("b", "a"):
        (tmp_path / f"{name}.tar").write_bytes(tar.read_bytes())

    (alone,) = find_holdings(str(tmp_path / "a.tar"))
    (folder,) = find_holdings(str(tmp_path))

    assert look_into(alone).samples == 4
    assert look_into(folder).samples == 8
    assert folder.num_bytes == 2 * tar.stat().st_size


def test_shards_of_other_tools_are_told_apart_by_their_fields(tmp_path: Path) -> None:
    image = encode_image((6, 9))
    path = write_tar(
        tmp_path / "foreign.tar",
        [
            {"__key__": "a/1", "json": json.dumps({"captions": captions(1)}).encode(), "png": image},
            {"__key__": "a/2", "json": json.dumps({"conversations": talk()}).encode()},
            {
                "__key__": "a/3",
                "json": json.dumps({"instruction_list": [["x", "y"]]}).encode(),
                "0.png": image,
                "1.png": image,
            },
            {"__key__": "a/4", "txt": b"a caption", "jpg": b"no image"},
            {"__key__": "a/5", "json": b"{broken", "mp4": b"video"},
            {"__key__": "a/6", "json": json.dumps({"captions": [1]}).encode(), "png": image},
        ],
    )

    contents = look_into(find_holdings(path)[0])

    assert contents.kinds == {"t2i": 2, "vlm": 1, "edit": 1, "unknown": 2}
    assert contents.texts == {"captions": 2, "turns": 2, "instructions": 2}
    assert contents.files == {"png": 4, "jpg": 1, "mp4": 1}
    assert contents.faults == {"image_unreadable": 1, "captions_invalid": 1}


@pytest.mark.parametrize("with_index", [True, False])
def test_a_sample_is_found_by_its_key(out: Path, tmp_path: Path, with_index: bool) -> None:
    key = "part-1=2Eparquet-3-1"
    place = out / "t2i"
    if not with_index:
        for tar in place.glob("*.tar"):
            (tmp_path / tar.name).write_bytes(tar.read_bytes())
        place = tmp_path

    sample = find_sample(find_holdings(str(place)), key)

    assert sample["__key__"] == key
    assert json.loads(sample["json"])["id"] == "1/10"


@pytest.mark.parametrize("with_index", [True, False])
def test_a_key_that_is_not_there_is_an_error_with_an_example(
    out: Path, tmp_path: Path, with_index: bool
) -> None:
    place = (
        str(out / "t2i") if with_index else write_tar(tmp_path / "a.tar", [{"__key__": "k1", "json": b"{}"}])
    )

    with pytest.raises(
        ConfigError, match=r"no sample 'nope' .*; a key here looks like '(part-0=2Eparquet-0-0|k1)'"
    ):
        find_sample(find_holdings(place), "nope")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"g": {"d": {"num_files": 3}}}, "g.d has no shards; convert it first"),
        ({"g": ["d"]}, "g is list, not a mapping"),
    ],
)
def test_an_info_without_shards_says_what_to_do(tmp_path: Path, info: dict[str, Any], message: str) -> None:
    (tmp_path / "info.yaml").write_text(yaml.safe_dump(info))

    with pytest.raises(ConfigError, match=message):
        find_holdings(str(tmp_path / "info.yaml"))


def test_raw_files_of_an_info_are_told_of_beside_its_shards(out: Path, tmp_path: Path) -> None:
    raw = {"jsonl_path": "s3://bucket/a.jsonl", "data_dir": "media", "num_files": 3}
    info = {"g": {"talks": raw, "pictures": {"shards": str(out / "t2i" / "manifest.json")}}}
    (tmp_path / "info.yaml").write_text(yaml.safe_dump(info))

    done = CliRunner().invoke(app, ["show", str(tmp_path / "info.yaml")])

    assert done.exit_code == 0
    told = done.stdout.splitlines()
    assert told[0] == "g.pictures"
    assert told[-2:] == [
        "g.talks",
        "  raw files    data_dir media, jsonl_path s3://bucket/a.jsonl; `bagel-wds check` looks into them",
    ]
    with pytest.raises(ConfigError, match=r"no sample 'nope' in g\.pictures, g\.talks"):
        find_sample(find_holdings(str(tmp_path / "info.yaml")), "nope")
