"""Parquet as it is found: every form of image column, other names, schema drift, and row groups of any size."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from source_factory import captions, encode_image, talk, write_edit, write_parquet, write_t2i

from bagel_wds.errors import ConfigError, Reason
from bagel_wds.sources import (
    Place,
    RejectedRow,
    RowGroups,
    Slice,
    Source,
    SourceSample,
    describe_file,
    plan_rows,
    plan_source,
    read_slice,
    t2i,
)
from bagel_wds.sources.layout import drift_notes
from bagel_wds.sources.parquet import _read_batches
from converters.convert import convert_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bagel_wds.schema import SampleKind

Row = SourceSample | RejectedRow

IMAGES = [encode_image((8, 12 + seed), seed=seed, codec=("PNG", "JPEG")[seed % 2]) for seed in range(4)]
HUGGING_FACE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def source(path: Path, kind: SampleKind = "t2i", **more: Any) -> Source:
    return Source(kind=kind, name="x", path=str(path), **more)


def plan(of: Source, slice_bytes: int = 1 << 30) -> tuple[Slice, ...]:
    return plan_source(of, slice_bytes=slice_bytes, slice_rows=1).slices


def read(of: Source, slices: Iterable[Slice] | None = None) -> list[Row]:
    return [row for part in (plan(of) if slices is None else slices) for row in read_slice(of, part)]


def samples(of: Source) -> list[SourceSample]:
    rows = read(of)
    assert not [row for row in rows if isinstance(row, RejectedRow)]
    return [row for row in rows if isinstance(row, SourceSample)]


def only_rejection(of: Source) -> RejectedRow:
    (row,) = read(of)
    assert isinstance(row, RejectedRow), row
    return row


def data_of(sample: SourceSample) -> list[bytes]:
    return [image.data for medium in sample.media for image in medium.images]


def refusal(of: Source) -> str:
    with pytest.raises(ConfigError) as refused:
        plan(of)
    return str(refused.value)


# C29: forms of image columns


class Wrapped(pa.ExtensionType):  # type: ignore[misc]
    """Some other library's type, over any storage."""

    def __init__(self, storage: pa.DataType) -> None:
        super().__init__(storage, "bagel_wds.tests.wrapped")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Wrapped:
        return cls(storage)


def hugging_face(images: Sequence[bytes], *names: str) -> pa.Array:
    kinds = {"bytes": pa.binary(), "path": pa.string()}
    rows = [{"bytes": image, "path": f"{i}.png"} for i, image in enumerate(images)]
    return pa.array(rows, pa.struct([(name, kinds[name]) for name in names]))


def wrapped(values: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(Wrapped(values.type), values)


def ones(values: pa.Array) -> pa.Array:
    """A list of one for each value."""
    return pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), values)


FORMS = {
    "binary": pa.array(IMAGES),
    "large_binary": pa.array(IMAGES, pa.large_binary()),
    "binary_view": pa.array(IMAGES, pa.binary_view()),
    "struct": hugging_face(IMAGES, "bytes", "path"),
    "struct the other way round": hugging_face(IMAGES, "path", "bytes"),
    "struct of bytes alone": hugging_face(IMAGES, "bytes"),
    "struct with null paths": pa.array([{"bytes": image, "path": None} for image in IMAGES]),
    "dictionary": pa.array(IMAGES).dictionary_encode(),
    "dictionaries in a struct": pa.StructArray.from_arrays(
        [pa.array(IMAGES).dictionary_encode(), pa.array(["a"] * 4).dictionary_encode()], ["bytes", "path"]
    ),
    "extension": wrapped(pa.array(IMAGES)),
    "extension of a struct": wrapped(hugging_face(IMAGES, "bytes", "path")),
}


@pytest.fixture
def extension_type() -> Iterable[None]:
    pa.register_extension_type(Wrapped(pa.binary()))
    yield
    pa.unregister_extension_type("bagel_wds.tests.wrapped")


def tars_of(of: Source, out: Path) -> dict[str, str]:
    convert_source(of, str(out))
    return {tar.name: hashlib.sha256(tar.read_bytes()).hexdigest() for tar in sorted(out.glob("*.tar"))}


