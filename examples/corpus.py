"""Draw a small training corpus: pictures of shapes, and texts that are true of them.

    python examples/corpus.py OUT

A ``Scene`` says what is in a picture. The picture and each text about it are functions of the scene, so a
caption, an answer or an edit can not be wrong about its picture:

    Scene ── draw_scene ──▶ the picture
      ├───── describe ────▶ captions                    t2i/      parquet
      ├───── questions ───▶ (question, answer), ...     vlm/      JSONL and image files
      └───── edits ───────▶ next Scene, phrasings       editing/  parquet

The three folders have upstream BAGEL's layouts. ``mixture.yaml`` and ``dataset_info.yaml`` go with them. A row is
drawn from (seed, folder, row number), so asking for more rows leaves the first ones as they are.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Callable

#: Colours, backgrounds (both as CSS has them) and kinds of shapes, with their Chinese names.
COLOURS = {"red": "红", "yellow": "黄", "green": "绿", "blue": "蓝", "purple": "紫", "black": "黑"}
BACKGROUNDS = {"white": "白", "light grey": "浅灰", "pink": "粉", "sky blue": "天蓝", "tan": "棕褐"}
KINDS = {"circle": "圆形", "square": "正方形", "triangle": "三角形", "star": "五角星"}

#: The encodings of the rows, in turn; "RGBA" is a PNG on a transparent ground. Seven of them, so that each meets
#: each of the four lengths of an edit chain.
ENCODINGS = ("JPEG", "PNG", "RGBA", "JPEG", "WEBP", "JPEG", "PNG")
#: The VLM rows, in turn: how many pictures, and how many questions about them.
TALKS = ((1, 1), (2, 1), (1, 3), (0, 2), (3, 2), (1, 4), (0, 1), (4, 1))
#: The groups, with pictures small enough for a run on two CPU cores.
MIXTURE = """\
t2i_pretrain:
  dataset_names: [t2i]
  image_transform_args: {image_stride: 16, max_image_size: 512, min_image_size: 256}
  is_mandatory: true
  weight: 1
unified_edit:
  dataset_names: [seed]
  image_transform_args: {image_stride: 16, max_image_size: 512, min_image_size: 256}
  vit_image_transform_args: {image_stride: 14, max_image_size: 392, min_image_size: 224}
  is_mandatory: false
  weight: 1
vlm_sft:
  dataset_names: [vlm]
  image_transform_args: {image_stride: 14, max_image_size: 392, min_image_size: 224, max_pixels: 2_007_040}
  frame_sampler_args: {max_num_frames: 12, min_num_frames: 8}
  is_mandatory: true
  shuffle_lines: true
  shuffle_seed: 0
  weight: 1
