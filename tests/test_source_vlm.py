"""Conversation rows: where their media are, in all forms, what becomes of the fields, and tags under each policy."""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from source_factory import encode_image, talk, write_jsonl, write_parquet

from bagel_wds.errors import ConfigError, Reason
from bagel_wds.geometry import ResizeRule
from bagel_wds.images import EncodedImage
from bagel_wds.planners import PlanTools, plan_vlm
from bagel_wds.records import Kind, RawSample
from bagel_wds.rng import KeyedDraws
from bagel_wds.sources import (
    Placeholders,
    RejectedRow,
    Source,
    SourceSample,
    Verify,
    plan_source,
    read_slice,
)

if TYPE_CHECKING:
    from pathlib import Path

IMAGE, OTHER = encode_image((8, 12), seed=1), encode_image((6, 4), seed=2, codec="JPEG")
TEXT = base64.b64encode(IMAGE).decode()
URI = f"data:image/png;base64,{TEXT}"
Row = SourceSample | RejectedRow


def read_all(source: Source) -> list[Row]:
    slices = plan_source(source, slice_bytes=1, slice_rows=1).slices
    return [row for part in slices for row in read_slice(source, part)]


def read_rows(root: Path, *rows: dict[str, Any] | str, **settings: Any) -> list[Row]:
    """The rows as JSON lines beside their media."""
    write_jsonl(root / "a.jsonl", rows)
    return read_all(Source(kind="vlm", name="x", path=str(root / "a.jsonl"), **settings))


def read_parquet_rows(root: Path, table: pa.Table, **settings: Any) -> list[Row]:
    """The same out of a parquet file."""
    write_parquet(root / "a.parquet", table, group_rows=100)
    return read_all(Source(kind="vlm", name="x", path=str(root / "a.parquet"), **settings))


def sample(root: Path, row: dict[str, Any], **settings: Any) -> SourceSample:
    (read,) = read_rows(root, row, **settings)
    assert isinstance(read, SourceSample), read
    return read


def rejected(root: Path, row: dict[str, Any] | str, **settings: Any) -> RejectedRow:
    (read,) = read_rows(root, row, **settings)
    assert isinstance(read, RejectedRow), read
    return read


def encoded(read: Row) -> list[bytes]:
    assert isinstance(read, SourceSample), read
    return [image.data for medium in read.media for image in medium.images]


def asks(num_images: int = 1, **fields: Any) -> dict[str, Any]:
    """A row that shows so many images."""
    return {**fields, "conversations": talk("<image>" * num_images + "q", "a")}


