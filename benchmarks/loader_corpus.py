"""The corpus of `benchmarks.loader`: photo-like JPEGs in upstream's raw layout, and the same rows as shards.

    FOLDER/t2i/part-*.parquet, edit/part-*.parquet, vlm/train.jsonl, vlm/images/*.jpg     raw
    FOLDER/mixture.yaml, raw_info.yaml, parquet_info.json                               how upstream finds them
    FOLDER/shards/, shards/dataset_info.yaml                                            converted
    FOLDER/tokenizer/                                                                   trained on such texts

Pictures are crops: of noise whose spectrum, and so whose bytes a pixel, are like a photo's, or of photos.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image, ImageOps

from bagel_wds.converters import Mode, convert_mixture
from bagel_wds.errors import ConfigError
from examples.demo import train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Crop = Callable[[np.random.Generator, tuple[int, int]], Image.Image]

GROUPS = {"t2i_pretrain": "t2i", "unified_edit": "edit", "vlm_sft": "vlm"}
"""The groups of the mixture, each with its one dataset."""

MEGAPIXELS = {"t2i": (0.7, 1.0), "edit": (0.3, 0.7), "vlm": (0.2, 1.2)}
"""Areas of the pictures, drawn evenly between the two."""

NUM_FILES = {"t2i": 4, "edit": 2}
"""Parquet files: two workers of upstream's share the first, and the row groups of the second."""

ROLL_OFF = 1.4
"""The noise has amplitude 1/f to this power. At quality 90 it takes 2.1 bits a pixel; photos take 1 to 2.5, and with the
power 1 it would be 4.5, which makes more of the decoder's work, and less of all other, than there is with photos."""

ROWS_OF_GROUP = 25
"""Rows of a row group."""

WORDS = """
a the of in on under red blue green bright dark small large old new wooden quiet busy street house river tree
mountain cat dog child woman man table chair window door light shadow cloud morning evening winter summer
standing sitting running looking holding near behind between with without two three many some photograph
"""


@dataclass(frozen=True)
class Rows:
    """How many rows each dataset has."""

    t2i: int = 400
    edit: int = 200
    vlm: int = 400