@pytest.mark.usefixtures("extension_type")
def test_c29_the_same_images_in_each_form_give_the_same_tars(tmp_path: Path) -> None:
    texts = [captions(i) for i in range(4)]
    tars = {}
    for number, (name, column) in enumerate({**FORMS, "list": ones(FORMS["binary"])}.items()):
        folder = tmp_path / str(number)
        write_parquet(folder / "a.parquet", pa.table({"image": column, "captions": texts}))
        assert pq.read_schema(folder / "a.parquet").field("image").type == column.type
        tars[name] = tars_of(source(folder), tmp_path / f"out-{number}")

    assert len(tars["binary"]) == 1
    assert {name: tar for name, tar in tars.items() if tar != tars["binary"]} == {}
    assert [data_of(sample) for sample in samples(source(tmp_path / "0"))] == [[image] for image in IMAGES]


@pytest.mark.usefixtures("extension_type")
def test_c29_lists_of_each_form_give_the_same_tars(tmp_path: Path) -> None:
    pairs = {
        name: pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), column)
        for name, column in FORMS.items()
    }
    pairs["large list"] = pairs["binary"].cast(pa.large_list(pa.large_binary()))
    pairs["list of a fixed size"] = pairs["binary"].cast(pa.list_(pa.binary(), 2))
    pairs["list view"] = pa.array([IMAGES[:2], IMAGES[2:]], pa.list_view(pa.binary()))
    tars = {}
    for number, (name, column) in enumerate(pairs.items()):
        folder = tmp_path / str(number)
        table = pa.table({"image_list": column, "instruction_list": [[["a"]], [["b"]]]})
        write_parquet(folder / "a.parquet", table)
        tars[name] = tars_of(source(folder, "edit"), tmp_path / f"out-{number}")

    assert len(tars["binary"]) == 1
    assert {name: tar for name, tar in tars.items() if tar != tars["binary"]} == {}


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array(["a.png"]), "string"),
        (pa.array([b"ab"], pa.binary(2)), "fixed_size_binary[2]"),
        (pa.array([{"path": "a.png"}]), "struct<path: string>"),
        (
            pa.array([{"bytes": b"a", "path": "a.png", "size": 1}]),
            "struct<bytes: binary, path: string, size: int64>",
        ),
        (pa.array([[["a"]]]), "list<element: list<element: string>>"),
        (pa.array([{"bytes": "a"}]), "struct<bytes: string>"),
        (pa.nulls(1), "null"),
    ],
)
def test_c29_any_other_type_is_refused_before_the_first_row(
    tmp_path: Path, column: pa.Array, kind: str
) -> None:
    write_t2i(tmp_path / "a.parquet", [(IMAGES[0], "{}")])
    write_parquet(tmp_path / "b.parquet", pa.table({"image": column, "captions": ["{}"]}))

    message = refusal(source(tmp_path))

    assert f"{tmp_path}/b.parquet: column 'image' is {kind}; it must be binary" in message


@pytest.mark.parametrize(
    ("images", "reason", "detail"),
    [
        ([], Reason.IMAGE_MISSING, "empty"),
        ([IMAGES[0], IMAGES[1]], Reason.ROW_INVALID, "2 images"),
        ([None], Reason.IMAGE_EMPTY, ""),
        (None, Reason.IMAGE_EMPTY, ""),
    ],
)
def test_a_list_in_a_text_to_image_row_must_have_one_image(
    tmp_path: Path, images: Any, reason: Reason, detail: str
) -> None:
    table = pa.table({"image": pa.array([images], pa.list_(pa.binary())), "captions": ["{}"]})
    write_parquet(tmp_path / "a.parquet", table)

    rejected = only_rejection(source(tmp_path))

    assert rejected.reason is reason
    assert detail in rejected.detail


