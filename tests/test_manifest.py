"""The manifest: what is written is read, what wids would take is taken, and anything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagel_wds import manifest
from bagel_wds.converters import ShardSettings
from bagel_wds.converters.manifest import write_manifest, write_quarantine
from bagel_wds.converters.record import ConversionRecord, Mode, Part, settings_of
from bagel_wds.converters.shard_writer import ShardRecord
from bagel_wds.converters.slices import quarantine_entry
from bagel_wds.errors import ConfigError, Reason
from bagel_wds.manifest import Counts, Manifest, ManifestShard, read_manifest
from bagel_wds.sources import Place, Source


def write(tmp_path: Path, value: object) -> str:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(value))
    return str(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    source = Source(kind="edit", name="x", path="/somewhere/else", max_units=3)
    settings = settings_of(source, ShardSettings(shuffle=4))
    parts = (Part(Mode.CONVERT, (), 1, 4, settings), Part(Mode.APPEND, (), 1, 1, settings))
    counts = Counts(read=5, written=3, reasons={"image_empty": 2}, repaired={"placeholders": 1})
    before = ManifestShard("x-000000-000.tar", 2, 10_240, "xxh3_128:01", "x-000000-000.idx.parquet")

    write_manifest(
        str(tmp_path),
        ConversionRecord("x", "edit", parts),
        counts,
        [before],
        [ShardRecord("x-000001-000.tar", 1, 10_240, "xxh3_128:00")],
    )

    url = str(tmp_path / "manifest.json")
    added = ManifestShard("x-000001-000.tar", 1, 10_240, "xxh3_128:00", "x-000001-000.idx.parquet")
    read = read_manifest(url)
    assert read == Manifest(
        shards=(before, added), name="x", kind="edit", settings=settings, counts=counts, parts=2
    )
    assert counts.quarantined == 2
    assert (read.settings["max_units"], read.settings["shuffle"]) == (3, 4)
    assert "somewhere" not in Path(url).read_text()


def test_a_plain_wids_list_is_a_manifest_that_tells_less(tmp_path: Path) -> None:
    url = write(tmp_path, {"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 2}]})

    assert read_manifest(url) == Manifest(shards=(ManifestShard("a.tar", 2),))


SHARD = {"url": "a.tar", "nsamples": 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "no manifest: a JSON object with a `shardlist`"),
        ({"shards": []}, "no manifest"),
        ({"shardlist": [], "format_version": 2}, "format_version 2 and this version of bagel-wds reads 1"),
        ({"shardlist": {}}, "shardlist={} is dict, not list"),
        ({"shardlist": ["a.tar"]}, "shard 0: str, not an object"),
        ({"shardlist": [SHARD, {"nsamples": 2}]}, "shard 1: 'url' is missing"),
        ({"shardlist": [{"url": "a.tar"}]}, "shard 0: 'nsamples' is missing"),
        ({"shardlist": [SHARD | {"nsamples": True}]}, "nsamples=True is bool, not int"),
        ({"shardlist": [SHARD | {"nsamples": -1}]}, "nsamples=-1 is negative"),
        ({"shardlist": [SHARD | {"filesize": "9"}]}, "filesize='9' is str, not int"),
        ({"shardlist": [SHARD], "name": 3}, "name=3 is int, not str"),
        ({"shardlist": [SHARD], "counts": {"read": 1}}, "counts: "),
    ],
)
def test_what_is_no_manifest_is_refused_with_its_place(tmp_path: Path, value: Any, message: str) -> None:
    url = write(tmp_path, value)

    with pytest.raises(ConfigError) as refused:
        read_manifest(url)

    assert str(refused.value).startswith(url)
    assert message in str(refused.value)


def test_a_shard_with_all_its_fields_is_the_same_in_either_way() -> None:
    whole: dict[str, object] = {
        "url": "a.tar",
        "nsamples": 3,
        "filesize": 10,
        "checksum": "xxh3_128:0",
        "index": "a.idx.parquet",
    }
    values: list[object] = [None, True, -1, 1.5, []]
    odd: list[object] = [
        *({**whole, name: value} for name in whole for value in values),
        *({other: whole[other] for other in whole if other != name} for name in whole),
        "a.tar",
    ]

    assert (
        manifest._plain_shard(whole)
        == manifest._shard(whole, "")
        == ManifestShard("a.tar", 3, 10, "xxh3_128:0", "a.idx.parquet")
    )
    assert [entry for entry in odd if manifest._plain_shard(entry) is not None] == []


def test_a_manifest_that_is_not_there_or_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for name in ("gone.json", "broken.json"):
        with pytest.raises(ConfigError, match=f"{name}: the manifest cannot be read"):
            read_manifest(str(tmp_path / name))


def test_quarantine_lines_are_json_whatever_a_row_quotes(tmp_path: Path) -> None:
    before = tmp_path / "before.jsonl"
    before.write_text('{"row": 0}\n')
    rows = [
        quarantine_entry(Place("图.jsonl", 3), Reason.IMAGE_MISSING, "图\udcff.png: gone"),
        quarantine_entry(Place("odd\udcff.parquet", 1, 2), Reason.ROW_INVALID, "x" * 1000),
    ]

    write_quarantine(str(tmp_path / "quarantine.jsonl"), str(before), rows)

    old, first, second = (
        json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()
    )
    assert old == {"row": 0}
    assert first == {
        "file": "图.jsonl",
        "row": 3,
        "reason": "image_missing",
        "detail": "图\\udcff.png: gone",
    }
    assert (second["file"], second["row_group"], len(second["detail"])) == ("odd\\xff.parquet", 2, 300)
