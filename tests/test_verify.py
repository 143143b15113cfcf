"""Each thing that can be wrong with a converted dataset is found, by name, and a sound one has no finding.

The datasets here are written by the standard library and pyarrow, from what docs/shard-format.md says.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_factory import captions, encode_image, write_corpus, write_t2i

from bagel_wds.converters import ShardSettings, convert_source
from bagel_wds.errors import ConfigError
from bagel_wds.manifest import read_manifest
from bagel_wds.sources import Source
from bagel_wds.verify import Finding, ShardFindings, What, find_manifests, verify_shard, verify_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

IMAGE = encode_image((8, 12))
REASONS = {"image_missing": 2, "row_invalid": 1}
MEDIUM = {"ext": "png", "width": 12, "height": 8}


@dataclass(frozen=True)
class Row:
    """A sample: its members, and what its index says of its media."""

    key: str
    members: tuple[tuple[str, bytes], ...]
    media: tuple[Mapping[str, Any], ...]


def text(media: Sequence[Mapping[str, Any]], kind: str = "vlm") -> bytes:
    """A sample's JSON."""
    return json.dumps({"conversations": [], "_bagel": {"kind": kind, "media": media, "source": {}}}).encode()


def row(number: int) -> Row:
    """A sample with no image, one, two, or a clip of three frames, in turn."""
    frames = {} if number % 4 < 3 else {"frames": 3}
    images = [encode_image((8, 12), seed=number + i) for i in range(number % 4)]
    names = [f"0.{i:03d}.png" if frames else f"{i}.png" for i in range(len(images))]
    told = [{**MEDIUM, **frames}] * (1 if frames else len(images))
    sizes = [sum(map(len, images))] if frames else [len(image) for image in images]
    return Row(
        key=f"part=2Ejsonl-{number}",
        members=(("json", text(told)), *zip(names, images, strict=True)),
        media=tuple({**MEDIUM, "frames": 1, **frames, "bytes": size} for size in sizes),
    )


