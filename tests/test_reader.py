"""Tars become samples: what `tarfile` and webdataset see in them, with places that are true, and no silent short read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import member_keys

from bagel_wds import reader, storage
from bagel_wds.errors import ShardError
from bagel_wds.reader import BLOCK, read_offsets, walk_members, walk_places, walk_shard, walk_slice
from bagel_wds.schema import media_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
Samples = list[tuple[str, dict[str, bytes]]]


def write_members(path: Path, members: Iterable[tuple[str, bytes]], tar_format: str = "ustar") -> str:
    """Write a tar with the standard library alone."""
    with tarfile.open(path, "w", format=FORMATS[tar_format]) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def write_samples(path: Path, samples: Samples, tar_format: str = "ustar") -> str:
    """Write samples member by member."""
    members = [(f"{key}.{field}", data) for key, fields in samples for field, data in fields.items()]
    return write_members(path, members, tar_format)


def write_index(shard: str) -> str:
    """Write a shard's index as the shard format has it."""
    places = [(sample["__key__"], *sample["__ref__"]) for sample in walk_shard(shard)]
    keys, offsets, lengths = map(list, zip(*places, strict=True)) if places else ([], [], [])
    index = shard.removesuffix(".tar") + ".idx.parquet"
    columns = {"key": pa.array(keys, pa.string()), "offset": pa.array(offsets, pa.int64())}
    pq.write_table(pa.table({**columns, "length": pa.array(lengths, pa.int64())}), index)
    return index


def plain(samples: Iterable[Mapping[str, Any]]) -> Samples:
    """Keys and fields alone."""
    return [
        (sample["__key__"], {name: value for name, value in sample.items() if not name.startswith("__")})
        for sample in samples
    ]


def as_webdataset_reads(url: str) -> Samples:
    """What plain webdataset makes of a tar."""
    return plain(wds.DataPipeline(wds.SimpleShardList([url]), wds.tarfile_to_samples()))


def places_in(path: str) -> dict[str, tuple[int, int]]:
    """Where each sample starts and how long it is, by what the standard library says of its members."""
    places: dict[str, tuple[int, int]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key = member.name.rsplit("/", 1)[-1].split(".")[0]
            key = member.name[: member.name.rfind("/") + 1] + key
            start = places.get(key, (member.offset, 0))[0]
            end = member.offset_data + -(-member.size // 512) * 512
            places[key] = (start, end - start)
    return places


def error_of(url: str, **at: Any) -> str:
    """Why a shard was refused; the message names it."""
    with pytest.raises(ShardError) as error:
        list(walk_slice(url, **at))
    assert url in str(error.value)
    return str(error.value)


# What is in a tar


NAMES = {
    "short": "a",
    "in a folder": "folder/a",
    "over 100 characters": "k" * 150,
    "over 100 characters with folders": "/".join(["folder-with-a-name"] * 8) + "/a",
    "over 255 characters": "/".join(["folder-with-a-name"] * 20) + "/a",
    "not ASCII": "图片/größe-ß",
    "not ASCII and long": "汉字" * 60,
    "with blanks and quotes": " a 'b' \"c\"",
}
FITS_USTAR = (
    "short",
    "in a folder",
    "over 100 characters with folders",
    "not ASCII",
    "with blanks and quotes",
)


@pytest.mark.parametrize(
    ("name", "tar_format"),
    [(name, form) for name in NAMES for form in FORMATS if form != "ustar" or name in FITS_USTAR],
)
def test_names_of_every_tar_format_are_read_and_places_are_those_of_tarfile(
    tmp_path: Path, name: str, tar_format: str
) -> None:
    key = NAMES[name]
    samples: Samples = [
        ("first", {"json": b"{}", "0.jpg": b"1" * 513}),
        (key, {"json": b'{"a": 1}', "0.jpg": b"", "1.png": b"2" * 512}),
        ("last", {"json": b"3"}),
    ]
    url = write_samples(tmp_path / "a.tar", samples, tar_format)
    read = list(walk_shard(url))

    assert plain(read) == samples == as_webdataset_reads(url)
    assert [sample["__url__"] for sample in read] == [url] * 3
    assert {sample["__key__"]: sample["__ref__"] for sample in read} == places_in(url)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(member_keys(), unique=True, max_size=5),
    st.sampled_from(list(FORMATS)),
    st.lists(st.binary(max_size=1100), min_size=1, max_size=3),
)
def test_any_samples_are_read_as_webdataset_reads_them(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], tar_format: str, datas: list[bytes]
) -> None:
    samples: Samples = [
        (key, {f"{i}.jpg": data for i, data in enumerate(datas[: 1 + number % 3])})
        for number, key in enumerate(keys)
    ]
    path = tmp_path_factory.mktemp("law") / "a.tar"
    try:
        url = write_samples(path, samples, tar_format)
    except ValueError:
        # A name that ustar cannot hold.
        assume(False)
    read = list(walk_shard(url))

    assert plain(read) == samples == as_webdataset_reads(url)
    assert {sample["__key__"]: sample["__ref__"] for sample in read} == places_in(url)


