"""Files of JSON rows: lines and arrays, plain and compressed, give back what was written, however they are cut."""

from __future__ import annotations

import gzip
import io
import json
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from source_factory import write_jsonl
from strategies import words

from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.sources import Lines, Place, RejectedRow, Slice, Source, SourceFile, SourceSample
from bagel_wds.sources.content import MAX_LINE_BYTES
from bagel_wds.sources.jsonl import (
    describe_lines_file,
    parse_line,
    plan_chosen_lines,
    plan_lines,
    read_lines,
)
from bagel_wds.sources.rows import ParsedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

ALL = 1 << 30
MARK = b"\xef\xbb\xbf"


def zstd(data: bytes) -> bytes:
    compressed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return compressed


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def source_of(root: Path, **settings: Any) -> Source:
    return Source(kind="vlm", name="x", path=str(root), **settings)


def read(source: Source, slices: Sequence[Slice], skip_rows: int = 0) -> list[tuple[str, int, Any]]:
    """(file, number, fields, or the reason) of each row, `skip_rows` of each slice left out."""
    rows = (
        row
        for part in slices
        for row in read_lines(source, part.pieces, lambda fields: ParsedRow(fields, ()), skip_rows)  # type: ignore[arg-type]
    )
    return [
        (row.place.file, row.place.row, row.fields if isinstance(row, SourceSample) else row.reason)
        for row in rows
    ]


def write(root: Path, **files: bytes) -> Source:
    for name, data in files.items():
        (root / name).write_bytes(data)
    return source_of(root)


# What was written comes back

SPACE = st.text(" \t\r\n", max_size=3)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words(3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(words(4), VALUES, max_size=4)
AWKWARD = st.fixed_dictionaries({'é\\"[{': st.sampled_from(["图", "]", "},{", '\\"', "\u2028\x85\xa0"])})


def as_lines(rows: Sequence[dict[str, Any]], spaces: Iterator[str]) -> tuple[bytes, list[int]]:
    """Lines with blank ones between them, and the numbers of those that are not."""
    lines, numbers = [], []
    for row in rows:
        if blank := next(spaces).replace("\n", ""):
            lines.append(blank)
        numbers.append(len(lines))
        lines.append(json.dumps(row, ensure_ascii=False))
    return "\n".join(lines).encode(), numbers


def as_array(rows: Sequence[dict[str, Any]], spaces: Iterator[str]) -> tuple[bytes, list[int]]:
    texts = [f"{next(spaces)}{json.dumps(row, ensure_ascii=False)}{next(spaces)}" for row in rows]
    return f"{next(spaces)}[{next(spaces)}{','.join(texts)}]{next(spaces)}".encode(), list(range(len(rows)))


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes, list[tuple[int, dict[str, Any]]]]:
    """A suffix, a file of that form, and the rows that it holds with their numbers."""
    rows = draw(st.lists(OBJECTS | AWKWARD, max_size=8))
    count = 2 * len(rows) + 3
    spaces = draw(st.lists(SPACE, min_size=count, max_size=count))
    data, numbers = draw(st.sampled_from([as_lines, as_array]))(rows, iter(spaces))
    data = draw(st.sampled_from([b"", MARK])) + data
    suffix = draw(st.sampled_from(list(COMPRESS)))
    cut = draw(st.integers(0, len(data)))
    # In two members, or frames, as parallel compressors write them.
    packed = COMPRESS[suffix](data[:cut]) + COMPRESS[suffix](data[cut:])
    return suffix, packed, list(zip(numbers, rows, strict=True))