def test_null_bytes_with_a_path_are_a_file_under_the_media_root(tmp_path: Path) -> None:
    rows = [[{"bytes": IMAGES[0], "path": "not/there.png"}, {"bytes": None, "path": "sub/b.png"}]]
    table = pa.table({"image_list": pa.array(rows, pa.list_(HUGGING_FACE)), "instruction_list": [[["a"]]]})
    write_parquet(tmp_path / "data" / "a.parquet", table)
    (tmp_path / "media" / "sub").mkdir(parents=True)
    (tmp_path / "media" / "sub" / "b.png").write_bytes(IMAGES[1])
    without = source(tmp_path / "data", "edit")

    (sample,) = samples(replace(without, media_root=str(tmp_path / "media")))
    rejected = only_rejection(without)

    assert data_of(sample) == IMAGES[:2]
    assert rejected.reason is Reason.IMAGE_MISSING
    for part in ("image 1", "null", "sub/b.png", "--media-root"):
        assert part in rejected.detail
    elsewhere = replace(without, media_root=str(tmp_path / "data"))
    assert only_rejection(elsewhere).reason is Reason.IMAGE_MISSING


def test_null_bytes_without_a_path_are_an_empty_image(tmp_path: Path) -> None:
    for path in (None, ""):
        table = pa.table(
            {"image": pa.array([{"bytes": None, "path": path}], HUGGING_FACE), "captions": ["{}"]}
        )
        write_parquet(tmp_path / "a.parquet", table)

        assert only_rejection(source(tmp_path)).reason is Reason.IMAGE_EMPTY


# Names of columns


def test_columns_of_other_names_can_be_given(tmp_path: Path) -> None:
    table = pa.table(
        {
            "captions": ["somebody's own"],
            "caption": ['{"a": "x"}'],
            "img": [IMAGES[0]],
            "image": [7],
            "id": [1],
        }
    )
    write_parquet(tmp_path / "a.parquet", table)

    (sample,) = samples(source(tmp_path, columns={"image": "img", "captions": "caption"}))

    assert data_of(sample) == [IMAGES[0]]
    assert sample.fields == {
        "source_captions": "somebody's own",
        "captions": '{"a": "x"}',
        "source_image": 7,
        "id": 1,
    }


def test_columns_can_change_names(tmp_path: Path) -> None:
    table = pa.table({"image_list": [["a"]], "instruction_list": [[IMAGES[0], IMAGES[1]]]})
    write_parquet(tmp_path / "a.parquet", table)
    given_columns = {"image_list": "instruction_list", "instruction_list": "image_list"}

    (sample,) = samples(source(tmp_path, "edit", columns=given_columns))

    assert sample.fields == {"instruction_list": ["a"]}
    assert data_of(sample) == IMAGES[:2]


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        (
            "t2i",
            {"picture": "img"},
            "given for 'picture', which t2i rows do not have; they have image, captions",
        ),
        ("edit", {"captions": "c"}, "they have image_list, instruction_list"),
        ("t2i", {"image": "img", "captions": "img"}, "column 'img' is given for 2 things"),
        ("t2i", {"image": "pixels"}, "a.parquet: no column 'pixels', which was given for 'image'"),
        ("t2i", {"image": "imga"}, "no column 'imga', which was given for 'image'; did you mean 'img'?"),
        ("t2i", {"captions": "caption"}, "another column is given for 'captions'"),
        ("t2i", {}, "no column 'image'; did you mean 'img'?"),
    ],
)
def test_columns_that_are_given_wrongly_are_refused(
    tmp_path: Path, kind: Any, columns: dict[str, str], message: str
) -> None:
    table = pa.table({"img": [IMAGES[0]], "captions": ["{}"], "source_captions": ["{}"], "caption": ["{}"]})
    write_parquet(tmp_path / "a.parquet", table)

    assert message in refusal(source(tmp_path, kind, columns=columns))


# Captions


