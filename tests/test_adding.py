"""Adding to a dataset: new files, and rows that were left out; and how many rows may be."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from kill_points import Conversion, count_events, kill_at
from source_factory import captions, encode_image, talk, write_jsonl, write_t2i

from bagel_wds.converters import Limit, Mode, ShardSettings, convert_source
from bagel_wds.converters.quarantine import parse_limit
from bagel_wds.errors import ConfigError, QuarantineLimitError
from bagel_wds.manifest import read_manifest
from bagel_wds.sources import Placeholders, Source

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ShardSettings(shard_samples=4)


def write_file(folder: Path, name: str, first: int, num_rows: int = 10) -> None:
    """A t2i file whose every fifth image is broken."""
    rows = [
        (b"no image" if i % 5 == 2 else encode_image(seed=i), captions(i))
        for i in range(first, first + num_rows)
    ]
    write_t2i(folder / name, rows, group_rows=5)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def keys(out: Path) -> list[str]:
    """The keys of a dataset in the order of its manifest, read with tarfile alone."""
    found: list[str] = []
    for shard in json.loads((out / "manifest.json").read_bytes())["shardlist"]:
        with tarfile.open(out / shard["url"]) as tar:
            found += [name.removesuffix(".json") for name in tar.getnames() if name.endswith(".json")]
    return found


def quarantine(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


@pytest.fixture
def grown(tmp_path: Path) -> tuple[Source, Path, dict[str, bytes]]:
    """A source, the dataset that was made of its first file, and what lay there; a second file has come since."""
    write_file(tmp_path / "in", "b.parquet", 0)
    source = Source(kind="t2i", name="x", path=str(tmp_path / "in"))
    convert_source(source, str(tmp_path / "out"), settings=SETTINGS)
    before = contents(tmp_path / "out")
    write_file(tmp_path / "in", "a.parquet", 100)
    return source, tmp_path / "out", before


# New files


@pytest.mark.parametrize("shuffle", [None, 5])
def test_new_files_are_appended_and_what_was_there_is_not_touched(
    tmp_path: Path, shuffle: int | None
) -> None:
    settings = replace(SETTINGS, shuffle=shuffle)
    write_file(tmp_path / "in", "b.parquet", 0)
    source = Source(kind="t2i", name="x", path=str(tmp_path / "in"))
    out = tmp_path / "out"
    convert_source(source, str(out), settings=settings)
    before, first = contents(out), keys(out)
    write_file(tmp_path / "in", "a.parquet", 100, num_rows=15)

    summary = convert_source(source, str(out), settings=settings, mode=Mode.APPEND, processes=2)

    after = contents(out)
    rewritten = {"manifest.json", "quarantine.jsonl", "conversion.json"}
    assert {name: data for name, data in before.items() if name not in rewritten}.items() <= after.items()
    assert keys(out)[: len(first)] == first
    assert len(keys(out)) == len(set(keys(out))) == 20
    assert (summary.counts.read, summary.counts.written) == (25, 20)
    assert summary.counts.reasons == {"image_unreadable": 5}
    assert [row["file"] for row in quarantine(out)] == ["b.parquet"] * 2 + ["a.parquet"] * 3
    assert (
        len({shard.url for shard in read_manifest(str(out / "manifest.json")).shards}) == summary.num_shards
    )


def test_appending_nothing_changes_nothing(grown: tuple[Source, Path, dict[str, bytes]]) -> None:
    source, out, _ = grown
    convert_source(source, str(out), settings=SETTINGS, mode=Mode.APPEND)
    before = contents(out)

    again = convert_source(source, str(out), settings=SETTINGS, mode=Mode.APPEND)
    plainly = convert_source(source, str(out), settings=SETTINGS)

    assert again.was_complete
    assert plainly.was_complete
    assert contents(out) == before


def test_new_files_may_come_alone(grown: tuple[Source, Path, dict[str, bytes]], tmp_path: Path) -> None:
    source, out, _ = grown
    (tmp_path / "in" / "b.parquet").unlink()

    summary = convert_source(source, str(out), settings=SETTINGS, mode=Mode.APPEND)

    assert summary.counts.read == 20


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.APPEND, Mode.RETRY])
def test_adding_that_is_killed_at_any_point_ends_as_if_it_had_not_been(tmp_path: Path, mode: Mode) -> None:
    source, settings = damaged(tmp_path) if mode is Mode.RETRY else appendable(tmp_path)
    unbroken = tmp_path / "unbroken"
    shutil.copytree(tmp_path / "out", unbroken)
    convert_source(source, str(unbroken), settings=settings, mode=mode)
    expected = contents(unbroken)
    counted = tmp_path / "counted"
    shutil.copytree(tmp_path / "out", counted)
    total = count_events(str(counted), Conversion(source, str(counted), settings, mode=mode))

    for point in sorted({1 + i * (total - 1) // 9 for i in range(10)}):
        out = tmp_path / f"out-{point}"
        shutil.copytree(tmp_path / "out", out)
        convert = Conversion(source, str(out), settings, mode=mode)
        assert kill_at(point, str(out), convert)
        # Whenever it is killed, readers find a whole dataset.
        assert len(keys(out)) == sum(
            shard.samples for shard in read_manifest(str(out / "manifest.json")).shards
        )
        convert()
        assert contents(out) == expected, f"killed at event {point} of {total}"
        assert not (out / ".conversion").exists()


def appendable(tmp_path: Path) -> tuple[Source, ShardSettings]:
    write_file(tmp_path / "in", "b.parquet", 0)
    source = Source(kind="t2i", name="x", path=str(tmp_path / "in"))
    convert_source(source, str(tmp_path / "out"), settings=SETTINGS)
    write_file(tmp_path / "in", "a.parquet", 100)
    return source, SETTINGS


def damaged(tmp_path: Path) -> tuple[Source, ShardSettings]:
    """A conversation dataset of which some images were not there, and are now; one still is not."""
    rows = [{"image": f"{i}.png", "conversations": talk("<image> what?", f"answer {i}")} for i in range(20)]
    write_jsonl(tmp_path / "in" / "a.jsonl", rows)
    for i in range(20):
        if i % 4:
            (tmp_path / "in" / f"{i}.png").write_bytes(encode_image(seed=i))
    source = Source(kind="vlm", name="x", path=str(tmp_path / "in" / "a.jsonl"))
    convert_source(source, str(tmp_path / "out"), settings=SETTINGS)
    for i in (0, 4, 8, 16):
        (tmp_path / "in" / f"{i}.png").write_bytes(encode_image(seed=i))
    return source, SETTINGS


def test_an_unfinished_append_goes_on_as_an_append(
    grown: tuple[Source, Path, dict[str, bytes]],
) -> None:
    source, out, _ = grown
    assert kill_at(50, str(out), Conversion(source, str(out), SETTINGS, mode=Mode.APPEND))

    with pytest.raises(ConfigError, match="pass --append to go on with that"):
        convert_source(source, str(out), settings=SETTINGS)
    with pytest.raises(ConfigError, match="go on with it first, by --append"):
        convert_source(source, str(out), settings=SETTINGS, mode=Mode.RETRY)

    assert convert_source(source, str(out), settings=SETTINGS, mode=Mode.APPEND).counts.read == 20


def test_what_cannot_be_appended_is_refused(
    grown: tuple[Source, Path, dict[str, bytes]], tmp_path: Path
) -> None:
    source, out, before = grown
    with pytest.raises(ConfigError, match=r"has 1 file that it does not hold.*a\.parquet; pass --append"):
        convert_source(source, str(out), settings=SETTINGS)
    with pytest.raises(ConfigError, match="shard_samples=4, this is shard_samples=5"):
        convert_source(source, str(out), settings=ShardSettings(shard_samples=5), mode=Mode.APPEND)
    with pytest.raises(ConfigError, match="num_used_data=5 are taken cannot be appended to"):
        convert_source(replace(source, max_units=5), str(out), settings=SETTINGS, mode=Mode.APPEND)
    with pytest.raises(ConfigError, match="no conversion to go on with"):
        convert_source(source, str(tmp_path / "new"), settings=SETTINGS, mode=Mode.APPEND)
    write_file(tmp_path / "in", "b.parquet", 0, num_rows=11)
    with pytest.raises(ConfigError, match=r"b\.parquet has changed"):
        convert_source(source, str(out), settings=SETTINGS, mode=Mode.APPEND)

    assert contents(out) == before


# Rows that were left out


def test_quarantined_rows_are_retried_alone(tmp_path: Path) -> None:
    source, settings = damaged(tmp_path)
    out = tmp_path / "out"
    before, first = contents(out), keys(out)
    assert [row["row"] for row in quarantine(out)] == [0, 4, 8, 12, 16]

    summary = convert_source(source, str(out), settings=settings, mode=Mode.RETRY)

    assert keys(out) == [*first, *(f"a=2Ejsonl-{i}" for i in (0, 4, 8, 16))]
    assert [(row["row"], row["reason"]) for row in quarantine(out)] == [(12, "image_missing")]
    assert (summary.counts.read, summary.counts.written) == (20, 19)
    assert summary.counts.reasons == {"image_missing": 1}
    shards = {name: data for name, data in before.items() if name.endswith(".tar")}
    assert shards.items() <= contents(out).items()


def test_a_retry_may_judge_otherwise(tmp_path: Path) -> None:
    rows = [
        {"image": "a.png", "conversations": talk("what?", f"answer {i}")}
        if i % 2
        else {"conversations": talk()}
        for i in range(6)
    ]
    write_jsonl(tmp_path / "in" / "a.jsonl", rows)
    (tmp_path / "in" / "a.png").write_bytes(encode_image())
    source = Source(kind="vlm", name="x", path=str(tmp_path / "in" / "a.jsonl"))
    first = convert_source(source, str(tmp_path / "out"), settings=SETTINGS)

    lenient = replace(source, placeholders=Placeholders.REPAIR)
    second = convert_source(lenient, str(tmp_path / "out"), settings=SETTINGS, mode=Mode.RETRY)
    third = convert_source(lenient, str(tmp_path / "out"), settings=SETTINGS, mode=Mode.RETRY)

    assert first.counts.reasons == {"placeholder_mismatch": 3}
    assert (second.counts.written, second.counts.reasons, second.counts.repaired) == (
        6,
        {},
        {"placeholders": 3},
    )
    assert third.was_complete
    assert third.counts == second.counts


def test_parquet_rows_are_retried_too(tmp_path: Path) -> None:
    # The image is not there yet, its row says where it will be.
    import pyarrow as pa
    from source_factory import write_parquet

    images = [
        {"bytes": None if i in (2, 3, 9) else encode_image(seed=i), "path": f"{i}.png"} for i in range(12)
    ]
    table = pa.table(
        {
            "image": pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            "captions": [captions(i) for i in range(12)],
        }
    )
    write_parquet(tmp_path / "in" / "a.parquet", table, group_rows=4)
    source = Source(kind="t2i", name="x", path=str(tmp_path / "in"), media_root=str(tmp_path))
    out = tmp_path / "out"
    convert_source(source, str(out), settings=SETTINGS)
    for i in (3, 9):
        (tmp_path / f"{i}.png").write_bytes(encode_image(seed=i))

    summary = convert_source(source, str(out), settings=SETTINGS, mode=Mode.RETRY)

    assert [(row["row_group"], row["row"]) for row in quarantine(out)] == [(0, 2)]
    assert summary.counts.written == 11
    assert keys(out)[-2:] == ["a=2Eparquet-0-3", "a=2Eparquet-2-1"]


def test_a_retry_of_rows_of_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    source, settings = damaged(tmp_path)
    with (tmp_path / "in" / "a.jsonl").open("a") as file:
        file.write("{}\n")

    with pytest.raises(ConfigError, match=r"a\.jsonl has changed"):
        convert_source(source, str(tmp_path / "out"), settings=settings, mode=Mode.RETRY)


# How many may be left out


def bad_source(tmp_path: Path, num_rows: int, num_bad: int) -> Source:
    rows = [{"conversations": talk() if i >= num_bad else []} for i in range(num_rows)]
    write_jsonl(tmp_path / "in" / "a.jsonl", rows)
    return Source(kind="vlm", name="x", path=str(tmp_path / "in" / "a.jsonl"))


@pytest.mark.parametrize("limit", [Limit(percent=10), Limit(rows=10)])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_conversion_that_leaves_out_too_much_is_stopped_with_the_reasons(
    tmp_path: Path, limit: Limit, processes: int
) -> None:
    source = bad_source(tmp_path, 100, 11)
    out = tmp_path / "out"

    with pytest.raises(QuarantineLimitError) as stopped:
        convert_source(source, str(out), settings=SETTINGS, processes=processes, limit=limit)

    message = str(stopped.value)
    assert "11 of 100 rows were left out so far" in message
    assert f"allows {limit}" in message
    assert "conversations_invalid 11 (for example a.jsonl row " in message
    assert not (out / "manifest.json").exists()
    # What is finished is kept: with a higher limit the rest is done.
    assert list(out.glob("*.tar")) or processes == 1
    summary = convert_source(source, str(out), settings=SETTINGS, limit=Limit(rows=11))
    assert Counter(summary.counts.reasons) == {"conversations_invalid": 11}


def test_as_many_as_are_allowed_do_no_harm(tmp_path: Path) -> None:
    source = bad_source(tmp_path, 100, 10)

    for limit in (Limit(percent=10), Limit(rows=10), None):
        out = tmp_path / f"out-{limit}"
        assert convert_source(source, str(out), limit=limit).counts.quarantined == 10


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("1%", Limit(percent=1.0)),
        (" 0.5 % ", Limit(percent=0.5)),
        ("0", Limit(rows=0)),
        ("100", Limit(rows=100)),
    ],
)
def test_limits_are_read_as_people_write_them(text: str, limit: Limit) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", ["", "%", "-1", "1.5", "101%", "-1%", "nan%", "many"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no limit; write a share"):
        parse_limit(text)


def test_a_quarantine_is_one_json_object_a_line(tmp_path: Path) -> None:
    source = bad_source(tmp_path, 3, 2)
    convert_source(source, str(tmp_path / "out"))

    rows = [orjson.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").open("rb")]

    assert [(row["file"], row["row"], row["reason"]) for row in rows] == [
        ("a.jsonl", 0, "conversations_invalid"),
        ("a.jsonl", 1, "conversations_invalid"),
    ]


def test_images_that_come_after_a_stop_are_taken_by_the_next_run(tmp_path: Path) -> None:
    rows = [{"image": f"{i}.png", "conversations": talk("<image>", "a")} for i in range(24)]
    write_jsonl(tmp_path / "in" / "a.jsonl", rows)
    for i in range(24):
        if i not in (5, 13):
            (tmp_path / "in" / f"{i}.png").write_bytes(encode_image(seed=i))
    source = Source(kind="vlm", name="x", path=str(tmp_path / "in" / "a.jsonl"))

    with pytest.raises(QuarantineLimitError):
        convert_source(source, str(tmp_path / "out"), settings=SETTINGS, limit=Limit(rows=1))
    for i in (5, 13):
        (tmp_path / "in" / f"{i}.png").write_bytes(encode_image(seed=i))
    summary = convert_source(source, str(tmp_path / "out"), settings=SETTINGS, limit=Limit(rows=1))

    assert summary.counts.written == 24
    convert_source(source, str(tmp_path / "fresh"), settings=SETTINGS)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_share_is_one_of_the_whole_dataset(tmp_path: Path) -> None:
    source, settings = damaged(tmp_path)
    limit = Limit(percent=5)

    # One of the five rows that are tried again is left out, which is one of 20.
    summary = convert_source(source, str(tmp_path / "out"), settings=settings, mode=Mode.RETRY, limit=limit)
    assert summary.counts.quarantined == 1

    write_jsonl(tmp_path / "in" / "b.jsonl", [{}] + [{"conversations": talk()}] * 19)
    both = replace(source, path=(str(tmp_path / "in" / "a.jsonl"), str(tmp_path / "in" / "b.jsonl")))
    # One more of 20 more rows.
    summary = convert_source(both, str(tmp_path / "out"), settings=settings, mode=Mode.APPEND, limit=limit)
    assert (summary.counts.read, summary.counts.quarantined) == (40, 2)


def test_a_retry_that_gains_nothing_leaves_no_trace(tmp_path: Path) -> None:
    source, settings = damaged(tmp_path)
    out = tmp_path / "out"
    convert_source(source, str(out), settings=settings, mode=Mode.RETRY)
    before = contents(out)

    again = convert_source(source, str(out), settings=settings, mode=Mode.RETRY)

    assert again.counts.quarantined == 1
    assert contents(out) == before


def test_a_file_that_is_held_under_another_name_is_not_appended(tmp_path: Path) -> None:
    write_file(tmp_path / "in" / "2024", "part-0.parquet", 0)
    old = Source(kind="t2i", name="x", path=str(tmp_path / "in" / "2024"))
    out = tmp_path / "out"
    convert_source(old, str(out), settings=SETTINGS)
    before = contents(out)
    write_file(tmp_path / "in" / "2025", "part-0.parquet", 100)

    both = replace(old, path=(str(tmp_path / "in" / "2024"), str(tmp_path / "in" / "2025")))
    with pytest.raises(ConfigError, match=r"holds 2024/part-0\.parquet already, as part-0\.parquet"):
        convert_source(both, str(out), settings=SETTINGS, mode=Mode.APPEND)
    other = replace(old, path=str(tmp_path / "in" / "2025"))
    with pytest.raises(ConfigError, match=r"part-0\.parquet has changed, or is another file"):
        convert_source(other, str(out), settings=SETTINGS, mode=Mode.APPEND)

    assert contents(out) == before


def test_a_complete_dataset_that_lost_a_shard_is_not_called_complete(tmp_path: Path) -> None:
    write_file(tmp_path / "in", "a.parquet", 0)
    source = Source(kind="t2i", name="x", path=str(tmp_path / "in"))
    out = tmp_path / "out"
    convert_source(source, str(out), settings=SETTINGS)
    lost = sorted(out.glob("*.tar"))[1]
    lost.unlink()

    with pytest.raises(ConfigError, match=rf"but for {lost.name}, .* copy it back, or pass --overwrite"):
        convert_source(source, str(out), settings=SETTINGS)
