"""What goes wrong for people who convert: one test a case, through the whole conversion, read back by other tools."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds
from PIL import Image
from source_factory import captions, encode_image, talk, write_corpus, write_edit, write_jsonl, write_t2i

from bagel_wds.converters import ShardSettings, convert_source
from bagel_wds.sources import Source

if TYPE_CHECKING:
    from pathlib import Path


def members(out: Path) -> list[tuple[str, bytes]]:
    """Every member of a folder of shards in order, read with tarfile alone."""
    found = []
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            found += [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
@pytest.mark.parametrize("shuffle", [None, 1])
def test_c19_the_parts_of_a_sample_lie_together_with_its_json_first(
    tmp_path: Path, kind: str, shuffle: int | None
) -> None:
    source = getattr(write_corpus(tmp_path / "in"), kind)
    convert_source(source, str(tmp_path / "out"), settings=ShardSettings(shard_samples=3, shuffle=shuffle))

    names = [name for name, _ in members(tmp_path / "out")]

    keys = [name.partition(".")[0] for name in names]
    borders = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]]
    assert len(borders) == len(set(keys)) > 3
    for first, following in zip(borders, [*borders[1:], len(keys)], strict=True):
        fields = [name.partition(".")[2] for name in names[first:following]]
        assert fields[0] == "json"
        assert [int(field.partition(".")[0]) for field in fields[1:]] == list(range(len(fields) - 1))


def test_c20_ids_of_the_users_own_are_kept_and_no_part_of_a_key(tmp_path: Path) -> None:
    ids: list[Any] = ["v1.5 final", "22.0/1.1", "../x", "/abs", "x" * 300, "猫", "Cat", "cat", "", 7]
    rows = [{"id": name, "__key__": name, "conversations": talk()} for name in ids]
    write_jsonl(tmp_path / "v1.5 final/a..b.jsonl", rows)

    convert_source(Source(kind="vlm", name="x", path=str(tmp_path / "v1.5 final")), str(tmp_path / "out"))

    read = list(wds.WebDataset(str(tmp_path / "out" / "x-000000-000.tar"), shardshuffle=False))
    assert [json.loads(sample["json"])["id"] for sample in read] == ids
    assert [sample["__key__"] for sample in read] == [f"a=2E=2Eb=2Ejsonl-{i}" for i in range(len(ids))]
    assert all(sample.keys() == {"__key__", "__url__", "__local_path__", "json"} for sample in read)


def test_c21_rows_with_2_3_1_and_12_images_round_trip_in_order(tmp_path: Path) -> None:
    counts = [2, 3, 1, 12]
    images: list[list[bytes | None] | None] = [
        [encode_image(seed=100 * i + j) for j in range(count)] for i, count in enumerate(counts)
    ]
    steps = [[[f"step {j}"] for j in range(max(1, count - 1))] for count in counts]
    write_edit(tmp_path / "a.parquet", list(zip(images, steps, strict=True)), group_rows=4)

    convert_source(Source(kind="edit", name="x", path=str(tmp_path / "a.parquet")), str(tmp_path / "out"))

    read: dict[str, list[bytes]] = {}
    for name, data in members(tmp_path / "out"):
        key, _, field = name.partition(".")
        if field != "json":
            assert field == f"{len(read.setdefault(key, []))}.png"
            read[key].append(data)
    # The row with one image is no edit; it is listed.
    assert list(read.values()) == [images[0], images[1], images[3]]
    entry = json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())
    assert (entry["row"], entry["reason"]) == (2, "too_few_images")


def test_c26_bytes_are_those_of_the_source_whatever_is_looked_at(tmp_path: Path) -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    alpha = io.BytesIO()
    Image.fromarray(np.arange(256, dtype=np.uint8).reshape(8, 8, 4)).save(alpha, "PNG")
    originals = [
        encode_image(codec="JPEG", quality=95, exif=exif, icc_profile=b"profile"),
        alpha.getvalue(),
        encode_image(codec="WEBP", quality=40),
        encode_image(codec="WEBP", lossless=True),
    ]
    write_t2i(tmp_path / "a.parquet", [(data, captions(i)) for i, data in enumerate(originals)])

    for settings in (ShardSettings(), ShardSettings(shuffle=2), ShardSettings(max_side=12)):
        out = tmp_path / f"out-{settings.shuffle}-{settings.max_side}"
        convert_source(
            Source(kind="t2i", name="x", path=str(tmp_path / "a.parquet")), str(out), settings=settings
        )
        written = [data for name, data in members(out) if not name.endswith(".json")]
        assert sorted(written) == sorted(originals)


@pytest.mark.slow
def test_c28_a_small_file_that_decodes_to_gigabytes_is_converted_in_bounded_memory(tmp_path: Path) -> None:
    # 600 rows of 2 images of 2 MiB, valid PNGs with constant bytes behind their end, in one row group.
    image = encode_image((8, 8))
    padded = image + bytes((2 << 20) - len(image))
    row = pa.array([[padded, padded]], pa.list_(pa.binary()))
    table = pa.table(
        {"image_list": pa.chunked_array([row] * 600), "instruction_list": pa.array([[["do"]]] * 600)}
    )
    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(table, path, compression="zstd", row_group_size=600)
    assert path.stat().st_size < 1 << 20
    assert pq.ParquetFile(path).num_row_groups == 1

    # The peak of a child starts at that of its parent, so a small process stands in between.
    code = (
        "import os, resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-m', 'bagel_wds.converters', 'edit', {str(path)!r}, {str(tmp_path / 'out')!r}, "
        "'--processes', '1', '--verify', 'none'], check=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert int(done.stdout.splitlines()[-1]) < 1.5 * 2**20
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["written"] == 600
    assert sum(shard["filesize"] for shard in manifest["shardlist"]) > 600 * 2 * (2 << 20)
    for tar in (tmp_path / "out").glob("*.tar"):
        tar.unlink()