def write_tar(path: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A tar as `tarfile` writes it; gives the rows of its index."""
    index: list[dict[str, Any]] = []
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in rows:
            offset = tar.offset
            for field, data in sample.members:
                info = tarfile.TarInfo(f"{sample.key}.{field}" if field else sample.key)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            place = {"offset": offset, "length": tar.offset - offset}
            index.append({"key": sample.key, **place, "media": list(sample.media)})
    return index


def write_index(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    media = pa.struct(
        [("ext", pa.string()), *((name, pa.int64()) for name in ("width", "height", "frames", "bytes"))]
    )
    columns = {"key": pa.string(), "offset": pa.int64(), "length": pa.int64(), "media": pa.list_(media)}
    pq.write_table(pa.Table.from_pylist(list(rows), schema=pa.schema(list(columns.items()))), path)


def describe(path: Path, samples: int) -> dict[str, Any]:
    """What the manifest says of a tar as it is."""
    data = path.read_bytes()
    return {
        "url": path.name,
        "nsamples": samples,
        "filesize": len(data),
        "checksum": f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}",
        "index": index_of(path).name,
    }


def index_of(tar: Path) -> Path:
    return tar.with_name(tar.name.removesuffix(".tar") + ".idx.parquet")


def write_dataset(folder: Path, shards: Sequence[Sequence[Row]]) -> Path:
    """A dataset whose sidecars agree with its tars, whatever these hold."""
    folder.mkdir(parents=True, exist_ok=True)
    told = []
    for number, rows in enumerate(shards):
        path = folder / f"talks-{number:06d}-000.tar"
        write_index(index_of(path), write_tar(path, rows))
        told.append(describe(path, len(rows)))
    written, left_out = sum(map(len, shards)), sum(REASONS.values())
    counts = {
        "read": written + left_out,
        "written": written,
        "quarantined": left_out,
        "reasons": REASONS,
    }
    manifest = {"format_version": 1, "wids_version": 1, "name": "talks", "kind": "vlm", "settings": {}}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "counts": counts, "shardlist": told}))
    lines = [
        {"file": "part.jsonl", "row": 9, "reason": reason} for reason, n in REASONS.items() for _ in range(n)
    ]
    (folder / "quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


ROWS = [row(number) for number in range(10)]
SHARDS = [ROWS[:4], ROWS[4:8], ROWS[8:]]
SECOND = "talks-000001-000.tar"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A sound dataset of three shards."""
    return write_dataset(tmp_path / "out", SHARDS)


def faults(folder: Path) -> list[tuple[str, What]]:
    """What is found: (shard, what)."""
    return [(finding.shard, finding.what) for finding in verify_shards(str(folder)).faults]


def detail(folder: Path, what: What) -> str:
    """What is said of it."""
    [said] = [finding.detail for finding in verify_shards(str(folder)).faults if finding.what is what]
    return said


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def member(path: Path, name: str) -> tarfile.TarInfo:
    with tarfile.open(path) as tar:
        return tar.getmember(name)


# Sound


def test_a_sound_dataset_has_no_finding(out: Path) -> None:
    seen: list[ShardFindings] = []
    findings = verify_shards(str(out), seen.append)

    assert findings.sound
    assert (findings.faults, findings.notes) == ((), ())
    assert (findings.num_shards, findings.num_samples) == (3, 10)
    assert findings.num_bytes == sum(path.stat().st_size for path in out.glob("*.tar"))
    assert findings == verify_shards(str(out / "manifest.json"))
    assert [done.shard for done in seen] == [f"talks-{number:06d}-000.tar" for number in range(3)]
    assert [done.num_samples for done in seen] == [4, 4, 2]
    assert all(done.kinds == {"vlm"} for done in seen)


def test_what_a_conversion_writes_has_no_finding(tmp_path: Path) -> None:
    for source in write_corpus(tmp_path / "sources").sources:
        out = tmp_path / source.name
        convert_source(source, str(out), settings=ShardSettings(shard_bytes=20_480, shard_samples=4))
        findings = verify_shards(str(out))

        assert (findings.faults, findings.notes) == ((), ())
        assert (
            findings.num_samples
            == sum(shard.samples for shard in read_manifest(findings.manifest).shards)
            > 0
        )


def test_shards_may_be_read_in_other_processes_and_in_any_order(out: Path) -> None:
    flip(out / SECOND, 600)
    edit_manifest(out, lambda manifest: manifest["shardlist"][2].update(nsamples=7))
    here = verify_shards(str(out))

    backwards = verify_shards(str(out), run=lambda work, shards: map(work, reversed(shards)))
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        elsewhere = verify_shards(str(out), run=pool.map)

    assert not here.sound
    assert backwards == elsewhere == here
    work = partial(verify_shard, folder=str(out))
    shard = read_manifest(str(out / "manifest.json")).shards[1]
    assert pickle.loads(pickle.dumps(work))(shard) == pickle.loads(pickle.dumps(work(shard)))


def test_memory_holds_a_member_and_not_a_shard(tmp_path: Path) -> None:
    image = IMAGE + bytes(1 << 20)
    media = ({**MEDIUM, "frames": 1, "bytes": len(image)},)
    rows = [Row(f"k-{i}", (("json", text([MEDIUM])), ("0.png", image)), media) for i in range(32)]
    out = write_dataset(tmp_path, [rows])

    tracemalloc.start()
    sound = verify_shards(str(out)).sound
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert sound
    assert (out / "talks-000000-000.tar").stat().st_size > 32 << 20
    assert peak < 8 << 20


# The bytes of a shard


def test_a_byte_of_a_picture_changed_is_found_by_the_checksum_alone(out: Path) -> None:
    picture = member(out / SECOND, "part=2Ejsonl-5.0.png")
    flip(out / SECOND, picture.offset_data + picture.size // 2)

    assert faults(out) == [(SECOND, What.CHECKSUM)]
    manifest = read_manifest(str(out / "manifest.json"))
    assert f"the manifest says {manifest.shards[1].checksum}" in detail(out, What.CHECKSUM)


def test_a_byte_of_a_header_changed_breaks_the_tar_where_it_lies(out: Path) -> None:
    place = member(out / SECOND, "part=2Ejsonl-6.json").offset
    flip(out / SECOND, place + 3)

    assert faults(out) == [(SECOND, What.TAR), (SECOND, What.CHECKSUM)]
    assert detail(out, What.TAR).startswith(f"no tar header at byte {place}")


def test_a_byte_behind_the_last_sample_is_found(out: Path) -> None:
    data = (out / SECOND).read_bytes()
    last = member(out / SECOND, "part=2Ejsonl-7.0.002.png")
    behind = last.offset_data + -(-last.size // 512) * 512
    for place in (behind + 512, behind + 1024 + 9, len(data) - 1):
        (out / SECOND).write_bytes(data)
        flip(out / SECOND, place)

        assert set(faults(out)) == {(SECOND, What.TAR), (SECOND, What.CHECKSUM)}


def test_what_is_put_behind_a_tar_is_found_even_if_the_manifest_agrees(out: Path) -> None:
    whole = (out / SECOND).read_bytes()
    for more in (b"garbage", b"\0" * 512 + b"x", whole):
        (out / SECOND).write_bytes(whole + more)
        edit_manifest(out, lambda manifest: manifest["shardlist"].__setitem__(1, describe(out / SECOND, 4)))

        assert faults(out) == [(SECOND, What.TAR)]


def test_a_shard_that_was_cut_is_found_with_its_size(out: Path) -> None:
    whole = (out / SECOND).read_bytes()
    (out / SECOND).write_bytes(whole[: len(whole) // 2])

    assert faults(out) == [(SECOND, What.TAR), (SECOND, What.SIZE), (SECOND, What.CHECKSUM)]
    assert detail(out, What.SIZE) == f"{len(whole) // 2} bytes, the manifest says {len(whole)}"
    assert "cut short" in detail(out, What.TAR)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 10_239), cut=st.booleans())
def test_no_byte_is_changed_or_cut_off_unseen(out: Path, place: int, cut: bool) -> None:
    write_dataset(out, SHARDS)
    path = out / SECOND
    place %= path.stat().st_size
    if cut:
        path.write_bytes(path.read_bytes()[:place])
    else:
        flip(path, place)

    found = faults(out)

    assert (SECOND, What.CHECKSUM) in found
    assert ((SECOND, What.SIZE) in found) == cut
    assert {shard for shard, _ in found} == {SECOND}


def test_a_shard_that_is_not_there_is_found(out: Path) -> None:
    (out / SECOND).unlink()

    assert faults(out) == [(SECOND, What.MISSING)]


def test_a_folder_in_place_of_a_shard_is_found(out: Path) -> None:
    (out / SECOND).unlink()
    (out / SECOND).mkdir()

    assert faults(out) == [(SECOND, What.UNREADABLE)]


def test_a_compressed_shard_is_found(out: Path) -> None:
    (out / SECOND).write_bytes(gzip.compress((out / SECOND).read_bytes()))

    assert (SECOND, What.TAR) in faults(out)
    assert "compressed with gzip" in detail(out, What.TAR)


def test_two_shards_that_changed_places_are_both_found(out: Path) -> None:
    first = out / "talks-000000-000.tar"
    held = first.read_bytes()
    (out / SECOND).replace(first)
    (out / SECOND).write_bytes(held)

    found = faults(out)

    for shard in (first.name, SECOND):
        assert (shard, What.CHECKSUM) in found
        assert (shard, What.INDEX) in found
    assert detail_of(out, SECOND, What.INDEX).startswith("row 0: key is 'part=2Ejsonl-4', in the tar it is")


def detail_of(folder: Path, shard: str, what: What) -> str:
    [said] = [
        finding.detail
        for finding in verify_shards(str(folder)).faults
        if (finding.shard, finding.what) == (shard, what)
    ]
    return said


# Samples


def with_second(tmp_path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    """A dataset in which the sample with one image has other members; its sidecars agree with them."""
    changed = replace(ROWS[1], members=tuple(members))
    return write_dataset(tmp_path / "out", [[ROWS[0], changed, *ROWS[2:4]], *SHARDS[1:]])


JSON, PICTURE = ROWS[1].members
NOT_OURS = {
    "JSON is not first": ([PICTURE, JSON], "its first member is '0.png'"),
    "no JSON": ([PICTURE], "its first member is '0.png'"),
    "broken JSON": ([("json", b"{"), PICTURE], "its JSON is broken"),
    "JSON is a list": ([("json", b"[]"), PICTURE], "its JSON is list"),
    "no header": ([("json", b"{}"), PICTURE], "it is of kind None"),
    "a header of another tool": ([("json", b'{"_bagel": 1}'), PICTURE], "'_bagel' is int"),
    "an unknown kind": ([("json", text([MEDIUM], "audio")), PICTURE], "it is of kind 'audio'"),
    "no media in the header": ([("json", text([])), PICTURE], "speaks of the media [], and it has 1"),
    "the image is missing": ([JSON], "and it has 0"),
    "an image more": ([JSON, PICTURE, ("1.png", IMAGE)], "and it has 2"),
    "images out of order": (
        [("json", text([MEDIUM] * 2)), ("1.png", IMAGE), ("0.png", IMAGE)],
        "its members are json, 1.png, 0.png",
    ),
    "another extension": ([JSON, ("0.jpg", IMAGE)], "its members are 0.jpg"),
    "a frame for an image": ([JSON, ("0.000.png", IMAGE)], "its members are 0.000.png"),
    "a size that is none": ([("json", text([{**MEDIUM, "width": "12"}])), PICTURE], "medium 0: {"),
    "an image twice": ([JSON, PICTURE, PICTURE], "its members are"),
    "something else": ([JSON, PICTURE, ("txt", b"a caption")], "its members are json, 0.png, txt"),
}


@pytest.mark.parametrize(("members", "message"), NOT_OURS.values(), ids=NOT_OURS)
def test_a_sample_that_is_not_as_the_format_has_it_is_found_by_its_key(
    tmp_path: Path, members: list[tuple[str, bytes]], message: str
) -> None:
    found = verify_shards(str(with_second(tmp_path, members))).faults

    assert [(finding.shard, finding.what) for finding in found] == [("talks-000000-000.tar", What.SAMPLE)]
    assert found[0].detail.startswith("sample 1, 'part=2Ejsonl-1': ")
    assert message in found[0].detail


def test_a_member_that_is_of_no_sample_is_found(tmp_path: Path) -> None:
    stray = Row("README", (("", b"text"),), ())
    out = write_dataset(tmp_path / "out", [[*ROWS[:4], stray]])

    assert faults(out) == [("talks-000000-000.tar", What.SAMPLE)]


def test_many_samples_that_are_wrong_are_one_finding_with_their_number(tmp_path: Path) -> None:
    rows = [replace(sample, members=(("json", b"{}"), *sample.members[1:])) for sample in ROWS[:4]]
    out = write_dataset(tmp_path / "out", [rows])

    assert detail(out, What.SAMPLE).endswith("; and 3 more")


def test_a_sample_of_another_kind_than_the_manifest_says_is_found(tmp_path: Path) -> None:
    members = (("json", text([MEDIUM], "t2i")), PICTURE)
    out = with_second(tmp_path, members)

    assert faults(out) == [("talks-000000-000.tar", What.SAMPLE)]
    assert detail(out, What.SAMPLE) == "samples of kind t2i in a dataset of vlm"


# The index


def change_index(out: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    path = index_of(out / SECOND)
    rows = pq.read_table(path).to_pylist()
    change(rows)
    write_index(path, rows)


WRONG_INDEXES: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "key": (
        lambda rows: rows[2].update(key="other"),
        "row 2: key is 'other', in the tar it is 'part=2Ejsonl-6'",
    ),
    "offset": (lambda rows: rows[1].update(offset=512), "row 1: offset is 512, in the tar it is "),
    "length": (lambda rows: rows[3].update(length=1), "row 3: length is 1, in the tar it is "),
    "width": (
        lambda rows: rows[1]["media"][0].update(width=13),
        "row 1: media is [{'ext': 'png', 'width': 13",
    ),
    "bytes": (lambda rows: rows[3]["media"][0].update(bytes=0), "row 3: media is "),
    "media": (lambda rows: rows[2]["media"].pop(), "row 2: media is "),
    "order": (lambda rows: rows.reverse(), "row 0: key is 'part=2Ejsonl-7'"),
    "a row less": (lambda rows: rows.pop(), "row 3 is not there, for sample 'part=2Ejsonl-7'"),
    "a row more": (
        lambda rows: rows.append({**rows[0], "key": "more"}),
        "row 4, 'more', and what follows it have no sample",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG_INDEXES.values(), ids=WRONG_INDEXES)
def test_an_index_that_says_something_else_than_the_tar_is_found(
    out: Path, change: Callable[[list[dict[str, Any]]], Any], message: str
) -> None:
    change_index(out, change)

    assert faults(out) == [(SECOND, What.INDEX)]
    assert detail(out, What.INDEX).startswith(message)


def test_an_index_that_is_gone_cut_or_something_else_is_found(out: Path) -> None:
    path = index_of(out / SECOND)
    whole = path.read_bytes()
    other = io.BytesIO()
    pq.write_table(pa.table({"name": ["a"] * 4}), other)
    for data in (whole[:-1], whole[: len(whole) // 2], b"", b"no parquet", other.getvalue()):
        path.write_bytes(data)
        assert faults(out) == [(SECOND, What.INDEX)]
    path.unlink()
    assert faults(out) == [(SECOND, What.INDEX)]
    edit_manifest(out, lambda manifest: manifest["shardlist"][1].pop("index"))
    assert faults(out) == [(SECOND, What.INDEX)]
    assert "the manifest names none" in detail(out, What.INDEX)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 5000))
def test_a_byte_of_an_index_changed_is_a_finding_or_changes_nothing(out: Path, place: int) -> None:
    write_dataset(out, SHARDS)
    path = index_of(out / SECOND)
    before = pq.read_table(path).to_pylist()
    flip(path, place % path.stat().st_size)

    found = faults(out)

    assert found in ([], [(SECOND, What.INDEX)])
    if not found:
        assert pq.read_table(path).to_pylist() == before


# All shards together


def test_a_key_that_two_shards_have_is_found_in_the_second(tmp_path: Path) -> None:
    out = write_dataset(tmp_path / "out", [ROWS[:4], [*ROWS[4:6], ROWS[1], ROWS[2]], ROWS[8:]])

    assert faults(out) == [(SECOND, What.KEYS)]
    assert (
        detail(out, What.KEYS)
        == "key 'part=2Ejsonl-1' is that of an earlier sample in talks-000000-000.tar; and 1 more"
    )


def test_a_key_that_comes_twice_in_one_shard_is_found(tmp_path: Path) -> None:
    out = write_dataset(tmp_path / "out", [ROWS[:4], [*ROWS[4:6], ROWS[4]]])

    assert faults(out) == [(SECOND, What.KEYS)]
    assert detail(out, What.KEYS) == f"key 'part=2Ejsonl-4' is that of an earlier sample in {SECOND}"


def test_a_shard_that_the_manifest_names_twice_is_found_by_its_keys(out: Path) -> None:
    edit_manifest(out, lambda manifest: manifest["shardlist"].append(manifest["shardlist"][1]))

    assert (SECOND, What.KEYS) in faults(out)


COUNT_EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], set[tuple[str, What]]]] = {
    "read": (lambda m: m["counts"].update(read=99), {("manifest.json", What.COUNTS)}),
    "written": (lambda m: m["counts"].update(written=9), {("manifest.json", What.COUNTS)}),
    "quarantined": (lambda m: m["counts"].update(quarantined=4), {("manifest.json", What.COUNTS)}),
    "reasons": (
        lambda m: m["counts"]["reasons"].update(video=1),
        {("manifest.json", What.COUNTS), ("quarantine.jsonl", What.QUARANTINE)},
    ),
    "samples of a shard": (
        lambda m: m["shardlist"][1].update(nsamples=5),
        {(SECOND, What.SAMPLES), ("manifest.json", What.COUNTS)},
    ),
    "size of a shard": (lambda m: m["shardlist"][1].update(filesize=5), {(SECOND, What.SIZE)}),
    "no size": (lambda m: m["shardlist"][1].pop("filesize"), {(SECOND, What.SIZE)}),
    "checksum": (lambda m: m["shardlist"][1].update(checksum="xxh3_128:0"), {(SECOND, What.CHECKSUM)}),
    "no checksum": (lambda m: m["shardlist"][1].pop("checksum"), {(SECOND, What.CHECKSUM)}),
    "a shard less": (lambda m: m["shardlist"].pop(1), {("manifest.json", What.COUNTS)}),
}


@pytest.mark.parametrize(("change", "expected"), COUNT_EDITS.values(), ids=COUNT_EDITS)
def test_a_manifest_that_was_edited_is_found(
    out: Path, change: Callable[[dict[str, Any]], Any], expected: set[tuple[str, What]]
) -> None:
    edit_manifest(out, change)

    assert set(faults(out)) == expected


def test_the_sums_that_do_not_add_up_are_told(out: Path) -> None:
    edit_manifest(out, lambda manifest: manifest["counts"].update(read=99))

    assert detail(out, What.COUNTS) == "read is 99, written 10 + quarantined 3 is not"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"reason": "image_missing"}', '{"reason": "row_invalid"}'], "1 rows left out for image_missing"),
        (['{"reason": "video"}'] * 3, "0 rows left out for image_missing, the manifest says 2"),
        (['{"reason": "image_missing"}', "{"], "line 2 is no row left out: JSONDecodeError"),
        (["[]"], "line 1 is no row left out: TypeError"),
        (["{}"], "line 1 is no row left out: KeyError"),
        (None, "FileNotFoundError"),
    ],
    ids=["a row less", "other reasons", "broken", "a list", "no reason", "gone"],
)
def test_a_quarantine_that_does_not_agree_is_found(out: Path, lines: list[str] | None, message: str) -> None:
    path = out / "quarantine.jsonl"
    path.unlink()
    if lines is not None:
        path.write_text("".join(f"{line}\n" for line in lines))

    found = verify_shards(str(out)).faults

    assert {(finding.shard, finding.what) for finding in found} == {("quarantine.jsonl", What.QUARANTINE)}
    assert message in found[0].detail