@pytest.mark.parametrize(
    ("column", "field"),
    [
        (pa.array(["a cat"]), "a cat"),
        (pa.array(["a cat"], pa.large_string()), "a cat"),
        (pa.array(["a cat"]).dictionary_encode(), "a cat"),
        (pa.array([["a", None, ""]]), ["a", None, ""]),
        (pa.array([["a"]], pa.large_list(pa.large_string())), ["a"]),
        (pa.array([{"en": "a", "zh": None}]), {"en": "a", "zh": None}),
        (pa.array([[("en", "a"), ("zh", "b")]], pa.map_(pa.string(), pa.string())), {"en": "a", "zh": "b"}),
    ],
)
def test_captions_come_in_any_column_of_strings(tmp_path: Path, column: pa.Array, field: Any) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"image": [IMAGES[0]], "captions": column}))

    (sample,) = samples(source(tmp_path))

    assert sample.fields == {"captions": field}


def test_a_map_with_a_key_twice_is_no_object(tmp_path: Path) -> None:
    column = pa.array([[("en", "a"), ("en", "b")]], pa.map_(pa.string(), pa.string()))
    write_parquet(tmp_path / "a.parquet", pa.table({"image": [IMAGES[0]], "captions": column}))

    rejected = only_rejection(source(tmp_path))

    assert rejected.reason is Reason.ROW_INVALID
    assert "twice" in rejected.detail


# C30


@pytest.mark.parametrize(
    ("images", "instructions", "outcome"),
    [
        (3, [["a", "b"], ["c"]], None),
        (2, None, Reason.INSTRUCTION_MISSING),
        (2, [[]], Reason.INSTRUCTION_EMPTY),
        (3, [["a"]], Reason.INSTRUCTION_MISSING),
        (2, [["a"], ["b"]], Reason.INSTRUCTION_SURPLUS),
        (2, [["  "]], Reason.INSTRUCTION_EMPTY),
        (2, [[None]], Reason.INSTRUCTION_EMPTY),
        (1, [["a"]], Reason.TOO_FEW_IMAGES),
        (0, [["a"]], Reason.IMAGE_MISSING),
        (None, [["a"]], Reason.IMAGE_MISSING),
    ],
)
def test_c30_an_edit_row_has_two_images_or_more_and_a_step_for_each_edit(
    tmp_path: Path, images: int | None, instructions: Any, outcome: Reason | None
) -> None:
    write_edit(tmp_path / "a.parquet", [(None if images is None else [*IMAGES[:images]], instructions)])

    (row,) = read(source(tmp_path, "edit"))

    assert (row.reason if isinstance(row, RejectedRow) else None) is outcome
    if isinstance(row, SourceSample):
        assert data_of(row) == IMAGES[:images]
        assert row.fields == {"instruction_list": instructions}


# Conversations


CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@pytest.mark.parametrize(
    ("columns", "images"),
    [
        ({"conversations": [talk("<image>q", "a")], "image": [IMAGES[0]]}, 1),
        (
            {
                "conversations": [json.dumps(talk("<image>q", "a"))],
                "image": hugging_face(IMAGES[:1], "bytes", "path"),
            },
            1,
        ),
        (
            {
                "messages": pa.array(
                    [[{"role": "user", "content": "<image><image>q"}, {"role": "assistant", "content": "a"}]],
                    CHAT,
                ),
                "images": [IMAGES[:2]],
            },
            2,
        ),
        ({"conversations": [talk("<image>q", "a")], "image": ["b.png"]}, 1),
        ({"conversations": [talk("<image>q", "a")], "images": [["b.png"]]}, 1),
        ({"conversations": [talk("<video>q", "a")], "video": ["clip"], "image": pa.nulls(1)}, 2),
        ({"conversations": [talk("q", "a")], "image": pa.nulls(1)}, 0),
        ({"conversations": [talk("q", "a")]}, 0),
    ],
)
def test_conversations_come_in_parquet_too(tmp_path: Path, columns: dict[str, Any], images: int) -> None:
    (tmp_path / "clip").mkdir()
    for name, image in (("b.png", 0), ("clip/0.png", 0), ("clip/1.jpg", 1)):
        (tmp_path / name).write_bytes(IMAGES[image])
    write_parquet(tmp_path / "a.parquet", pa.table(columns))

    (sample,) = samples(source(tmp_path, "vlm"))

    assert data_of(sample) == IMAGES[:images]
    assert set(sample.fields) == set(columns)
    assert IMAGES[0] not in str(sample.fields).encode()
    json.dumps(dict(sample.fields))


