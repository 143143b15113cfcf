"""Laws of the demo corpus: it is reproducible, it keeps the source layouts, and its texts are true.

Truth is checked from the outside: pictures are decoded and their pixels counted, texts are taken apart with
regular expressions, and colours are those of the CSS standard, written out below.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from examples.corpus import CorpusPaths, draw_corpus

if TYPE_CHECKING:
    from collections.abc import Callable

RGB = {
    "red": (255, 0, 0),
    "yellow": (255, 255, 0),
    "green": (0, 128, 0),
    "blue": (0, 0, 255),
    "purple": (128, 0, 128),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "light grey": (211, 211, 211),
    "pink": (255, 192, 203),
    "sky blue": (135, 206, 235),
    "tan": (210, 180, 140),
}
NAMES = list(RGB)
SHAPE_COLOURS = NAMES[:6]
CHINESE = dict(zip("红黄绿蓝紫黑", SHAPE_COLOURS, strict=True))
CHINESE |= {"圆形": "circle", "正方": "square", "三角": "triangle", "五角": "star"}
SHAPE = rf"((?:{'|'.join(SHAPE_COLOURS)}) (?:circle|square|triangle|star))"
PLACE = r"((?:top|bottom) (?:left|middle|right))"
Row = dict[str, Any]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusPaths:
    return draw_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def t2i_rows(corpus: CorpusPaths) -> list[Row]:
    return read_parquet(corpus.t2i_dir)


@pytest.fixture(scope="module")
def edit_rows(corpus: CorpusPaths) -> list[Row]:
    return read_parquet(corpus.edit_dir)


@pytest.fixture(scope="module")
def vlm_rows(corpus: CorpusPaths) -> list[Row]:
    return read_jsonl(corpus.vlm_jsonl)


def read_jsonl(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_parquet(folder: Path) -> list[Row]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def digests(root: Path) -> dict[str, str]:
    """Hash each file by its relative name, but for the one that holds absolute paths."""
    files = [file for file in root.rglob("*") if file.is_file() and file.name != "dataset_info.yaml"]
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def image_names(row: Row) -> list[str]:
    names = row.get("image", [])
    return [names] if isinstance(names, str) else names


def turns(row: Row) -> list[tuple[str, str]]:
    """Pair each question, without its image tags, with its answer."""
    values = [turn["value"].split("<image>\n")[-1] for turn in row["conversations"]]
    return list(zip(values[::2], values[1::2], strict=True))


@dataclass(frozen=True)
class Seen:
    """What a picture shows when it lies on white; nothing of it comes from its texts."""

    ground: str
    """The colour that covers most."""
    shapes: dict[str, tuple[float, float]]
    """The middle of each shape as (x, y), 0 to 1, by a name like "red circle"."""


@cache
def look(data: bytes) -> Seen:
    """Find the ground and the shapes of an encoded picture."""
    picture = Image.open(io.BytesIO(data)).convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    # Every second pixel of every second line is enough, and faster.
    labels = inside(nearest_names(np.asarray(flat, np.int64)[::2, ::2]))
    shapes = {}
    for colour in SHAPE_COLOURS:
        for blob in blobs(labels == NAMES.index(colour)):
            name = f"{colour} {kind_of(blob)}"
            assert name not in shapes
            y, x = blob.mean(0) / labels.shape
            shapes[name] = (float(x), float(y))
    return Seen(NAMES[np.bincount(labels[labels >= 0]).argmax()], shapes)


def nearest_names(pixels: Ints) -> Ints:
    """Index ``NAMES`` by the nearest colour of each pixel, (H, W, 3) to (H, W)."""
    # Few colours cover most pixels, so each different one is compared once.
    codes: Ints = pixels @ np.array([1 << 16, 1 << 8, 1])
    different, where = np.unique(codes, return_inverse=True)
    rgb = np.stack([different >> 16, different >> 8 & 255, different & 255], -1)
    nearest: Ints = ((rgb[:, None] - np.array(list(RGB.values()))) ** 2).sum(-1).argmin(-1)
    return nearest[where].reshape(codes.shape)


def inside(labels: Ints) -> Ints:
    """Set to -1 what has another colour beside it: a smoothed edge may look like a third colour."""
    inner = labels[1:-1, 1:-1]
    height, width = inner.shape
    around = [labels[dy : dy + height, dx : dx + width] == inner for dy in range(3) for dx in range(3)]
    return np.where(np.all(around, 0), inner, -1)


def blobs(mask: Bools) -> list[Ints]:
    """Find the connected areas of a mask, each as its (y, x) points."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    found = []
    while left:
        blob = [left.pop()]
        for y, x in blob:  # grows while we walk it
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            blob.extend(near)
        found.append(np.array(blob))
    # A point of a star may lose touch with its star; the smallest star has some 200 pixels here.
    return [blob for blob in found if len(blob) > 20]


