"""A conversion that was stopped, in whatever way and wherever: run again, it ends as if it had not been."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest
from kill_points import Conversion, count_events, kill_at, kill_once_there_are, run_with_small_files
from source_factory import captions, encode_image, talk, write_corpus, write_jsonl, write_t2i

from bagel_wds.converters import Mode, ShardSettings, convert_source
from bagel_wds.errors import ConfigError, ShardError
from bagel_wds.sources import Source, Verify

if TYPE_CHECKING:
    from pathlib import Path

    from bagel_wds.converters.progress import Step

EIGHT_A_SHARD = ShardSettings(shard_samples=8)


def digests(folder: Path) -> dict[str, str]:
    """The checksum of every file under a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def inodes(folder: Path) -> dict[str, int]:
    """Which file lies under each shard's name: one that is written again is another file."""
    return {path.name: path.stat().st_ino for path in folder.glob("*.tar")}


def write_rows(path: Path, num_rows: int = 50, group_rows: int = 25) -> Source:
    """A t2i source, some of whose rows cannot be used."""
    rows = [(b"no image" if i % 11 == 5 else encode_image(seed=i), captions(i)) for i in range(num_rows)]
    write_t2i(path / "a.parquet", rows, group_rows=group_rows)
    return Source(kind="t2i", name="x", path=str(path))


def unbroken(source: Source, out: Path, settings: ShardSettings) -> dict[str, str]:
    convert_source(source, str(out), settings=settings)
    return digests(out)


