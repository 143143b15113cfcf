"""Samples as a tar holds them, one member in memory at a time, and what each says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from bagel_wds.errors import BadSample, Reason
from bagel_wds.schema import SAMPLE_KINDS, VIDEO_EXTENSIONS, media_fields, read_header, split_member

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from bagel_wds.reader import Member


@dataclass(frozen=True, slots=True)
class TarSample:
    """A sample as the tar holds it.

    Attributes:
        key: of its members.
        offset, length: in the tar, in bytes.
        text: of its JSON, if that comes first.
        sizes: (field, bytes) of each member, in order.
    """

    key: str
    offset: int
    length: int
    text: bytes | None
    sizes: tuple[tuple[str, int], ...]

    @property
    def key_digest(self) -> int:
        """Of 64 bits."""
        return xxhash.xxh3_64_intdigest(self.key.encode("utf-8", "surrogateescape"))


def group_samples(members: Iterable[Member]) -> Iterator[TarSample]:
    """Members grouped by key as they follow each other; one that belongs to no sample is one by itself."""
    for key, group in groupby(members, lambda member: split_member(member.name)[0]):
        text = None
        sizes: list[tuple[str, int]] = []
        offset = end = 0
        for member in group:
            name = split_member(member.name)[1]
            if not sizes:
                offset, text = member.offset, member.data if name == "json" else None
            sizes.append((name, len(member.data)))
            end = member.end
        yield TarSample(key, offset, end - offset, text, tuple(sizes))


def describe_sample(sample: TarSample) -> tuple[str, list[dict[str, Any]]]:
    """Kind of a sample, and what its index should say of its media.

    Raises:
        BadSample: if it is not as the shard format has it.
    """
    if sample.text is None:
        raise _not_ours(f"its first member is {sample.sizes[0][0]!r}, not its JSON")
    header = _read_json(sample.text)
    names = [name for name, _ in sample.sizes]
    media = media_fields(names)
    in_order = ["json", *(name for _, parts in media for name in parts)]
    if names != in_order or len(set(names)) < len(names):
        raise _not_ours(f"its members are {', '.join(names)}, where JSON and media in order belong")
    kind, described = header.get("kind"), header.get("media")
    if kind not in SAMPLE_KINDS:
        raise _not_ours(
            f"its JSON says that it is of kind {kind!r}, which is none of {', '.join(SAMPLE_KINDS)}"
        )
    if not isinstance(described, list) or len(described) != len(media):
        raise _not_ours(f"its JSON speaks of the media {described}, and it has {len(media)}")
    sizes = dict(sample.sizes)
    return kind, [
        _describe_medium(number, entry, is_clip, {name: sizes[name] for name in parts})
        for number, (entry, (is_clip, parts)) in enumerate(zip(described, media, strict=True))
    ]


def _describe_medium(number: int, entry: object, is_clip: bool, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What an index says of a medium whose members have these sizes, and which the JSON describes so."""
    told = entry if isinstance(entry, dict) else {}
    ext = next(iter(sizes)).rpartition(".")[2]
    is_video = ext in VIDEO_EXTENSIONS
    if (
        told.get("ext") != ext
        or ("frames" in told) != is_clip
        or not (is_video or told.get("frames", 1) == len(sizes))
        or not isinstance(told.get("frames", 1), int)
        or not all(isinstance(told.get(edge), int) for edge in ("width", "height"))
    ):
        raise _not_ours(f"its JSON says of medium {number}: {entry}, and its members are {', '.join(sizes)}")
    return {
        "ext": ext,
        "width": told["width"],
        "height": told["height"],
        "frames": told.get("frames", 1),
        "bytes": sum(sizes.values()),
    }


def _read_json(text: bytes) -> dict[str, Any]:
    """Our header in a sample's JSON."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _not_ours(f"its JSON is broken: {error}") from error
    if not isinstance(value, dict):
        raise _not_ours(f"its JSON is {type(value).__name__}, not an object")
    return read_header(value)[1]


def _not_ours(detail: str) -> BadSample:
    return BadSample(Reason.ROW_INVALID, detail)
