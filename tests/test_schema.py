"""The contract of a sample in a tar: keys that are safe, members that split as webdataset splits them, media in order."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from strategies import member_keys, words
from webdataset.tariterators import base_plus_ext

from bagel_wds.errors import BadSample, Reason
from bagel_wds.schema import (
    IMAGE_EXTENSIONS,
    MAX_KEY_BYTES,
    VIDEO_EXTENSIONS,
    make_key,
    media_fields,
    media_name,
    natural,
    read_header,
    split_member,
)

paths = st.one_of(
    words(20),
    st.text("ab/.-_ =%", max_size=12),
    st.text("ä字/.", min_size=30, max_size=90),
    st.sampled_from(["v1.5 final", "22.0/1.1", "../x", "/abs", "x" * 300, "图片", "Name", "name", "", "7"]),
)
rows = st.integers(0, 10**12)


@settings(max_examples=300, deadline=None)
@given(file=paths, row=rows, row_group=st.none() | st.integers(0, 10**6))
def test_c20_a_key_is_safe_in_a_tar_and_for_webdataset(file: str, row: int, row_group: int | None) -> None:
    key = make_key(file, row, row_group)

    assert re.fullmatch(r"[A-Za-z0-9_=-]+", key)
    assert len(key) <= MAX_KEY_BYTES
    assert len(media_name(key, 999, "jpeg", 999_999).encode()) <= 100
    for name in (f"{key}.json", media_name(key, 3, "jpg"), media_name(key, 0, "png", 7)):
        assert split_member(name) == (key, name.removeprefix(f"{key}."))
        assert base_plus_ext(name) == split_member(name)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(paths, rows, st.integers(0, 9)), min_size=2, max_size=6, unique=True), st.booleans()
)
@example([("a-1", 2, 0), ("a", 2, 1)], True)
@example([("a", 12, 0), ("a-1", 2, 0)], False)
@example([("x=2F", 0, 0), ("x/", 0, 0)], True)
@example([("Name", 0, 0), ("name", 0, 0)], True)
@example([("y" + "x" * 99, 0, 0), ("z" + "x" * 99, 0, 0)], True)
def test_c20_two_rows_of_a_source_never_share_a_key(
    origins: list[tuple[str, int, int]], grouped: bool
) -> None:
    # Rows of parquet have a row group, lines of JSONL have none.
    wanted = origins if grouped else list({(file, row): (file, row, 0) for file, row, _ in origins}.values())
    keys = {make_key(file, row, group if grouped else None) for file, row, group in wanted}

    assert len(keys) == len(wanted)


def test_keys_literally() -> None:
    # A change here changes what is drawn for every sample: a new version of the format.
    assert make_key("a/chunk_0.parquet", 12, row_group=3) == "a=2Fchunk_0=2Eparquet-3-12"
    assert make_key("train.jsonl", 0) == "train=2Ejsonl-0"
    assert make_key("v1.5 final", 7) == "v1=2E5=20final-7"
    assert make_key("größe/图", 1) == "gr=C3=B6=C3=9Fe=2F=E5=9B=BE-1"
    assert make_key(b"caf\xe9".decode("utf-8", "surrogateescape"), 1) == "caf=E9-1"
    assert make_key("x" * 300, 5, 2) == "125237ea2ad7bc7aa5d1b4607dc83554=" + "x" * 39 + "-2-5"


# Members


@settings(max_examples=300, deadline=None)
@given(
    key=member_keys(),
    field=st.text("abcJPG.019-_", min_size=1, max_size=10).filter(lambda text: text[0] != "."),
)
def test_a_member_is_split_as_webdataset_splits_it(key: str, field: str) -> None:
    name = f"{key}.{field}"
    theirs = base_plus_ext(name)
    # It knows no line end in a name.
    assume(theirs[0] is not None)

    assert split_member(name) == (theirs[0], theirs[1].lower())
    assert split_member(name) == (key, field.lower())


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a/b.0.JPG", ("a/b", "0.jpg")),
        ("v1.5/b.c.d", ("v1.5/b", "c.d")),
        ("a", ("a", "")),
        ("a.", ("a", "")),
        ("a.b/c", ("a.b/c", "")),
        (".hidden", ("", "hidden")),
        ("d/.hidden.jpg", ("d/", "hidden.jpg")),
    ],
)
def test_members_are_split_at_the_first_dot_behind_the_last_slash(name: str, split: tuple[str, str]) -> None:
    assert split_member(name) == split


# Media


media = st.lists(
    st.one_of(
        st.sampled_from(sorted(IMAGE_EXTENSIONS)).map(lambda ext: ([ext], False)),
        st.integers(1, 12).map(lambda frames: (["jpg"] * frames, True)),
        st.sampled_from(sorted(VIDEO_EXTENSIONS)).map(lambda ext: ([ext], True)),
    ),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(media=media, seed=st.integers(0, 99))
def test_c21_media_come_in_numeric_order_whatever_the_order_in_the_tar(
    media: list[tuple[list[str], bool]], seed: int
) -> None:
    wanted = [
        (
            is_clip,
            tuple(
                split_member(media_name("k", number, ext, frame if is_clip and ext == "jpg" else None))[1]
                for frame, ext in enumerate(exts)
            ),
        )
        for number, (exts, is_clip) in enumerate(media)
    ]
    names = ["json", "__key__", "__url__", *(name for _, fields in wanted for name in fields)]
    random.Random(seed).shuffle(names)

    assert list(media_fields(names)) == wanted


def test_c21_twelve_images_literally() -> None:
    names = sorted(f"{number}.jpg" for number in range(12))

    assert names[:3] == ["0.jpg", "1.jpg", "10.jpg"]
    assert media_fields(names) == tuple((False, (f"{number}.jpg",)) for number in range(12))


def test_a_clip_and_images_literally() -> None:
    names = ["2.png", "1.010.jpg", "json", "1.009.jpg", "0.jpg", "3.mp4"]

    assert media_fields(names) == (
        (False, ("0.jpg",)),
        (True, ("1.009.jpg", "1.010.jpg")),
        (False, ("2.png",)),
        (True, ("3.mp4",)),
    )


def test_fields_of_other_tools_are_media_if_their_extension_says_so() -> None:
    names = [
        "jpg",
        "input.png",
        "cls",
        "txt",
        "output.webp",
        "mask.npy",
        "__note__.jpg",
        "json",
        "mp4",
        "a.1.webm",
    ]

    assert media_fields(names) == (
        (True, ("a.1.webm",)),
        (False, ("input.png",)),
        (False, ("jpg",)),
        (True, ("mp4",)),
        (False, ("output.webp",)),
    )


def test_no_extension_is_both_image_and_video() -> None:
    assert not IMAGE_EXTENSIONS & VIDEO_EXTENSIONS
    assert all(ext == ext.lower() for ext in IMAGE_EXTENSIONS | VIDEO_EXTENSIONS)


def test_digits_count_as_numbers_in_a_natural_order() -> None:
    names = ["f10", "f9", "f", "10", "9a", "F2", "f1b2", "f1b10", "٣"]

    assert sorted(names, key=natural) == ["٣", "9a", "10", "F2", "f", "f1b2", "f1b10", "f9", "f10"]


# JSON


def test_our_header_is_taken_out_of_the_fields_and_nothing_else_is() -> None:
    fields = {"captions": {"a": "b"}, "_bagel": {"kind": "t2i"}, "_other": 1}
    own, header = read_header(fields)

    assert own == {"captions": {"a": "b"}, "_other": 1}
    assert header == {"kind": "t2i"}
    assert set(fields) == {"captions", "_bagel", "_other"}
    assert read_header({"captions": {}}) == ({"captions": {}}, {})


@pytest.mark.parametrize("value", [None, [], "t2i", 1])
def test_a_reserved_key_of_somebody_else_is_a_bad_sample(value: object) -> None:
    with pytest.raises(BadSample, match="'_bagel' is") as bad:
        read_header({"_bagel": value})

    assert bad.value.reason == Reason.ROW_INVALID