def kind_of(blob: Ints) -> str:
    """Tell the kind by how much of its bounding box a shape fills: star 0.34, triangle 0.5, circle 0.79, square 1."""
    filled = len(blob) / (np.ptp(blob, 0) + 1).prod()
    return ("star", "triangle", "circle", "square")[int(np.digitize(filled, [0.45, 0.65, 0.9]))]


def is_at(middle: tuple[float, float], place: str) -> bool:
    """Whether a point lies in a place like "top left"."""
    row, column = ("top", "bottom")[int(middle[1] * 2)], ("left", "middle", "right")[int(middle[0] * 3)]
    return f"{row} {column}" == place


# --- reproducible


@pytest.mark.slow
def test_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    sizes = {"t2i_rows": 5, "vlm_rows": 9, "edit_rows": 5}
    one, two, other = (
        digests(draw_corpus(tmp_path / name, seed=seed, **sizes).root)
        for name, seed in (("one", 3), ("two", 3), ("other", 4))
    )

    assert one == two
    assert len(one) > 8
    assert all(one[name] != other[name] for name in one if name.endswith((".parquet", ".jsonl")))


def test_more_rows_leave_the_first_ones_as_they_are(
    tmp_path: Path, t2i_rows: list[Row], vlm_rows: list[Row], edit_rows: list[Row]
) -> None:
    few = draw_corpus(tmp_path, t2i_rows=3, vlm_rows=4, edit_rows=2)

    assert read_parquet(few.t2i_dir) == t2i_rows[:3]
    assert read_parquet(few.edit_dir) == edit_rows[:2]
    assert read_jsonl(few.vlm_jsonl) == vlm_rows[:4]


def test_too_few_rows_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="t2i_rows=1 is too few: use at least 2"):
        draw_corpus(tmp_path, t2i_rows=1)


# --- the source layouts


def test_t2i_rows_hold_a_picture_and_one_to_three_captions(t2i_rows: list[Row]) -> None:
    captions = [json.loads(row["captions"]) for row in t2i_rows]
    pictures = [Image.open(io.BytesIO(row["image"])) for row in t2i_rows]

    assert len(t2i_rows) == 48
    assert {len(named) for named in captions} == {1, 2, 3}
    assert 0 < sum("chinese" in named for named in captions) < 24
    assert {(picture.format, picture.mode) for picture in pictures} == {
        ("JPEG", "RGB"),
        ("PNG", "RGB"),
        ("PNG", "RGBA"),
        ("WEBP", "RGB"),
    }
    assert all(320 <= side <= 900 for picture in pictures for side in picture.size)


def test_transparent_pictures_have_clear_and_opaque_pixels_and_no_named_ground(t2i_rows: list[Row]) -> None:
    rows = [(Image.open(io.BytesIO(row["image"])), row["captions"]) for row in t2i_rows]
    transparent = [(picture, captions) for picture, captions in rows if picture.mode == "RGBA"]

    assert transparent
    for picture, captions in transparent:
        assert picture.getchannel("A").getextrema() == (0, 255)
        assert "background" not in captions
        assert "背景" not in captions