# What is no fault


def test_tars_that_nobody_names_and_unfinished_files_are_notes(out: Path) -> None:
    (out / "talks-000009-000.tar").write_bytes((out / SECOND).read_bytes())
    (out / ".talks-000010-000.tar.partial-77").write_bytes(b"half")
    (out / "._talks-000001-000.tar").write_bytes(b"what macOS leaves")
    findings = verify_shards(str(out))

    assert findings.sound
    assert [(note.shard, note.what) for note in findings.notes] == [
        ("talks-000009-000.tar", What.STRAY),
        (".talks-000010-000.tar.partial-77", What.UNFINISHED),
    ]


def test_a_finding_reads_as_one_line() -> None:
    assert str(Finding("a.tar", What.SIZE, "1 bytes, the manifest says 2")) == (
        "a.tar: size: 1 bytes, the manifest says 2"
    )


# Where datasets are


def test_manifests_are_found_by_folder_file_and_dataset_info(out: Path) -> None:
    manifest = str(out / "manifest.json")
    info = {"g": {"a": {"shards": manifest}, "b": {"shards": str(out)}}}
    (out.parent / "dataset_info.yaml").write_text(yaml.safe_dump(info))

    assert find_manifests(str(out)) == find_manifests(manifest) == [manifest]
    assert find_manifests(str(out.parent)) == [manifest, manifest]
    assert find_manifests(str(out.parent / "dataset_info.yaml")) == [manifest, manifest]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"g": {"d": {"data_dir": "x"}}}, "g.d names no manifest"),
        ({"g": {"d": {"shards": "a-{000..003}.tar"}}}, "g.d names no manifest"),
        ({"g": ["d"]}, "g is list, not a mapping"),
    ],
)
def test_datasets_without_a_manifest_cannot_be_verified(
    tmp_path: Path, info: dict[str, Any], message: str
) -> None:
    (tmp_path / "info.yaml").write_text(yaml.safe_dump(info))

    with pytest.raises(ConfigError, match=message):
        find_manifests(str(tmp_path / "info.yaml"))


