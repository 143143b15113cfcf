"""Conversion: every row is written or quarantined, media bytes stay what they are, and the output is one of its kind."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import webdataset as wds
import wids
import yaml
from source_factory import (
    Corpus,
    captions,
    encode_image,
    talk,
    write_corpus,
    write_edit,
    write_jsonl,
    write_t2i,
)

from bagel_wds.converters import Mode, ShardSettings, convert_mixture, convert_source
from bagel_wds.converters.progress import Step
from bagel_wds.errors import BadSample, ConfigError, Reason, ShardError
from bagel_wds.images import read_header
from bagel_wds.manifest import read_manifest
from bagel_wds.reader import walk_shard
from bagel_wds.schema import split_member
from bagel_wds.sources import Medium, Place, Source, SourceImage, SourceSample, plan_source, read_slice
from bagel_wds.sources.encode import encode_sample

REAL = Path(__file__).parent / "data" / "real"
SMALL = ShardSettings(shard_bytes=20_480, shard_samples=4)
IMAGE = encode_image()


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="module")
def real_sources() -> list[Source]:
    return [
        Source(kind="t2i", name="t2i", path=str(REAL / "t2i")),
        Source(kind="edit", name="seed", path=str(REAL / "editing" / "seed")),
        Source(
            kind="vlm",
            name="vlm",
            path=str(REAL / "vlm" / "train.jsonl"),
            media_root=str(REAL / "vlm" / "images"),
        ),
    ]


def digests(folder: Path) -> dict[str, str]:
    """The checksum of every file under a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read_quarantine(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


def tar_members(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def samples_of(out: Path) -> dict[str, dict[str, bytes]]:
    """Every sample of a folder of shards by key, read with tarfile alone."""
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(out.glob("*.tar")):
        for name, data in tar_members(path):
            key, _, field = name.partition(".")
            samples.setdefault(key, {})[field] = data
    return samples


# The laws


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
def test_read_is_written_plus_quarantined(corpus: Corpus, tmp_path: Path, kind: str) -> None:
    source = getattr(corpus, kind)
    out = tmp_path / "out"
    num_rows = sum(part.num_rows for part in plan_source(source, slice_bytes=1, slice_rows=1).slices)

    summary = convert_source(source, str(out), settings=SMALL)

    counts = summary.counts
    assert counts.read == num_rows == counts.written + counts.quarantined
    assert counts.written == len(samples_of(out))
    assert counts.reasons == Counter(row["reason"] for row in read_quarantine(out))
    assert min(counts.written, counts.quarantined) > 0
    assert summary.num_shards == len(list(out.glob("*.tar"))) > 1
    assert summary.num_bytes == sum(path.stat().st_size for path in out.glob("*.tar"))


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
def test_the_bytes_do_not_depend_on_the_number_of_processes(
    corpus: Corpus, tmp_path: Path, kind: str
) -> None:
    outputs = []
    for processes in (1, 2, 3):
        out = tmp_path / f"out-{processes}"
        settings = ShardSettings(shard_bytes=10_240, shard_samples=4)
        convert_source(getattr(corpus, kind), str(out), settings=settings, processes=processes)
        outputs.append(digests(out))

    assert outputs[0] == outputs[1] == outputs[2]
    slices = {name.split("-")[1] for name in outputs[0] if name.endswith(".tar")}
    assert len(slices) > 2


def test_the_bytes_do_not_depend_on_where_the_source_lies(tmp_path: Path) -> None:
    outputs = []
    for place in ("here", "there/deep"):
        source = write_corpus(tmp_path / place).vlm
        convert_source(source, str(tmp_path / place / "out"), settings=SMALL)
        outputs.append(digests(tmp_path / place / "out"))

    assert outputs[0] == outputs[1]


def test_the_shards_of_a_small_source_are_pinned(tmp_path: Path) -> None:
    # Bytes of tars and manifest depend on the source and on nothing else; a change here is a new format version.
    write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "conversations": talk("问", "答")}])
    source = Source(kind="vlm", name="x", path=str(tmp_path / "a.jsonl"))

    convert_source(source, str(tmp_path / "out"))

    (shard,) = read_manifest(str(tmp_path / "out" / "manifest.json")).shards
    assert (shard.url, shard.samples, shard.bytes, shard.index) == (
        "x-000000-000.tar",
        1,
        10_240,
        "x-000000-000.idx.parquet",
    )
    assert shard.checksum == "xxh3_128:794ebd8bbd1c75be6e56acc8320cab83"
    ((name, text),) = tar_members(tmp_path / "out" / shard.url)
    assert name == "a=2Ejsonl-0.json"
    assert text.decode() == (
        '{"id":1,"conversations":[{"from":"human","value":"问"},{"from":"gpt","value":"答"}],'
        '"_bagel":{"kind":"vlm","media":[],"source":{"file":"a.jsonl","row":0}}}'
    )