def test_vlm_rows_have_a_tag_for_each_picture(corpus: CorpusPaths, vlm_rows: list[Row]) -> None:
    for row in vlm_rows:
        senders = [turn["from"] for turn in row["conversations"]]
        num_tags = sum(turn["value"].count("<image>") for turn in row["conversations"][::2])

        assert senders == ["human", "gpt"] * (len(senders) // 2)
        assert num_tags == len(image_names(row))
        assert not any("<image>" in turn["value"] for turn in row["conversations"][1::2])
        for name in image_names(row):
            picture = Image.open(corpus.vlm_images_dir / name)
            assert picture.format == {".jpg": "JPEG", ".png": "PNG"}[Path(name).suffix]


def test_vlm_rows_are_of_every_kind(corpus: CorpusPaths, vlm_rows: list[Row]) -> None:
    modes = {Image.open(file).mode for file in corpus.vlm_images_dir.iterdir()}

    assert {len(image_names(row)) for row in vlm_rows} == {0, 1, 2, 3, 4}
    assert {len(row["conversations"]) // 2 for row in vlm_rows} == {1, 2, 3, 4}
    assert any("image" not in row for row in vlm_rows)
    assert modes == {"RGB", "RGBA"}
    assert len({row["id"] for row in vlm_rows}) == len(vlm_rows) == 48


def test_edit_rows_have_instructions_for_each_step(edit_rows: list[Row]) -> None:
    for row in edit_rows:
        assert len(row["instruction_list"]) == len(row["image_list"]) - 1
        assert all(1 <= len(set(phrasings)) == len(phrasings) <= 3 for phrasings in row["instruction_list"])
        assert len({Image.open(io.BytesIO(data)).size for data in row["image_list"]}) == 1

    assert len(edit_rows) == 24
    assert {len(row["image_list"]) for row in edit_rows} == {2, 3, 4, 5}


def test_parquet_files_have_several_row_groups_as_their_info_says(corpus: CorpusPaths) -> None:
    info = json.loads(corpus.parquet_info.read_text())

    assert [file.name for file in sorted(corpus.t2i_dir.iterdir())] == ["chunk_0.parquet", "chunk_1.parquet"]
    assert all(pq.read_metadata(file).num_row_groups == 3 for file in corpus.t2i_dir.iterdir())
    assert list(info) == ["editing/seed/chunk_0.parquet"]
    for name, of_file in info.items():
        assert of_file == {"num_row_groups": pq.read_metadata(corpus.root / name).num_row_groups}


def test_dataset_info_and_mixture_name_each_other_and_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = draw_corpus(Path("relative"), t2i_rows=4, vlm_rows=3, edit_rows=2)
    info = yaml.safe_load(paths.dataset_info.read_text(encoding="utf-8"))
    mixture = yaml.safe_load(paths.mixture.read_text(encoding="utf-8"))

    assert {group: of["dataset_names"] for group, of in mixture.items()} == {
        g: list(of) for g, of in info.items()
    }
    assert not any("num_used_data" in group for group in mixture.values())
    assert mixture["vlm_sft"]["image_transform_args"]["max_pixels"] == 2007040
    datasets = {name: of for group in info.values() for name, of in group.items()}
    assert {name: of["num_total_samples"] for name, of in datasets.items()} == {"t2i": 4, "seed": 2, "vlm": 3}
    places = [Path(of[key]) for of in datasets.values() for key in of if key.endswith(("_dir", "_path"))]
    assert len(places) == 5
    assert all(place.is_absolute() and place.exists() for place in places)


# --- the texts are true


def test_captions_name_exactly_the_shapes_that_are_there(t2i_rows: list[Row]) -> None:
    num_checked: Counter[str] = Counter()
    for row in t2i_rows:
        seen = look(row["image"])
        for name, caption in json.loads(row["captions"]).items():
            said = [
                CHINESE[colour] + " " + CHINESE[kind]
                for colour, kind in re.findall(r"一个(.)色的(..)", caption)
            ]
            said += re.findall(SHAPE, caption)
            num_checked[name] += 1

            assert sorted(said) == sorted(seen.shapes), caption
    assert num_checked.keys() == {"short", "layout", "chinese"}


def test_captions_name_the_ground_that_is_there(t2i_rows: list[Row]) -> None:
    said = [
        (ground, look(row["image"]).ground)
        for row in t2i_rows
        for caption in json.loads(row["captions"]).values()
        for ground in re.findall(r"(?:on a|background is) (.+?)(?: background|\.)", caption)
    ]

    assert len({ground for ground, _ in said}) == 5
    assert all(ground == seen for ground, seen in said)


def test_layout_captions_give_the_number_and_the_places(t2i_rows: list[Row]) -> None:
    layouts = [(look(row["image"]), json.loads(row["captions"]).get("layout")) for row in t2i_rows]
    layouts = [(seen, caption) for seen, caption in layouts if caption]

    assert layouts
    for seen, caption in layouts:
        assert caption.startswith(f"A picture of {len(seen.shapes)} shape")
        for shape, place in re.findall(f"{SHAPE} at the {PLACE}", caption):
            assert is_at(seen.shapes[shape], place), caption


def num_of(kind: str, seen: Seen) -> int:
    return sum(name.endswith(kind) for name in seen.shapes)


def having(kind: str, seen: list[Seen]) -> list[str]:
    return [str(number) for number, picture in enumerate(seen, 1) if num_of(kind, picture)]


#: What is asked of pictures: a pattern of "question answer", and whether what it says is seen.
ANSWERS: dict[str, tuple[str, Callable[[re.Match[str], list[Seen]], bool]]] = {
    "number": (
        r"How many shapes are there\? (\d) shapes?\.",
        lambda said, seen: int(said[1]) == len(seen[0].shapes),
    ),
    "number in Chinese": (
        r"图中有几个图形. 有(\d)个图形。",
        lambda said, seen: int(said[1]) == len(seen[0].shapes),
    ),
    "number of a kind": (
        r"How many (\w+)s are there\? (\d) \1s?\.",
        lambda said, seen: said[1] == "shape" or int(said[2]) == num_of(said[1], seen[0]),
    ),
    "a kind": (
        r"Is there a (\w+) in the picture\? (Yes|No)\.",
        lambda said, seen: (said[2] == "Yes") == (num_of(said[1], seen[0]) > 0),
    ),
    "colour": (
        r"What colour is the (circle|square|triangle|star)\? The \1 is (\w+)\.",
        lambda said, seen: f"{said[2]} {said[1]}" in seen[0].shapes and num_of(said[1], seen[0]) == 1,
    ),
    "ground": (
        r"What colour is the background\? The background is (.+)\.",
        lambda said, seen: said[1] == seen[0].ground,
    ),
    "place": (
        rf"Where is the {SHAPE}\? At the {PLACE}\.",
        lambda said, seen: is_at(seen[0].shapes[said[1]], said[2]),
    ),
    "left": (
        rf"Is the {SHAPE} to the left or to the right of the {SHAPE}\? It is to the left of the \2\.",
        lambda said, seen: seen[0].shapes[said[1]][0] < seen[0].shapes[said[2]][0],
    ),
    "right": (
        rf"Is the {SHAPE} to the left or to the right of the {SHAPE}\? It is to the right of the \2\.",
        lambda said, seen: seen[0].shapes[said[1]][0] > seen[0].shapes[said[2]][0],
    ),
    "total": (
        r"How many shapes are there in all pictures together\? (\d+) shapes?\.",
        lambda said, seen: int(said[1]) == sum(len(picture.shapes) for picture in seen),
    ),
    "most": (
        r"Which picture has the most shapes\? Picture (\d), with (\d) shapes?\.",
        lambda said, seen: (
            [number for number, picture in enumerate(seen, 1) if len(picture.shapes) >= int(said[2])]
            == [int(said[1])]
        ),
    ),
    "which": (
        r"In which pictures is there a (\w+)\? In (?:none of them|pictures? (.+))\.",
        lambda said, seen: re.findall(r"\d", said[2] or "") == having(said[1], seen),
    ),
}


def test_answers_about_pictures_are_true(tmp_path: Path) -> None:
    corpus = draw_corpus(tmp_path, seed=1, vlm_rows=80, t2i_rows=2, edit_rows=1)
    checked: Counter[str] = Counter()
    for row in read_jsonl(corpus.vlm_jsonl):
        seen = [look((corpus.vlm_images_dir / name).read_bytes()) for name in image_names(row)]
        for question, answer in turns(row) if seen else []:
            text = f"{question} {answer}"
            about = [kind for kind, (pattern, _) in ANSWERS.items() if re.fullmatch(pattern, text)]

            assert about, f"no check for {text!r}"
            for kind in about:
                pattern, is_true = ANSWERS[kind]
                said = re.fullmatch(pattern, text)
                assert said
                assert is_true(said, seen), text
            checked.update(about)

    assert checked.keys() == ANSWERS.keys()


def test_answers_without_a_picture_are_right(vlm_rows: list[Row]) -> None:
    checked: Counter[str] = Counter()
    for question, answer in [turn for row in vlm_rows if "image" not in row for turn in turns(row)]:
        x, *others = map(int, re.findall(r"\d+", question))
        word = question.split()[3 if question.startswith("What") else 2]
        checked[word] += 1

        if word in "+*":
            assert answer == f"{x + others[0] if word == '+' else x * others[0]}."
        elif word == "larger,":
            assert answer == f"{max(x, *others)} is larger."
        else:
            assert answer == f"{x} is {['even', 'odd'][x % 2]}."
    assert checked.keys() == {"+", "*", "larger,", "even"}


def test_each_edit_is_what_its_instructions_ask_for(edit_rows: list[Row]) -> None:
    checked: Counter[str] = Counter()
    for row in edit_rows:
        seen = [look(data) for data in row["image_list"]]
        for before, after, phrasings in zip(seen[:-1], seen[1:], row["instruction_list"], strict=True):
            checked.update(check_edit(before, after, phrasing) for phrasing in phrasings)

    assert checked.keys() == {"background", "recolour", "add", "remove", "put", "left", "right", "up", "down"}


def check_edit(before: Seen, after: Seen, instruction: str) -> str:
    """Check one instruction against the pictures before and after; returns what it asks for."""
    was, now = before.shapes, after.shapes
    gone, new = was.keys() - now.keys(), now.keys() - was.keys()
    if "background" in instruction:
        assert was.keys() == now.keys()
        assert before.ground not in instruction
        assert after.ground in instruction
        return "background"
    assert before.ground == after.ground
    if found := re.fullmatch(rf"(?:Make|Change|Recolour) .*?{SHAPE} (?:to |in )?(\w+)\.", instruction):
        _, kind = found[1].split()
        assert (gone, new) == ({found[1]}, {f"{found[2]} {kind}"})
        assert now[f"{found[2]} {kind}"] == pytest.approx(was[found[1]], abs=0.01)
        return "recolour"
    if found := re.fullmatch(rf"(?:Add|Draw|Place) a {SHAPE} at the {PLACE}.*", instruction):
        assert (gone, new) == (set(), {found[1]})
        assert is_at(now[found[1]], found[2])
        return "add"
    if found := re.fullmatch(rf"(?:Remove|Delete|Take) the {SHAPE}.*", instruction):
        assert (gone, new) == ({found[1]}, set())
        return "remove"
    assert not gone | new
    if found := re.fullmatch(rf"Put the {SHAPE} at the {PLACE} instead\.", instruction):
        assert [is_at(seen[found[1]], found[2]) for seen in (was, now)] == [False, True]
        return "put"
    found = re.match(rf"(?:Move|Shift) the {SHAPE} (?:to the )?(left|right|up|down)", instruction)
    assert found, instruction
    (x, y), (new_x, new_y) = was[found[1]], now[found[1]]
    along = {"left": x - new_x, "right": new_x - x, "up": y - new_y, "down": new_y - y}[found[2]]
    assert along > 0.3
    assert abs(new_x - x) + abs(new_y - y) == pytest.approx(along, abs=0.01)
    return found[2]