def test_a_folder_without_manifest_and_a_foreign_shard_list_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"shardlist": [{"url": "a.tar", "nsamples": 1}]}))

    with pytest.raises(ConfigError, match=r"no manifest\.json and no dataset_info\.yaml"):
        find_manifests(str(tmp_path))
    with pytest.raises(ConfigError, match="the manifest cannot be read"):
        verify_shards(str(tmp_path))
    with pytest.raises(ConfigError, match="was not written by `bagel-wds convert`"):
        verify_shards(str(tmp_path / "other.json"))


def test_a_dataset_info_is_followed_from_where_it_lies(tmp_path: Path) -> None:
    write_t2i(tmp_path / "in" / "a.parquet", [(encode_image(), captions(0))])
    convert_source(Source(kind="t2i", name="x", path=str(tmp_path / "in")), str(tmp_path / "data" / "x"))
    info = tmp_path / "data" / "dataset_info.yaml"
    info.write_text("t2i_pretrain: {a: {shards: x}, b: {shards: x/manifest.json}}\n")

    assert find_manifests(str(info)) == [str(tmp_path / "data" / "x" / "manifest.json")] * 2


@pytest.mark.parametrize("line", ['{"reason": null}', '{"reason": 3}'])
def test_a_reason_that_is_no_text_is_a_finding(tmp_path: Path, line: str) -> None:
    write_t2i(tmp_path / "in" / "a.parquet", [(encode_image(), captions(0)), (b"", captions(0))])
    convert_source(Source(kind="t2i", name="x", path=str(tmp_path / "in")), str(tmp_path / "out"))
    (tmp_path / "out" / "quarantine.jsonl").write_text(line + "\n")

    found = verify_shards(str(tmp_path / "out"))

    assert {finding.what for finding in found.faults} == {What.QUARANTINE}
