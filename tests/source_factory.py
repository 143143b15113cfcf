"""Small sources in the three raw layouts, for the tests that read and convert them."""

from __future__ import annotations

import io
import json
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from bagel_wds.sources import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

BINARY_LIST = pa.list_(pa.binary())
PHRASINGS = pa.list_(pa.list_(pa.string()))


def encode_image(
    size_hw: tuple[int, int] = (8, 12),
    seed: int = 0,
    codec: str = "PNG",
    **options: Any,
) -> bytes:
    """An image of noise, so that no two seeds give the same bytes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size_hw, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, codec, **options)
    return buffer.getvalue()


def png_header(size_hw: tuple[int, int]) -> bytes:
    """A PNG that claims a size and has no pixels."""
    height, width = size_hw

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def captions(number: int) -> str:
    """The captions of a row."""
    return json.dumps({"short": f"picture {number}", "zh": f"图片 {number}"}, ensure_ascii=False)


def talk(*texts: str) -> list[dict[str, str]]:
    """A conversation: human and gpt in turn."""
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts or ("q", "a"))]


def write_t2i(
    path: Path, rows: Sequence[tuple[bytes | None, str | None]], *, group_rows: int = 2, **columns: Any
) -> None:
    """A t2i parquet file of (image, captions) rows."""
    table = {
        "image": pa.array([image for image, _ in rows], pa.binary()),
        "captions": pa.array([text for _, text in rows], pa.string()),
        **columns,
    }
    write_parquet(path, pa.table(table), group_rows)


def write_edit(
    path: Path, rows: Sequence[tuple[list[bytes | None] | None, Any]], *, group_rows: int = 2
) -> None:
    """An edit parquet file of (images, phrasings of each step) rows."""
    table = {
        "image_list": pa.array([images for images, _ in rows], BINARY_LIST),
        "instruction_list": pa.array([steps for _, steps in rows], PHRASINGS),
    }
    write_parquet(path, pa.table(table), group_rows)


def write_parquet(path: Path, table: pa.Table, group_rows: int = 2) -> None:
    """A parquet file with so many rows a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group_rows)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> None:
    """A JSONL file; a string is a line as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


@dataclass(frozen=True)
class Corpus:
    """A small source of each kind."""

    t2i: Source
    edit: Source
    vlm: Source

    @property
    def sources(self) -> tuple[Source, ...]:
        """All three."""
        return (self.t2i, self.edit, self.vlm)


def write_corpus(root: Path, *, rows: int = 12) -> Corpus:
    """A source of each kind, over several files, with some rows that cannot be used."""
    for file in range(2):
        write_t2i(
            root / "t2i" / f"part-{file}.parquet",
            [
                (encode_image((8 + i, 12), seed=100 * file + i), captions(i)) if i != 4 else (b"", "{}")
                for i in range(rows)
            ],
            group_rows=3,
            id=pa.array([f"{file}/{i}" for i in range(rows)]),
        )
    write_edit(
        root / "edit" / "deep" / "part.parquet",
        [
            (
                [encode_image(seed=1000 + 10 * i + j, codec="JPEG") for j in range(1 + i % 4)],
                [[f"step {j}", f"第{j}步"] for j in range(max(1, i % 4))],
            )
            for i in range(rows)
        ],
    )
    lines: list[dict[str, Any] | str] = []
    for i in range(rows):
        names = [f"{i}-{j}.jpg" for j in range(i % 3)]
        for name in names:
            image = root / "vlm" / "media" / name
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(encode_image(seed=2000 + i, codec="JPEG"))
        lines.append({"id": i, "image": names, "conversations": talk("<image>" * len(names) + "问", "答")})
    lines += ["{broken", {"image": "gone.jpg", "conversations": talk()}]
    write_jsonl(root / "vlm" / "train.jsonl", lines)
    return Corpus(
        t2i=Source(kind="t2i", name="pictures", path=str(root / "t2i")),
        edit=Source(kind="edit", name="edits", path=str(root / "edit")),
        vlm=Source(
            kind="vlm",
            name="talks",
            path=str(root / "vlm" / "train.jsonl"),
            media_root=str(root / "vlm" / "media"),
        ),
    )
