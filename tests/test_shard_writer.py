"""The writer of tars: every byte is what the standard library's tarfile would write."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import words

from bagel_wds.converters import ShardSettings
from bagel_wds.converters.shard_writer import member_header, write_shards
from bagel_wds.schema import make_key, media_name
from bagel_wds.sources.encode import EncodedSample

if TYPE_CHECKING:
    from pathlib import Path

MAX_SIZE = 8**11 - 1
"""The largest size that eleven octal digits can say."""

keys = st.builds(make_key, words(60), st.integers(0, 10**12), st.none() | st.integers(0, 10**6))
names_of_ours = st.one_of(
    keys.map(lambda key: f"{key}.json"),
    st.builds(
        media_name,
        keys,
        st.integers(0, 999),
        st.sampled_from(["jpg", "png", "webp", "tiff", "img"]),
        st.none() | st.integers(0, 999_999),
    ),
)


def tarfile_header(name: str, size: int) -> bytes:
    """The header that tarfile writes."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


@settings(max_examples=500, deadline=None)
@given(name=names_of_ours, size=st.integers(0, MAX_SIZE))
@example(name="k" * 95 + ".json", size=0)
@example(name="k.0.jpg", size=MAX_SIZE)
def test_a_header_is_tarfiles_for_every_name_that_we_write(name: str, size: int) -> None:
    assert member_header(name, size) == tarfile_header(name, size)


@settings(max_examples=200, deadline=None)
@given(
    name=st.one_of(
        words(120),
        st.text("ab/", min_size=90, max_size=260),
        st.sampled_from(["ü.json", "图" * 33, "图" * 34]),
    ),
    size=st.integers(0, 2 * MAX_SIZE),
)
@example(name="folder/" * 20 + "k.json", size=1)
@example(name="k" * 101, size=1)
@example(name="k.0.mp4", size=MAX_SIZE + 1)
def test_a_header_of_any_other_name_or_size_is_tarfiles_too_or_refused_as_it_does(
    name: str, size: int
) -> None:
    try:
        wanted = tarfile_header(name, size)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)):
            member_header(name, size)
    else:
        assert member_header(name, size) == wanted


def encoded(key: str, contents: list[bytes]) -> EncodedSample:
    """A sample with these contents: the first is its JSON."""
    names = ["json", *(f"{number}.jpg" for number in range(len(contents) - 1))]
    members = tuple((f"{key}.{name}", data) for name, data in zip(names, contents, strict=True))
    media = tuple(
        {"ext": "jpg", "width": 1, "height": 1, "frames": 1, "bytes": len(data)} for data in contents[1:]
    )
    return EncodedSample(key, members, media)


def tarfile_bytes(samples: list[EncodedSample]) -> bytes:
    """The tar that tarfile writes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            for name, data in sample.members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


around_a_block = st.one_of(st.integers(0, 3), st.integers(505, 520), st.integers(8180, 8200))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.lists(around_a_block, min_size=1, max_size=4), min_size=1, max_size=12))
def test_a_tar_is_tarfiles_and_its_record_says_what_it_is(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]]
) -> None:
    out = tmp_path_factory.mktemp("tar")
    samples = [
        encoded(f"k{number}", [bytes([number]) * size for size in of_sample])
        for number, of_sample in enumerate(sizes)
    ]

    (record,) = write_shards(iter(samples), str(out), "x", ShardSettings())

    data = (out / "x-000.tar").read_bytes()
    assert data == tarfile_bytes(samples)
    assert (record.name, record.samples, record.bytes) == ("x-000.tar", len(samples), len(data))
    assert record.checksum == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
    assert sum(sample.num_bytes for sample in samples) == sum(
        512 + size + -size % 512 for of_sample in sizes for size in of_sample
    )


def test_a_tar_of_many_megabytes_is_whole(tmp_path: Path) -> None:
    # So large that its bytes set out for the disk several times before it is closed.
    samples = [
        encoded(f"k{number}", [b"{}", bytes([number]) * size])
        for number, size in enumerate([5_000_000, 1, 20_000_000, 9_000_000, 511, 3_000_000])
    ]

    (record,) = write_shards(iter(samples), str(tmp_path), "x", ShardSettings())

    data = (tmp_path / record.name).read_bytes()
    assert data == tarfile_bytes(samples)
    assert record.checksum == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-000.idx.parquet", "x-000.tar"]