def test_a_place_literally(tmp_path: Path) -> None:
    url = write_samples(tmp_path / "a.tar", [("a", {"json": b"12"}), ("b", {"json": b"", "jpg": b"x" * 600})])

    # a.json: header and one block. b.json: header. b.jpg: header and two blocks.
    assert [sample["__ref__"] for sample in walk_shard(url)] == [(0, 1024), (1024, 2048)]


def test_the_bytes_at_a_place_are_the_sample_alone(tmp_path: Path) -> None:
    samples: Samples = [(f"{'key' * 50}{i}", {"json": b"%d" % i, "0.jpg": b"x" * 700 * i}) for i in range(4)]
    for tar_format in ("gnu", "pax"):
        url = write_samples(tmp_path / f"{tar_format}.tar", samples, tar_format)
        for sample in walk_shard(url):
            part = io.BytesIO(storage.read_range(url, *sample["__ref__"]) + bytes(1024))
            fields = {member.name.split(".", 1)[1]: member.data for member in walk_members(part, "part")}
            assert [(sample["__key__"], fields)] == plain([sample])


def test_what_webdatasets_writer_writes_is_read_back(tmp_path: Path) -> None:
    url = str(tmp_path / "a.tar")
    with wds.TarWriter(url) as tar:
        for i in range(5):
            tar.write({"__key__": f"s/{i}", "json": {"n": i}, "jpg": b"%d" % i, "txt": "größer"})
    read = list(walk_shard(url))

    assert plain(read) == as_webdataset_reads(url)
    assert read[3]["json"] == b'{"n": 3}'
    assert read[3]["txt"].decode() == "größer"
    assert {sample["__key__"]: sample["__ref__"] for sample in read} == places_in(url)


def test_folders_links_and_devices_are_passed_over_whatever_size_they_claim(tmp_path: Path) -> None:
    kinds = {
        "folder": tarfile.DIRTYPE,
        "symbolic.jpg": tarfile.SYMTYPE,
        "hard.jpg": tarfile.LNKTYPE,
        "pipe.jpg": tarfile.FIFOTYPE,
        "device.jpg": tarfile.CHRTYPE,
    }
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for number, (name, kind) in enumerate(kinds.items()):
            data = tarfile.TarInfo(f"{number}.json")
            data.size = 1
            tar.addfile(data, io.BytesIO(b"%d" % number))
            odd = tarfile.TarInfo(name)
            odd.type, odd.linkname, odd.size = kind, "0.json" * 40, 4096
            tar.addfile(odd)
    url = str(path)

    expected = [(str(number), {"json": b"%d" % number}) for number in range(len(kinds))]
    assert plain(walk_shard(url)) == expected == as_webdataset_reads(url)


def test_hidden_and_meta_files_belong_to_no_sample(tmp_path: Path) -> None:
    members = [
        ("._a.json", b"mac"),
        ("a.json", b"{}"),
        ("__notes.txt__", b"notes"),
        ("._a.jpg", b"mac"),
        ("a.jpg", b"1"),
        ("README", b"no extension"),
        ("__index__/b.json", b"[]"),
        ("d/._b.json", b"mac"),
        ("d/b.json", b"{}"),
    ]
    url = write_members(tmp_path / "a.tar", members)

    assert plain(walk_shard(url)) == [("a", {"json": b"{}", "jpg": b"1"}), ("d/b", {"json": b"{}"})]