# Real data


@pytest.fixture(scope="module")
def real_out(tmp_path_factory: pytest.TempPathFactory, real_sources: list[Source]) -> Path:
    out = tmp_path_factory.mktemp("real")
    for source in real_sources:
        convert_source(source, str(out / source.kind), settings=ShardSettings(shard_bytes=1 << 20))
    return out


def test_real_data_is_written_whole(real_out: Path) -> None:
    counts = {
        kind: read_manifest(str(real_out / kind / "manifest.json")).counts for kind in ("t2i", "edit", "vlm")
    }

    assert {kind: (c.read, c.written, dict(c.reasons)) for kind, c in counts.items() if c} == {
        "t2i": (8, 8, {}),
        "edit": (4, 4, {}),
        "vlm": (8, 8, {}),
    }
    assert read_quarantine(real_out / "vlm") == []


@pytest.mark.parametrize(
    ("kind", "path", "column"),
    [
        ("t2i", REAL / "t2i", "image"),
        ("edit", REAL / "editing" / "seed", "image_list"),
    ],
)
def test_media_and_fields_of_parquet_are_those_of_the_source(
    real_out: Path, kind: str, path: Path, column: str
) -> None:
    written = samples_of(real_out / kind)
    seen = 0
    for file in sorted(path.glob("*.parquet")):
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            for number, row in enumerate(parquet.read_row_group(group).to_pylist()):
                sample = written[f"{file.stem}=2Eparquet-{group}-{number}"]
                value = row.pop(column)
                images = value if isinstance(value, list) else [value]
                media = [data for name, data in sample.items() if name != "json"]
                fields = json.loads(sample["json"])
                header = fields.pop("_bagel")

                assert media == images
                assert fields == row
                assert header["source"] == {"file": file.name, "row_group": group, "row": number}
                seen += 1
    assert seen == len(written) > 0