@dataclass(frozen=True)
class Corpus:
    """A corpus that is there."""

    folder: Path

    @property
    def mixture(self) -> Path:
        """The mixture file, for upstream and for us."""
        return self.folder / "mixture.yaml"

    @property
    def raw_info(self) -> Path:
        """Where the raw datasets lie, in upstream's form."""
        return self.folder / "raw_info.yaml"

    @property
    def shards(self) -> Path:
        """What the conversion wrote."""
        return self.folder / "shards"

    @property
    def shard_info(self) -> Path:
        """Where the shards lie."""
        return self.shards / "dataset_info.yaml"

    @property
    def tokenizer(self) -> Path:
        """A folder for `AutoTokenizer.from_pretrained`."""
        return self.folder / "tokenizer"

    def groups(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The mixture, of these groups alone."""
        mixture: dict[str, Any] = yaml.safe_load(self.mixture.read_text())
        return {name: mixture[name] for name in names}


def make_corpus(folder: Path, rows: Rows, photos: Path | None = None) -> Corpus:
    """Write the corpus, or take the one that is there.

    Raises:
        ConfigError: if another one is there, or `photos` has no picture.
    """
    folder = folder.resolve()
    corpus, wanted = Corpus(folder), {**asdict(rows), "photos": str(photos) if photos else None}
    written = folder / "corpus.json"
    if written.exists():
        found = json.loads(written.read_text())
        if found != wanted:
            raise ConfigError(
                f"{folder} holds a corpus of {found}, and {wanted} is asked for; give another folder"
            )
        return corpus
    crop = noise_crops(seed=0) if photos is None else photo_crops(photos)
    folder.mkdir(parents=True, exist_ok=True)
    _write_parquet(folder / "t2i", "t2i", [_t2i_row(crop, row) for row in range(rows.t2i)])
    _write_parquet(folder / "edit", "edit", [_edit_row(crop, row) for row in range(rows.edit)])
    _write_vlm(folder / "vlm", crop, rows.vlm)
    _write_settings(corpus, rows)
    draws = _draws("tokenizer", 0)
    train_tokenizer(_sentence(draws, 5, 60) for _ in range(1000)).save_pretrained(corpus.tokenizer)
    convert_mixture(
        str(corpus.mixture), str(corpus.raw_info), str(corpus.shards), processes=2, mode=Mode.OVERWRITE
    )
    # Last, so that a corpus that was left half made is made again.
    written.write_text(json.dumps(wanted))
    return corpus


def noise_crops(seed: int, *, side: int = 2048, count: int = 2) -> Crop:
    """Crops of noise: a grey picture with some colour in it."""
    draws = np.random.default_rng(seed)
    canvases = [Image.fromarray(_noise(draws, side)) for _ in range(count)]
    return lambda own, size_hw: _crop(own, canvases[own.integers(count)], size_hw)


def _noise(draws: np.random.Generator, side: int) -> np.ndarray:
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side))
    frequency[0, 0] = np.inf
    grey, *colours = draws.standard_normal((4, side, side), dtype=np.float32)
    planes = [np.fft.irfft2(np.fft.rfft2(grey + 0.4 * colour) / frequency**ROLL_OFF) for colour in colours]
    pixels = np.stack(planes, axis=-1)
    eight: np.ndarray = np.clip(128 + 45 * pixels / pixels.std(), 0, 255).astype(np.uint8)
    return eight


def photo_crops(folder: Path) -> Crop:
    """Crops of the JPEGs in a folder and below it."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise ConfigError(f"{folder} has no .jpg or .jpeg; give a folder of photos")
    return partial(_crop_photo, paths)


def _crop_photo(paths: list[Path], draws: np.random.Generator, size_hw: tuple[int, int]) -> Image.Image:
    with Image.open(paths[draws.integers(len(paths))]) as photo:
        # As small as may be: a crop out of the middle of a camera's photo has no detail at all.
        photo.draft("RGB", size_hw[::-1])
        return _crop(draws, photo.convert("RGB"), size_hw)


def _crop(draws: np.random.Generator, picture: Image.Image, size_hw: tuple[int, int]) -> Image.Image:
    height, width = size_hw
    if picture.height < height or picture.width < width:
        return ImageOps.fit(picture, (width, height))
    top = int(draws.integers(picture.height - height + 1))
    left = int(draws.integers(picture.width - width + 1))
    return picture.crop((left, top, left + width, top + height))


def _draws(purpose: str, row: int) -> np.random.Generator:
    return np.random.default_rng([row, *purpose.encode()])


def _size(draws: np.random.Generator, kind: str) -> tuple[int, int]:
    """Height and width of an area in the kind's range, up to twice as long as wide."""
    area, aspect = draws.uniform(*MEGAPIXELS[kind]) * 1e6, 2 ** draws.uniform(-1, 1)
    return int(math.sqrt(area * aspect)), int(math.sqrt(area / aspect))


def _jpeg(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=90)
    return out.getvalue()


def _sentence(draws: np.random.Generator, least: int, most: int) -> str:
    return " ".join(draws.choice(WORDS.split(), draws.integers(least, most + 1)).tolist())


def _t2i_row(crop: Crop, row: int) -> dict[str, Any]:
    draws = _draws("t2i", row)
    captions = {"short": _sentence(draws, 6, 15), "long": _sentence(draws, 40, 90)}
    return {"image": _jpeg(crop(draws, _size(draws, "t2i"))), "captions": json.dumps(captions)}


def _edit_row(crop: Crop, row: int) -> dict[str, Any]:
    """Two to four pictures of one size."""
    draws = _draws("edit", row)
    size_hw, count = _size(draws, "edit"), 2 + row % 3
    phrasings = [[_sentence(draws, 6, 14) for _ in range(2)] for _ in range(count - 1)]
    return {"image_list": [_jpeg(crop(draws, size_hw)) for _ in range(count)], "instruction_list": phrasings}


def _write_parquet(folder: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    if len(rows) < NUM_FILES[kind]:
        raise ConfigError(f"{kind}: {len(rows)} rows are too few for {NUM_FILES[kind]} files")
    folder.mkdir(exist_ok=True)
    for number in range(NUM_FILES[kind]):
        table = pa.Table.from_pylist(rows[number :: NUM_FILES[kind]])
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=ROWS_OF_GROUP)


def _write_vlm(folder: Path, crop: Crop, rows: int) -> None:
    """Every fourth row has two pictures."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for row in range(rows):
        draws = _draws("vlm", row)
        names = [f"{row:06d}-{number}.jpg" for number in range(2 if row % 4 == 3 else 1)]
        for name in names:
            (folder / "images" / name).write_bytes(_jpeg(crop(draws, _size(draws, "vlm"))))
        turns = [(_sentence(draws, 8, 20), _sentence(draws, 20, 80)) for _ in range(1 + row % 3)]
        told = chain.from_iterable((("human", question), ("gpt", answer)) for question, answer in turns)
        conversations = [{"from": who, "value": text} for who, text in told]
        conversations[0]["value"] = "<image>\n" * len(names) + conversations[0]["value"]
        lines.append(json.dumps({"image": names, "conversations": conversations}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))


def _write_settings(corpus: Corpus, rows: Rows) -> None:
    folder = corpus.folder
    vae = {"image_stride": 16, "max_image_size": 1024, "min_image_size": 512}
    mixture: dict[str, dict[str, Any]] = {
        "t2i_pretrain": {
            "dataset_names": ["t2i"],
            "image_transform_args": vae,
            "is_mandatory": True,
            "num_used_data": [NUM_FILES["t2i"]],
            "weight": 1,
        },
        "unified_edit": {
            "dataset_names": ["edit"],
            "image_transform_args": dict(vae),
            "vit_image_transform_args": {"image_stride": 14, "max_image_size": 518, "min_image_size": 224},
            "is_mandatory": False,
            "num_used_data": [NUM_FILES["edit"]],
            "weight": 1,
        },
        "vlm_sft": {
            "dataset_names": ["vlm"],
            "image_transform_args": {
                "image_stride": 14,
                "max_image_size": 980,
                "min_image_size": 378,
                "max_pixels": 2_007_040,
            },
            "frame_sampler_args": {"max_num_frames": 12, "min_num_frames": 8},
            "is_mandatory": True,
            "shuffle_lines": True,
            "shuffle_seed": 0,
            "num_used_data": [rows.vlm],
            "weight": 1,
        },
    }
    corpus.mixture.write_text(yaml.safe_dump(mixture, sort_keys=False))
    row_groups = folder / "parquet_info.json"
    row_groups.write_text(json.dumps(dict(_row_groups(folder / "edit"))))
    info = {
        "t2i_pretrain": {"t2i": {"data_dir": str(folder / "t2i")}},
        "unified_edit": {
            "edit": {"data_dir": str(folder / "edit"), "parquet_info_path": str(row_groups)},
        },
        "vlm_sft": {
            "vlm": {
                "data_dir": str(folder / "vlm/images"),
                "jsonl_path": str(folder / "vlm/train.jsonl"),
            },
        },
    }
    corpus.raw_info.write_text(yaml.safe_dump(info, sort_keys=False))


def _row_groups(folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    for path in sorted(folder.glob("*.parquet")):
        yield str(path), {"num_row_groups": pq.read_metadata(path).num_row_groups}
