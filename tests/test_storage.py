"""Files by path or URL: only what is on the disk, only whole, and never through a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bagel_wds import storage
from bagel_wds.errors import ConfigError

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


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "https"])
def test_a_url_of_another_scheme_is_refused_by_its_name(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"{scheme}:// is not read by this version"):
        storage.open_read(f"{scheme}://host/a.tar")


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
