"""What a shard or a dataset holds, found by looking into it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow.parquet as pq

from bagel_wds import storage
from bagel_wds.config import load_mapping
from bagel_wds.conversations import read_turns
from bagel_wds.errors import BadSample, ConfigError, ShardError
from bagel_wds.images import read_header
from bagel_wds.items import TextItem, read_items
from bagel_wds.manifest import INFO_NAME, MANIFEST_NAME, Manifest, read_manifest
from bagel_wds.raw_info import RAW_KEYS
from bagel_wds.reader import walk_shard
from bagel_wds.schema import IMAGE_EXTENSIONS, RESERVED, media_fields
from bagel_wds.shards import Shard, list_shards
from bagel_wds.texts import read_captions, read_instructions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_KIND_OF_FIELD = {
    "captions": "t2i",
    "instruction_list": "edit",
    "conversations": "vlm",
    "messages": "vlm",
    "items": "interleaved",
}
"""How samples of other tools are told apart: they do not say what they are."""


@dataclass(frozen=True)
class Holding:
    """A dataset, or a single shard, that can be looked into.

    Attributes:
        name: what it is called.
        shards: in order.
        manifest: of a dataset that has one.
        raw: of a dataset in raw files, which has no shards: where they are.
    """

    name: str
    shards: tuple[Shard, ...]
    manifest: Manifest | None = None
    raw: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards."""
        # In a bucket each size is a request, which a manifest saves.
        return sum(
            storage.size(shard.url) if shard.bytes is None or storage.is_local(shard.url) else shard.bytes
            for shard in self.shards
        )


def find_holdings(path: str) -> list[Holding]:
    """The datasets that lie at a path.

    Args:
        path: a tar, a folder of tars, a manifest or its folder, a dataset info or its folder.

    Raises:
        ConfigError: if there is none.
    """
    if storage.is_folder(path):
        for name in (MANIFEST_NAME, INFO_NAME):
            if storage.exists(storage.join(path, name)):
                return find_holdings(storage.join(path, name))
    if path.endswith((".yaml", ".yml", ".json")):
        mapping = load_mapping(path)
        if "shardlist" in mapping:
            return [_of_manifest(path)]
        return list(_of_info(path, mapping))
    return [Holding(path, tuple(list_shards(path)))]


def _of_manifest(url: str) -> Holding:
    manifest = read_manifest(url)
    return Holding(manifest.name or url, tuple(list_shards(url)), manifest)


def _of_info(path: str, info: Mapping[str, Any]) -> Iterator[Holding]:
    for group, entries in info.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {group} is {type(entries).__name__}, not a mapping of datasets")
        for name, entry in entries.items():
            spec = entry.get("shards") if isinstance(entry, dict) else None
            raw = [key for key in RAW_KEYS if entry.get(key)] if isinstance(entry, dict) else []
            if not spec and raw:
                yield Holding(f"{group}.{name}", (), raw=", ".join(f"{key} {entry[key]}" for key in raw))
                continue
            if not spec:
                raise ConfigError(
                    f"{path}: {group}.{name} has no shards; convert it first, with `bagel-wds convert`"
                )
            if isinstance(spec, str):
                spec = storage.find_near(spec, storage.parent(path))
                spec = _manifest_in(spec) if storage.is_folder(spec) else spec
            if isinstance(spec, str) and spec.endswith(".json"):
                yield Holding(f"{group}.{name}", tuple(list_shards(spec)), read_manifest(spec))
            else:
                yield Holding(f"{group}.{name}", tuple(list_shards(spec)))


def _manifest_in(folder: str) -> str:
    manifest = storage.join(folder, MANIFEST_NAME)
    return manifest if storage.exists(manifest) else folder