def test_a_global_pax_header_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(
        path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "made by git archive"}
    ) as tar:
        for name in ("a.json", "k" * 120 + ".json"):
            tar.addfile(tarfile.TarInfo(name))

    assert plain(walk_shard(str(path))) == [("a", {"json": b""}), ("k" * 120, {"json": b""})]


def test_a_size_in_a_pax_header_counts(tmp_path: Path) -> None:
    parts = []
    for name in ("a.json", "b.json"):
        extended, member = tarfile.TarInfo("x"), tarfile.TarInfo(name)
        extended.type, extended.size = tarfile.XHDTYPE, 12
        parts += [extended.tobuf(tarfile.USTAR_FORMAT), b"12 size=700\n".ljust(512, b"\0")]
        # The plain header claims no bytes.
        parts += [member.tobuf(tarfile.USTAR_FORMAT), (name.encode() * 117)[:700].ljust(1024, b"\0")]
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(parts) + bytes(1024))
    read = list(walk_shard(str(path)))

    assert plain(read) == as_webdataset_reads(str(path))
    assert {sample["__key__"]: sample["__ref__"] for sample in read} == places_in(str(path))
    assert [len(sample["json"]) for sample in read] == [700, 700]


def test_names_that_are_no_utf8_are_kept(tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    url = write_samples(tmp_path / "a.tar", [(name, {"json": b"{}"})])
    [sample] = walk_shard(url)

    assert sample["__key__"] == name
    assert sample["__key__"].encode("utf-8", "surrogateescape") == b"caf\xe9"


# Samples: cases C19 to C21


def test_c19_members_of_two_samples_that_alternate_are_an_error_that_names_shard_and_key(
    tmp_path: Path,
) -> None:
    url = write_members(tmp_path / "a.tar", [(name, b"") for name in ("0.a", "1.a", "0.b", "1.b")])
    read = walk_shard(url)

    assert plain([next(read)]) == [("0", {"a": b""})]
    with pytest.raises(ShardError, match="key '0' comes back at byte 1024") as error:
        list(read)
    assert url in str(error.value)
    # What we save the user from.
    assert len(as_webdataset_reads(url)) == 4


@pytest.mark.parametrize("without", [0, 1, 2])
def test_c19_a_sample_without_its_image_is_a_sample_wherever_it_stands(tmp_path: Path, without: int) -> None:
    samples: Samples = [
        (str(i), {"json": b"{}", **({} if i == without else {"jpg": b"x"})}) for i in range(3)
    ]

    assert plain(walk_shard(write_samples(tmp_path / "a.tar", samples))) == samples


@pytest.mark.parametrize("again", ["a.jpg", "a.JPG"])
def test_a_member_that_comes_twice_is_an_error_that_names_it(tmp_path: Path, again: str) -> None:
    url = write_members(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.json", b"{}"), (again, b"2")])

    assert f"member '{again}' at byte 2048 comes twice" in error_of(url)


def test_c20_a_key_ends_at_the_first_dot_behind_its_folders(tmp_path: Path) -> None:
    names = ["v1.5 final.0.jpg", "22.0/1.1.jpg", "../x.json", "/abs/y.json", "日本/語.JSON"]
    url = write_members(tmp_path / "a.tar", [(name, b"") for name in names])

    assert plain(walk_shard(url)) == [
        ("v1", {"5 final.0.jpg": b""}),
        ("22.0/1", {"1.jpg": b""}),
        ("../x", {"json": b""}),
        ("/abs/y", {"json": b""}),
        ("日本/語", {"json": b""}),
    ]
    assert as_webdataset_reads(url) == plain(walk_shard(url))


def test_c21_samples_of_2_3_1_and_12_images_keep_them_in_numeric_order(tmp_path: Path) -> None:
    counts = [2, 3, 1, 12]
    samples: Samples = [
        (f"edit-{number}", {"json": b"{}", **{f"{i}.jpg": b"%d of %d" % (i, number) for i in range(count)}})
        for number, count in enumerate(counts)
    ]
    url = write_samples(tmp_path / "a.tar", [(key, dict(sorted(fields.items()))) for key, fields in samples])

    for number, (sample, count) in enumerate(zip(walk_shard(url), counts, strict=True)):
        images = [sample[name] for _, [name] in media_fields(sample)]
        assert images == [b"%d of %d" % (i, number) for i in range(count)]


def test_a_sample_of_too_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write_samples(tmp_path / "a.tar", [("a", {f"{i}.jpg": b"" for i in range(9)})])

    assert len(list(walk_shard(url))) == 1
    monkeypatch.setattr(reader, "MAX_MEMBERS", 5)
    assert "sample 'a' has more than 5 members" in error_of(url)


# Broken shards: case C13


def test_c13_a_shard_cut_anywhere_is_an_error_and_what_came_before_it_is_right(tmp_path: Path) -> None:
    samples: Samples = [
        (f"{'long' * 30 if i == 1 else 'key'}-{i}", {"json": b'{"n": %d}' % i, "0.jpg": b"x" * 300 * i})
        for i in range(4)
    ]
    chance = random.Random(0)
    checked = {"short": 0, "whole": 0}
    for tar_format in ("gnu", "pax"):
        whole = Path(write_samples(tmp_path / f"{tar_format}.tar", samples, tar_format)).read_bytes()
        last_start, last_length = list(walk_shard(str(tmp_path / f"{tar_format}.tar")))[-1]["__ref__"]
        marker = last_start + last_length
        cut = tmp_path / f"{tar_format}-cut.tar"
        for length in [*range(0, len(whole) + 1, 512), *(chance.randrange(len(whole)) for _ in range(200))]:
            cut.write_bytes(whole[:length])
            read: list[dict[str, Any]] = []
            # One zero block is the marker; whatever follows it holds nothing.
            if length >= marker + 512:
                assert plain(walk_shard(str(cut))) == samples
                checked["whole"] += 1
                continue
            with pytest.raises(ShardError, match="cut short") as error:
                read.extend(walk_shard(str(cut)))
            assert str(cut) in str(error.value)
            assert plain(read) == samples[: len(read)]
            checked["short"] += 1

    assert checked["short"] > 200
    assert checked["whole"] > 20


def test_c13_a_cut_between_two_members_of_the_last_sample_does_not_give_half_of_it(tmp_path: Path) -> None:
    whole = Path(write_samples(tmp_path / "a.tar", [("a", {"json": b"{}", "jpg": b"x"})])).read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole[:1024])

    assert as_webdataset_reads(str(cut)) == [("a", {"json": b"{}"})]
    assert "the file ends at or after byte 1024, before the end-of-archive marker" in error_of(str(cut))


def test_an_empty_file_is_an_error_and_an_empty_tar_is_not(tmp_path: Path) -> None:
    (tmp_path / "nothing.tar").write_bytes(b"")
    url = write_members(tmp_path / "empty.tar", [])

    assert "cut short" in error_of(str(tmp_path / "nothing.tar"))
    assert list(walk_shard(url)) == []


@pytest.mark.parametrize(
    "garbage",
    [b"<html>" + b"x" * 2000, random.Random(0).randbytes(4096), b"PK\x03\x04" + bytes(2000)],
    ids=["a page", "noise", "a zip"],
)
def test_garbage_is_no_tar(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(garbage)

    assert "no tar header at byte 0" in error_of(str(tmp_path / "a.tar"))


@pytest.mark.parametrize("place", [0, 1024, 2048])
def test_a_damaged_header_is_an_error_that_tells_its_place(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a.tar"
    data = bytearray(Path(write_samples(path, [(str(i), {"json": b"{}"}) for i in range(3)])).read_bytes())
    data[place + 4] ^= 1
    path.write_bytes(data)

    assert f"no tar header at byte {place}: bad checksum" in error_of(str(path))


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("samples", [1, 40], ids=["tiny", "larger"])
@pytest.mark.parametrize("kind", [*COMPRESSED, "zstd"])
def test_a_compressed_tar_is_refused_by_the_name_of_its_compression(
    tmp_path: Path, kind: str, samples: int
) -> None:
    tar = Path(
        write_samples(tmp_path / "a.tar", [(f"{i}", {"jpg": os.urandom(50)}) for i in range(samples)])
    ).read_bytes()
    data = b"\x28\xb5\x2f\xfd" + os.urandom(600 * samples) if kind == "zstd" else COMPRESSED[kind](tar)
    (tmp_path / "b.tar").write_bytes(data)

    assert f"is compressed with {kind}" in error_of(str(tmp_path / "b.tar"))


def test_a_name_that_looks_like_compression_is_none(tmp_path: Path) -> None:
    url = write_samples(tmp_path / "a.tar", [("BZh91AY", {"json": b"{}"})])

    assert plain(walk_shard(url)) == [("BZh91AY", {"json": b"{}"})]


def test_a_tar_behind_another_is_an_error_and_padding_or_noise_there_is_not(tmp_path: Path) -> None:
    first = Path(write_samples(tmp_path / "a.tar", [("a", {"json": b"1"})])).read_bytes()
    second = Path(write_samples(tmp_path / "b.tar", [("b", {"json": b"2"})])).read_bytes()
    both = tmp_path / "both.tar"

    both.write_bytes(first + second)
    assert f"more members follow at byte {len(first)}" in error_of(str(both))
    for tail in (bytes(5000), b"noise" * 300):
        both.write_bytes(first + tail)
        assert plain(walk_shard(str(both))) == [("a", {"json": b"1"})]


def test_a_tar_that_was_added_to_is_read_whole(tmp_path: Path) -> None:
    url = write_samples(tmp_path / "a.tar", [("a", {"json": b"1"})])
    with tarfile.open(url, "a") as tar:
        tar.addfile(tarfile.TarInfo("b.json"))

    assert plain(walk_shard(url)) == [("a", {"json": b"1"}), ("b", {"json": b""})]


@pytest.mark.parametrize("size", [-5, 5 << 30])
def test_a_member_of_an_impossible_size_is_refused_unread(tmp_path: Path, size: int) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.size = size
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))

    assert f"member 'a.jpg' at byte 0 claims {size} bytes; the most is {4 << 30}" in error_of(
        str(tmp_path / "a.tar")
    )


def test_sparse_members_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.mp4")
    info.type = tarfile.GNUTYPE_SPARSE
    old = tmp_path / "old.tar"
    old.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    new = tmp_path / "new.tar"
    with tarfile.open(new, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a.mp4")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.mp4"}
        tar.addfile(member)

    for path in (old, new):
        assert "the member at byte 0 is stored sparse" in error_of(str(path))


@pytest.mark.parametrize(
    "records",
    [b"no length", b"99 path=a.jpg\n", b"0 path=a.jpg\n", b"2 path=a.jpg\n", b"9" * 5000 + b" path=a\n"],
)
def test_a_broken_pax_header_is_an_error(tmp_path: Path, records: bytes) -> None:
    extended, member = tarfile.TarInfo("x"), tarfile.TarInfo("a.json")
    extended.type, extended.size = tarfile.XHDTYPE, len(records)
    padded = records + bytes(-len(records) % 512)
    (tmp_path / "a.tar").write_bytes(
        extended.tobuf(tarfile.USTAR_FORMAT) + padded + member.tobuf() + bytes(1024)
    )

    assert "broken extended header at byte 0" in error_of(str(tmp_path / "a.tar"))


def test_a_shard_that_cannot_be_opened_is_an_error_of_that_shard(tmp_path: Path) -> None:
    (tmp_path / "folder.tar").mkdir()

    for name in ("absent.tar", "folder.tar"):
        assert "cannot be opened" in error_of(str(tmp_path / name))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files through /proc")
def test_a_walk_that_is_given_up_closes_its_file(tmp_path: Path) -> None:
    url = write_samples(tmp_path / "a.tar", [(str(i), {"json": b"{}"}) for i in range(9)])

    def is_open() -> bool:
        return url in {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}

    walk = walk_slice(url, 2)
    assert next(walk)["__key__"] == "2"
    assert is_open()
    walk.close()  # type: ignore[attr-defined]
    assert not is_open()


# Slices


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A shard of nine samples and its index."""
    folder = tmp_path_factory.mktemp("nine")
    url = write_samples(
        folder / "a.tar", [(f"k{i}", {"json": b"%d" % i, "jpg": b"x" * 99 * i}) for i in range(9)]
    )
    return url, write_index(url)


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, 12),
    stop=st.none() | st.integers(0, 9),
    step=st.integers(1, 10),
    indexed=st.booleans(),
)
def test_a_slice_of_a_shard_is_the_slice_of_its_list(
    nine: tuple[str, str], start: int, stop: int | None, step: int, indexed: bool
) -> None:
    url, index = nine
    whole = list(walk_shard(url))
    ordinals = list(range(9))[start:stop:step]
    got = list(walk_slice(url, start, stop, step, index if indexed else None))

    assert plain(got) == plain(whole[start:stop:step])
    assert [sample["__ordinal__"] for sample in got] == ordinals
    assert [sample["__ref__"] for sample in got] == [whole[i]["__ref__"] for i in ordinals]


def test_with_an_index_the_reader_does_not_look_at_what_comes_before(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    url = write_samples(path, [(f"k{i}", {"json": b"%d" % i}) for i in range(9)])
    index = write_index(url)
    data = bytearray(path.read_bytes())
    data[:2048] = b"\xff" * 2048
    path.write_bytes(data)

    assert plain(walk_slice(url, 2, 4, index_url=index)) == [("k2", {"json": b"2"}), ("k3", {"json": b"3"})]
    assert "no tar header at byte 0" in error_of(url, start=2, stop=4)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 10), (4, 10), (9, 10), (20, 21)])
def test_a_shard_of_fewer_samples_than_were_promised_is_an_error(
    nine: tuple[str, str], start: int, stop: int, indexed: bool
) -> None:
    url, index = nine
    with pytest.raises(ShardError, match=f"has 9 samples.* promises {stop} or more") as error:
        list(walk_slice(url, start, stop, index_url=index if indexed else None))

    assert url.removesuffix(".tar") in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PAR1 is no index", None])
def test_an_index_that_cannot_be_read_is_an_error_that_names_it(
    nine: tuple[str, str], tmp_path: Path, content: bytes | None
) -> None:
    index = tmp_path / "a.idx.parquet"
    if content is not None:
        index.write_bytes(content)

    with pytest.raises(ShardError, match="the index cannot be read") as error:
        list(walk_slice(nine[0], 1, index_url=str(index)))
    assert str(index) in str(error.value)


def test_an_index_without_offsets_is_an_error_that_names_it(nine: tuple[str, str], tmp_path: Path) -> None:
    index = str(tmp_path / "a.idx.parquet")
    pq.write_table(pa.table({"key": ["k0"]}), index)

    with pytest.raises(ShardError, match="the index cannot be read"):
        list(walk_slice(nine[0], 1, index_url=index))


def header_block(name: str, size: int, tar_format: str) -> bytes:
    """A member's header as the standard library writes it; the last of them, where it takes several blocks."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(FORMATS[tar_format], "utf-8", "surrogateescape")[-BLOCK:]  # type: ignore[arg-type]


def with_checksum(block: bytes) -> bytes:
    """The block with a checksum that is right."""
    blank = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(blank) + block[156:]


def as_tarfile_reads(block: bytes) -> tuple[str, int, bytes] | None:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return info.name, info.size, info.type


@pytest.mark.parametrize("tar_format", FORMATS)
def test_plain_headers_take_the_quick_way(tar_format: str) -> None:
    found = reader._plain_header(header_block("a=2Fb-17.0.jpg", 70_123, tar_format))

    assert found == reader._Header("a=2Fb-17.0.jpg", 70_123, tarfile.REGTYPE, is_file=True)


@settings(max_examples=600, deadline=None)
@given(
    key=member_keys(),
    size=st.integers(0, 20 << 30),
    tar_format=st.sampled_from(["gnu", "pax"]),
    changes=st.lists(
        st.tuples(
            st.one_of(st.integers(0, BLOCK - 1), st.integers(95, 165), st.integers(256, 346)),
            st.sampled_from([*b"\0 057AZ/\x80\xff"]),
        ),
        max_size=3,
    ),
    mended=st.booleans(),
)
def test_whatever_takes_the_quick_way_is_read_as_tarfile_reads_it(
    key: str, size: int, tar_format: str, changes: list[tuple[int, int]], mended: bool
) -> None:
    block = bytearray(header_block(f"{key}.json", size, tar_format))
    for place, value in changes:
        block[place] = value
    header = with_checksum(bytes(block)) if mended else bytes(block)

    quick = reader._plain_header(header)

    if quick is not None:
        assert (quick.name, quick.size, quick.type) == as_tarfile_reads(header)


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(
        st.tuples(member_keys(), st.binary(max_size=1500)), max_size=6, unique_by=lambda s: s[0]
    ),
    tar_format=st.sampled_from(["gnu", "pax"]),
)
def test_both_ways_of_reading_headers_give_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[str, bytes]], tar_format: str
) -> None:
    path = tmp_path_factory.mktemp("ways") / "s.tar"
    fields = [(key, {"json": data[:20], "0.jpg": data}) for key, data in samples]
    url = write_samples(path, fields, tar_format)

    with pytest.MonkeyPatch.context() as patch:
        quick = list(walk_shard(url))
        patch.setattr(reader, "_plain_header", lambda block: None)
        assert list(walk_shard(url)) == quick