"""
MAX_SHAPES = 4
NUM_COLUMNS, NUM_ROWS = 3, 2


class Cell(NamedTuple):
    """A place of the grid that shapes stand on; no shape leaves its cell, so shapes never overlap."""

    column: int
    row: int

    @property
    def name(self) -> str:
        """For example "top left"."""
        return f"{('top', 'bottom')[self.row]} {('left', 'middle', 'right')[self.column]}"


CELLS = tuple(Cell(column, row) for row in range(NUM_ROWS) for column in range(NUM_COLUMNS))


@dataclass(frozen=True)
class Shape:
    """One shape; no two of a scene have the same colour and the same kind."""

    kind: str
    colour: str
    cell: Cell
    scale: float
    """Radius, as a part of the largest one that the cell holds."""
    drift_xy: tuple[float, float]
    """Distance from the middle of the cell, -1 to 1: 1 touches the cell's right or lower edge."""

    @property
    def name(self) -> str:
        """For example "red circle"."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """All there is to know about one picture."""

    size_hw: tuple[int, int]
    background: str | None
    """A name from ``BACKGROUNDS``, or None for a transparent ground, which no text speaks of."""
    shapes: tuple[Shape, ...]

    def count(self, kind: str) -> int:
        """How many shapes are of this kind."""
        return sum(shape.kind == kind for shape in self.shapes)


QA = tuple[str, str]
Edit = tuple[Scene, tuple[str, ...]]


def random_shape(rng: random.Random, name: tuple[str, str], cell: Cell) -> Shape:
    """Draw a size and a position for the shape ``name``, which is (colour, kind)."""
    colour, kind = name
    drift_xy = (rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5))
    return Shape(kind, colour, cell, rng.uniform(0.65, 0.9), drift_xy)


def random_scene(rng: random.Random, *, transparent: bool = False) -> Scene:
    """Draw a scene of 1 to 4 shapes, 320 to 900 pixels on a side."""
    size_hw = (rng.randint(320, 900), rng.randint(320, 900))
    background = None if transparent else rng.choice(list(BACKGROUNDS))
    cells = rng.sample(CELLS, rng.randint(1, MAX_SHAPES))
    names = rng.sample([(colour, kind) for colour in COLOURS for kind in KINDS], len(cells))
    shapes = tuple(random_shape(rng, name, cell) for name, cell in zip(names, cells, strict=True))
    return Scene(size_hw, background, shapes)


def draw_scene(scene: Scene) -> Image.Image:
    """Draw the picture: RGB, or RGBA if the ground is transparent."""
    height, width = scene.size_hw
    mode = "RGBA" if scene.background is None else "RGB"
    ground = (scene.background or "#00000000").replace(" ", "")
    # At twice the size, so that halving it smooths the edges.
    image = Image.new(mode, (2 * width, 2 * height), ground)
    pen = ImageDraw.Draw(image)
    for shape in scene.shapes:
        pen.polygon(outline(shape, (2 * height, 2 * width)), fill=shape.colour)
    return image.reduce(2)


def outline(shape: Shape, size_hw: tuple[int, int]) -> list[tuple[float, float]]:
    """Give the (x, y) corners of a shape, clockwise, in a picture of this size."""
    half_width, half_height = size_hw[1] / NUM_COLUMNS / 2, size_hw[0] / NUM_ROWS / 2
    radius = shape.scale * min(half_width, half_height)
    x = (2 * shape.cell.column + 1) * half_width + shape.drift_xy[0] * (half_width - radius)
    y = (2 * shape.cell.row + 1) * half_height + shape.drift_xy[1] * (half_height - radius)
    num_corners = {"triangle": 3, "square": 4, "star": 10, "circle": 180}[shape.kind]
    corners = []
    for corner in range(num_corners):
        turn = (corner + (0.5 if shape.kind == "square" else 0)) / num_corners
        reach = radius * (0.4 if shape.kind == "star" and corner % 2 else 1)
        corners.append((x + reach * math.sin(math.tau * turn), y - reach * math.cos(math.tau * turn)))
    return corners


def encode(scene: Scene, encoding: str) -> bytes:
    """Draw the picture as a file of one of the ``ENCODINGS``."""
    file = io.BytesIO()
    draw_scene(scene).save(file, format="PNG" if encoding == "RGBA" else encoding, quality=90)
    return file.getvalue()


def describe(scene: Scene) -> dict[str, str]:
    """Give the captions by name: ``short``, ``layout`` (with the places) and ``chinese``."""
    ground = scene.background
    things = listed([f"a {shape.name}" for shape in scene.shapes])
    places = listed([f"a {shape.name} at the {shape.cell.name}" for shape in scene.shapes])
    chinese = "、".join(f"一个{COLOURS[shape.colour]}色的{KINDS[shape.kind]}" for shape in scene.shapes)
    return {
        "short": things if ground is None else f"{things} on a {ground} background",
        "layout": f"A picture of {plural(len(scene.shapes), 'shape')}: {places}."
        + ("" if ground is None else f" The background is {ground}."),
        "chinese": f"{'图中' if ground is None else BACKGROUNDS[ground] + '色背景上'}有{chinese}。",
    }


def questions(scene: Scene) -> list[QA]:
    """Give all that can be asked about one picture, with the answers."""
    return [*_count_questions(scene), *_colour_questions(scene), *_place_questions(scene)]


def _count_questions(scene: Scene) -> list[QA]:
    num_shapes = len(scene.shapes)
    asked = [
        ("How many shapes are there?", f"{plural(num_shapes, 'shape')}."),
        ("图中有几个图形？", f"有{num_shapes}个图形。"),  # noqa: RUF001 - the Chinese question mark
    ]
    for kind in KINDS:
        asked.append((f"How many {kind}s are there?", f"{plural(scene.count(kind), kind)}."))
        asked.append((f"Is there a {kind} in the picture?", "Yes." if scene.count(kind) else "No."))
    return asked


def _colour_questions(scene: Scene) -> list[QA]:
    asked = [
        (f"What colour is the {shape.kind}?", f"The {shape.kind} is {shape.colour}.")
        for shape in scene.shapes
        if scene.count(shape.kind) == 1
    ]
    if scene.background is not None:
        asked.append(("What colour is the background?", f"The background is {scene.background}."))
    return asked


def _place_questions(scene: Scene) -> list[QA]:
    asked = [(f"Where is the {shape.name}?", f"At the {shape.cell.name}.") for shape in scene.shapes]
    for one in scene.shapes:
        for other in scene.shapes:
            if one.cell.column != other.cell.column:
                side = "left" if one.cell.column < other.cell.column else "right"
                question = f"Is the {one.name} to the left or to the right of the {other.name}?"
                asked.append((question, f"It is to the {side} of the {other.name}."))
    return asked


def comparisons(scenes: list[Scene]) -> list[QA]:
    """Give what can be asked about two or more pictures, numbered from 1, with the answers."""
    sizes = [len(scene.shapes) for scene in scenes]
    asked = [("How many shapes are there in all pictures together?", f"{plural(sum(sizes), 'shape')}.")]
    if sizes.count(max(sizes)) == 1:
        most = sizes.index(max(sizes)) + 1
        asked.append(
            ("Which picture has the most shapes?", f"Picture {most}, with {plural(max(sizes), 'shape')}.")
        )
    for kind in KINDS:
        having = [str(number) for number, scene in enumerate(scenes, 1) if scene.count(kind)]
        where = f"picture{'s' if len(having) > 1 else ''} {listed(having)}" if having else "none of them"
        asked.append((f"In which pictures is there a {kind}?", f"In {where}."))
    return asked


def arithmetic(rng: random.Random) -> list[QA]:
    """Draw a few sums; they need no picture."""
    x, y = rng.sample(range(2, 100), 2)
    return [
        (f"What is {x} + {y}?", f"{x + y}."),
        (f"What is {x} * {y}?", f"{x * y}."),
        (f"Which is larger, {x} or {y}?", f"{max(x, y)} is larger."),
        (f"Is {x} even or odd?", f"{x} is {'odd' if x % 2 else 'even'}."),
    ]


def edits(scene: Scene, rng: random.Random) -> Edit:
    """Draw one edit of a scene: the scene after it, and 1 to 3 phrasings that ask for it."""
    options: list[Callable[[Scene, random.Random], Edit]] = [_recolour, _move]
    if len(scene.shapes) < MAX_SHAPES:
        options.append(_add)
    if len(scene.shapes) > 1:
        options.append(_remove)
    if scene.background is not None:
        options.append(_change_background)
    edited, phrasings = rng.choice(options)(scene, rng)
    return edited, tuple(rng.sample(phrasings, rng.randint(1, len(phrasings))))


def _recolour(scene: Scene, rng: random.Random) -> Edit:
    shape = rng.choice(scene.shapes)
    taken = {other.colour for other in scene.shapes if other.kind == shape.kind}
    colour = rng.choice([colour for colour in COLOURS if colour not in taken])
    return _swap(scene, shape, replace(shape, colour=colour)), (
        f"Make the {shape.name} {colour}.",
        f"Change the colour of the {shape.name} to {colour}.",
        f"Recolour the {shape.name} in {colour}.",
    )


def _move(scene: Scene, rng: random.Random) -> Edit:
    """Move a shape along its row or its column; with 1 to 4 shapes in 6 cells there always is one that can."""
    free = free_cells(scene)
    options = [
        (s, cell)
        for s in scene.shapes
        for cell in free
        if cell.row == s.cell.row or cell.column == s.cell.column
    ]
    shape, cell = rng.choice(options)
    if cell.row == shape.cell.row:
        where = "to the left" if cell.column < shape.cell.column else "to the right"
    else:
        where = "up" if cell.row < shape.cell.row else "down"
    return _swap(scene, shape, replace(shape, cell=cell)), (
        f"Move the {shape.name} {where}.",
        f"Shift the {shape.name} {where}, to the {cell.name}.",
        f"Put the {shape.name} at the {cell.name} instead.",
    )


def _add(scene: Scene, rng: random.Random) -> Edit:
    taken = {shape.name for shape in scene.shapes}
    names = [(colour, kind) for colour in COLOURS for kind in KINDS if f"{colour} {kind}" not in taken]
    shape = random_shape(rng, rng.choice(names), rng.choice(free_cells(scene)))
    return replace(scene, shapes=(*scene.shapes, shape)), (
        f"Add a {shape.name} at the {shape.cell.name}.",
        f"Draw a {shape.name} at the {shape.cell.name}.",
        f"Place a {shape.name} at the {shape.cell.name} of the picture.",
    )


def _remove(scene: Scene, rng: random.Random) -> Edit:
    shape = rng.choice(scene.shapes)
    return _swap(scene, shape), (
        f"Remove the {shape.name}.",
        f"Delete the {shape.name} from the picture.",
        f"Take the {shape.name} away.",
    )


def _change_background(scene: Scene, rng: random.Random) -> Edit:
    ground = rng.choice([ground for ground in BACKGROUNDS if ground != scene.background])
    return replace(scene, background=ground), (
        f"Change the background to {ground}.",
        f"Make the background {ground}.",
        f"Give the picture a {ground} background.",
    )


def _swap(scene: Scene, old: Shape, *new: Shape) -> Scene:
    return replace(scene, shapes=(*(shape for shape in scene.shapes if shape != old), *new))


def free_cells(scene: Scene) -> list[Cell]:
    """List the cells with no shape in them."""
    return [cell for cell in CELLS if cell not in {shape.cell for shape in scene.shapes}]


def plural(count: int, noun: str) -> str:
    """Count: "1 star", "0 stars"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(items: list[str]) -> str:
    """Join: "x", "x and y", "x, y and z"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


@dataclass(frozen=True)
class CorpusPaths:
    """Where a corpus lies; all paths are absolute."""

    root: Path
    t2i_dir: Path
    vlm_images_dir: Path
    vlm_jsonl: Path
    edit_dir: Path
    parquet_info: Path
    mixture: Path
    dataset_info: Path


def draw_corpus(
    out: Path, *, seed: int = 0, t2i_rows: int = 48, vlm_rows: int = 48, edit_rows: int = 24
) -> CorpusPaths:
    """Draw a corpus into the folder ``out``; the same arguments give the same bytes.

    Raises:
        ValueError: if there are fewer than 2 ``t2i_rows`` (they fill two files) or no row of another kind.
    """
    for name, num_rows, least in (("t2i", t2i_rows, 2), ("vlm", vlm_rows, 1), ("edit", edit_rows, 1)):
        if num_rows < least:
            raise ValueError(f"{name}_rows={num_rows} is too few: use at least {least}")
    root = out.resolve()
    paths = CorpusPaths(
        root=root,
        t2i_dir=root / "t2i",
        vlm_images_dir=root / "vlm/images",
        vlm_jsonl=root / "vlm/train.jsonl",
        edit_dir=root / "editing/seed",
        parquet_info=root / "editing/parquet_info.json",
        mixture=root / "mixture.yaml",
        dataset_info=root / "dataset_info.yaml",
    )
    for folder in (paths.t2i_dir, paths.vlm_images_dir, paths.edit_dir):
        folder.mkdir(parents=True, exist_ok=True)
    _write_t2i(paths, seed, t2i_rows)
    _write_vlm(paths, seed, vlm_rows)
    _write_edits(paths, seed, edit_rows)
    paths.mixture.write_text(MIXTURE, encoding="utf-8")
    info = _dataset_info(paths, t2i_rows, vlm_rows, edit_rows)
    paths.dataset_info.write_text(yaml.safe_dump(info, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return paths


def _rng(seed: int, folder: str, row: int) -> random.Random:
    return random.Random(f"{seed}/{folder}/{row}")  # noqa: S311 - pictures, not secrets


def _first_scene(rng: random.Random, row: int) -> tuple[Scene, str]:
    encoding = ENCODINGS[row % len(ENCODINGS)]
    return random_scene(rng, transparent=encoding == "RGBA"), encoding


def _write_t2i(paths: CorpusPaths, seed: int, num_rows: int) -> None:
    rows = [_t2i_row(_rng(seed, "t2i", row), row) for row in range(num_rows)]
    schema = pa.schema({"image": pa.binary(), "captions": pa.string()})
    half = (num_rows + 1) // 2
    for chunk, part in enumerate((rows[:half], rows[half:])):
        _write_parquet(paths.t2i_dir / f"chunk_{chunk}.parquet", part, schema)


def _t2i_row(rng: random.Random, row: int) -> dict[str, Any]:
    scene, encoding = _first_scene(rng, row)
    captions = describe(scene)
    names = rng.choice((["short"], ["layout"], ["short", "layout"])) + ["chinese"] * (rng.random() < 0.25)
    chosen = {name: captions[name] for name in names}
    return {"image": encode(scene, encoding), "captions": json.dumps(chosen, ensure_ascii=False)}


def _write_edits(paths: CorpusPaths, seed: int, num_rows: int) -> None:
    rows = [_edit_row(_rng(seed, "editing", row), row) for row in range(num_rows)]
    schema = pa.schema(
        {"image_list": pa.list_(pa.binary()), "instruction_list": pa.list_(pa.list_(pa.string()))}
    )
    file = paths.edit_dir / "chunk_0.parquet"
    _write_parquet(file, rows, schema)
    info = {
        file.relative_to(paths.root).as_posix(): {"num_row_groups": pq.read_metadata(file).num_row_groups}
    }
    paths.parquet_info.write_text(json.dumps(info), encoding="utf-8")


def _edit_row(rng: random.Random, row: int) -> dict[str, Any]:
    """Draw a chain of 1 to 4 edits, each made to the picture before it."""
    scene, encoding = _first_scene(rng, row)
    images, instructions = [encode(scene, encoding)], []
    for _ in range(1 + row % 4):
        scene, phrasings = edits(scene, rng)
        images.append(encode(scene, encoding))
        instructions.append(list(phrasings))
    return {"image_list": images, "instruction_list": instructions}


def _write_parquet(file: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Write rows in up to three row groups."""
    pq.write_table(pa.Table.from_pylist(rows, schema), file, row_group_size=-(-len(rows) // 3))


def _write_vlm(paths: CorpusPaths, seed: int, num_rows: int) -> None:
    rows = [_vlm_row(_rng(seed, "vlm", row), row, paths.vlm_images_dir) for row in range(num_rows)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    paths.vlm_jsonl.write_text("".join(lines), encoding="utf-8")


def _vlm_row(rng: random.Random, row: int, images_dir: Path) -> dict[str, Any]:
    num_pictures, num_turns = TALKS[row % len(TALKS)]
    scenes = [random_scene(rng, transparent=rng.random() < 0.25) for _ in range(num_pictures)]
    names = [_write_picture(rng, scene, images_dir / f"{row:05d}-{i}") for i, scene in enumerate(scenes)]
    tags = ["<image>\n" if num_pictures == 1 else f"Picture {i}: <image>\n" for i, _ in enumerate(scenes, 1)]
    conversations = []
    for turn, (question, answer) in enumerate(rng.sample(_asked(rng, scenes), num_turns)):
        conversations.append({"from": "human", "value": question if turn else "".join(tags) + question})
        conversations.append({"from": "gpt", "value": answer})
    images = {"image": names[0] if num_pictures == 1 else names} if names else {}
    return {"id": f"vlm-{row:05d}", **images, "conversations": conversations}


def _asked(rng: random.Random, scenes: list[Scene]) -> list[QA]:
    if not scenes:
        return arithmetic(rng)
    return questions(scenes[0]) if len(scenes) == 1 else comparisons(scenes)


def _write_picture(rng: random.Random, scene: Scene, stem: Path) -> str:
    encoding = "PNG" if scene.background is None else rng.choice(("JPEG", "JPEG", "PNG"))
    file = stem.with_suffix(".jpg" if encoding == "JPEG" else ".png")
    file.write_bytes(encode(scene, encoding))
    return file.name


def _dataset_info(paths: CorpusPaths, t2i_rows: int, vlm_rows: int, edit_rows: int) -> dict[str, Any]:
    t2i = {"data_dir": str(paths.t2i_dir), "num_files": 2, "num_total_samples": t2i_rows}
    seed = {
        "data_dir": str(paths.edit_dir),
        "num_files": 1,
        "num_total_samples": edit_rows,
        "parquet_info_path": str(paths.parquet_info),
    }
    vlm = {
        "data_dir": str(paths.vlm_images_dir),
        "jsonl_path": str(paths.vlm_jsonl),
        "num_total_samples": vlm_rows,
    }
    return {"t2i_pretrain": {"t2i": t2i}, "unified_edit": {"seed": seed}, "vlm_sft": {"vlm": vlm}}


def main() -> None:
    """Draw a corpus into a folder."""
    parser = argparse.ArgumentParser(description="Draw a small training corpus of shapes.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--t2i-rows", type=int, default=48)
    parser.add_argument("--vlm-rows", type=int, default=48)
    parser.add_argument("--edit-rows", type=int, default=24)
    args = parser.parse_args()
    print(f"drew {draw_corpus(**vars(args)).root}")


if __name__ == "__main__":
    main()