def read_in_blocks(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Blocks so small that lines and elements go over their borders."""
    for room in ("content", "lines", "elements"):
        patch.setattr(f"bagel_wds.sources.{room}.BLOCK_BYTES", num_bytes)


@settings(deadline=None)
@given(st.lists(files(), min_size=1, max_size=3), st.integers(1, 9), st.integers(0, 9), st.integers(1, 40))
def test_rows_come_back_whatever_the_form_and_the_cut(
    tmp_path_factory: pytest.TempPathFactory, written: list[Any], slice_rows: int, skip: int, block: int
) -> None:
    root = tmp_path_factory.mktemp("rows")
    names = [f"{number}.jsonl{suffix}" for number, (suffix, _, _) in enumerate(written)]
    source = write(root, **{name: data for name, (_, data, _) in zip(names, written, strict=True)})
    expected = [(name, *row) for name, (_, _, rows) in zip(names, written, strict=True) for row in rows]

    with pytest.MonkeyPatch.context() as patch:
        read_in_blocks(patch, block)
        plan = plan_lines(source, slice_rows, names)

        assert read(source, plan.slices) == expected
        (whole,) = plan_lines(source, ALL, names).slices or (None,)
        if whole:
            assert read(source, [whole], skip) == expected[skip:]
        places = [Place(name, number) for name, number, _ in expected[::2]]
        chosen = plan_chosen_lines(source, places[::-1], slice_rows)
        assert read(source, chosen) == expected[::2]

    sizes = [part.num_rows for part in plan.slices]
    assert sum(sizes) == len(expected)
    assert set(sizes[:-1]) <= {slice_rows}
    assert [part.number for part in plan.slices] == list(range(len(sizes)))
    assert [part.num_rows for part in chosen[:-1]] == [slice_rows] * (len(chosen) - 1)
    assert plan.files == tuple(describe_lines_file(source, name) for name in names)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([b'{"a":1}', b"", b"  ", b"x", MARK, MARK + b"{}", b"\r", b" {}", b"\xef"])),
    st.integers(1, 30),
)
def test_lines_are_found_as_a_loop_over_the_file_finds_them(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], block: int
) -> None:
    for data in (b"\n".join(lines), b"".join(line + b"\n" for line in lines)):
        source = write(tmp_path_factory.mktemp("lines"), **{"a.jsonl": data})
        expected, offset = [], 0
        for number, line in enumerate(io.BytesIO(data)):
            if line.strip(b" \r\n" + MARK):
                expected.append((number, offset))
            offset += len(line)

        with pytest.MonkeyPatch.context() as patch:
            read_in_blocks(patch, block)
            slices = plan_lines(source, 1, ["a.jsonl"]).slices

        assert [(piece.first, piece.offset) for part in slices for piece in part.pieces] == expected  # type: ignore[union-attr]


def test_pieces_of_lines_and_elements_say_where_they_start(tmp_path: Path) -> None:
    lines = b'{"a":1}\n\n{"a":2}\n{"a":3}'
    array = b' [{"a":4},\n {"a":5}]\n'
    source = write(tmp_path, **{"a.jsonl": lines, "b.json": array, "c.jsonl.gz": gzip.compress(lines)})

    slices = plan_lines(source, 2, ["a.jsonl", "b.json", "c.jsonl.gz"]).slices

    assert slices == (
        Slice(0, (Lines("a.jsonl", 0, 0, 2),)),
        Slice(1, (Lines("a.jsonl", 3, 17, 1), Lines("b.json", 0, 2, 1, in_array=True))),
        Slice(2, (Lines("b.json", 1, 12, 1, in_array=True), Lines("c.jsonl.gz", 0, 0, 1))),
        Slice(3, (Lines("c.jsonl.gz", 2, 9, 2),)),
    )


def test_a_file_is_described_as_it_lies_on_the_disk(tmp_path: Path) -> None:
    data = gzip.compress(b'{"a":1}\n' * 1000)
    source = write(tmp_path, **{"a.jsonl.gz": data, "b.json": b"[]", "c.jsonl": b""})

    plan = plan_lines(source, 10, ["a.jsonl.gz", "b.json", "c.jsonl"])

    assert plan.files[0] == SourceFile("a.jsonl.gz", len(data), f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}")
    assert [file.bytes for file in plan.files] == [len(data), 2, 0]
    assert len(plan.slices) == 100


# Caps


def test_max_units_counts_rows_over_all_files_and_leaves_the_others_unread(tmp_path: Path) -> None:
    names = ["a.jsonl", "b.json", "c.jsonl"]
    write(
        tmp_path, **{"a.jsonl": b'{"n":0}\n{"n":1}\n', "b.json": b'[{"n":2},{"n":3}]', "c.jsonl": b'{"n":4}'}
    )
    rows = {
        n: [row["n"] for _, _, row in read(*_cut(source_of(tmp_path, max_units=n), names))]
        for n in (1, 3, 4, 9)
    }
    plan = plan_lines(source_of(tmp_path, max_units=3), 2, names)

    assert rows == {1: [0], 3: [0, 1, 2], 4: [0, 1, 2, 3], 9: [0, 1, 2, 3, 4]}
    assert [file.name for file in plan.files] == ["a.jsonl", "b.json"]
    assert [part.num_rows for part in plan.slices] == [2, 1]


def _cut(source: Source, names: Sequence[str]) -> tuple[Source, Sequence[Slice]]:
    return source, plan_lines(source, 2, names).slices


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 5), st.integers(1, 7))
def test_a_seeded_choice_is_upstreams_and_keeps_the_order(
    tmp_path_factory: pytest.TempPathFactory, max_units: int, seed: int, slice_rows: int
) -> None:
    root = tmp_path_factory.mktemp("choice")
    write_jsonl(root / "a.jsonl", [*({"n": n} for n in range(13)), ""])
    (root / "b.json").write_text(json.dumps([{"n": n} for n in range(13, 20)]))
    source = source_of(root, max_units=max_units, shuffle_lines=True, shuffle_seed=seed)
    order = list(range(20))
    random.Random(seed).shuffle(order)

    plan = plan_lines(source, slice_rows, ["a.jsonl", "b.json"])

    assert [row["n"] for _, _, row in read(source, plan.slices)] == sorted(order[:max_units])
    assert [file.name for file in plan.files] == ["a.jsonl", "b.json"]


# Rows chosen by name


def test_chosen_rows_come_once_in_the_order_of_the_source(tmp_path: Path) -> None:
    source = write(
        tmp_path, **{name: b"".join(b'{"n":%d}\n' % n for n in range(9)) for name in ("a.jsonl", "b.jsonl")}
    )
    places = [
        Place("b.jsonl", 3),
        Place("a.jsonl", 8),
        Place("b.jsonl", 1),
        Place("a.jsonl", 8),
        Place("a.jsonl", 2),
    ]

    slices = plan_chosen_lines(source, places, 3)

    assert slices == [
        Slice(0, (Lines("a.jsonl", 2, 16, 2, (2, 8)), Lines("b.jsonl", 1, 8, 1, (1,)))),
        Slice(1, (Lines("b.jsonl", 3, 24, 1, (3,)),)),
    ]
    assert [(file, number) for file, number, _ in read(source, slices)] == [
        ("a.jsonl", 2), ("a.jsonl", 8), ("b.jsonl", 1), ("b.jsonl", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), [(1, "no row 1; has the file changed"), (7, "no row 7")])
def test_a_chosen_row_that_is_not_there_is_named(tmp_path: Path, row: int, message: str) -> None:
    source = write(tmp_path, **{"a.jsonl": b'{"n":0}\n\n{"n":2}\n'})

    with pytest.raises(ConfigError, match=message) as refused:
        plan_chosen_lines(source, [Place("a.jsonl", 0), Place("a.jsonl", row)], 3)
    assert "a.jsonl" in str(refused.value)


# Rows that cannot be used


def test_an_element_that_is_no_object_is_a_row_of_its_own(tmp_path: Path) -> None:
    data = b'[{"n":0}, 1, -2.5e3, "x]", [{}], null, NaN, {"n":7}, {"n":"\xff"}, {"a\tb":1}]'
    source = write(tmp_path, **{"a.json": data})
    bad = Reason.ROW_INVALID

    rows = read(*_cut(source, ["a.json"]))

    assert [number for _, number, _ in rows] == list(range(10))
    assert [row for _, _, row in rows] == [{"n": 0}, bad, bad, bad, bad, bad, bad, {"n": 7}, bad, bad]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", Reason.ROW_INVALID),
        (b"[1]", Reason.ROW_INVALID),
        (b"3", Reason.ROW_INVALID),
        (b'"x"', Reason.ROW_INVALID),
    ],
)
def test_a_line_that_is_no_object_is_rejected_alone(line: bytes, reason: Reason) -> None:
    with pytest.raises(BadSample) as refused:
        parse_line(line)
    assert refused.value.reason is reason


def test_a_line_that_is_too_long_is_a_row_of_its_own(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"n":0}\n{"n":"')
        # A hole in the file: zeros that take no place on the disk.
        file.seek(MAX_LINE_BYTES + (3 << 20), io.SEEK_CUR)
        file.write(b'"}\n{"n":2}\n')
    source = source_of(tmp_path)

    rows = read(*_cut(source, ["a.jsonl"]))

    assert [(number, row) for _, number, row in rows] == [
        (0, {"n": 0}),
        (1, Reason.JSON_TOO_LARGE),
        (2, {"n": 2}),
    ]


# Files that cannot be used


@pytest.mark.parametrize(
    ("array", "place", "message"),
    [
        (b'[{"a":1},]', 9, "a comma with no element after it"),
        (b'[{"a":1} {"a":2}]', 9, "',' should stand here, not '{'"),
        (b'[{"a":1},\n{"a":}]', 15, "Expecting value"),
        (b'[{"a":1}', 8, "the file ends"),
        (b'[{"a":1},', 9, "Expecting value"),
        (b"[", 1, "Expecting value"),
        (b"[,", 1, "Expecting value"),
        (b'[{"a":"x}]', 6, "Unterminated string"),
        (b'[{"a":1}]\n{"a":2}\n', 10, "the end of the file should stand here, not '{'"),
        (b"[] ]", 3, "the end of the file should stand here"),
        (MARK + b'["\xe5\x9b\xbe",]', 10, "a comma with no element"),
        (b"[" * 100_000, 1, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_a_broken_array_is_refused_before_the_first_row_with_the_place(
    tmp_path: Path, array: bytes, place: int, message: str, suffix: str
) -> None:
    source = write(tmp_path, **{f"a.json{suffix}": COMPRESS[suffix](array)})

    with pytest.raises(ConfigError) as refused:
        plan_lines(source, 1, [f"a.json{suffix}"])

    assert f"a.json{suffix}: a broken JSON array, at byte {place}: " in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("form", [as_lines, as_array])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@settings(deadline=None)
@given(where=st.floats(0, 1), damage=st.sampled_from(["cut", "changed", "followed"]))
def test_a_compressed_file_that_is_broken_is_named_and_never_read_short(
    tmp_path_factory: pytest.TempPathFactory, form: Any, suffix: str, where: float, damage: str
) -> None:
    rows = [{"n": random.Random(n).random()} for n in range(200)]
    text, _ = form(rows, iter([""] * 500))
    first, second = COMPRESS[suffix](text[:1000]), COMPRESS[suffix](text[1000:])
    packed = bytearray(first + second)
    match damage:
        case "cut":
            place = 6 + int(where * (len(packed) - 7))
            # Between two members there is nothing to tell that the second is missing.
            del packed[place + (place == len(first)) :]
        case "changed":
            # Gzip checks its data, behind a header of 10 bytes; Arrow writes zstd without a checksum.
            packed[10 + int(where * (len(first) - 11)) if suffix == ".gz" else len(first)] ^= 0xFF
        case _:
            packed += b"x"
    name = f"a.jsonl{suffix}"
    source = write(tmp_path_factory.mktemp("broken"), **{name: bytes(packed)})

    with pytest.raises(ConfigError) as refused:
        plan_lines(source, 50, [name])

    assert name in str(refused.value)
    assert "cannot be decompressed to its end" in str(refused.value)


def test_a_compressed_file_that_breaks_between_plan_and_reading_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(b'{"n":%d}\n' % n for n in range(9999)))
    source = write(tmp_path, **{"a.jsonl.gz": packed})
    slices = plan_lines(source, ALL, ["a.jsonl.gz"]).slices
    write(tmp_path, **{"a.jsonl.gz": packed[:-9]})

    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: cannot be decompressed to its end"):
        read(source, slices)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("text", ['{"a": 1}\n', '[{"a": 1}]'])
def test_utf_16_is_refused_with_what_to_do(tmp_path: Path, encoding: str, text: str) -> None:
    source = write(tmp_path, **{"a.jsonl": text.encode(encoding)})

    with pytest.raises(ConfigError, match=r"a\.jsonl: UTF-16 or UTF-32; write it anew as UTF-8"):
        plan_lines(source, 1, ["a.jsonl"])


@pytest.mark.parametrize("zeros", [1, 2, 3, 4, 5000])
def test_zero_bytes_in_front_are_no_utf_16(tmp_path: Path, zeros: int) -> None:
    source = write(tmp_path, **{"a.jsonl": bytes(zeros) + b'{"a": 1}\n{"a": 2}\n'})
    if zeros == 3:
        # As UTF-32 begins.
        with pytest.raises(ConfigError, match=r"a\.jsonl: UTF-16 or UTF-32"):
            plan_lines(source, 1, ["a.jsonl"])
        return

    with pytest.raises(
        ConfigError, match=r"a\.jsonl: begins with b'\\x00.*no JSON has zero bytes; .* Copy it anew"
    ):
        plan_lines(source, 1, ["a.jsonl"])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for call in (lambda s: plan_lines(s, 1, ["gone.jsonl"]), lambda s: describe_lines_file(s, "gone.jsonl")):
        with pytest.raises(ConfigError, match=r"gone\.jsonl: cannot be read: No such file"):
            call(source_of(tmp_path))


def test_the_content_says_how_a_file_is_compressed_not_its_name(tmp_path: Path) -> None:
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    source = write(
        tmp_path,
        **{
            "a.jsonl": gzip.compress(b'{"n":0}'),
            "b.jsonl.gz": b'{"n":1}',
            "c.jsonl": skipped + zstd(b'{"n":2}'),
        },
    )

    rows = read(*_cut(source, ["a.jsonl", "b.jsonl.gz", "c.jsonl"]))

    assert [row["n"] for _, _, row in rows] == [0, 1, 2]


def test_rows_that_are_passed_over_are_not_parsed(tmp_path: Path) -> None:
    source = write(tmp_path, **{"a.jsonl": b'{"n":0}\n{\n{"n":2}\n', "b.jsonl": b'{"n":3}\n'})
    (part,) = plan_lines(source, ALL, ["a.jsonl", "b.jsonl"]).slices
    parsed = []

    def parse(fields: dict[str, Any]) -> ParsedRow:
        parsed.append(fields["n"])
        return ParsedRow(fields, ())

    rows = list(read_lines(source, part.pieces, parse, 2))  # type: ignore[arg-type]

    assert parsed == [2, 3]
    assert not [row for row in rows if isinstance(row, RejectedRow)]
    assert list(read_lines(source, part.pieces, parse, 4)) == []  # type: ignore[arg-type]