def test_columns_of_conversations_can_be_given_and_are_checked(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"chat": [talk("<image>q", "a")], "img": [IMAGES[0]]}))
    write_parquet(tmp_path / "b" / "a.parquet", pa.table({"conversations": [talk()], "image": [1.5]}))

    (sample,) = samples(
        source(tmp_path / "a.parquet", "vlm", columns={"conversations": "chat", "image": "img"})
    )

    assert data_of(sample) == IMAGES[:1]
    assert sample.fields["conversations"] == talk("<image>q", "a")
    assert "no column 'conversations' or 'messages'" in refusal(source(tmp_path / "a.parquet", "vlm"))
    assert "column 'image' is double" in refusal(source(tmp_path / "b", "vlm"))


# Schema drift and digests


def test_columns_that_differ_between_files_are_told_before_the_first_row(tmp_path: Path) -> None:
    row = [(IMAGES[0], "{}")]
    for name in "acd":
        write_t2i(
            tmp_path / f"{name}.parquet", row, score=pa.array([1]), word=pa.array(["w"]).dictionary_encode()
        )
    write_t2i(tmp_path / "b.parquet", row, score=pa.array(["high"]), word=pa.array(["w"], pa.large_string()))
    write_t2i(tmp_path / "e.parquet", row, word=pa.array(["w"]), extra=pa.array([[1]]))

    notes = plan_source(source(tmp_path), slice_bytes=1, slice_rows=1).notes

    assert notes == (
        "column 'score' is int64 in 3 files, string in b.parquet, missing in e.parquet",
        "column 'extra' is list<int64> in e.parquet, missing in 4 files",
    )
    assert plan_source(source(tmp_path / "[acd].parquet"), slice_bytes=1, slice_rows=1).notes == ()


def test_a_file_without_differences_needs_no_note() -> None:
    assert drift_notes({}) == ()
    assert drift_notes({"a": (("x", "int64"),), "b": (("x", "int64"),)}) == ()


def test_a_file_is_told_by_its_size_and_the_digest_of_its_footer(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_t2i(path, [(IMAGES[0], "{}")] * 5)
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    of = source(tmp_path)

    (file,) = plan_source(of, slice_bytes=1, slice_rows=1).files

    assert file == describe_file(of, "a.parquet")
    assert (file.name, file.bytes) == ("a.parquet", len(data))
    assert file.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data[-8 - length :])}"
    write_t2i(path, [(IMAGES[1], "{}")] * 5)
    assert describe_file(of, "a.parquet") != file


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1 nothing", b"PAR1\0\0\0\0\0\0\0\0PAR1"])
def test_a_file_that_was_cut_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(data)

    assert f"{tmp_path}/a.parquet: cannot be read as parquet" in refusal(source(tmp_path))


# Parts of a slice, and chosen rows