def chat(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A row of typed parts."""
    return {
        **fields,
        "messages": [
            {"role": "user", "content": [*content, {"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "a"},
        ],
    }


def num_shown(read: SourceSample) -> int:
    """How many pictures the planner shows, given the row as a shard has it."""
    plan = plan_vlm(
        RawSample(
            key=read.key,
            url="url",
            fields=json.loads(json.dumps(read.fields)),
            media=tuple(tuple(EncodedImage(image.data) for image in medium.images) for medium in read.media),
            is_clip=tuple(medium.is_clip for medium in read.media),
        ),
        PlanTools(
            group="g",
            encode=lambda text: list(text.encode()),
            resize={Kind.VIT_IMAGE: ResizeRule(max_size=56, min_size=28, stride=14)},
        ),
        KeyedDraws(0, read.key),
    )
    return sum(segment.kind is Kind.VIT_IMAGE for segment in plan.segments)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.png").write_bytes(IMAGE)
    (tmp_path / "sub" / "b.jpg").write_bytes(OTHER)
    for frame in range(3):
        clip = tmp_path / "clip"
        clip.mkdir(exist_ok=True)
        (clip / f"f_{frame}.png").write_bytes(encode_image(seed=frame))
    return tmp_path


# Media by path


@pytest.mark.parametrize("field", ["image", "images"])
@pytest.mark.parametrize(
    "value",
    ["a.png", ["a.png"], {"path": "a.png"}, {"bytes": None, "path": "a.png"}, [{"url": "a.png", "path": ""}]],
)
def test_an_image_file_is_named_in_any_of_these_forms(root: Path, field: str, value: Any) -> None:
    row = asks(**{field: value})

    read = sample(root, row)

    assert encoded(read) == [IMAGE]
    assert read.fields == row
    assert num_shown(read) == 1


def test_typed_parts_name_their_media_in_the_order_in_which_they_come(root: Path) -> None:
    row = chat(
        {"type": "image_url", "image_url": {"url": "sub/b.jpg"}},
        {"type": "video", "video": "clip"},
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "sub/b.jpg"},
    )

    read = sample(root, row)

    frames = [(root / "clip" / f"f_{frame}.png").read_bytes() for frame in range(3)]
    assert encoded(read) == [OTHER, *frames, IMAGE, OTHER]
    assert [medium.is_clip for medium in read.media] == [False, True, False, False]
    assert read.fields == row
    assert num_shown(read) == 6


def test_typed_parts_that_name_nothing_stand_for_the_images_of_the_row(root: Path) -> None:
    row = chat({"type": "image"}, {"type": "image", "image": None}, images=["sub/b.jpg", "a.png"])

    read = sample(root, row)

    assert encoded(read) == [OTHER, IMAGE]
    assert num_shown(read) == 2


def test_videos_are_folders_of_frames_in_a_list_too(root: Path) -> None:
    row = {"videos": ["clip", "clip/"], "conversations": talk("<video> and <video>?", "a")}

    read = sample(root, row)

    assert [len(medium.images) for medium in read.media] == [3, 3]
    assert num_shown(read) == 6


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (asks(image="a.png", images=["a.png"]), "both `image` and `images` name media"),
        (
            asks(image="a.png", video="clip"),
            "both `image` and `video` name media; keep one, or split the row",
        ),
        (asks(video="clip", videos=["clip"]), "both `video` and `videos`"),
        (
            chat({"type": "image", "image": "a.png"}, image="a.png"),
            "`messages[0].content[0].image` names a medium, and `image` names some too",
        ),
        (
            chat({"type": "image", "path": "a.png"}, {"type": "image"}),
            "`messages[0].content[0]` names a medium, and `messages[0].content[1]` names none",
        ),
        (asks(image=3), "`image` is int, neither a path nor an object"),
        (asks(image=[["a.png"]]), "`image[0]` is list"),
        (asks(image={"file": "a.png"}), "`image` is an object with none of 'bytes', 'base64', 'path', 'url'"),
        (asks(image={"path": ["a.png"]}), "`image`: 'path' is list, not a path"),
        (asks(image={"bytes": [137, 80]}), "`image`: 'bytes' is list, not base64 text"),
        (
            asks(image="data:application/pdf;base64,AAAA"),
            "of data: URIs only images and videos in base64 are read",
        ),
    ],
)
def test_media_that_are_named_in_two_ways_or_none_are_a_fault_of_the_row(
    root: Path, row: dict[str, Any], detail: str
) -> None:
    read = rejected(root, row)

    assert read.reason is Reason.ROW_INVALID
    assert detail in read.detail


@pytest.mark.parametrize("image", [None, "", "None", "none", "null", [], "absent"])
@pytest.mark.parametrize("policy", list(Placeholders))
def test_c34_a_row_without_image_is_text_alone(tmp_path: Path, image: Any, policy: Placeholders) -> None:
    row = {"image": image, "conversations": talk()}
    if image == "absent":
        del row["image"]

    read = sample(tmp_path, row, placeholders=policy)

    assert (read.media, read.fields, read.repaired) == ((), row, ())
    assert num_shown(read) == 0


@pytest.mark.parametrize("nothing", [None, "", "None", {"bytes": None, "path": None}, {"url": "None"}])
def test_an_entry_that_names_nothing_is_an_empty_image(root: Path, nothing: Any) -> None:
    read = rejected(root, asks(2, image=["a.png", nothing]))

    assert read.reason is Reason.IMAGE_EMPTY
    assert "`image[1]`" in read.detail


# Media inside the row


@pytest.mark.parametrize(
    ("value", "left"),
    [
        (URI, "data:image/png;base64,"),
        (URI.replace("data:image/png", "DATA:IMAGE/x;name=a"), "DATA:IMAGE/x;name=a;base64,"),
        ([URI], ["data:image/png;base64,"]),
        ({"bytes": TEXT, "path": "gone.png"}, {"bytes": None, "path": "gone.png"}),
        ([{"bytes": {"base64": TEXT}}], [{"bytes": None}]),
        ({"base64": TEXT[:40] + "\n" + TEXT[40:]}, {"base64": None}),
        ({"url": URI, "detail": "low"}, {"url": "data:image/png;base64,", "detail": "low"}),
    ],
)
def test_bytes_in_the_row_become_the_medium_and_leave_the_fields(
    tmp_path: Path, value: Any, left: Any
) -> None:
    read = sample(tmp_path, asks(id=7, image=value))

    assert encoded(read) == [IMAGE]
    assert read.fields == asks(id=7, image=left)
    assert num_shown(read) == 1


def test_bytes_in_typed_parts_leave_them_too(root: Path) -> None:
    row = chat(
        {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
        {"type": "image", "image": "sub/b.jpg"},
        {"type": "image", "bytes": TEXT},
        {"type": "image_url", "image_url": URI},
    )

    read = sample(root, row)

    assert encoded(read) == [IMAGE, OTHER, IMAGE, IMAGE]
    assert read.fields == chat(
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,", "detail": "low"}},
        {"type": "image", "image": "sub/b.jpg"},
        {"type": "image", "bytes": None},
        {"type": "image_url", "image_url": "data:image/png;base64,"},
    )
    assert num_shown(read) == 4


def test_a_row_larger_than_its_json_may_be_is_read_where_bytes_make_it_so(tmp_path: Path) -> None:
    # A PNG with as much behind its end as makes 17 MiB of text.
    row = asks(image={"bytes": base64.b64encode(IMAGE + bytes(13 << 20)).decode()})
    assert len(json.dumps(row)) > 16 << 20

    read = sample(tmp_path, row)

    assert len(encoded(read)[0]) > 13 << 20
    assert len(json.dumps(read.fields)) < 200


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (asks(image="data:image/png;base64,"), Reason.IMAGE_EMPTY),
        (asks(image={"bytes": ""}), Reason.IMAGE_EMPTY),
        (asks(image="data:image/png;base64,???"), Reason.IMAGE_UNREADABLE),
        (asks(image={"bytes": "é"}), Reason.IMAGE_UNREADABLE),
        (asks(image=URI[:-3]), Reason.IMAGE_UNREADABLE),
        (
            asks(image=f"data:image/png;base64,{base64.b64encode(IMAGE[:-30]).decode()}"),
            Reason.IMAGE_TRUNCATED,
        ),
        ({"video": "data:text/plain,a", "conversations": talk("<video>", "a")}, Reason.VIDEO),
        (
            {"video": "data:video/mp4;base64,AAAA", "conversations": talk("<video>", "a")},
            Reason.VIDEO_UNREADABLE,
        ),
        ({"video": {"bytes": "AAAA"}, "conversations": talk("<video>", "a")}, Reason.VIDEO_UNREADABLE),
        ({"video": {"bytes": "A"}, "conversations": talk("<video>", "a")}, Reason.VIDEO_UNREADABLE),
        ({"video": {"bytes": ""}, "conversations": talk("<video>", "a")}, Reason.VIDEO_EMPTY),
        ({"video": [None], "conversations": talk("<video>", "a")}, Reason.VIDEO_MISSING),
    ],
)
def test_bytes_that_are_no_image_say_where_they_stand(
    tmp_path: Path, row: dict[str, Any], reason: Reason
) -> None:
    read = rejected(tmp_path, row)

    assert read.reason is reason
    assert read.detail.startswith(("`image`", "`video`", "`video[0]`"))


# Paths


def test_c35_each_medium_that_cannot_be_used_is_named_with_its_row(tmp_path: Path) -> None:
    faults = {
        3: ("gone.png", Reason.IMAGE_MISSING, "gone.png: No such file or directory"),
        5: ("sub/gone.png", Reason.IMAGE_MISSING, "sub/gone.png: No such file or directory"),
        6: ("empty.png", Reason.IMAGE_EMPTY, "empty.png: "),
        8: ("folder.png", Reason.IMAGE_MISSING, "folder.png: a folder, where an image file belongs"),
        11: ("1.PNG", Reason.IMAGE_MISSING, "1.PNG: No such file or directory; there is 1.png"),
        13: (str(tmp_path.parent / "1.png"), Reason.PATH_OUTSIDE, "not a path under the media root"),
        14: ("sub/../1.png", Reason.PATH_OUTSIDE, "sub/../1.png: not a path under the media root"),
        17: (
            "https://example.com/1.png",
            Reason.PATH_OUTSIDE,
            "a URL, and none is fetched; download it first",
        ),
    }
    for number in range(20):
        (tmp_path / f"{number}.png").write_bytes(IMAGE)
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "sub").mkdir()
    rows = [asks(image=faults.get(number, (f"{number}.png",))[0]) for number in range(20)]

    read = read_rows(tmp_path, *rows, media_root=str(tmp_path))

    bad = {row.place.row: row for row in read if isinstance(row, RejectedRow)}
    assert {number: row.reason for number, row in bad.items()} == {
        number: reason for number, (_, reason, _) in faults.items()
    }
    for number, (_, _, detail) in faults.items():
        assert detail in bad[number].detail
    assert [row.place.row for row in read] == list(range(20))


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("SUB/b.JPG", "sub/b.jpg"),
        ("sub/B.jpg", "sub/b.jpg"),
        ("Clip", "clip"),
        ("sub/c.jpg", None),
        ("x/b.jpg", None),
    ],
)
def test_a_file_of_that_name_in_other_case_is_said(root: Path, path: str, there: str | None) -> None:
    detail = rejected(root, asks(image=path), media_root=str(root)).detail

    if there:
        assert detail.endswith(f"; there is {there}")
    else:
        assert "there is" not in detail


def test_a_name_in_other_case_is_not_looked_for_outside(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.png").write_bytes(IMAGE)
    (root / "link").symlink_to(outside)

    assert "secret" not in rejected(root, asks(image="link/SECRET.png")).detail


def test_where_no_media_root_is_given_a_missing_file_makes_one_ask(root: Path) -> None:
    row = asks(image="images/a.png")
    hint = "under the source's own folder; is that folder right (`data_dir` of a dataset info, --media-root of the"

    assert hint in rejected(root, row).detail
    assert hint not in rejected(root, row, media_root=str(root)).detail


def test_paths_may_lead_outside_where_that_is_allowed(root: Path) -> None:
    (root / "data" / "images").mkdir(parents=True)
    (root / "data" / "images" / "link.png").symlink_to(root / "a.png")
    rows = [asks(image=path) for path in (str(root / "a.png"), "../../a.png", "link.png", "https://a/b.png")]

    refused = read_rows(root, *rows, media_root=str(root / "data" / "images"))
    taken = read_rows(root, *rows, media_root=str(root / "data" / "images"), allow_outside=True)

    assert [row.reason for row in refused if isinstance(row, RejectedRow)] == [Reason.PATH_OUTSIDE] * 4
    assert [encoded(row) for row in taken[:3]] == [[IMAGE]] * 3
    assert [row.reason for row in taken if isinstance(row, RejectedRow)] == [Reason.PATH_OUTSIDE]


def test_an_absolute_path_is_taken_where_it_leads_into_the_media_root(root: Path) -> None:
    (root / "data").mkdir()
    (root / "data" / "b.png").write_bytes(OTHER)
    (root / "data" / "out.png").symlink_to(root / "a.png")
    (root / "alias").symlink_to(root / "data")
    inside = [str(root / "data" / "b.png"), str(root / "alias" / "b.png"), str(root / "data" / "gone.png")]
    outside = [str(root / "a.png"), str(root / "gone.png"), str(root / "data" / "out.png"), "/a\0", f"{root}-b/b.png",
               str(root / "data" / ".." / "data" / "b.png")]  # fmt: skip

    rows = read_rows(root, *(asks(image=path) for path in inside + outside), media_root=str(root / "alias"))

    assert [encoded(row) for row in rows[:2]] == [[OTHER]] * 2
    rejected = [row for row in rows if isinstance(row, RejectedRow)]
    assert [row.reason for row in rejected] == [Reason.IMAGE_MISSING] + [Reason.PATH_OUTSIDE] * len(outside)
    # What is not in the root is not looked for in the words of a verdict, which say what to do.
    assert all(
        "`allow_outside: true` of a dataset info, or --allow-outside" in row.detail for row in rejected[1:]
    )


def test_a_relative_root_is_that_of_the_folder_we_are_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "sub" / "a.png").write_bytes(OTHER)
    found = []
    for here in (root, root / "sub"):
        write_jsonl(here / "a.jsonl", [asks(image="a.png")])
        monkeypatch.chdir(here)
        (row,) = read_all(Source(kind="vlm", name="x", path="a.jsonl", media_root="."))
        found += encoded(row)

    assert found == [IMAGE, OTHER]


@pytest.mark.parametrize(("verify", "taken"), [(Verify.FULL, False), (Verify.NONE, True)])
def test_images_are_looked_at_as_far_as_the_source_says(tmp_path: Path, verify: Verify, taken: bool) -> None:
    cut = encode_image((64, 64), codec="JPEG")[:-200]
    (tmp_path / "cut.jpg").write_bytes(cut)
    rows = [asks(image="cut.jpg"), asks(image={"bytes": base64.b64encode(cut).decode()})]

    for row in read_rows(tmp_path, *rows, verify=verify):
        assert isinstance(row, SourceSample) == taken


# Tags

TAGS_IN_TURNS = {
    "none": ("q", "a"),
    "one": ("<image>q", "a"),
    "two in two turns": ("<image>q", "a", "<image>q", "a"),
    "three": ("<image>q", "a", "<image><image>q", "a"),
    "in an answer alone": ("q", "a <image>"),
    "twice in a line": ("<image> and <image>?", "a"),
}
MATCHES, REPAIRED, LEFT_OUT = "taken", "repaired", "left out"
# For each image field: what becomes of it under strict, and under repair. Upstream takes each as it is.
OUTCOMES: dict[str, list[tuple[Any, str, str]]] = {
    "none": [("a.png", LEFT_OUT, REPAIRED), (["a.png"], LEFT_OUT, REPAIRED), (["a.png", "sub/b.jpg"], LEFT_OUT, REPAIRED)],
    "one": [("a.png", MATCHES, MATCHES), (["a.png"], MATCHES, MATCHES), (["a.png", "sub/b.jpg"], LEFT_OUT, LEFT_OUT)],
    "two in two turns": [("a.png", LEFT_OUT, LEFT_OUT), (["a.png"], LEFT_OUT, LEFT_OUT), (["a.png", "sub/b.jpg"], MATCHES, MATCHES)],
    "three": [("a.png", LEFT_OUT, LEFT_OUT), (["a.png"], LEFT_OUT, LEFT_OUT), (["a.png", "sub/b.jpg"], LEFT_OUT, LEFT_OUT)],
    "in an answer alone": [("a.png", LEFT_OUT, REPAIRED), (["a.png"], LEFT_OUT, REPAIRED), (["a.png", "sub/b.jpg"], LEFT_OUT, REPAIRED)],
    "twice in a line": [("a.png", LEFT_OUT, LEFT_OUT), (["a.png"], LEFT_OUT, LEFT_OUT), (["a.png", "sub/b.jpg"], MATCHES, MATCHES)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tags", "image", "strict", "repair"),
    [(tags, *outcome) for tags, outcomes in OUTCOMES.items() for outcome in outcomes],
)
def test_c33_tags_against_images_under_each_policy(
    root: Path, tags: str, image: Any, strict: str, repair: str
) -> None:
    row = {"image": image, "conversations": talk(*TAGS_IN_TURNS[tags])}
    num_images = 1 if isinstance(image, str) else len(image)
    outcomes = {
        Placeholders.STRICT: strict,
        Placeholders.REPAIR: repair,
        Placeholders.UPSTREAM: MATCHES,
    }

    for policy, outcome in outcomes.items():
        (read,) = read_rows(root, row, placeholders=policy)

        if outcome is LEFT_OUT:
            assert isinstance(read, RejectedRow)
            assert read.reason is Reason.PLACEHOLDER_MISMATCH
            continue
        assert isinstance(read, SourceSample)
        assert len(read.media) == num_images
        assert read.repaired == (("placeholders",) if outcome is REPAIRED else ())
        first = talk("<image>\n" * num_images + TAGS_IN_TURNS[tags][0])
        turns = [*first, *row["conversations"][1:]] if outcome is REPAIRED else row["conversations"]
        assert read.fields == {**row, "conversations": turns}
        if policy is not Placeholders.UPSTREAM:
            assert num_shown(read) == num_images


def test_tags_are_repaired_among_typed_parts_and_for_clips(root: Path) -> None:
    typed = sample(root, chat(images=["a.png"]), placeholders=Placeholders.REPAIR)
    clip = sample(root, {"video": "clip", "conversations": talk()}, placeholders=Placeholders.REPAIR)

    assert typed.fields == chat({"type": "image"}, images=["a.png"])
    assert clip.fields == {"video": "clip", "conversations": talk("<video>\nq", "a")}
    assert (num_shown(typed), num_shown(clip)) == (1, 3)


def test_a_tag_of_the_wrong_kind_is_no_match_and_no_repair(root: Path) -> None:
    row = {"video": "clip", "conversations": talk("<image>q", "a")}

    for policy in (Placeholders.STRICT, Placeholders.REPAIR):
        assert rejected(root, row, placeholders=policy).reason is Reason.PLACEHOLDER_MISMATCH


def test_tags_without_any_medium_are_no_match(root: Path) -> None:
    for policy in (Placeholders.STRICT, Placeholders.REPAIR):
        assert rejected(root, asks(1), placeholders=policy).reason is Reason.PLACEHOLDER_MISMATCH


@pytest.mark.parametrize("turns", [talk("q", " \n"), talk("q"), [{"from": "system", "value": "s"}]])
def test_a_conversation_without_an_answer_is_left_out(tmp_path: Path, turns: list[dict[str, str]]) -> None:
    assert rejected(tmp_path, {"conversations": turns}).reason is Reason.EMPTY_TEXT


def test_a_conversation_without_a_question_is_taken(tmp_path: Path) -> None:
    assert sample(tmp_path, {"conversations": [{"from": "gpt", "value": "a"}]}).media == ()


# Columns of other names


def test_columns_of_other_names_come_under_ours_and_make_way_for_them(root: Path) -> None:
    row = {"image": 3, "picture": "a.png", "dialog": talk("<image>q", "a"), "conversations": "id-17", "id": 1}

    read = sample(root, row, columns={"image": "picture", "conversations": "dialog"})

    assert encoded(read) == [IMAGE]
    assert read.fields == {
        "source_image": 3,
        "image": "a.png",
        "conversations": talk("<image>q", "a"),
        "source_conversations": "id-17",
        "id": 1,
    }
    assert num_shown(read) == 1


def test_two_fields_of_one_name_are_a_fault_of_the_row(root: Path) -> None:
    row = asks(image=3, source_image=4, picture="a.png")

    read = rejected(root, row, columns={"image": "picture"})

    assert read.reason is Reason.ROW_INVALID
    assert "two fields have one name" in read.detail


# Parquet

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize(
    ("images", "left"),
    [
        (pa.array([IMAGE]), {"bytes": None}),
        (pa.array([[IMAGE]], pa.list_(pa.large_binary())), [{"bytes": None}]),
        (pa.array([{"bytes": IMAGE, "path": "x"}], STRUCT), {"bytes": None, "path": "x"}),
        (
            pa.array([[{"bytes": None, "path": "a.png"}]], pa.list_(STRUCT)),
            [{"bytes": None, "path": "a.png"}],
        ),
        (pa.array(["a.png"]), "a.png"),
        (pa.array([["a.png"]]), ["a.png"]),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_conversations_in_parquet_have_their_images_in_it_or_beside_it(
    root: Path, images: pa.Array, left: Any, as_text: bool
) -> None:
    turns = talk("<image>q", "a")
    column = pa.array([json.dumps(turns) if as_text else turns])
    table = pa.table({"conversations": column, "images": images, "image": pa.nulls(1), "id": [5]})

    (read,) = read_parquet_rows(root, table)

    assert encoded(read) == [IMAGE]
    assert isinstance(read, SourceSample)
    assert read.fields == {
        "conversations": json.dumps(turns) if as_text else turns, "images": left, "image": None, "id": 5,
    }  # fmt: skip
    assert num_shown(read) == 1


def test_bytes_in_typed_parts_of_parquet_become_media(root: Path) -> None:
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", STRUCT)])
    turn = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    turns = [
        {
            "role": "user",
            "content": [{"type": "image", "image": {"bytes": IMAGE}}, {"type": "text", "text": "q"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
    ]
    table = pa.table({"messages": pa.array([turns], pa.list_(turn))})

    (read,) = read_parquet_rows(root, table)

    assert encoded(read) == [IMAGE]
    assert isinstance(read, SourceSample)
    assert read.fields["messages"][0]["content"][0] == {
        "type": "image", "text": None, "image": {"bytes": None, "path": None},
    }  # fmt: skip
    assert num_shown(read) == 1


def test_a_repair_of_json_text_is_json_text(root: Path) -> None:
    table = pa.table({"messages": [json.dumps(talk("图?", "a"))], "image": ["a.png"]})

    (read,) = read_parquet_rows(root, table, placeholders=Placeholders.REPAIR)

    assert isinstance(read, SourceSample)
    assert json.loads(read.fields["messages"]) == talk("<image>\n图?", "a")
    assert read.repaired == ("placeholders",)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": [1]}, "no column 'conversations' or 'messages'"),
        ({"conversations": [1]}, "column 'conversations' is int64"),
        ({"conversations": ["[]"], "image": [1.5]}, "column 'image' is double"),
    ],
)
def test_columns_that_will_not_do_are_refused_before_the_first_row(
    root: Path, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_parquet_rows(root, pa.table(columns))


def test_a_pipe_in_place_of_an_image_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")

    assert "no plain file" in rejected(tmp_path, asks(image="pipe.png")).detail