def test_media_and_fields_of_jsonl_are_those_of_the_source(real_out: Path) -> None:
    written = samples_of(real_out / "vlm")
    lines = (REAL / "vlm" / "train.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        row = json.loads(line)
        sample = written.pop(f"train=2Ejsonl-{number}")
        names = row.get("image", row.get("video", []))
        names = [names] if isinstance(names, str) else names
        media = [data for name, data in sample.items() if name != "json"]
        fields = json.loads(sample["json"])
        header = fields.pop("_bagel")

        assert media == [(REAL / "vlm" / "images" / name).read_bytes() for name in names]
        assert fields == row
        assert header["source"] == {"file": "train.jsonl", "row": number}
    assert not written
    assert "招牌上写着“曹记焖烤鸡腿”。" in samples_of(real_out / "vlm")["train=2Ejsonl-3"]["json"].decode()


# What a shard looks like


def test_members_are_plain_with_the_json_first_and_media_in_order(tmp_path: Path) -> None:
    images = [encode_image((8, 10 + i), seed=i, codec=codec) for i, codec in enumerate(["PNG", "JPEG"] * 6)]
    write_edit(tmp_path / "a.parquet", [(list(images), [[str(i)] for i in range(11)])])
    convert_source(Source(kind="edit", name="x", path=str(tmp_path / "a.parquet")), str(tmp_path / "out"))

    with tarfile.open(tmp_path / "out" / "x-000000-000.tar") as tar:
        members = tar.getmembers()

    assert [split_member(member.name)[1] for member in members] == [
        "json",
        *(f"{i}.{('png', 'jpg')[i % 2]}" for i in range(12)),
    ]
    for member in members:
        assert member.isreg()
        assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
        assert member.mode == 0o644
        assert not member.pax_headers
    header = json.loads(tar_members(tmp_path / "out" / "x-000000-000.tar")[0][1])["_bagel"]
    assert header["kind"] == "edit"
    assert header["media"] == [
        {"ext": ("png", "jpg")[i % 2], "width": 10 + i, "height": 8} for i in range(12)
    ]


def test_bytes_are_never_encoded_again(tmp_path: Path) -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    originals = [
        encode_image(codec="JPEG", quality=95, exif=exif, icc_profile=b"profile"),
        encode_image(codec="WEBP", lossless=True),
        encode_image(codec="WEBP", quality=40),
        encode_image(codec="GIF"),
        encode_image(codec="BMP"),
    ]
    write_t2i(tmp_path / "a.parquet", [(data, "{}") for data in originals])
    convert_source(Source(kind="t2i", name="x", path=str(tmp_path / "a.parquet")), str(tmp_path / "out"))

    samples = list(samples_of(tmp_path / "out").values())

    assert [next(data for name, data in sample.items() if name != "json") for sample in samples] == originals
    headers = [json.loads(sample["json"])["_bagel"]["media"][0] for sample in samples]
    assert headers[0] == {"ext": "jpg", "width": 12, "height": 8, "orientation": 6}
    assert [header["ext"] for header in headers] == ["jpg", "webp", "webp", "gif", "bmp"]
    assert all("orientation" not in header for header in headers[1:])


def test_a_clip_is_written_frame_by_frame(tmp_path: Path) -> None:
    frames = [encode_image(seed=i) for i in range(12)]
    for number, data in enumerate(frames):
        path = tmp_path / "clip" / f"f_{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    write_jsonl(tmp_path / "a.jsonl", [{"video": "clip", "conversations": talk("<video>", "a")}])
    convert_source(Source(kind="vlm", name="x", path=str(tmp_path / "a.jsonl")), str(tmp_path / "out"))

    (sample,) = samples_of(tmp_path / "out").values()

    assert list(sample) == ["json", *(f"0.{i:03d}.png" for i in range(12))]
    assert [data for name, data in sample.items() if name != "json"] == frames
    assert json.loads(sample["json"])["_bagel"]["media"] == [
        {"ext": "png", "width": 12, "height": 8, "frames": 12}
    ]


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
def test_the_index_says_where_each_sample_lies(corpus: Corpus, tmp_path: Path, kind: str) -> None:
    convert_source(getattr(corpus, kind), str(tmp_path / "out"), settings=SMALL)

    for path in sorted((tmp_path / "out").glob("*.tar")):
        index = pq.read_table(path.with_name(path.name.replace(".tar", ".idx.parquet"))).to_pylist()
        data = path.read_bytes()
        by_key: dict[str, list[tarfile.TarInfo]] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                by_key.setdefault(split_member(member.name)[0], []).append(member)

        assert [row["key"] for row in index] == list(by_key)
        end = 0
        for row, members in zip(index, by_key.values(), strict=True):
            assert row["offset"] == members[0].offset == end
            end = row["offset"] + row["length"]
            last = members[-1]
            assert end == last.offset_data + last.size + -last.size % 512
            part = data[row["offset"] : end]
            with tarfile.open(fileobj=io.BytesIO(part), mode="r:") as tar:
                assert [member.name for member in tar] == [member.name for member in members]
            assert [medium["bytes"] for medium in row["media"]] == [member.size for member in members[1:]]
            described = json.loads(part[512 : 512 + members[0].size])["_bagel"]["media"]
            assert [(m["ext"], m["width"], m["height"]) for m in row["media"]] == [
                (m["ext"], m["width"], m["height"]) for m in described
            ]
        assert not any(data[end:])


def test_a_shard_is_closed_before_the_sample_that_would_exceed_a_limit(tmp_path: Path) -> None:
    sizes = [3000, 3000, 3000, 60_000, 3000, 3000, 3000, 3000, 3000]
    write_t2i(
        tmp_path / "a.parquet",
        [(IMAGE + bytes(size), "{}") for size in sizes],
        group_rows=100,
    )
    settings = ShardSettings(shard_bytes=40_960, shard_samples=4)
    convert_source(
        Source(kind="t2i", name="x", path=str(tmp_path / "a.parquet")),
        str(tmp_path / "out"),
        settings=settings,
    )

    shards = read_manifest(str(tmp_path / "out" / "manifest.json")).shards

    assert [shard.samples for shard in shards] == [3, 1, 4, 1]
    assert [shard.bytes for shard in shards] == [20_480, 71_680, 30_720, 10_240]
    assert [shard.url for shard in shards] == [f"x-000000-{i:03d}.tar" for i in range(4)]


def test_no_shard_spans_two_slices_and_none_is_empty(tmp_path: Path) -> None:
    # The second row group has no row that can be used.
    write_t2i(tmp_path / "a.parquet", [(IMAGE, "{}"), (b"", "{}")] + [(b"", "{}")] * 2 + [(IMAGE, "{}")])
    convert_source(
        Source(kind="t2i", name="x", path=str(tmp_path / "a.parquet")),
        str(tmp_path / "out"),
        settings=ShardSettings(shard_bytes=1),
    )

    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == [
        "x-000000-000.tar",
        "x-000002-000.tar",
    ]


def test_quarantine_is_in_the_order_of_the_source_and_written_even_when_empty(tmp_path: Path) -> None:
    bad = {1, 3, 4}
    write_t2i(tmp_path / "a.parquet", [(b"" if i in bad else IMAGE, "{}") for i in range(6)])
    write_t2i(tmp_path / "b.parquet", [(IMAGE, "{}")])
    for name in ("a", "b"):
        source = Source(kind="t2i", name="x", path=str(tmp_path / f"{name}.parquet"))
        convert_source(source, str(tmp_path / name), settings=ShardSettings(shard_bytes=1), processes=2)

    rows = read_quarantine(tmp_path / "a")

    assert [(row["file"], row["row_group"], row["row"], row["reason"]) for row in rows] == [
        ("a.parquet", 0, 1, "image_empty"),
        ("a.parquet", 1, 1, "image_empty"),
        ("a.parquet", 2, 0, "image_empty"),
    ]
    assert (tmp_path / "b" / "quarantine.jsonl").read_bytes() == b""


# Fields that have no place in a member


def encode(fields: dict[str, Any]) -> dict[str, Any]:
    image = SourceImage(IMAGE, read_header(IMAGE))
    place = Place("a.jsonl", 0)
    sample = SourceSample(place.key, fields, (Medium((image,)),), place)
    value: dict[str, Any] = json.loads(encode_sample(sample, "vlm").members[0][1])
    return value


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"_bagel": {}}, Reason.ROW_INVALID),
        ({"text": "x" * (16 << 20)}, Reason.JSON_TOO_LARGE),
        ({"text": "\ud83d"}, Reason.ROW_INVALID),
        ({"deep": json.loads("[" * 300 + "]" * 300), "text": "\ud83d"}, Reason.ROW_INVALID),
    ],
)
def test_fields_that_cannot_be_written_are_a_verdict(fields: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(BadSample) as refused:
        encode(fields)

    assert refused.value.reason is reason


def test_numbers_of_any_size_are_written_as_they_are() -> None:
    assert encode({"id": 10**30, "zh": "图"})["id"] == 10**30


def test_a_row_with_our_reserved_key_is_quarantined(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"conversations": talk(), "_bagel": 1}, {"conversations": talk()}])
    convert_source(Source(kind="vlm", name="x", path=str(tmp_path / "a.jsonl")), str(tmp_path / "out"))

    assert [(row["row"], row["reason"]) for row in read_quarantine(tmp_path / "out")] == [(0, "row_invalid")]