def write_mixed(folder: Path, *, rows: int = 23, group_rows: int = 5) -> list[bytes]:
    """Two files, with a bad row here and there; images of very different sizes."""
    images = [encode_image((8, 8 + 40 * (i % 4)), seed=i) for i in range(rows)]
    table = [(b"" if i % 7 == 3 else image, captions(i)) for i, image in enumerate(images)]
    write_t2i(folder / "a.parquet", table[: rows // 2], group_rows=group_rows)
    write_t2i(folder / "b.parquet", table[rows // 2 :], group_rows=group_rows)
    return images


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(2, 30),
    group_rows=st.integers(1, 12),
    slice_bytes=st.sampled_from([1, 3000, 1 << 30]),
    batch_bytes=st.sampled_from([1, 2000, 1 << 20]),
    data=st.data(),
)
def test_a_slice_read_from_a_row_on_gives_what_is_left_of_it(
    rows: int, group_rows: int, slice_bytes: int, batch_bytes: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_mixed(Path(folder), rows=rows, group_rows=group_rows)
        of = source(Path(folder), batch_bytes=batch_bytes)
        whole = [[*read_slice(of, part)] for part in plan(of, slice_bytes)]
        number = data.draw(st.integers(0, len(whole) - 1))
        skip = data.draw(st.integers(0, len(whole[number]) + 2))

        left = list(read_slice(of, plan(of, slice_bytes)[number], skip_rows=skip))

        assert sum(map(len, whole)) == rows
        assert left == whole[number][skip:]


@settings(deadline=None, max_examples=30)
@given(
    chosen=st.sets(st.integers(0, 22), min_size=1),
    slice_bytes=st.sampled_from([1, 3000, 1 << 30]),
    skip=st.integers(0, 3),
)
def test_chosen_rows_are_those_rows_in_the_order_of_the_source(
    chosen: set[int], slice_bytes: int, skip: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_mixed(Path(folder))
        of = source(Path(folder))
        rows = read(of)
        places = [rows[number].place for number in chosen]
        random.Random(0).shuffle(places)

        slices = plan_rows(of, places, slice_bytes=slice_bytes, slice_rows=1)

        assert [part.number for part in slices] == list(range(len(slices)))
        assert sum(part.num_rows for part in slices) == len(chosen)
        assert read(of, slices) == [rows[number] for number in sorted(chosen)]
        assert list(read_slice(of, slices[0], skip_rows=skip)) == [*read_slice(of, slices[0])][skip:]


def test_chosen_rows_are_named_by_row_group(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    places = [
        Place("b.parquet", 0, 1),
        Place("a.parquet", 4, 0),
        Place("a.parquet", 1, 0),
        Place("a.parquet", 1, 0),
    ]

    (part,) = plan_rows(source(tmp_path), places, slice_bytes=1 << 30, slice_rows=1)

    assert part.pieces == (
        RowGroups("a.parquet", 0, 1, 2, chosen=(1, 4)),
        RowGroups("b.parquet", 1, 2, 1, chosen=(0,)),
    )


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Place("a.parquet", 5, 0), "a.parquet: there is no row 5 in row group 0, which has 5 rows"),
        (Place("a.parquet", 0, 9), "a.parquet: there is no row 0 in row group 9, which has 0 rows"),
        (Place("c.parquet", 0, 0), "c.parquet is none of its 2 files"),
    ],
)
def test_a_chosen_row_that_is_not_there_is_named(tmp_path: Path, place: Place, message: str) -> None:
    write_mixed(tmp_path)

    with pytest.raises(ConfigError, match=message):
        plan_rows(source(tmp_path), [place], slice_bytes=1, slice_rows=1)


# Memory


def test_batches_grow_to_their_bytes_and_shrink_where_rows_become_large(tmp_path: Path) -> None:
    # 100 small rows, 20 of a MiB, 100 small ones, in one row group whose metadata tells the average.
    padded = IMAGES[0] + bytes((1 << 20) - len(IMAGES[0]))
    rows = [padded if 100 <= i < 120 else IMAGES[0] for i in range(220)]
    write_t2i(tmp_path / "a.parquet", [(image, "{}") for image in rows], group_rows=220)
    of = source(tmp_path, batch_bytes=4 << 20)

    sizes = [
        (len(batch.rows), sum(values.nbytes for _, values in batch.columns))
        for batch in _read_batches(of, RowGroups("a.parquet", 0, 1, 220), t2i.LAYOUT, 0)
    ]

    numbers = [number for number, _ in sizes]
    assert numbers[:4] == [1, 2, 4, 8]
    assert sum(numbers) == 220
    assert max(numbers) <= 64
    assert numbers[-1] > 4
    # One batch meets the large rows unprepared.
    assert len([num_bytes for _, num_bytes in sizes if num_bytes > 4 << 20]) <= 1


READ_ALL = """
import sys
from bagel_wds.sources import Source, SourceSample, plan_source, read_slice

source = Source(kind="edit", name="x", path=sys.argv[1])
slices = plan_source(source, slice_bytes=224 << 20, slice_rows=1).slices
rows = sum(isinstance(row, SourceSample) for part in slices for row in read_slice(source, part))
print(rows, len(slices))
"""

# A process begins with the peak of the one that started it: a small one stands between it and this one.
MEASURE = """
import resource, subprocess, sys

subprocess.run([sys.executable, "-c", *sys.argv[1:]], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_c28_a_small_file_that_decodes_to_gigabytes_is_read_in_bounded_memory(tmp_path: Path) -> None:
    # 600 rows of two sound PNGs of 2 MiB: 2.3 GiB in one row group, which no machine needs to hold to write it.
    image = encode_image((8, 8))
    image += bytes((2 << 20) - len(image))
    row = pa.array([[image, image]], pa.list_(pa.binary()))
    table = pa.table(
        {"image_list": pa.chunked_array([row] * 600), "instruction_list": pa.array([[["a"]]] * 600)}
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="zstd", row_group_size=600)
    assert path.stat().st_size < 1 << 20
    assert pq.read_metadata(path).num_row_groups == 1
    assert Image.open(io.BytesIO(image)).size == (8, 8)

    done = subprocess.run(
        [sys.executable, "-c", MEASURE, READ_ALL, str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    rows, slices, peak_kib = map(int, done.stdout.split())

    assert (rows, slices) == (600, 1)
    assert peak_kib < 3 << 19
    assert peak_kib < 400 << 10, "the default is meant to stay far below"


@pytest.mark.parametrize(
    ("columns", "group_rows", "says"),
    [
        (
            {"image": [encode_image()] * 4, "captions": ["a"] * 4},
            4,
            "there is no row group 1, it has 1; did the file",
        ),
        ({"captions": ["a"] * 4}, 2, "no column 'image'"),
        ({"image": [encode_image()] * 4}, 2, "no column 'captions'"),
        ({"image": [1, 2, 3, 4], "captions": ["a"] * 4}, 2, "column 'image' is int64"),
        ({"image": [encode_image()] * 4, "captions": [1, 2, 3, 4]}, 2, "column 'captions' is int64"),
    ],
)
def test_a_file_that_was_replaced_since_it_was_planned_is_no_error_from_the_depths(
    tmp_path: Path, columns: dict[str, list[Any]], group_rows: int, says: str
) -> None:
    write_t2i(tmp_path / "a.parquet", [(encode_image(), captions(0))] * 4, group_rows=2)
    of = source(tmp_path / "a.parquet")
    *_, last = plan(of, -1)
    write_parquet(tmp_path / "a.parquet", pa.table(columns), group_rows)

    with pytest.raises(ConfigError, match=rf"a\.parquet: {says}"):
        read(of, [last])


def test_text_that_is_no_utf8_in_a_dictionary_is_a_verdict_on_its_row_alone(tmp_path: Path) -> None:
    offsets = pa.py_buffer(struct.pack("<3i", 0, 4, 7))
    bad = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"goodb\xffd")])
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1], pa.int32()), bad, safe=False)
    table = pa.table({"image": [encode_image()] * 4, "captions": ["a"] * 4, "note": column})
    pq.write_table(table, tmp_path / "a.parquet")

    rows = read(source(tmp_path / "a.parquet"))

    assert [isinstance(row, SourceSample) for row in rows] == [True, False, True, False]
    rejected = [row for row in rows if isinstance(row, RejectedRow)]
    assert {row.reason for row in rejected} == {Reason.ROW_INVALID}
    assert all("'note'" in row.detail for row in rejected)


def test_a_time_zone_that_nobody_knows_is_refused_before_the_first_row(tmp_path: Path) -> None:
    when = pa.array([0], pa.timestamp("us", tz="Foo/Bar"))
    table = pa.table({"image": [encode_image()], "captions": ["a"], "when": when})
    pq.write_table(table, tmp_path / "a.parquet")

    with pytest.raises(ConfigError, match=r"a\.parquet: column 'when' is timestamp\[us, tz=Foo/Bar\]"):
        plan(source(tmp_path / "a.parquet"))
