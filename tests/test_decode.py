"""A sample's JSON is parsed and checked, its images stay as they are; whatever is odd is one `BadSample`."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bagel_wds.decode import decode_sample
from bagel_wds.errors import BadSample, Reason
from bagel_wds.images import DecodedImage, EncodedImage
from bagel_wds.records import RawSample, SampleRef
from bagel_wds.schema import MAX_JSON_BYTES


def picture(size: tuple[int, int] = (8, 6)) -> bytes:
    """A small PNG."""
    out = io.BytesIO()
    Image.new("RGB", size).save(out, "PNG")
    return out.getvalue()


def sample(fields: object, **members: Any) -> dict[str, Any]:
    """A sample as a reader gives it."""
    return {"__key__": "k", "__url__": "a.tar", "json": json.dumps(fields).encode(), **members}


def described(*media: object, **members: Any) -> dict[str, Any]:
    """A sample with one picture and our header, which says this of its media."""
    return sample({"_bagel": {"kind": "t2i", "media": list(media)}}, **{"0.png": picture(), **members})


GOOD = {"ext": "png", "width": 8, "height": 6}


def reason_of(broken: dict[str, Any]) -> Reason:
    """Why a sample was refused."""
    with pytest.raises(BadSample) as bad:
        decode_sample(broken)
    return bad.value.reason


def test_a_sample_is_decoded_literally() -> None:
    place = SampleRef(shard=1, offset=512, length=2048, epoch=3)
    raw = decode_sample(
        {
            **described(
                GOOD, {"ext": "jpg", "width": 20, "height": 10, "orientation": 6}, **{"1.jpg": b"unread"}
            ),
            "__ref__": place,
            "__dataset__": "seed",
            "__data_indexes__": (1, 7),
        }
    )

    assert raw == RawSample(
        key="k",
        url="a.tar",
        fields={},
        media=raw.media,
        is_clip=(False, False),
        dataset="seed",
        ref=place,
        indexes=(1, 7),
    )
    # Sizes are what the JSON says; the bytes are not looked at.
    assert [image.size_hw for [image] in raw.media] == [(6, 8), (20, 10)]
    assert [image.num_bytes for [image] in raw.media] == [len(picture()), 6]


def test_without_our_header_sizes_come_from_the_images() -> None:
    raw = decode_sample(sample({"captions": {}}, **{"jpg": picture((5, 4)), "input.png": picture((3, 2))}))

    assert [image.size_hw for [image] in raw.media] == [(2, 3), (4, 5)]
    assert raw.fields == {"captions": {}}


def test_frames_of_a_clip_stay_together() -> None:
    frames = {f"0.{number:03d}.png": picture((number + 1, 2)) for number in (10, 9, 0)}
    raw = decode_sample(sample({"_bagel": {"media": [{**GOOD, "frames": 3}]}}, **frames))

    assert raw.is_clip == (True,)
    assert [image.size_hw[1] for image in raw.media[0]] == [1, 10, 11]


def test_what_an_earlier_stage_decoded_is_taken_as_it_is() -> None:
    image = Image.new("RGB", (3, 2))
    raw = decode_sample({"__key__": "k", "json": {"a": 1}, "png": image, "jpg": picture()})

    assert raw.fields == {"a": 1}
    assert [type(found) for [found] in raw.media] == [EncodedImage, DecodedImage]
    assert raw.media[1][0].size_hw == (2, 3)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", Reason.ROW_INVALID),
        (b"{", Reason.ROW_INVALID),
        (b"[1]", Reason.ROW_INVALID),
        (b"null", Reason.ROW_INVALID),
        (b"NaN", Reason.ROW_INVALID),
        (b"\xff\xfe{}", Reason.ROW_INVALID),
        (b'{"a": "\\ud800"}', Reason.ROW_INVALID),
        (b"[" * 100_000, Reason.ROW_INVALID),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, Reason.ROW_INVALID),
        (b" " * (MAX_JSON_BYTES + 1), Reason.JSON_TOO_LARGE),
        (None, Reason.ROW_INVALID),
        (7, Reason.ROW_INVALID),
        ([1], Reason.ROW_INVALID),
    ],
)
def test_odd_json_is_a_bad_sample(value: object, reason: Reason) -> None:
    assert reason_of({"__key__": "k", "json": value}) == reason


def test_json_of_the_largest_size_is_taken() -> None:
    data = b'{"a": 1}'.ljust(MAX_JSON_BYTES)

    assert decode_sample({"__key__": "k", "json": data}).fields == {"a": 1}


def test_a_sample_without_json_is_a_bad_sample() -> None:
    assert reason_of({"__key__": "k", "jpg": picture()}) == Reason.ROW_INVALID


def test_c19_a_sample_that_lost_an_image_is_a_bad_sample() -> None:
    lost = described(GOOD, GOOD)

    with pytest.raises(BadSample, match="the JSON describes 2 media, the tar has 1") as bad:
        decode_sample(lost)
    assert bad.value.reason == Reason.IMAGE_MISSING


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "png",
        [],
        {},
        {"ext": "png", "width": 8},
        {**GOOD, "width": "wide"},
        {**GOOD, "width": None},
        {**GOOD, "width": 0},
        {**GOOD, "height": -6},
        {**GOOD, "height": 1e400},
        {**GOOD, "orientation": 0},
        {**GOOD, "orientation": 9},
        {**GOOD, "orientation": "up"},
        {**GOOD, "orientation": None},
    ],
)
def test_a_broken_description_of_a_picture_is_a_bad_sample(entry: object) -> None:
    whole = {"__key__": "k", "json": {"_bagel": {"media": [entry]}}, "0.png": picture()}

    assert reason_of(whole) == Reason.ROW_INVALID


@pytest.mark.parametrize("media", [{"0": GOOD}, "x", 1])
def test_a_description_of_media_that_is_no_list_is_a_bad_sample(media: object) -> None:
    assert reason_of(sample({"_bagel": {"media": media}}, **{"0.png": picture()})) == Reason.ROW_INVALID


@pytest.mark.parametrize("media", [None, []])
def test_no_description_of_media_is_none(media: object) -> None:
    raw = decode_sample(sample({"_bagel": {"media": media}}, **{"0.png": picture()}))

    assert raw.media[0][0].size_hw == (6, 8)


def test_a_video_and_a_picture_of_an_unknown_type_are_bad_samples() -> None:
    assert reason_of(sample({}, **{"0.mp4": ["frames"]})) == Reason.VIDEO
    assert reason_of(sample({}, jpg=[1, 2])) == Reason.IMAGE_UNREADABLE


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ext", "width", "height", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    header=st.dictionaries(st.sampled_from(["media", "kind", "source"]), json_values | st.lists(json_values)),
    fields=st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    media=st.integers(0, 2),
)
def test_any_json_is_a_sample_or_a_bad_one(
    header: dict[str, Any], fields: dict[str, Any], media: int
) -> None:
    members = {f"{number}.png": picture() for number in range(media)}
    whole: dict[str, Any] = {"__key__": "k", "json": {**fields, "_bagel": header}, **members}
    try:
        raw = decode_sample(whole)
    except BadSample as bad:
        outcome: object = bad.reason
    else:
        outcome = raw.fields
        assert all(min(image.size_hw) > 0 for [image] in raw.media)

    assert outcome in (fields, Reason.ROW_INVALID, Reason.IMAGE_MISSING)
