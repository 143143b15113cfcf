"""Raw sources: slices that depend on nothing but the source, rows as they are, and a verdict on each bad one."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_factory import (
    BINARY_LIST,
    PHRASINGS,
    Corpus,
    captions,
    encode_image,
    png_header,
    talk,
    write_corpus,
    write_edit,
    write_jsonl,
    write_parquet,
    write_t2i,
)

from bagel_wds.errors import ConfigError, Reason
from bagel_wds.schema import make_key, media_name
from bagel_wds.sources import (
    Lines,
    RejectedRow,
    RowGroups,
    Slice,
    Source,
    SourceSample,
    describe_file,
    list_files,
    plan_rows,
    plan_source,
    read_slice,
    t2i,
)
from bagel_wds.sources.jsonl import parse_line
from bagel_wds.sources.layout import ParquetLayout, check_schema

REAL = Path(__file__).parent / "data" / "real"
IMAGE = encode_image((8, 12))
Row = SourceSample | RejectedRow


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write_corpus(tmp_path)


def read_all(source: Source, slice_bytes: int = 1 << 30, slice_rows: int = 1 << 30) -> list[Row]:
    slices = plan_source(source, slice_bytes=slice_bytes, slice_rows=slice_rows).slices
    return [row for part in slices for row in read_slice(source, part)]


def read_samples(source: Source) -> list[SourceSample]:
    rows = read_all(source)
    assert not [row for row in rows if isinstance(row, RejectedRow)]
    return [row for row in rows if isinstance(row, SourceSample)]


def only_rejection(source: Source) -> RejectedRow:
    (row,) = read_all(source)
    assert isinstance(row, RejectedRow), row
    return row


# Slices


def test_parquet_slices_join_row_groups_over_files_and_never_divide_one(tmp_path: Path) -> None:
    for name in ("b", "a/z", "a/y"):
        write_t2i(tmp_path / f"{name}.parquet", [(IMAGE, "{}")] * 4, group_rows=2)
    source = Source(kind="t2i", name="x", path=str(tmp_path))
    group_bytes = pq.ParquetFile(tmp_path / "b.parquet").metadata.row_group(0).total_byte_size

    slices = plan_source(source, slice_bytes=3 * group_bytes, slice_rows=1).slices

    assert slices == (
        Slice(0, (RowGroups("a/y.parquet", 0, 2, 4), RowGroups("a/z.parquet", 0, 1, 2))),
        Slice(1, (RowGroups("a/z.parquet", 1, 2, 2), RowGroups("b.parquet", 0, 2, 4))),
    )
    assert [part.num_rows for part in slices] == [6, 6]
    assert [part.num_rows for part in plan_source(source, slice_bytes=1, slice_rows=1).slices] == [2] * 6


def test_jsonl_slices_join_lines_over_files_and_skip_blank_ones(tmp_path: Path) -> None:
    row = {"conversations": talk()}
    write_jsonl(tmp_path / "a.jsonl", [row, "", row, "   ", row])
    write_jsonl(tmp_path / "b.jsonl", [row])
    source = Source(kind="vlm", name="x", path=str(tmp_path))
    width = len(json.dumps(row)) + 1

    slices = plan_source(source, slice_bytes=1, slice_rows=2).slices

    assert slices == (
        Slice(0, (Lines("a.jsonl", 0, 0, 2),)),
        Slice(1, (Lines("a.jsonl", 4, 2 * width + 5, 1), Lines("b.jsonl", 0, 0, 1))),
    )
    places = [(read.place.file, read.place.row) for part in slices for read in read_slice(source, part)]
    assert places == [("a.jsonl", 0), ("a.jsonl", 2), ("a.jsonl", 4), ("b.jsonl", 0)]


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
def test_rows_do_not_depend_on_how_the_source_is_cut(corpus: Corpus, kind: str) -> None:
    source = getattr(corpus, kind)
    whole = read_all(source)

    assert len(plan_source(source, slice_bytes=1, slice_rows=1).slices) > len(whole) // 4
    for slice_bytes, slice_rows in ((1, 1), (3000, 5)):
        assert read_all(source, slice_bytes, slice_rows) == whole


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
def test_some_rows_alone_are_read_as_they_were(corpus: Corpus, kind: str) -> None:
    source = getattr(corpus, kind)
    whole = read_all(source)
    chosen = [whole[number] for number in (7, 1, 4)]

    slices = plan_rows(source, [row.place for row in chosen], slice_bytes=1, slice_rows=2)

    read = [row for part in slices for row in read_slice(source, part)]
    assert read == [whole[number] for number in (1, 4, 7)]
    assert [row for part in slices for row in read_slice(source, part, skip_rows=1)] == [
        row for part in slices for row in list(read_slice(source, part))[1:]
    ]


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
def test_a_plan_describes_each_file_as_it_is(corpus: Corpus, kind: str) -> None:
    source = getattr(corpus, kind)

    files = plan_source(source, slice_bytes=1, slice_rows=1).files

    assert [file.name for file in files] == list_files(source)
    assert list(files) == [describe_file(source, file.name) for file in files]
    assert [file.bytes for file in files] == [Path(source.root, file.name).stat().st_size for file in files]


def test_a_folder_and_its_only_file_give_the_same_keys(tmp_path: Path) -> None:
    write_t2i(tmp_path / "a.parquet", [(IMAGE, "{}")])
    (by_folder,) = read_samples(Source(kind="t2i", name="x", path=str(tmp_path)))
    (by_file,) = read_samples(Source(kind="t2i", name="x", path=str(tmp_path / "a.parquet")))

    assert by_folder == by_file
    assert by_file.key == "a=2Eparquet-0-0"


def test_files_come_in_byte_order_through_links_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("data/b", "data/A", "data/b/c", "data/.tmp/x", "data/.y", "elsewhere/z"):
        write_t2i(tmp_path / f"{name}.parquet", [(IMAGE, "{}")])
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "ring").symlink_to(tmp_path / "data")

    samples = read_samples(Source(kind="t2i", name="x", path=str(tmp_path / "data")))

    assert [sample.place.file for sample in samples] == [
        "A.parquet",
        "b.parquet",
        "b/c.parquet",
        "link/z.parquet",
    ]


# Caps


def test_max_units_takes_the_first_files_and_never_repeats(tmp_path: Path) -> None:
    for name in "cab":
        write_t2i(tmp_path / f"{name}.parquet", [(IMAGE, "{}")])

    def files(max_units: int) -> list[str]:
        source = Source(kind="t2i", name="x", path=str(tmp_path), max_units=max_units)
        return [row.place.file for row in read_all(source)]

    assert files(2) == ["a.parquet", "b.parquet"]
    assert files(10) == ["a.parquet", "b.parquet", "c.parquet"]


def test_max_units_takes_the_first_lines_or_a_seeded_choice_in_file_order(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*({"conversations": talk(), "id": i} for i in range(6)), ""])
    write_jsonl(tmp_path / "b.jsonl", ["", *({"conversations": talk(), "id": i} for i in range(6, 12))])

    def ids(**caps: Any) -> list[int]:
        return [
            int(sample.fields["id"])
            for sample in read_samples(Source(kind="vlm", name="x", path=str(tmp_path), **caps))
        ]

    order = list(range(12))
    random.Random(7).shuffle(order)
    chosen = sorted(order[:5])
    assert ids(max_units=5) == [0, 1, 2, 3, 4]
    assert ids(max_units=5, shuffle_lines=True, shuffle_seed=7) == chosen
    assert chosen not in ([0, 1, 2, 3, 4], ids(max_units=5, shuffle_lines=True, shuffle_seed=8))
    assert ids(max_units=50, shuffle_lines=True) == list(range(12))
    assert ids(shuffle_lines=True) == list(range(12))


# Rows as they are


def test_t2i_keeps_captions_to_the_letter_and_other_columns_by_the_table(tmp_path: Path) -> None:
    text = '{ "b": "",  "a": "caf\\u00e9 图" }'
    moment = dt.datetime(2024, 5, 1, 12, 30, tzinfo=dt.UTC)
    write_t2i(
        tmp_path / "a.parquet",
        [(IMAGE, text)],
        null=pa.nulls(1),
        yes=pa.array([True]),
        big=pa.array([2**63], pa.uint64()),
        half=pa.array([1.5], pa.float16()),
        price=pa.array([decimal.Decimal("1.10")]),
        time=pa.array([moment], pa.timestamp("us", "UTC")),
        nanos=pa.array([1], pa.timestamp("ns")),
        day=pa.array([moment.date()]),
        took=pa.array([7], pa.duration("ms")),
        hash=pa.array([b"\x00\xff"]),
        tags=pa.array([["a", None]]).cast(pa.large_list(pa.string())),
        box=pa.array([{"xy": [1, 2], "at": moment.date(), "raw": b"a"}]),
        pairs=pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        word=pa.array(["w"]).dictionary_encode(),
    )

    (sample,) = read_samples(Source(kind="t2i", name="x", path=str(tmp_path)))

    assert sample.fields == {
        "captions": text,
        "null": None,
        "yes": True,
        "big": 2**63,
        "half": 1.5,
        "price": "1.10",
        "time": "2024-05-01 12:30:00.000000Z",
        "nanos": "1970-01-01 00:00:00.000000001",
        "day": "2024-05-01",
        "took": 7,
        "hash": {"base64": "AP8="},
        "tags": ["a", None],
        "box": {"xy": [1, 2], "at": "2024-05-01", "raw": {"base64": "YQ=="}},
        "pairs": [["k", 1]],
        "word": "w",
    }
    assert [image.data for medium in sample.media for image in medium.images] == [IMAGE]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())])
def test_encoded_images_come_in_any_binary_column(tmp_path: Path, kind: pa.DataType) -> None:
    image = pa.array([IMAGE, IMAGE]).cast(kind) if not pa.types.is_dictionary(kind) else None
    column = image if image is not None else pa.array([IMAGE, IMAGE]).dictionary_encode()
    write_parquet(tmp_path / "a.parquet", pa.table({"image": column, "captions": ["{}", "{}"]}))

    samples = read_samples(Source(kind="t2i", name="x", path=str(tmp_path)))

    assert [sample.media[0].images[0].data for sample in samples] == [IMAGE, IMAGE]


def test_captions_may_be_none_or_empty(tmp_path: Path) -> None:
    write_t2i(tmp_path / "a.parquet", [(IMAGE, "{}"), (IMAGE, '{"a": ""}')])

    assert len(read_samples(Source(kind="t2i", name="x", path=str(tmp_path)))) == 2


@pytest.mark.parametrize(
    ("instructions", "kind", "images"),
    [
        (["make it red", "now blue"], pa.list_(pa.string()), 3),
        ("make it red", pa.string(), 2),
        ([["make it red"]], pa.large_list(pa.list_(pa.large_string())), 2),
    ],
)
def test_edit_takes_a_plain_string_as_a_step_and_as_all_there_is(
    tmp_path: Path, instructions: Any, kind: pa.DataType, images: int
) -> None:
    table = pa.table(
        {
            "image_list": pa.array([[IMAGE] * images], pa.large_list(pa.large_binary())),
            "instruction_list": pa.array([instructions], kind),
        }
    )
    write_parquet(tmp_path / "a.parquet", table)

    (sample,) = read_samples(Source(kind="edit", name="x", path=str(tmp_path)))

    assert sample.fields == {"instruction_list": instructions}
    assert len(sample.media) == images


@pytest.mark.parametrize("image", [None, "", "None", [], "absent"])
def test_a_row_without_image_is_text_only(tmp_path: Path, image: object) -> None:
    row = {"conversations": talk(), "image": image}
    if image == "absent":
        del row["image"]
    write_jsonl(tmp_path / "a.jsonl", [row])

    (sample,) = read_samples(Source(kind="vlm", name="x", path=str(tmp_path)))

    assert sample.media == ()
    assert sample.fields == row


def test_images_of_a_row_come_in_order_with_the_format_of_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "really a png.jpg").write_bytes(IMAGE)
    (tmp_path / "b.webp").write_bytes(encode_image(codec="WEBP"))
    row = {"image": ["b.webp", "sub/really a png.jpg"], "conversations": talk("<image><image>", "a")}
    write_jsonl(tmp_path / "a.jsonl", [row])

    (sample,) = read_samples(Source(kind="vlm", name="x", path=str(tmp_path)))

    assert [image.header.ext for medium in sample.media for image in medium.images] == ["webp", "png"]
    assert sample.fields == row


def test_a_folder_of_frames_is_a_clip_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    names = ["f_10.png", "f_9.png", "g_2.png", "title.png", "title 2.png", "title 10.png"]
    for seed, name in enumerate([*names, ".hidden_1.png", "notes.txt"]):
        path = tmp_path / "clip" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_image(seed=seed))
    write_jsonl(
        tmp_path / "a.jsonl", [{"video": "clip/", "image": None, "conversations": talk("<video>", "a")}]
    )

    (sample,) = read_samples(Source(kind="vlm", name="x", path=str(tmp_path)))

    (clip,) = sample.media
    assert clip.is_clip
    expected = ["title.png", "title 2.png", "title 10.png", "g_2.png", "f_9.png", "f_10.png"]
    by_data = {(tmp_path / "clip" / name).read_bytes(): name for name in names}
    shown = [by_data[image.data] for image in clip.images]
    assert sorted(shown[:3]) == sorted(expected[:3])
    assert shown.index("title 2.png") < shown.index("title 10.png")
    assert shown[3:] == expected[3:]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"score": NaN, "x": [-Infinity, 1.50]}', {"score": None, "x": [None, 1.5]}),
        (b'{"id": 123456789012345678901234567890}', {"id": 123456789012345678901234567890}),
        (b'\xef\xbb\xbf{"zh": "\xe5\x9b\xbe"}\r\n', {"zh": "图"}),
    ],
)
def test_json_as_other_tools_write_it_is_read(line: bytes, value: dict[str, Any]) -> None:
    assert parse_line(line) == value


def test_rows_of_a_row_group_are_numbered_over_its_batches(tmp_path: Path) -> None:
    write_t2i(tmp_path / "a.parquet", [(IMAGE, captions(i)) for i in range(45)], group_rows=40)

    samples = read_samples(Source(kind="t2i", name="x", path=str(tmp_path)))

    places = [(sample.place.row_group, sample.place.row) for sample in samples]
    assert places == [(0, i) for i in range(40)] + [(1, i) for i in range(5)]
    assert [sample.fields["captions"] for sample in samples] == [captions(i) for i in range(45)]


def test_the_real_data_is_read_whole() -> None:
    sources = (
        Source(kind="t2i", name="t2i", path=str(REAL / "t2i")),
        Source(kind="edit", name="seed", path=str(REAL / "editing" / "seed")),
        Source(
            kind="vlm",
            name="vlm",
            path=str(REAL / "vlm" / "train.jsonl"),
            media_root=str(REAL / "vlm" / "images"),
        ),
    )
    rows = {source.name: read_all(source, slice_bytes=1, slice_rows=3) for source in sources}

    assert {name: len(found) for name, found in rows.items()} == {"t2i": 8, "seed": 4, "vlm": 8}
    assert [row for found in rows.values() for row in found if isinstance(row, RejectedRow)] == []


# Rows that cannot be used


@pytest.mark.parametrize(
    ("image", "text", "reason"),
    [
        (None, "{}", Reason.IMAGE_EMPTY),
        (b"", "{}", Reason.IMAGE_EMPTY),
        (b"<html>not found</html>", "{}", Reason.IMAGE_UNREADABLE),
        (IMAGE[:20], "{}", Reason.IMAGE_UNREADABLE),
        (png_header((20_000, 20_000)), "{}", Reason.IMAGE_TOO_LARGE),
        (IMAGE, None, Reason.EMPTY_TEXT),
        (IMAGE, " ", Reason.EMPTY_TEXT),
        (IMAGE, '{"a": null}', Reason.EMPTY_TEXT),
        (IMAGE, '{"a": 1}', Reason.CAPTIONS_INVALID),
        (IMAGE, '{"a": "cut', Reason.CAPTIONS_INVALID),
    ],
)
def test_a_t2i_row_that_cannot_be_used_says_why(
    tmp_path: Path, image: bytes | None, text: str | None, reason: Reason
) -> None:
    write_t2i(tmp_path / "a.parquet", [(image, text)])

    rejected = only_rejection(Source(kind="t2i", name="x", path=str(tmp_path)))

    assert rejected.reason is reason
    assert rejected.detail
    assert rejected.place.as_json() == {"file": "a.parquet", "row_group": 0, "row": 0}


@pytest.mark.parametrize(
    ("images", "steps", "reason"),
    [
        (None, [["a"]], Reason.IMAGE_MISSING),
        ([], [["a"]], Reason.IMAGE_MISSING),
        ([IMAGE], [], Reason.TOO_FEW_IMAGES),
        ([IMAGE, None], [["a"]], Reason.IMAGE_EMPTY),
        ([IMAGE, b"GIF"], [["a"]], Reason.IMAGE_UNREADABLE),
        ([IMAGE, IMAGE], None, Reason.INSTRUCTION_MISSING),
        ([IMAGE, IMAGE], [], Reason.INSTRUCTION_MISSING),
        ([IMAGE, IMAGE], [[]], Reason.INSTRUCTION_EMPTY),
        ([IMAGE, IMAGE], [None], Reason.INSTRUCTION_EMPTY),
        ([IMAGE, IMAGE], [["a", None]], Reason.INSTRUCTION_EMPTY),
        ([IMAGE, IMAGE], [["a", " "]], Reason.INSTRUCTION_EMPTY),
        ([IMAGE, IMAGE, IMAGE], [["a"]], Reason.INSTRUCTION_MISSING),
        ([IMAGE, IMAGE, IMAGE], [["a"], []], Reason.INSTRUCTION_EMPTY),
        ([IMAGE, IMAGE], [["a"], ["b"]], Reason.INSTRUCTION_SURPLUS),
    ],
)
def test_an_edit_row_that_cannot_be_used_says_why(
    tmp_path: Path, images: list[bytes | None] | None, steps: Any, reason: Reason
) -> None:
    write_edit(tmp_path / "a.parquet", [(images, steps)])

    assert only_rejection(Source(kind="edit", name="x", path=str(tmp_path))).reason is reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", Reason.ROW_INVALID),
        ("12", Reason.ROW_INVALID),
        ('"text"', Reason.ROW_INVALID),
        ({"image": "a.png"}, Reason.CONVERSATIONS_INVALID),
        ({"conversations": "q"}, Reason.CONVERSATIONS_INVALID),
        ({"conversations": ["q"]}, Reason.CONVERSATIONS_INVALID),
        ({"conversations": [{"from": "human", "value": 3}]}, Reason.CONVERSATIONS_INVALID),
        ({"image": 3, "conversations": talk()}, Reason.ROW_INVALID),
        ({"image": ["a.png", {}], "conversations": talk()}, Reason.ROW_INVALID),
        ({"image": "a.png", "video": "clip", "conversations": talk()}, Reason.ROW_INVALID),
        ({"image": ["a.png", None], "conversations": talk()}, Reason.IMAGE_EMPTY),
        ({"image": "gone.png", "conversations": talk()}, Reason.IMAGE_MISSING),
        ({"image": "A.PNG", "conversations": talk()}, Reason.IMAGE_MISSING),
        ({"image": "folder", "conversations": talk()}, Reason.IMAGE_MISSING),
        ({"image": "a.png/b.png", "conversations": talk()}, Reason.IMAGE_MISSING),
        ({"image": "x" * 300, "conversations": talk()}, Reason.IMAGE_MISSING),
        ({"image": "zero\0.png", "conversations": talk()}, Reason.IMAGE_MISSING),
        ({"image": "ring.png", "conversations": talk()}, Reason.IMAGE_MISSING),
        ({"image": "pipe", "conversations": talk()}, Reason.IMAGE_MISSING),
        ({"image": "empty.png", "conversations": talk()}, Reason.IMAGE_EMPTY),
        ({"image": "text.png", "conversations": talk()}, Reason.IMAGE_UNREADABLE),
        ({"image": "../outside.png", "conversations": talk()}, Reason.PATH_OUTSIDE),
        ({"image": "folder/../a.png", "conversations": talk()}, Reason.PATH_OUTSIDE),
        ({"image": "/etc/hostname", "conversations": talk()}, Reason.PATH_OUTSIDE),
        ({"image": "https://example.com/a.png", "conversations": talk()}, Reason.PATH_OUTSIDE),
        ({"image": "link.png", "conversations": talk()}, Reason.PATH_OUTSIDE),
        ({"image": "link/outside.png", "conversations": talk()}, Reason.PATH_OUTSIDE),
        ({"video": "clip.mp4", "conversations": talk()}, Reason.VIDEO_UNREADABLE),
        ({"video": "pipe", "conversations": talk()}, Reason.VIDEO_MISSING),
        ({"video": "gone", "conversations": talk()}, Reason.VIDEO_MISSING),
        ({"video": "folder", "conversations": talk()}, Reason.VIDEO_MISSING),
        ({"video": "../clip", "conversations": talk()}, Reason.PATH_OUTSIDE),
    ],
)
def test_a_vlm_row_that_cannot_be_used_says_why(
    tmp_path: Path, row: dict[str, Any] | str, reason: Reason
) -> None:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "a.png").write_bytes(IMAGE)
    (root / "clip.mp4").write_bytes(b"video")
    (root / "empty.png").touch()
    (root / "text.png").write_text("<html>")
    (tmp_path / "outside.png").write_bytes(IMAGE)
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "link").symlink_to(tmp_path)
    (root / "ring.png").symlink_to(root / "ring.png")
    os.mkfifo(root / "pipe")
    write_jsonl(tmp_path / "a.jsonl", [row])
    source = Source(kind="vlm", name="x", path=str(tmp_path / "a.jsonl"), media_root=str(root))

    rejected = only_rejection(source)

    assert rejected.reason is reason
    assert str(tmp_path) not in rejected.detail


def test_a_link_that_stays_in_the_root_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(IMAGE)
    (tmp_path / "link.png").symlink_to("a.png")
    write_jsonl(tmp_path / "a.jsonl", [{"image": "link.png", "conversations": talk("<image>", "a")}])

    assert len(read_samples(Source(kind="vlm", name="x", path=str(tmp_path)))) == 1


def test_text_that_is_no_utf8_is_a_verdict_on_its_row_alone(tmp_path: Path) -> None:
    broken = pa.array([b"ok", b"\xff"]).view(pa.string())
    write_t2i(tmp_path / "a.parquet", [(IMAGE, "{}")] * 2, note=broken)

    good, bad = read_all(Source(kind="t2i", name="x", path=str(tmp_path)))

    assert isinstance(good, SourceSample)
    assert isinstance(bad, RejectedRow)
    assert bad.reason is Reason.ROW_INVALID


# Sources that cannot be used


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        ("t2i", {"image": [IMAGE], "caption": ["{}"]}, "no column 'captions'; did you mean 'caption'?"),
        ("t2i", {"x": [1]}, "no column 'image'; it has x"),
        ("t2i", {"image": ["a"], "captions": ["{}"]}, "column 'image' is string; it must be binary"),
        ("t2i", {"image": [{"path": "a.png"}], "captions": ["{}"]}, "'image' is struct<"),
        ("t2i", {"image": [[[IMAGE]]], "captions": ["{}"]}, "'image' is list<"),
        ("t2i", {"image": [IMAGE], "captions": [[1]]}, "'captions' is list<"),
        ("t2i", {"image": [IMAGE], "captions": [{"a": 1}]}, "'captions' is struct<"),
        ("edit", {"image_list": [IMAGE], "instruction_list": [[["a"]]]}, "'image_list' is binary"),
        ("edit", {"image_list": [["a"]], "instruction_list": [[["a"]]]}, "'image_list' is list<"),
        ("edit", {"image_list": [[IMAGE]], "instruction_list": [1]}, "'instruction_list' is int64"),
    ],
)
def test_columns_that_will_not_do_are_refused_before_the_first_row(
    tmp_path: Path, kind: Any, columns: dict[str, Any], message: str
) -> None:
    if kind == "t2i":
        write_t2i(tmp_path / "a.parquet", [(IMAGE, "{}")])
    else:
        write_edit(tmp_path / "a.parquet", [([IMAGE, IMAGE], [["a"]])])
    write_parquet(tmp_path / "b.parquet", pa.table(columns))

    with pytest.raises(ConfigError) as refused:
        plan_source(Source(kind=kind, name="x", path=str(tmp_path)), slice_bytes=1, slice_rows=1)

    assert "b.parquet" in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        # Parquet itself has no such type to write.
        (pa.month_day_nano_interval(), "month_day_nano_interval"),
        (pa.list_(pa.struct([("a", pa.int64()), ("a", pa.int64())])), "list<"),
    ],
)
def test_a_type_without_a_form_in_json_is_refused(kind: pa.DataType, name: str) -> None:
    schema = pa.schema([("span", kind)])

    with pytest.raises(ConfigError, match=rf"b\.parquet: column 'span' is {name}"):
        check_schema(schema, "b.parquet", ParquetLayout({}, (), parse=t2i.parse_row), {})


def test_a_column_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    table = pa.table([[IMAGE], ["{}"], [1], [2]], names=["image", "captions", "id", "id"])
    write_parquet(tmp_path / "a.parquet", table)

    with pytest.raises(ConfigError, match="2 columns are named 'id'"):
        plan_source(Source(kind="t2i", name="x", path=str(tmp_path)), slice_bytes=1, slice_rows=1)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")

    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as parquet"):
        plan_source(Source(kind="t2i", name="x", path=str(tmp_path)), slice_bytes=1, slice_rows=1)


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
def test_a_path_without_source_files_is_named(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "readme.txt").touch()
    for path, message in ((tmp_path, "no .* file in this folder"), (tmp_path / "gone", "no such file")):
        with pytest.raises(ConfigError, match=message) as refused:
            plan_source(Source(kind=kind, name="x", path=str(path)), slice_bytes=1, slice_rows=1)
        assert str(path) in str(refused.value)


# Memory


def test_a_large_row_group_of_nested_binaries_is_read_in_small_batches(tmp_path: Path) -> None:
    # 80 rows of two images, each padded to 256 KiB: 40 MiB in one row group, a few KB on disk.
    image = IMAGE + bytes((256 << 10) - len(IMAGE))
    table = pa.table(
        {
            "image_list": pa.array([[image, image]] * 80, BINARY_LIST),
            "instruction_list": pa.array([[["a"]]] * 80, PHRASINGS),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    del table
    source = Source(kind="edit", name="x", path=str(tmp_path))
    (part,) = plan_source(source, slice_bytes=1, slice_rows=1).slices
    before, peak = pa.total_allocated_bytes(), 0

    for row in read_slice(source, part):
        assert isinstance(row, SourceSample)
        peak = max(peak, pa.total_allocated_bytes() - before)

    assert 0 < peak < 24 << 20


# Keys


PLACES = st.tuples(st.text(min_size=1, max_size=200), st.integers(0, 10**6), st.integers(0, 10**12))


@given(PLACES, PLACES)
def test_keys_are_unique_and_safe_in_a_tar(first: tuple[str, int, int], second: tuple[str, int, int]) -> None:
    def safe(text: str) -> str:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")

    keys = [make_key(safe(file), row, group) for file, group, row in (first, second)]

    assert (keys[0] == keys[1]) == (first == second)
    for key in keys:
        assert not set("./\\") & set(key)
        assert key.isascii()
        assert len(media_name(key, 999, "jpeg", 999_999)) <= 100


@pytest.mark.parametrize(
    "file",
    ["v1.5 final.parquet", "22.0/1.1.parquet", "a/../x", "/abs", "图.parquet", "x" * 300, "a" * 60 + "/b"],
)
def test_awkward_file_names_make_plain_keys(file: str) -> None:
    key = make_key(file, 3, 2)

    assert key.endswith("-2-3")
    assert not set("./") & set(key)


def test_keys_are_pinned() -> None:
    # Draws are addressed by key: another key is another order.
    assert make_key("a/chunk_0.parquet", 12, 3) == "a=2Fchunk_0=2Eparquet-3-12"
    assert make_key("图.jsonl", 5) == "=E5=9B=BE=2Ejsonl-5"
    assert captions(1) == '{"short": "picture 1", "zh": "图片 1"}'