@dataclass
class Contents:
    """What was met in some samples.

    Attributes:
        samples: how many.
        kinds: samples by kind; "unknown" where neither the JSON nor its fields tell.
        files: media files by extension; each frame of a clip is one.
        media: media by how many a sample has.
        clips: media that are videos, as files or as folders of frames.
        texts: captions, turns, instructions, items by what they are.
        json_bytes, media_bytes: of the members.
        smallest_hw, largest_hw: by area, in pixels.
        faults: what cannot be used, by reason.
    """

    samples: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    media: Counter[int] = field(default_factory=Counter)
    clips: int = 0
    texts: Counter[str] = field(default_factory=Counter)
    json_bytes: int = 0
    media_bytes: int = 0
    smallest_hw: tuple[int, int] | None = None
    largest_hw: tuple[int, int] | None = None
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Look into one more sample."""
        media = media_fields(sample)
        self.samples += 1
        self.media[len(media)] += 1
        self.clips += sum(is_clip for is_clip, _ in media)
        for _, names in media:
            for name in names:
                self._add_file(name.rpartition(".")[2], sample[name])
        fields = _parse(sample.get("json", b""))
        self.json_bytes += len(sample.get("json", b""))
        kind = _kind(fields)
        self.kinds[kind] += 1
        try:
            self._add_texts(kind, fields, len(media))
        except BadSample as bad:
            self.faults[bad.reason] += 1

    def _add_file(self, ext: str, data: bytes) -> None:
        self.files[ext] += 1
        self.media_bytes += len(data)
        if ext not in IMAGE_EXTENSIONS:
            return
        try:
            size_hw = read_header(data).size_hw
        except BadSample as bad:
            self.faults[bad.reason] += 1
            return
        self.smallest_hw = min(self.smallest_hw or size_hw, size_hw, key=_area)
        self.largest_hw = max(self.largest_hw or size_hw, size_hw, key=_area)

    def _add_texts(self, kind: str, fields: Mapping[str, Any], num_media: int) -> None:
        if kind == "t2i":
            self.texts["captions"] += len(read_captions(fields))
        elif kind == "vlm":
            self.texts["turns"] += len(read_turns(fields))
        elif kind == "edit":
            steps = read_instructions(fields, max(0, num_media - 1), surplus_ok=True)
            self.texts["instructions"] += sum(len(step) for step in steps)
        elif kind == "interleaved":
            for item in read_items(fields):
                what = "text" if isinstance(item, TextItem) else item.tag.name.lower()
                self.texts[f"{what} items{' with loss' if item.loss else ''}"] += 1


def _area(size_hw: tuple[int, int]) -> int:
    return size_hw[0] * size_hw[1]


def _parse(text: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _kind(fields: Mapping[str, Any]) -> str:
    header = fields.get(RESERVED)
    if isinstance(header, dict) and isinstance(header.get("kind"), str):
        return str(header["kind"])
    return next((kind for name, kind in _KIND_OF_FIELD.items() if name in fields), "unknown")


def look_into(holding: Holding, max_samples: int | None = None) -> Contents:
    """Walk through a dataset, or its first samples.

    Args:
        holding: the dataset.
        max_samples: stop after so many; None looks into all.

    Raises:
        ShardError: if a shard cannot be read.
    """
    contents = Contents()
    for shard in holding.shards:
        for sample in walk_shard(shard.url):
            if contents.samples == max_samples:
                return contents
            contents.add(sample)
    return contents


def find_sample(holdings: Sequence[Holding], key: str) -> dict[str, Any]:
    """The sample of a key, found by the index where there is one.

    Raises:
        ConfigError: if there is no such sample; tells what a key here looks like.
    """
    example = None
    for holding in holdings:
        for shard in holding.shards:
            for sample in _with_key(shard, key):
                if sample["__key__"] == key:
                    return sample
                example = example or sample["__key__"]
    names = ", ".join(holding.name for holding in holdings)
    raise ConfigError(
        f"no sample {key!r} in {names}" + (f"; a key here looks like {example!r}" if example else "")
    )


def _with_key(shard: Shard, key: str) -> Iterator[dict[str, Any]]:
    """The sample of a key out of an indexed shard, or its first one; every sample of a shard without index."""
    if shard.index_url is None:
        yield from walk_shard(shard.url)
        return
    try:
        with storage.open_read(shard.index_url) as file:
            index = pq.read_table(file, columns=["key", "offset"]).to_pydict()
    except (OSError, ValueError) as error:
        raise ShardError(f"{shard.index_url}: the index cannot be read: {error}") from error
    offsets = dict(zip(index["key"], index["offset"], strict=True))
    yield next(walk_shard(shard.url, offsets.get(key, 0)))