# Killed


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [EIGHT_A_SHARD, replace(EIGHT_A_SHARD, shuffle=3)], ids=["plain", "shuffled"]
)
def test_c24_c25_a_conversion_killed_at_any_point_ends_as_an_unbroken_one(
    tmp_path: Path, settings: ShardSettings
) -> None:
    # Killed right before each of 20 openings, renamings or removals in the output, spread evenly over all of them.
    source = write_rows(tmp_path / "in")
    expected = unbroken(source, tmp_path / "unbroken", settings)
    total = count_events(str(tmp_path / "counted"), Conversion(source, str(tmp_path / "counted"), settings))
    points = sorted({1 + i * (total - 1) // 19 for i in range(20)})
    assert len(points) == 20

    for point in points:
        out = tmp_path / f"out-{point}"
        convert = Conversion(source, str(out), settings)
        assert kill_at(point, str(out), convert), f"it ended before event {point} of {total}"
        partly = digests(out)
        finished = {
            name: digest for name, digest in partly.items() if name.endswith(".tar") and "/" not in name
        }
        assert {name: digest for name, digest in finished.items() if not name.startswith(".")}.items() <= (
            expected.items()
        ), "a partial shard under a final name"
        convert()
        assert digests(out) == expected, f"killed at event {point} of {total}"


def test_a_conversion_killed_again_and_again_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "in").vlm
    settings = ShardSettings(shard_samples=2)
    expected = unbroken(source, tmp_path / "unbroken", settings)
    convert = Conversion(source, str(tmp_path / "out"), settings)
    points = iter(range(10, 1000, 7))

    # Each run gets a little further than the one before.
    kills = sum(1 for _ in takewhile(lambda point: kill_at(point, convert.out, convert), points))

    assert kills >= 5
    assert digests(tmp_path / "out") == expected


@pytest.mark.slow
def test_two_processes_killed_at_any_time_end_as_an_unbroken_run(tmp_path: Path) -> None:
    rows = [(encode_image(seed=i) + bytes(100_000), captions(i)) for i in range(120)]
    write_t2i(tmp_path / "in" / "a.parquet", rows, group_rows=10)
    source = Source(kind="t2i", name="x", path=str(tmp_path / "in"))
    settings = ShardSettings(shard_bytes=400_000)
    expected = unbroken(source, tmp_path / "unbroken", settings)
    rng = random.Random(0)
    killed = 0

    for trial in range(10):
        out = tmp_path / f"out-{trial}"
        convert = Conversion(source, str(out), settings, processes=2)
        killed += kill_once_there_are(rng.randrange(20), out, convert)
        names = (
            {name for name in digests(out) if name.endswith(".tar") and not name.startswith(".")}
            if out.exists()
            else set()
        )
        assert names <= expected.keys()
        convert_source(source, str(out), settings=settings, processes=2)
        assert digests(out) == expected

    assert killed == 10


def test_the_command_killed_by_the_system_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = [(encode_image(seed=i) + bytes(300_000), captions(i)) for i in range(160)]
    write_t2i(tmp_path / "in" / "a.parquet", rows, group_rows=8)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bagel_wds.converters", "t2i", str(tmp_path / "in"), str(out)]
    command += ["--processes", "2", "--shard-size", "3MB"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list(out.glob("*.tar"))) < 5:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    marked = {
        shard["name"]
        for path in (out / ".conversion").glob("[0-9]*.json")
        for shard in json.loads(path.read_bytes())["shards"]
    }
    there = inodes(out)
    kept = {name: inode for name, inode in there.items() if name in marked}

    subprocess.run(command, check=True, capture_output=True)

    # All but the two at work, at most, are finished.
    assert len(kept) >= len(there) - 2 >= 1
    assert kept.items() <= inodes(out).items(), "a whole shard was written again"
    subprocess.run([*command[:5], str(tmp_path / "unbroken"), *command[6:]], check=True, capture_output=True)
    assert digests(out) == digests(tmp_path / "unbroken")


def test_workers_do_not_outlive_a_conversion_that_is_killed(tmp_path: Path) -> None:
    rows = [(encode_image(seed=i) + bytes(300_000), captions(i)) for i in range(160)]
    write_t2i(tmp_path / "in" / "a.parquet", rows, group_rows=8)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bagel_wds.converters", "t2i", str(tmp_path / "in"), str(out)]
    process = subprocess.Popen(
        [*command, "--processes", "2", "--shard-size", "3MB"],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None and len(list(out.glob("*.tar"))) < 2:
        time.sleep(0.002)
    assert len(session_of(process.pid)) > 2
    process.send_signal(signal.SIGKILL)
    process.wait()

    deadline = time.monotonic() + 30
    while session_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert session_of(process.pid) == []


def session_of(leader: int) -> list[int]:
    """The processes of a session."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(leader)], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in listed.stdout.split() if int(pid) != leader]


# Failed


@pytest.mark.parametrize("finished", [0, 1, 3, 6])
def test_c24_a_reader_that_fails_after_some_shards_is_gone_on_with(tmp_path: Path, finished: int) -> None:
    source = write_rows(tmp_path / "in", num_rows=56, group_rows=8)
    # One row group a slice.
    settings = ShardSettings(shard_bytes=1, shard_samples=8)
    expected = unbroken(source, tmp_path / "unbroken", settings)
    path = tmp_path / "in" / "a.parquet"
    whole = path.read_bytes()
    path.write_bytes(spoiled(path, finished))
    out = tmp_path / "out"

    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as parquet"):
        convert_source(source, str(out), settings=settings)
    kept = inodes(out)
    path.write_bytes(whole)
    convert_source(source, str(out), settings=settings)

    assert {name.split("-")[1] for name in kept} == {f"{i:06d}" for i in range(finished)}
    assert kept.items() <= inodes(out).items()
    assert digests(out) == expected


def spoiled(path: Path, group: int) -> bytes:
    """A parquet file with the image data of one row group spoiled; its footer is sound."""
    import pyarrow.parquet as pq

    data = bytearray(path.read_bytes())
    offset = pq.ParquetFile(path).metadata.row_group(group).column(0).data_page_offset
    data[offset : offset + 64] = b"\xff" * 64
    return bytes(data)


def test_c25_a_disk_that_is_full_leaves_no_partial_shard_and_is_gone_on_with(tmp_path: Path) -> None:
    rows = [(encode_image(seed=i) + bytes(20_000 * i), captions(i)) for i in range(12)]
    write_t2i(tmp_path / "in" / "a.parquet", rows, group_rows=2)
    source = Source(kind="t2i", name="x", path=str(tmp_path / "in"))
    settings = ShardSettings(shard_bytes=1)
    expected = unbroken(source, tmp_path / "unbroken", settings)
    out = tmp_path / "out"

    # No file may grow over 150 kB: the system refuses to write more, as it does on a full disk.
    status = run_with_small_files(150_000, Conversion(source, str(out), settings))

    assert status == 1
    partly = digests(out)
    shards = {name: digest for name, digest in partly.items() if name.endswith(".tar")}
    assert 0 < len(shards) < len([name for name in expected if name.endswith(".tar")])
    assert shards.items() <= expected.items()
    assert not [name for name in partly if ".partial-" in name]
    convert_source(source, str(out), settings=settings)
    assert digests(out) == expected


def test_a_shard_that_was_spoiled_meanwhile_is_written_again(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    expected = unbroken(source, tmp_path / "unbroken", EIGHT_A_SHARD)
    out = tmp_path / "out"
    convert = Conversion(source, str(out), EIGHT_A_SHARD)
    total = count_events(
        str(tmp_path / "counted"), Conversion(source, str(tmp_path / "counted"), EIGHT_A_SHARD)
    )
    assert kill_at(total * 2 // 3, str(out), convert)
    first, second = sorted(out.glob("*.tar"))[:2]
    first.write_bytes(b"short")
    second.unlink()

    convert()

    assert digests(out) == expected


# Finished, and run again


def test_a_finished_conversion_is_left_as_it_is(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    out = tmp_path / "out"
    first = convert_source(source, str(out), settings=EIGHT_A_SHARD)
    before, kept = digests(out), inodes(out)

    again = convert_source(source, str(out), settings=EIGHT_A_SHARD, processes=2)

    assert again == replace(first, was_complete=True)
    assert digests(out) == before
    assert inodes(out) == kept


@pytest.mark.parametrize("when", ["unfinished", "finished"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": ShardSettings(shard_samples=9)}, r"shard_samples=8, this is shard_samples=9"),
        ({"settings": ShardSettings(shard_samples=8, shuffle=1)}, r"shuffle=None, this is shuffle=1"),
        ({"settings": ShardSettings(shard_samples=8, max_side=64)}, r"max_side=None, this is max_side=64"),
        ({"verify": Verify.NONE}, r"verify='full', this is verify='none'"),
        ({"name": "y"}, r"holds the t2i dataset 'x', not the t2i dataset 'y'"),
    ],
    ids=["shard size", "shuffle", "max side", "verify", "name"],
)
def test_c24_other_settings_are_refused(
    tmp_path: Path, when: str, change: dict[str, Any], message: str
) -> None:
    source = write_rows(tmp_path / "in")
    out = tmp_path / "out"
    if when == "finished":
        convert_source(source, str(out), settings=EIGHT_A_SHARD)
    else:
        kill_at(60, str(out), Conversion(source, str(out), EIGHT_A_SHARD))
    before = digests(out)
    other = replace(source, **{name: value for name, value in change.items() if name != "settings"})

    with pytest.raises(ConfigError, match=message) as refused:
        convert_source(other, str(out), settings=change.get("settings", EIGHT_A_SHARD))

    assert "--overwrite" in str(refused.value)
    assert str(out) in str(refused.value)
    assert digests(out) == before


@pytest.mark.parametrize("when", ["unfinished", "finished"])
@pytest.mark.parametrize("change", ["changed", "gone", "new"])
def test_c24_another_input_is_refused(tmp_path: Path, when: str, change: str) -> None:
    source = write_rows(tmp_path / "in")
    write_rows(tmp_path / "other", num_rows=9)
    (tmp_path / "other" / "a.parquet").rename(tmp_path / "in" / "b.parquet")
    out = tmp_path / "out"
    if when == "finished":
        convert_source(source, str(out), settings=EIGHT_A_SHARD)
    else:
        kill_at(60, str(out), Conversion(source, str(out), EIGHT_A_SHARD))
    before = digests(out)
    if change == "changed":
        write_rows(tmp_path / "other", num_rows=10)
        (tmp_path / "other" / "a.parquet").rename(tmp_path / "in" / "b.parquet")
    elif change == "gone":
        (tmp_path / "in" / "b.parquet").unlink()
    else:
        write_rows(tmp_path / "other")
        (tmp_path / "other" / "a.parquet").rename(tmp_path / "in" / "c.parquet")

    with pytest.raises(ConfigError, match=r"c\.parquet" if change == "new" else r"b\.parquet"):
        convert_source(source, str(out), settings=EIGHT_A_SHARD)

    assert digests(out) == before


def test_a_jsonl_of_the_same_size_with_other_text_is_another_input(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"conversations": talk("q", "yes")}])
    source = Source(kind="vlm", name="x", path=str(path))
    convert_source(source, str(tmp_path / "out"))
    write_jsonl(path, [{"conversations": talk("q", "no!")}])

    with pytest.raises(ConfigError, match=r"a\.jsonl has changed"):
        convert_source(source, str(tmp_path / "out"))


def test_a_conversion_does_not_depend_on_where_it_goes_on(tmp_path: Path) -> None:
    # Source and output are moved between two runs: neither sidecar nor mark holds a path from the root.
    source = write_rows(tmp_path / "here" / "in")
    expected = unbroken(source, tmp_path / "unbroken", EIGHT_A_SHARD)
    assert kill_at(
        60, str(tmp_path / "here" / "out"), Conversion(source, str(tmp_path / "here" / "out"), EIGHT_A_SHARD)
    )
    (tmp_path / "here").rename(tmp_path / "there")

    moved = replace(source, path=str(tmp_path / "there" / "in"))
    convert_source(moved, str(tmp_path / "there" / "out"), settings=EIGHT_A_SHARD)

    assert digests(tmp_path / "there" / "out") == expected


# One at a time


def test_two_conversions_into_one_folder_are_refused_until_the_first_dies(tmp_path: Path) -> None:
    rows = [(encode_image(seed=i) + bytes(300_000), captions(i)) for i in range(160)]
    write_t2i(tmp_path / "in" / "a.parquet", rows, group_rows=8)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bagel_wds.converters", "t2i", str(tmp_path / "in"), str(out)]
    command += ["--processes", "1", "--shard-size", "3MB"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(out.glob("*.tar")):
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    source = Source(kind="t2i", name="in", path=str(tmp_path / "in"))
    settings = ShardSettings(shard_bytes=3_000_000)
    try:
        with pytest.raises(ConfigError, match="another process is converting into this folder"):
            convert_source(source, str(out), settings=settings)
        with pytest.raises(ConfigError, match="another process is converting into this folder"):
            convert_source(source, str(out), settings=settings, mode=Mode.OVERWRITE)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()

    assert convert_source(source, str(out), settings=settings).counts.written == 160


def test_what_another_tool_wrote_is_never_taken_for_ours(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x-000000-000.tar").write_bytes(b"mine")

    with pytest.raises(ConfigError, match=r"holds 1 tars without a manifest, the first is x-000000-000\.tar"):
        convert_source(source, str(tmp_path / "out"), settings=EIGHT_A_SHARD)

    assert (tmp_path / "out" / "x-000000-000.tar").read_bytes() == b"mine"


def test_a_record_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    (tmp_path / "out").mkdir()
    for text, message in (
        ("{", "no record of a conversion"),
        ("[]", "no record of a conversion"),
        (json.dumps({"format_version": 1, "name": "x"}), "no record of a conversion.*'kind'"),
        (json.dumps({"format_version": 99}), "format_version 99"),
    ):
        (tmp_path / "out" / "conversion.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            convert_source(source, str(tmp_path / "out"))


def test_a_failing_slice_says_that_the_rest_is_kept(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    (tmp_path / "out" / "x-000001-000.tar").mkdir(parents=True)

    with pytest.raises(ShardError, match=r"run it again \(without --overwrite\) to go on"):
        convert_source(source, str(tmp_path / "out"), settings=ShardSettings(shard_bytes=1))


# Overwritten


def test_overwriting_gives_what_a_fresh_conversion_gives_and_can_be_gone_on_with(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    expected = unbroken(source, tmp_path / "unbroken", EIGHT_A_SHARD)
    out = tmp_path / "out"
    convert_source(source, str(out), settings=EIGHT_A_SHARD)

    convert_source(source, str(out), settings=EIGHT_A_SHARD, mode=Mode.OVERWRITE)
    assert digests(out) == expected

    convert = Conversion(source, str(out), EIGHT_A_SHARD, mode=Mode.OVERWRITE)
    for point in range(1, 100, 9):
        kill_at(point, str(out), convert)
        convert_source(source, str(out), settings=EIGHT_A_SHARD)
        assert digests(out) == expected, point


def test_a_record_that_cannot_be_read_can_be_overwritten(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "conversion.json").write_text("{")

    convert_source(source, str(tmp_path / "out"), mode=Mode.OVERWRITE)

    assert digests(tmp_path / "out") == unbroken(source, tmp_path / "fresh", ShardSettings())


# A source that changes while it is read


def test_a_source_that_is_replaced_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"conversations": talk("q", f"A{i:02d}")} for i in range(40)])
    source = Source(kind="vlm", name="x", path=str(path))
    first = path.read_bytes()

    def replace_source(step: Step) -> None:
        if step.rows == 0:
            write_jsonl(path, [{"conversations": talk("q", f"B{i:02d}")} for i in range(40)])

    with pytest.raises(ConfigError, match=r"a\.jsonl has changed, .*, while it was being converted"):
        convert_source(source, str(tmp_path / "out"), settings=EIGHT_A_SHARD, report=replace_source)
    assert not (tmp_path / "out" / "manifest.json").exists()

    # Brought back, it is read anew: nothing of the other is left.
    path.write_bytes(first)
    convert_source(source, str(tmp_path / "out"), settings=EIGHT_A_SHARD)
    assert digests(tmp_path / "out") == unbroken(source, tmp_path / "fresh", EIGHT_A_SHARD)


def test_a_source_that_is_cut_while_it_is_read_costs_nothing_once_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"conversations": talk("q", f"A{i:02d}")} for i in range(40)])
    source = Source(kind="vlm", name="x", path=str(path))
    whole = path.read_bytes()

    def cut_source(step: Step) -> None:
        if step.rows == 0:
            path.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(ShardError, match=r"8 rows were planned and \d read: did a file change"):
        convert_source(source, str(tmp_path / "out"), settings=EIGHT_A_SHARD, report=cut_source)
    kept = inodes(tmp_path / "out")
    path.write_bytes(whole)
    convert_source(source, str(tmp_path / "out"), settings=EIGHT_A_SHARD)

    assert len(kept) >= 2
    assert digests(tmp_path / "out") == unbroken(source, tmp_path / "fresh", EIGHT_A_SHARD)


# Left behind


def test_what_a_run_left_that_was_killed_after_its_last_word_is_removed(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in")
    out = tmp_path / "out"
    convert_source(source, str(out), settings=EIGHT_A_SHARD)
    expected = digests(out)
    (out / ".conversion" / "unshuffled").mkdir(parents=True)
    (out / ".conversion" / "unshuffled" / "x-000000-000.tar").touch()

    convert_source(source, str(out), settings=EIGHT_A_SHARD)

    assert digests(out) == expected
    assert not (out / ".conversion").exists()


def test_files_whose_names_are_no_utf8_are_converted_and_retried(tmp_path: Path) -> None:
    odd = os.fsdecode(b"x\xff")
    write_rows(tmp_path / "plain", num_rows=12)
    (tmp_path / "plain").rename(tmp_path / odd)
    write_jsonl(
        tmp_path / odd / f"{odd}.jsonl", [{"image": "a.png", "conversations": talk("<image>", "a")}, {}]
    )
    t2i = Source(kind="t2i", name="x", path=str(tmp_path / odd / "a.parquet"))
    vlm = Source(kind="vlm", name="x", path=str(tmp_path / odd / f"{odd}.jsonl"))
    write_jsonl(tmp_path / odd / "good.jsonl", [{"conversations": talk()}])
    both = replace(vlm, path=(str(vlm.path), str(tmp_path / odd / "good.jsonl")))

    assert convert_source(t2i, str(tmp_path / "t2i")).counts.written == 11
    first = convert_source(both, str(tmp_path / odd / "vlm"))
    (tmp_path / odd / "a.png").write_bytes(encode_image())
    second = convert_source(both, str(tmp_path / odd / "vlm"), mode=Mode.RETRY)

    assert (first.counts.written, second.counts.written) == (1, 2)
    assert convert_source(both, str(tmp_path / odd / "vlm")).was_complete


@pytest.mark.parametrize("link", ["itself", "nowhere"])
def test_an_output_that_is_a_broken_link_is_refused(tmp_path: Path, link: str) -> None:
    source = write_rows(tmp_path / "in")
    (tmp_path / "out").symlink_to(tmp_path / ("out" if link == "itself" else "gone"))

    with pytest.raises(ConfigError, match="a link that leads nowhere"):
        convert_source(source, str(tmp_path / "out"))


def test_a_name_too_long_for_files_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = replace(write_rows(tmp_path / "in"), name="x" * 200)

    with pytest.raises(ConfigError, match="of 200 bytes is too long for files"):
        convert_source(source, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_pipe_as_a_source_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")

    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        convert_source(Source(kind="vlm", name="x", path=str(tmp_path / "a.jsonl")), str(tmp_path / "out"))