# Other tools


def test_webdataset_reads_the_shards(real_out: Path) -> None:
    for kind, count in (("t2i", 8), ("edit", 4), ("vlm", 8)):
        urls = [str(path) for path in sorted((real_out / kind).glob("*.tar"))]
        read = list(wds.WebDataset(urls, shardshuffle=False))

        expected = samples_of(real_out / kind)
        assert len(read) == count
        for sample in read:
            fields = {name: data for name, data in sample.items() if not name.startswith("__")}
            assert fields == expected[sample["__key__"]]


def test_wids_reads_the_manifest(real_out: Path, tmp_path: Path) -> None:
    for kind in ("t2i", "edit", "vlm"):
        dataset = wids.ShardListDataset(
            str(real_out / kind / "manifest.json"), cache_dir=str(tmp_path / kind), transformations=[]
        )
        expected = samples_of(real_out / kind)

        assert len(dataset) == len(expected)
        for number, (key, members) in enumerate(expected.items()):
            sample = dataset[number]
            assert sample["__key__"] == key
            assert {
                name.removeprefix("."): data.read()
                for name, data in sample.items()
                if not name.startswith("__")
            } == members
        dataset.close()


def test_our_reader_agrees_with_the_index(corpus: Corpus, tmp_path: Path) -> None:
    convert_source(corpus.vlm, str(tmp_path / "out"), settings=SMALL)
    for path in sorted((tmp_path / "out").glob("*.tar")):
        index = pq.read_table(path.with_name(path.name.replace(".tar", ".idx.parquet"))).to_pylist()

        assert [(sample["__key__"], sample["__ref__"]) for sample in walk_shard(str(path))] == [
            (row["key"], (row["offset"], row["length"])) for row in index
        ]


