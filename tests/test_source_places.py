"""Where a source lies: folders, patterns, lists and several places give the same files under one root, or an error."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_factory import encode_image, talk, write_jsonl, write_t2i

from bagel_wds.errors import ConfigError
from bagel_wds.sources import Source, SourceSample, list_files, plan_source, read_slice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bagel_wds.schema import SampleKind


def source(*paths: str | Path, kind: SampleKind = "t2i") -> Source:
    places = tuple(map(str, paths))
    return Source(kind=kind, name="x", path=places[0] if len(places) == 1 else places)


def touch(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def refusal(*paths: str | Path, kind: SampleKind = "t2i") -> str:
    with pytest.raises(ConfigError) as refused:
        list_files(source(*paths, kind=kind))
    return str(refused.value)


FILES = ("a.parquet", "b/c/e.parquet", "b/d.parquet", "part-1.parquet", "part-2.parquet", "part-10.parquet")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    touch(tmp_path / "data", [*FILES, "readme.md", ".hidden/x.parquet", "b/.y.parquet"])
    return tmp_path / "data"


# What each place names


@pytest.mark.parametrize(
    ("place", "files"),
    [
        ("", sorted(FILES)),
        ("a.parquet", ["a.parquet"]),
        ("*.parquet", ["a.parquet", "part-1.parquet", "part-10.parquet", "part-2.parquet"]),
        ("part-?.parquet", ["part-1.parquet", "part-2.parquet"]),
        ("part-[!1].parquet", ["part-2.parquet"]),
        ("part-*", ["part-1.parquet", "part-10.parquet", "part-2.parquet"]),
        ("*/*.parquet", ["b/d.parquet"]),
        ("**/*.parquet", sorted(FILES)),
        ("**/e.parquet", ["b/c/e.parquet"]),
        ("**/c/**/*.parquet", ["b/c/e.parquet"]),
        (".hidden/*.parquet", ["x.parquet"]),
        # A folder that matches gives what lies in it.
        ("[b]", ["b/c/e.parquet", "b/d.parquet"]),
        ("part-{2,1}.parquet", ["part-1.parquet", "part-2.parquet"]),
        ("part-{1..2}.parquet", ["part-1.parquet", "part-2.parquet"]),
        ("{a.parquet,b}", ["a.parquet", "b/c/e.parquet", "b/d.parquet"]),
        ("{a,part-?}.parquet", ["a.parquet", "part-1.parquet", "part-2.parquet"]),
    ],
)
def test_files_come_in_byte_order_relative_to_the_root(data: Path, place: str, files: list[str]) -> None:
    found = source(data / place)

    assert list_files(found) == files
    assert found.root == str(data / ".hidden" if place.startswith(".hidden") else data)


def test_the_root_of_a_pattern_does_not_depend_on_what_matches(tmp_path: Path) -> None:
    touch(tmp_path, ["data/2024-01/a.parquet"])
    pattern = source(tmp_path / "data" / "2024-*" / "*.parquet")
    before = (pattern.root, list_files(pattern))
    touch(tmp_path, ["data/2024-02/a.parquet"])

    assert before == (str(tmp_path / "data"), ["2024-01/a.parquet"])
    assert list_files(source(tmp_path / "data" / "2024-*" / "*.parquet")) == [
        "2024-01/a.parquet",
        "2024-02/a.parquet",
    ]
    assert list_files(source(tmp_path / "data")) == ["2024-01/a.parquet", "2024-02/a.parquet"]


def test_relative_places_stay_relative(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)

    assert (source("*.parquet").root, source("b/*").root, source("b").root) == (".", "b", "b")
    assert list_files(source("{b,a.parquet}")) == ["a.parquet", "b/c/e.parquet", "b/d.parquet"]
    assert list_files(source("./b/../a.parquet")) == ["a.parquet"]


def test_a_name_that_is_there_as_it_is_written_is_no_pattern(tmp_path: Path) -> None:
    touch(tmp_path, ["part-[1].parquet", "part-1.parquet", "{a,b}/x.parquet", "a/y.parquet", "b/z.parquet"])

    assert list_files(source(tmp_path / "part-[1].parquet")) == ["part-[1].parquet"]
    assert list_files(source(tmp_path / "{a,b}")) == ["x.parquet"]
    assert source(tmp_path / "{a,b}").root == str(tmp_path / "{a,b}")


def test_a_pattern_goes_through_links_but_not_round_a_ring_of_them(data: Path, tmp_path: Path) -> None:
    touch(tmp_path, ["elsewhere/z.parquet"])
    (data / "link").symlink_to(tmp_path / "elsewhere")
    (data / "b" / "ring").symlink_to(data)

    assert list_files(source(data / "**" / "*.parquet")) == sorted([*FILES, "link/z.parquet"])


def test_a_file_url_is_a_path(data: Path) -> None:
    by_url = source(f"file://{data}")

    assert (by_url.root, list_files(by_url)) == (str(data), sorted(FILES))


# Lists


def test_a_list_names_files_relative_to_its_folder_or_to_the_current_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"\ufeff# the first ones\n\n  b/d.parquet\r\n{data}/a.parquet\ndata/part-1.parquet\nb/c\n"
    (data / "files.txt").write_text(text, encoding="utf-8")
    listed = source(data / "files.txt")

    assert listed.root == str(data)
    assert list_files(listed) == ["a.parquet", "b/c/e.parquet", "b/d.parquet", "part-1.parquet"]


def test_a_list_of_files_that_lie_elsewhere_has_their_common_folder_as_root(
    data: Path, tmp_path: Path
) -> None:
    touch(tmp_path, ["more/x.parquet"])
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "files.txt").write_text("../data/b/d.parquet\n../more/x.parquet\n")
    listed = source(tmp_path / "lists" / "files.txt")

    assert listed.root == str(tmp_path)
    assert list_files(listed) == ["data/b/d.parquet", "more/x.parquet"]


@pytest.mark.parametrize(
    "value", [["b/d.parquet", "a.parquet"], {"b/d.parquet": {"num_row_groups": 2}, "a.parquet": {}}]
)
def test_upstreams_parquet_info_is_a_list(data: Path, value: Any) -> None:
    (data / "info.json").write_text(json.dumps(value))

    assert list_files(source(data / "info.json")) == ["a.parquet", "b/d.parquet"]


def test_several_places_have_one_root(data: Path, tmp_path: Path) -> None:
    touch(tmp_path, ["more/x.parquet"])
    (data / "files.txt").write_text("a.parquet\n")
    several = source(tmp_path / "more", data / "b" / "**" / "*.parquet", data / "files.txt")

    assert several.root == str(tmp_path)
    assert list_files(several) == [
        "data/a.parquet",
        "data/b/c/e.parquet",
        "data/b/d.parquet",
        "more/x.parquet",
    ]
    assert source(data / "a.parquet", data / "part-1.parquet").root == str(data)


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "[x]", "{p,q}", "é", "\udcff", "z"]), min_size=1, max_size=3).map(
        lambda parts: "/".join(parts) + ".parquet"
    ),
    min_size=1,
    max_size=6,
    unique=True,
)


@settings(deadline=None)
@given(NAMES)
def test_however_the_same_files_are_named_they_are_the_same_source(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        touch(folder, names)
        (folder / "files.txt").write_bytes(b"\n".join(os.fsencode(name) for name in names))
        expected = sorted(names, key=os.fsencode)

        for place in (folder, f"{folder}/", folder / "**/*.parquet", folder / "files.txt"):
            assert list_files(source(place)) == expected
            assert Path(source(place).root) == folder
        one_by_one = source(*(folder / name for name in names))
        assert [Path(one_by_one.root, file) for file in list_files(one_by_one)] == [
            folder / name for name in expected
        ]


# What is read from them


def test_keys_and_rows_do_not_depend_on_how_the_files_are_named(tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        write_t2i(tmp_path / f"{name}.parquet", [(encode_image(), "{}")])
    (tmp_path / "files.txt").write_text("b/c.parquet\na.parquet\n")

    def rows(place: str | Path) -> list[Any]:
        named = source(place)
        slices = plan_source(named, slice_bytes=1, slice_rows=1).slices
        return [row for part in slices for row in read_slice(named, part)]

    whole = rows(tmp_path)
    assert [row.key for row in whole if isinstance(row, SourceSample)] == [
        "a=2Eparquet-0-0",
        "b=2Fc=2Eparquet-0-0",
    ]
    assert rows(tmp_path / "**/*.parquet") == rows(tmp_path / "{a,b/c}.parquet") == whole
    assert rows(tmp_path / "files.txt") == whole


def test_a_plan_can_be_limited_to_some_files(tmp_path: Path) -> None:
    for name in "abc":
        write_t2i(tmp_path / f"{name}.parquet", [(encode_image(), "{}")])
    capped = Source(kind="t2i", name="x", path=str(tmp_path), max_units=1)

    def files(**some: Any) -> list[str]:
        return [file.name for file in plan_source(capped, slice_bytes=1, slice_rows=1, **some).files]

    assert files() == ["a.parquet"]
    assert files(files=["c.parquet", "b.parquet"]) == ["b.parquet", "c.parquet"]
    with pytest.raises(ConfigError, match=r"dataset 'x': .*/d\.parquet is none of its 3 files"):
        files(files=["b.parquet", "d.parquet"])


def test_conversations_are_read_from_either_form(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"conversations": talk()}])
    touch(tmp_path, ["b.json.gz", "c.jsonl.zst", "notes.md"])

    assert list_files(source(tmp_path, kind="vlm")) == ["a.jsonl", "b.json.gz", "c.jsonl.zst"]
    touch(tmp_path, ["d.parquet"])
    assert list_files(source(tmp_path / "*.parquet", kind="vlm")) == ["d.parquet"]
    message = refusal(tmp_path, kind="vlm")
    assert "both parquet and JSON" in message
    assert f"{tmp_path}/*.parquet" in message
    assert "both parquet and JSON" in refusal(tmp_path / "a.jsonl", tmp_path / "d.parquet", kind="vlm")


# What is refused


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("gone.parquet", "gone.parquet: no such file or folder"),
        ("gone/*.parquet", "gone/*.parquet: no file matches this pattern"),
        ("x-*.parquet", "x-*.parquet: no file matches this pattern"),
        ("part-{1..3}.parquet", "part-3.parquet: no such file or folder"),
        ("{a,x*}.parquet", "x*.parquet: no file matches this pattern"),
        ("part-{1,2.parquet", "braces do not match"),
        ("readme.md", "readme.md: t2i rows are read from .parquet files"),
        ("*", "readme.md: t2i rows are read from .parquet files"),
        ("{a,a}.parquet", "a.parquet comes twice; name each file once"),
        ("{b,b/c}", "b/c/e.parquet comes twice"),
    ],
)
def test_a_place_that_names_no_file_is_an_error_that_names_it(data: Path, place: str, message: str) -> None:
    refused = refusal(data / place)

    assert message in refused
    assert refused.startswith("dataset 'x': ")
    assert str(data) in refused


def test_a_file_that_comes_twice_by_two_places_is_refused(data: Path) -> None:
    assert "a.parquet comes twice" in refusal(data, data / "b" / ".." / "a.parquet")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("files.txt", "a.parquet\n# b\ngone.parquet\n", "files.txt: there is no "),
        ("files.txt", "# nothing\n\n", "files.txt: this list of files is empty"),
        ("files.txt", "a.parquet\n./a.parquet\n", "a.parquet comes twice"),
        ("files.txt", "readme.md\n", "t2i rows are read from .parquet files"),
        ("files.txt", "ftp://host/a.parquet\n", "ftp:// is not read; there are"),
        ("info.json", "{", "info.json: no JSON"),
        ("info.json", "[]", "info.json: this list of files is empty"),
        ("info.json", '[{"path": "a.parquet"}]', "must be a JSON array of paths, or an object whose keys"),
        ("info.json", '"a.parquet"', "must be a JSON array of paths"),
    ],
)
def test_a_list_that_will_not_do_is_an_error_that_says_why(
    data: Path, name: str, text: str, message: str
) -> None:
    (data / name).write_text(text)

    assert message in refusal(data / name)


def test_an_empty_path_and_other_storage_are_refused() -> None:
    assert "an empty path" in refusal("")
    assert "ftp:// is not read; there are" in refusal("ftp://host/data")