@pytest.mark.parametrize("read_ahead", [0, 1, 5000, 8 << 20])
def test_reading_ahead_changes_nothing_of_what_is_read(nine: tuple[str, str], read_ahead: int) -> None:
    url, index = nine

    ahead = walk_slice(url, 2, 9, 1, index, read_ahead=read_ahead, next_url="/nowhere/next.tar")

    assert list(ahead) == list(walk_slice(url, 2, 9, 1, index))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice on reading")
def test_bytes_ahead_and_the_next_shard_are_asked_for_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_samples(tmp_path / "a.tar", [(f"{n:03}", {"jpg": bytes(3000)}) for n in range(50)])
    other = write_samples(tmp_path / "b.tar", [("x", {"jpg": bytes(3000)})])
    asked: list[tuple[str, int, int]] = []
    real = os.posix_fadvise

    def noted(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            asked.append((Path(f"/proc/self/fd/{fd}").readlink().name, offset, offset + length))
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    window = 20_000
    for sample in walk_shard(url, read_ahead=window, next_url=other):
        read = sum(sample["__ref__"])
        mine = [end for name, _, end in asked if name == "a.tar"]
        # Always half a window ahead, never more than one.
        assert min(read + window // 2, os.path.getsize(url)) <= max(mine) <= read + window  # noqa: PTH202
    spans = [(start, end) for name, start, end in asked if name == "a.tar"]
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert [span for span in asked if span[0] == "b.tar"] == [("b.tar", 0, window)]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files and threads through /proc")
def test_a_walk_that_reads_ahead_and_is_given_up_leaves_no_file_and_no_thread(nine: tuple[str, str]) -> None:
    def open_things() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    before = open_things()
    walk = walk_slice(nine[0], read_ahead=8 << 20, next_url=nine[0])
    next(walk)
    assert open_things() == (before[0] + 1, before[1])
    del walk

    assert open_things() == before


@given(start=st.integers(0, 12), stop=st.integers(0, 9), step=st.integers(1, 4), at=st.integers(-1, 9))
def test_places_of_an_index_are_those_of_the_samples_that_are_read(
    nine: tuple[str, str], start: int, stop: int, step: int, at: int
) -> None:
    url, index = nine
    every = read_offsets(index)
    going_on = None if not start <= at < 9 else (at, every[at])

    read = [
        (sample["__ordinal__"], *sample["__ref__"])
        for sample in walk_slice(url, start, stop, step, index, going_on)
    ]

    assert list(walk_places(index, start, stop, step, going_on and going_on[0])) == read