# Failures


def break_row_group(path: Path, group: int) -> None:
    """Spoil the image data of one row group; the footer stays sound."""
    column = pq.ParquetFile(path).metadata.row_group(group).column(0)
    with path.open("r+b") as file:
        file.seek(column.data_page_offset)
        file.write(b"\xff" * 64)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_in_the_middle_of_a_shard_leaves_nothing_of_it(tmp_path: Path, processes: int) -> None:
    path = tmp_path / "a.parquet"
    write_t2i(path, [(encode_image(seed=i), captions(i)) for i in range(6)])
    break_row_group(path, 2)
    out = tmp_path / "out"
    settings = ShardSettings(shard_bytes=1 << 20 if processes == 1 else 1)

    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as parquet"):
        convert_source(
            Source(kind="t2i", name="x", path=str(path)), str(out), settings=settings, processes=processes
        )

    left = {name for name in digests(out) if not name.startswith(".conversion/")}
    finished = {"x-000000-000", "x-000000-001", "x-000001-000", "x-000001-001"} if processes == 2 else set()
    assert {name.partition(".")[0] for name in left} <= {"conversion", *finished}
    assert not [name for name in digests(out) if ".partial-" in name]


@pytest.mark.parametrize("processes", [1, 2])
def test_any_other_failure_names_the_slice(tmp_path: Path, processes: int) -> None:
    write_t2i(tmp_path / "a.parquet", [(IMAGE, "{}")] * 4)
    # A folder stands where a shard should go.
    (tmp_path / "out" / "x-000001-000.tar").mkdir(parents=True)

    with pytest.raises(ShardError, match=r"slice 1 \(a\.parquet row group 1 .*IsADirectoryError") as failed:
        convert_source(
            Source(kind="t2i", name="x", path=str(tmp_path / "a.parquet")),
            str(tmp_path / "out"),
            settings=ShardSettings(shard_bytes=1),
            processes=processes,
        )

    assert isinstance(failed.value.__cause__, OSError)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_interrupt_leaves_whole_shards_only(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for file in range(12):
        images = [IMAGE + rng.bytes(200_000) for _ in range(40)]
        write_t2i(tmp_path / "in" / f"{file}.parquet", [(image, "{}") for image in images], group_rows=40)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bagel_wds.converters", "t2i", str(tmp_path / "in"), str(out)]
    command += ["--processes", "2", "--shard-size", "3MB"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and len(list(out.glob("*.tar"))) < 2:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert process.returncode != 0, "it was done before it could be interrupted"
    assert "Traceback" not in errors
    assert not (out / "manifest.json").exists()
    for path in out.glob("*.tar"):
        assert sum(1 for _ in walk_shard(str(path))) > 0


def test_a_source_of_which_nothing_can_be_written_is_an_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"image": f"{i}.png", "conversations": talk()} for i in range(3)])
    source = Source(kind="vlm", name="x", path=str(tmp_path / "a.jsonl"))

    with pytest.raises(
        ConfigError, match=r"no sample was written, each of the 3 rows .* image_missing 3.*0\.png"
    ):
        convert_source(source, str(tmp_path / "out"))

    assert len(read_quarantine(tmp_path / "out")) == 3
    assert sorted(digests(tmp_path / "out")) == ["quarantine.jsonl"]


