"""Files by path or URL: only what is on the disk, only whole, and never through a shell."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bagel_wds import storage
from bagel_wds.errors import ConfigError, ShardError
from bagel_wds.redact import redact
from bagel_wds.urls import split

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "name", ["plain.tar", "with blank.tar", "100%.tar", "a#b.tar", "wh?t.tar", "größe-字.tar", "%41.tar"]
)
def test_a_file_is_found_by_path_and_by_file_url_whatever_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"0123456789")

    for folder in (str(tmp_path), f"file://{tmp_path}", f"{tmp_path}/"):
        url = storage.join(folder, storage.list_files(folder)[0])
        assert storage.local_path(url) == tmp_path / name
        assert storage.exists(url)
        assert storage.read_bytes(url) == b"0123456789"
        assert storage.read_range(url, 3, 4) == b"3456"
        assert storage.read_range(url, 8, 4) == b"89"
        assert storage.read_range(url, 20, 4) == b""
        assert storage.is_folder(storage.parent(url))


@pytest.mark.parametrize(
    ("folder", "name", "joined"),
    [
        ("a", "b", "a/b"),
        ("a/", "b/c", "a/b/c"),
        ("/", "b", "/b"),
        ("a", "/b", "/b"),
        ("a", "s3://bucket/b", "s3://bucket/b"),
        ("s3://bucket/a", "b", "s3://bucket/a/b"),
        ("file:///a", "b c", "file:///a/b%20c"),
        ("s3://bucket", "b c%41?.tar", "s3://bucket/b c%41?.tar"),
        ("s3://bucket/a", "./b.tar", "s3://bucket/a/b.tar"),
        ("s3://bucket/a", "../b.tar", "s3://bucket/b.tar"),
        ("https://host/a/", "b c", "https://host/a/b%20c"),
        ("https://host/a?sv=1&sig=2", "b", "https://host/a/b?sv=1&sig=2"),
    ],
)
def test_names_are_joined_to_folders(folder: str, name: str, joined: str) -> None:
    assert storage.join(folder, name) == joined


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("a/b", "a"),
        ("b", "."),
        ("/b", "/"),
        ("/a/b", "/a"),
        ("s3://bucket/a/b", "s3://bucket/a"),
        ("file:///a/b", "file:///a"),
        ("file:///a", "file:///"),
        ("s3://bucket/a", "s3://bucket"),
        ("s3://bucket", "s3://bucket"),
        ("https://host/a?b=c/d", "https://host?b=c/d"),
    ],
)
def test_a_file_lies_in_its_folder(url: str, folder: str) -> None:
    assert storage.parent(url) == folder


@pytest.mark.parametrize("url", ["pipe:touch made-by-a-shell", "pipe://touch made-by-a-shell"])
def test_a_pipe_is_refused_and_nothing_is_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (storage.open_read, storage.read_bytes, storage.exists, storage.list_files):
        with pytest.raises(ConfigError, match="run a shell command and are refused"):
            call(url)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["ftp://host/a.tar", "hdfs://host/a.tar", "s3a://bucket/a.tar"])
def test_a_url_of_another_scheme_is_refused_with_those_there_are(url: str) -> None:
    for call in (storage.open_read, storage.exists, storage.read_bytes, storage.list_files):
        with pytest.raises(
            ConfigError, match="is not read; there are paths, file://, s3://, gs://, az://, http://"
        ):
            call(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "names no bucket"),
        ("s3:///a.tar", "names no bucket"),
        ("http:///a.tar", "names no host"),
        ("s3://bucket/a//b.tar", "a part of the key is empty"),
        ("gs://bucket/a/../b.tar", "a part of the key is empty"),
        ("s3://bucket/a\nb.tar", "a control character"),
        ("s3://AKIAX:mine@bucket/a.tar", "a credential in a URL"),
        ("s3://AKIAX:some/mine@bucket/a.tar", "a credential in a URL"),
        ("gs://bucket:80/a.tar", "a credential in a URL"),
        ("s3://b c/a.tar", "no bucket is called 'b c'"),
        ("s3://bucket/a\udcff.tar", "the key is no text"),
        ("https://me:some/mine@host/a.tar", "no host and port that can be asked"),
        ("https://me:some?mine@host/a.tar", "no host and port that can be asked"),
        ("https://me:so me/mine@host/a.tar", "no host and port that can be asked"),
        ("https://[mine/a.tar", "no host and port that can be asked"),
        ("https://host:port/a.tar", "no host and port that can be asked"),
    ],
)
def test_a_url_that_names_no_object_is_refused_before_anything_is_asked(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        storage.read_bytes(url)
    assert "mine" not in str(caught.value)


def test_what_is_not_on_the_disk_has_no_path() -> None:
    with pytest.raises(ConfigError, match="a path on the disk belongs here, not s3://"):
        storage.local_path("s3://bucket/a.tar")


@pytest.mark.parametrize(
    "name", ["plain.tar", "with blank.tar", "100%.tar", "a#b.tar", "wh?t.tar", "größe-字.tar", "%41.tar"]
)
@pytest.mark.parametrize(
    "folder",
    [
        "a",
        "/a",
        "file:///a",
        "s3://bucket",
        "s3://bucket/a",
        "gs://b/a",
        "az://c/a",
        "https://h/a",
        "https://h/a?sv=1&sig=2",
    ],
)
def test_a_name_comes_out_of_a_url_as_it_went_in(folder: str, name: str) -> None:
    url = storage.join(folder, name)
    assert storage.base_name(url) == name
    assert storage.parent(url) == folder
    if not storage.is_local(url):
        assert split(url).key.rpartition("/")[2] == name


def test_a_url_signed_for_one_object_lends_its_signature_to_no_other() -> None:
    signed = "https://h/a/b.tar?X-Amz-Date=1&X-Amz-Signature=2"
    assert storage.is_signed(signed)
    assert not storage.is_signed("https://h/a/b.tar?sv=1&sig=2")
    assert not storage.is_signed("s3://bucket/b.tar?X-Amz-Signature=2")
    assert storage.parent(signed) == "https://h/a"
    assert storage.join(storage.parent(signed), "c.tar") == "https://h/a/c.tar"


def test_a_file_that_is_written_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.tar"
    with storage.open_write(target) as file:
        file.write(b"half")
        file.flush()
        assert not target.exists()
        file.write(b" and half")

    assert target.read_bytes() == b"half and half"
    assert [path.name for path in target.parent.iterdir()] == ["a.tar"]


def write_and_fail(target: Path, error: type[BaseException]) -> None:
    """Begin to write a file, then fail."""
    with storage.open_write(target) as file:
        file.write(b"new")
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "a.tar"
    storage.write_bytes(target, b"old")
    with pytest.raises(error):
        write_and_fail(target, error)

    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "GET https://h/a.tar?X-Amz-Credential=AKIA%2F1&X-Amz-Date=2&X-Amz-Signature=0123abc in 3 ms",
            "GET https://h/a.tar?X-Amz-Credential=***&X-Amz-Date=2&X-Amz-Signature=*** in 3 ms",
        ),
        ("'https://a.blob/c/b?sv=2&sp=r&sig=a%2Bb%3D'", "'https://a.blob/c/b?sv=2&sp=r&sig=***'"),
        (
            "https://h/b?AWSAccessKeyId=A&Signature=B&Expires=1",
            "https://h/b?AWSAccessKeyId=***&Signature=***&Expires=1",
        ),
        ("https://h/b?access_token=t&part=2", "https://h/b?access_token=***&part=2"),
        ("<a>https://me:mine@h/b</a>", "<a>https://***@h/b</a>"),
        ("s3://key:secret@bucket/b", "s3://***@bucket/b"),
        ("https://me:mi@ne@h/b", "https://***@h/b"),
        ("'https://me:mi'ne@h/b'", "'https://***@h/b'"),
        ("s3://AKIA:mi/n/e@bucket/b: no", "s3://***@bucket/b: no"),
        (
            "http://127.0.0.1:80/a@b and http://[::1]:80/a@b",
            "http://127.0.0.1:80/a@b and http://[::1]:80/a@b",
        ),
        ('{"a":"s3://b","c":"x@y"}', '{"a":"s3://b","c":"x@y"}'),
        (
            "https://h/b?jwt=t&code=t&encode=1&hdnts=t and https://h/b#token=t",
            "https://h/b?jwt=***&code=***&encode=1&hdnts=*** and https://h/b#token=***",
        ),
        ("s3://bucket/a@b.tar and me:mine@here", "s3://bucket/a@b.tar and me:mine@here"),
        ("/data/a?b=c", "/data/a?b=c"),
    ],
)
def test_a_text_is_told_without_what_opens_something(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert str(ConfigError(text)) == str(ShardError(text)) == clean
    assert clean in repr(pickle.loads(pickle.dumps(ShardError(text))))


def test_claims_on_the_disk_leave_nothing_beside_them(tmp_path: Path) -> None:
    assert storage.create(tmp_path / "claim", b"me")
    assert not storage.create(tmp_path / "claim", b"you")

    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("claim", b"me")]


def test_a_folder_is_listed_by_its_names(tmp_path: Path) -> None:
    for name in ("b.tar", "a/1.tar", "Z.tar"):
        storage.write_bytes(tmp_path / name, b"x")

    assert storage.list_folder(tmp_path) == ["Z.tar", "a/", "b.tar"]


def test_local_use_does_not_import_the_client() -> None:
    code = (
        "import sys; from bagel_wds import storage; storage.exists('/'); sys.exit('obstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
