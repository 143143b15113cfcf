"""Objects of a real store through `storage`: what the disk does, a bucket does."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import S3Store as Client
from s3_store import BUCKET

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from pathlib import Path

    from s3_store import S3Store

DATA = bytes(range(256)) * 3000
"""768 000 bytes: more than the first window of a reader."""
ODD_NAMES = [
    "plain.tar",
    "with blank.tar",
    "100%.tar",
    "a#b.tar",
    "wh?t.tar",
    "größe-字.tar",
    "%41.tar",
    "a+b&c=d~*'.tar",
]


def client(store: S3Store) -> Client:
    """The store by another way than ours."""
    return Client(BUCKET, endpoint=store.endpoint, client_options={"allow_http": True})


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_object_is_found_by_its_key_as_it_is(s3_store: S3Store, s3_folder: str, name: str) -> None:
    key = s3_folder.removeprefix(f"s3://{BUCKET}/") + "/" + name
    obstore.put(client(s3_store), key, b"0123456789")
    options = s3_store.options
    for folder in (s3_folder, f"{s3_folder}/"):
        assert storage.list_files(folder, options) == storage.list_folder(folder, options) == [name]
        url = storage.join(folder, name)
        assert storage.exists(url, options)
        assert storage.is_file(url, options)
        assert not storage.is_folder(url, options)
        assert storage.is_folder(storage.parent(url), options)
        assert storage.size(url, options) == 10
        assert storage.read_bytes(url, options) == b"0123456789"
        assert storage.read_range(url, 3, 4, options) == b"3456"
        assert storage.read_range(url, 8, 4, options) == b"89"
        assert storage.read_range(url, 20, 4, options) == b""
        assert storage.read_range(url, 3, 0, options) == b""
    storage.write_bytes(url, b"new", options)

    assert bytes(obstore.get(client(s3_store), key).bytes()) == b"new"


def test_what_is_not_there_is_not_there(s3_store: S3Store, s3_folder: str) -> None:
    options, url = s3_store.options, f"{s3_folder}/none.tar"
    assert not storage.exists(url, options)
    assert not storage.is_file(url, options)
    assert not storage.is_folder(s3_folder, options)
    assert storage.list_files(s3_folder, options) == storage.list_folder(s3_folder, options) == []
    storage.remove(url, options)
    storage.remove_folder(s3_folder, options)
    for call in (storage.read_bytes, storage.size):
        with pytest.raises(FileNotFoundError, match=r"none\.tar"):
            call(url, options)
    with storage.open_read(url, options) as file, pytest.raises(FileNotFoundError, match=r"none\.tar"):
        file.read(1)


def test_a_prefix_is_listed_by_code_points_and_a_folder_by_its_names(
    s3_store: S3Store, s3_folder: str
) -> None:
    options = s3_store.options
    names = ["b.tar", "a/2.tar", "a/1.tar", "a/c/3.tar", "Z.tar", "a.tar", "a b.tar"]
    for name in names:
        storage.write_bytes(storage.join(s3_folder, name), b"x", options)

    assert storage.list_files(s3_folder, options) == sorted(names)
    assert storage.list_folder(s3_folder, options) == ["Z.tar", "a b.tar", "a.tar", "a/", "b.tar"]
    assert storage.list_files(f"{s3_folder}/a", options) == ["1.tar", "2.tar", "c/3.tar"]
    storage.remove_folder(f"{s3_folder}/a", options)
    assert storage.list_files(s3_folder, options) == ["Z.tar", "a b.tar", "a.tar", "b.tar"]


def test_many_files_are_looked_for_at_once(s3_store: S3Store, s3_folder: str, tmp_path: Path) -> None:
    options = s3_store.options
    (tmp_path / "here.tar").touch()
    there = [f"{s3_folder}/{number}.tar" for number in range(20)] + [str(tmp_path / "here.tar")]
    for url in there[:20]:
        storage.write_bytes(url, b"x", options)
    missing = [f"{s3_folder}/x.tar", f"{s3_folder}/other/0.tar", str(tmp_path / "x.tar"), str(tmp_path)]
    for count in (3, 20):
        asked = there[-count - 1 :] + missing
        assert storage.which_are_files(asked, options) == set(there[-count - 1 :])


@given(
    data=st.sampled_from([b"", b"0", DATA]),
    steps=st.lists(
        st.tuples(st.integers(-10, 800_000), st.sampled_from([0, 1, 511, 70_000, 400_000, -1])), max_size=6
    ),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_open_object_reads_and_seeks_like_a_file(
    s3_store: S3Store, s3_folder: str, data: bytes, steps: list[tuple[int, int]]
) -> None:
    url = f"{s3_folder}/{len(data)}"
    if not storage.is_file(url, s3_store.options):
        storage.write_bytes(url, data, s3_store.options)
    with storage.open_read(url, s3_store.options) as file, io.BytesIO(data) as plain:
        for offset, count in steps:
            whence = io.SEEK_SET if offset >= 0 else io.SEEK_END
            if offset >= 0 or len(data) + offset >= 0:
                assert file.seek(offset, whence) == plain.seek(offset, whence)
            assert file.read(count) == plain.read(count)
            assert file.tell() == plain.tell()


def test_parquet_is_read_from_an_object(s3_store: S3Store, s3_folder: str) -> None:
    table = pa.table({"a": list(range(1000))})
    with storage.open_write(f"{s3_folder}/a.parquet", s3_store.options) as file:
        pq.write_table(table, file)
    with storage.open_read(f"{s3_folder}/a.parquet", s3_store.options) as file:
        assert pq.read_table(file).equals(table)


def test_an_object_appears_when_its_block_ends(s3_store: S3Store, s3_folder: str) -> None:
    options, url = s3_store.options, f"{s3_folder}/a.tar"
    data = os.urandom(1 << 20)
    with storage.open_write(url, options) as file:
        for number in range(20):
            assert file.write(data) == len(data)
            assert file.tell() == (number + 1) * len(data)
        assert not storage.exists(url, options)

    assert storage.read_bytes(url, options) == 20 * data


def write_and_fail(url: str, options: StorageOptions, count: int, error: type[BaseException]) -> None:
    """Begin to write an object of so many MiB, then fail."""
    with storage.open_write(url, options) as file:
        for _ in range(count):
            file.write(bytes(1 << 20))
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_a_write_that_fails_leaves_what_was_there_and_no_part(
    s3_store: S3Store, s3_folder: str, error: type[BaseException], count: int
) -> None:
    options, url = s3_store.options, f"{s3_folder}/a.tar"
    begun = s3_store.unfinished_uploads()
    storage.write_bytes(url, b"old", options)
    with pytest.raises(error):
        write_and_fail(url, options, count, error)

    assert storage.read_bytes(url, options) == b"old"
    assert s3_store.unfinished_uploads() == begun


def test_one_of_two_claims_holds(s3_store: S3Store, s3_folder: str, tmp_path: Path) -> None:
    for folder in (s3_folder, str(tmp_path / "new")):
        url = storage.join(folder, "claim")
        assert storage.create(url, b"first", s3_store.options)
        assert not storage.create(url, b"other", s3_store.options)
        assert storage.read_bytes(url, s3_store.options) == b"first"
        assert storage.list_files(folder, s3_store.options) == ["claim"]
    # The answer to the first request may have been lost.
    assert storage.create(f"{s3_folder}/claim", b"first", s3_store.options)


def test_the_environment_says_where_the_store_is(
    s3_store: S3Store, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write_bytes(f"{s3_folder}/a", b"x", s3_store.options)
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)

    assert storage.read_bytes(f"{s3_folder}/a") == b"x"
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(ConfigError, match="AWS_ALLOW_HTTP=true"):
        storage.read_bytes(f"{s3_folder}/a")


def test_wrong_credentials_are_refused_without_being_told(
    s3_store: S3Store, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write_bytes(f"{s3_folder}/a", b"x", s3_store.options)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped-secret")
    url, options = f"{s3_folder}/a", s3_store.options
    calls = (storage.read_bytes, storage.exists, storage.list_files, storage.list_folder, storage.size)
    for call in calls:
        with pytest.raises(PermissionError, match=r"access is refused .*check the credentials") as caught:
            call(url, options)
        assert "mistyped" not in repr(caught.value)
        assert caught.value.__context__ is None
    with pytest.raises(PermissionError, match="access is refused"):
        storage.write_bytes(url, b"y", options)
    anonymous = replace(options, anonymous=True)
    with pytest.raises(PermissionError, match="access is refused"):
        storage.read_bytes(url, anonymous)


def test_a_bucket_that_is_not_there_is_named(s3_store: S3Store) -> None:
    for call in (storage.read_bytes, storage.list_files, storage.is_folder):
        with pytest.raises(FileNotFoundError, match="there is no bucket 'nobucket'"):
            call("s3://nobucket/a", s3_store.options)


def test_a_store_that_does_not_answer_is_named(s3_folder: str) -> None:
    options = StorageOptions(endpoint="http://127.0.0.1:1", allow_http=True, retries=1)
    for call in (storage.read_bytes, storage.list_files, storage.exists, storage.size):
        with pytest.raises(OSError, match=rf"{s3_folder}/a: .*"):
            call(f"{s3_folder}/a", options)


@pytest.fixture
def signed(s3_store: S3Store, s3_folder: str) -> str:
    """A presigned URL of an object that holds `DATA`."""
    key = s3_folder.removeprefix(f"s3://{BUCKET}/") + "/größe 1%.tar"
    obstore.put(client(s3_store), key, DATA)
    return obstore.sign(client(s3_store), "GET", key, timedelta(hours=1))


def test_a_presigned_url_is_read(signed: str) -> None:
    assert storage.is_file(signed)
    assert not storage.is_folder(signed)
    assert storage.size(signed) == len(DATA)
    assert storage.read_bytes(signed) == DATA
    assert storage.read_range(signed, 300, 5) == DATA[300:305]
    with storage.open_read(signed) as file:
        file.seek(-7, io.SEEK_END)
        assert file.read() == DATA[-7:]


def test_a_presigned_url_is_not_told(signed: str) -> None:
    wrong = signed.replace("X-Amz-Signature=", "X-Amz-Signature=0")
    signature = signed.rpartition("=")[2]
    for call in (storage.read_bytes, storage.size, storage.exists):
        with pytest.raises(PermissionError) as caught:
            call(wrong)
        assert signature not in repr(caught.value)
        assert caught.value.__context__ is None
    with pytest.raises(ConfigError, match="cannot be listed") as refused:
        storage.list_files(signed)
    assert signature not in repr(refused.value)


def test_a_web_server_is_not_written_to(signed: str) -> None:
    for write in (storage.write_bytes, storage.create):
        with pytest.raises(ConfigError, match="read only"):
            write(signed, b"")
    with pytest.raises(ConfigError, match="read only"), storage.open_write(signed):
        pass
    for remove in (storage.remove, storage.remove_folder):
        with pytest.raises(ConfigError, match="read only"):
            remove(signed)


def test_a_forked_child_is_told_how_to_start(s3_store: S3Store, s3_folder: str) -> None:
    storage.exists(s3_folder, s3_store.options)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            storage.exists(s3_folder, s3_store.options)
        except ConfigError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123 - a descriptor
        told = pipe.read().decode()
    os.waitpid(pid, 0)

    assert "forkserver" in told


@pytest.mark.parametrize("style", [None, True])
def test_options_are_checked(style: bool | None) -> None:
    assert StorageOptions(endpoint="https://s3.example.org", path_style=style).endpoint
    for endpoint in (
        "s3.example.org",
        "https://me:mine@s3.example.org",
        "https://h/bucket",
        "https://h?sig=1",
    ):
        with pytest.raises(ConfigError, match="is no URL of a server") as caught:
            StorageOptions(endpoint=endpoint)
        assert "mine" not in str(caught.value)
    with pytest.raises(ConfigError, match="allow_http: true"):
        StorageOptions(endpoint="http://127.0.0.1:9000")
    with pytest.raises(ConfigError, match="timeout_seconds"):
        StorageOptions(timeout_seconds=0)
    with pytest.raises(ConfigError, match="retries"):
        StorageOptions(retries=-1)