def test_a_source_without_rows_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")

    with pytest.raises(ConfigError, match="has no row"):
        convert_source(Source(kind="vlm", name="x", path=str(tmp_path / "a.jsonl")), str(tmp_path / "out"))


def test_a_cap_below_one_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_used_data=0 must be at least 1"):
        convert_source(replace(corpus.t2i, max_units=0), str(tmp_path / "out"))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../a", ".a", "a{0..3}", "s3:"])
def test_a_name_that_shards_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"conversations": talk()}])

    with pytest.raises(ConfigError, match="cannot begin the names of shards"):
        convert_source(Source(kind="vlm", name=name, path=str(tmp_path / "a.jsonl")), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"shard_bytes": 0}, "shard_bytes=0"), ({"shard_samples": -1}, "shard_samples=-1")],
)
def test_limits_below_one_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardSettings(**settings)


# The output folder


def test_a_converted_dataset_is_not_written_over_unless_asked(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_source(corpus.t2i, str(out), settings=SMALL)
    first = digests(out)
    (out / "notes.txt").write_text("mine")
    (out / "other.tar").write_text("mine")

    with pytest.raises(ConfigError, match=r"was begun with shard_bytes=20480, .* pass --overwrite"):
        convert_source(corpus.t2i, str(out), settings=ShardSettings())
    assert {name: digest for name, digest in digests(out).items() if name in first} == first

    convert_source(corpus.vlm, str(out), settings=SMALL, mode=Mode.OVERWRITE)
    fresh = tmp_path / "fresh"
    convert_source(corpus.vlm, str(fresh), settings=SMALL)
    second = digests(out)
    assert {second.pop("notes.txt"), second.pop("other.tar")} == {hashlib.sha256(b"mine").hexdigest()}
    assert second == digests(fresh)


def test_what_an_unfinished_conversion_left_is_refused_or_replaced(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_source(corpus.t2i, str(out), settings=SMALL)
    (out / "manifest.json").unlink()
    (out / "conversion.json").unlink()
    (out / ".pictures-000099-000.tar.partial-1").touch()

    with pytest.raises(ConfigError, match="tars without a manifest"):
        convert_source(corpus.t2i, str(out))

    convert_source(corpus.t2i, str(out), mode=Mode.OVERWRITE)
    convert_source(corpus.t2i, str(tmp_path / "fresh"))
    assert digests(out) == digests(tmp_path / "fresh")


def test_output_may_not_lie_in_the_source_or_be_a_file(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, message in (
        (Path(str(corpus.t2i.path)) / "out", "lies in the source"),
        (tmp_path / "file", "is a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert_source(corpus.t2i, str(out))


# Progress


def test_steps_add_up_to_the_summary(corpus: Corpus, tmp_path: Path) -> None:
    steps: list[Step] = []

    summary = convert_source(corpus.vlm, str(tmp_path / "out"), settings=SMALL, report=steps.append)

    assert steps[0] == Step("talks", summary.counts.read)
    assert steps[-1] == Step(
        "talks",
        summary.counts.read,
        rows=summary.counts.read,
        num_bytes=summary.num_bytes,
        quarantined=summary.counts.quarantined,
    )
    assert [step.rows for step in steps] == sorted({step.rows for step in steps})


# A mixture


def write_mixture(folder: Path, corpus: Corpus, **changes: Any) -> tuple[str, str]:
    sizes = {"image_stride": 16, "max_image_size": 64, "min_image_size": 32}
    groups: dict[str, dict[str, Any]] = {
        "t2i_pretrain": {"dataset_names": ["pictures"], "image_transform_args": sizes, "num_used_data": [1]},
        "unified_edit": {
            "dataset_names": ["edits"],
            "image_transform_args": sizes,
            "vit_image_transform_args": sizes,
        },
        "vlm_sft": {
            "dataset_names": ["talks"],
            "image_transform_args": sizes,
            "num_used_data": [5],
            "shuffle_lines": True,
            "shuffle_seed": 3,
        },
    }
    info: dict[str, dict[str, dict[str, Any]]] = {
        "t2i_pretrain": {"pictures": {"data_dir": "corpus/t2i", "num_files": 2, "num_total_samples": 8}},
        "unified_edit": {
            "edits": {"data_dir": corpus.edit.path, "num_files": 1, "parquet_info_path": "gone.json"}
        },
        "vlm_sft": {
            "talks": {
                "data_dir": "corpus/vlm/media",
                "jsonl_path": "corpus/vlm/train.jsonl",
                "num_total_samples": 9,
            }
        },
    }
    for place, value in changes.items():
        group, _, key = place.partition("__")
        if key == "group":
            groups[group] |= value
        else:
            info[group] = value
    (folder / "mix.yaml").write_text(yaml.safe_dump(groups, sort_keys=False))
    (folder / "info.yaml").write_text(yaml.safe_dump(info, sort_keys=False))
    return str(folder / "mix.yaml"), str(folder / "info.yaml")


def test_a_mixture_is_converted_under_the_caps_of_its_groups(corpus: Corpus, tmp_path: Path) -> None:
    config, info = write_mixture(tmp_path, corpus)
    out = tmp_path / "out"

    done = convert_mixture(config, info, str(out), settings=SMALL)

    new_info = yaml.safe_load((out / "dataset_info.yaml").read_text())
    places = {(group, name): entry for group, names in new_info.items() for name, entry in names.items()}
    assert list(places) == [("t2i_pretrain", "pictures"), ("unified_edit", "edits"), ("vlm_sft", "talks")]
    for (group, name), entry in places.items():
        assert entry["shards"] == str(out / group / name / "manifest.json")
        manifest = read_manifest(entry["shards"])
        assert manifest.counts is not None
        assert entry["num_total_samples"] == manifest.counts.written > 0
    assert [summary.counts.read for summary in done.datasets] == [12, 12, 5]
    vlm = read_manifest(places["vlm_sft", "talks"]["shards"])
    assert vlm.settings == {
        "shard_bytes": 20_480,
        "shard_samples": 4,
        "shuffle": None,
        "max_side": None,
        "encoder": None,
        "verify": "full",
        "columns": {},
        "placeholders": "strict",
        "allow_outside": False,
        "max_units": 5,
        "shuffle_lines": True,
        "shuffle_seed": 3,
    }


def test_relative_places_are_first_those_of_the_current_folder(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    config, info = write_mixture(tmp_path / "files", corpus)
    with pytest.raises(ConfigError, match=r"there is no corpus/t2i \(nor .*files/corpus/t2i\)"):
        convert_mixture(config, info, str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path)

    done = convert_mixture(config, info, "out")

    assert len(done.datasets) == 3
    assert done.info_path == str(tmp_path / "out" / "dataset_info.yaml")


def test_shards_in_the_info_are_passed_on(corpus: Corpus, tmp_path: Path) -> None:
    entry = {"shards": "s3://bucket/t2i-{000000..000127}.tar", "num_total_samples": 7}
    config, info = write_mixture(tmp_path, corpus, t2i_pretrain={"pictures": entry})

    convert_mixture(config, info, str(tmp_path / "out"))

    new_info = yaml.safe_load((tmp_path / "out" / "dataset_info.yaml").read_text())
    assert new_info["t2i_pretrain"]["pictures"] == entry


def test_a_dataset_that_a_group_names_twice_is_converted_once(corpus: Corpus, tmp_path: Path) -> None:
    twice = {"dataset_names": ["pictures", "pictures"], "num_used_data": [1, 1]}
    config, info = write_mixture(tmp_path, corpus, t2i_pretrain__group=twice)
    assert len(convert_mixture(config, info, str(tmp_path / "out")).datasets) == 3

    config, info = write_mixture(tmp_path, corpus, t2i_pretrain__group=twice | {"num_used_data": [1, 2]})
    with pytest.raises(ConfigError, match="names 'pictures' twice, with num_used_data 1 and 2"):
        convert_mixture(config, info, str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"data_dirs": "x"}, "unknown key 'data_dirs'; did you mean 'data_dir'?"),
        ({"data_dir": "nowhere"}, "data_dir: there is no nowhere"),
        ({"num_files": 2}, "data_dir is missing"),
        ({"data_dir": 3}, "data_dir: Input should be a valid string"),
    ],
)
def test_an_entry_that_will_not_do_is_refused_before_anything_is_written(
    corpus: Corpus, tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    config, info = write_mixture(tmp_path, corpus, unified_edit={"edits": entry})

    with pytest.raises(ConfigError) as refused:
        convert_mixture(config, info, str(tmp_path / "out"))

    assert message in str(refused.value)
    assert "unified_edit.edits" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_the_info_lacks_is_named_with_the_nearest(corpus: Corpus, tmp_path: Path) -> None:
    config, info = write_mixture(tmp_path, corpus, unified_edit={"edit": {"data_dir": "x"}})

    with pytest.raises(
        ConfigError, match=r"unified_edit\.edits is not there; did you mean unified_edit\.edit\?"
    ):
        convert_mixture(config, info, str(tmp_path / "out"))


def test_the_info_that_is_read_is_never_replaced(corpus: Corpus, tmp_path: Path) -> None:
    config, info = write_mixture(tmp_path, corpus)
    Path(info).rename(tmp_path / "dataset_info.yaml")
    before = (tmp_path / "dataset_info.yaml").read_bytes()

    for mode in (Mode.CONVERT, Mode.OVERWRITE):
        with pytest.raises(ConfigError, match="is the dataset info that is read"):
            convert_mixture(config, str(tmp_path / "dataset_info.yaml"), str(tmp_path), mode=mode)
    assert (tmp_path / "dataset_info.yaml").read_bytes() == before


def test_a_mixture_converted_again_goes_on_and_takes_more_datasets(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config, info = write_mixture(tmp_path, corpus)
    groups = yaml.safe_load(Path(config).read_text())
    alone = tmp_path / "alone.yaml"
    alone.write_text(yaml.safe_dump({"unified_edit": groups["unified_edit"]}))

    first = convert_mixture(str(alone), info, str(out))
    both = convert_mixture(config, info, str(out))
    again = convert_mixture(config, info, str(out))

    assert [summary.was_complete for summary in first.datasets] == [False]
    assert [summary.was_complete for summary in both.datasets] == [False, True, False]
    assert [summary.was_complete for summary in again.datasets] == [True, True, True]
    convert_mixture(config, info, str(tmp_path / "fresh"))
    assert {name: data for name, data in digests(out).items() if name != "dataset_info.yaml"} == {
        name: data for name, data in digests(tmp_path / "fresh").items() if name != "dataset_info.yaml"
    }
    with pytest.raises(ConfigError, match=r"names t2i_pretrain\.pictures, which is not converted now"):
        convert_mixture(str(alone), info, str(out))


def test_a_mixture_is_appended_to_dataset_by_dataset(corpus: Corpus, tmp_path: Path) -> None:
    config, info = write_mixture(
        tmp_path, corpus, t2i_pretrain__group={"num_used_data": None}, vlm_sft__group={"num_used_data": None}
    )
    before = convert_mixture(config, info, str(tmp_path / "out"))
    write_t2i(tmp_path / "corpus" / "t2i" / "part-9.parquet", [(IMAGE, captions(9))])

    after = convert_mixture(config, info, str(tmp_path / "out"), mode=Mode.APPEND)

    assert [summary.was_complete for summary in after.datasets] == [False, True, True]
    assert after.datasets[0].counts.written == before.datasets[0].counts.written + 1


def test_read_slices_match_what_is_written(corpus: Corpus, tmp_path: Path) -> None:
    """The raw reader and the shards give the same keys, so both draw alike."""
    for source in corpus.sources:
        out = tmp_path / source.name
        convert_source(source, str(out), settings=SMALL)
        rows = [
            row
            for part in plan_source(source, slice_bytes=1 << 30, slice_rows=1 << 30).slices
            for row in read_slice(source, part)
        ]

        assert [row.key for row in rows if isinstance(row, SourceSample)] == list(samples_of(out))
        assert orjson.loads((out / "manifest.json").read_bytes())["kind"] == source.kind
