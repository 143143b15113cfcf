"""A row of a source as the members of a tar: its JSON first, then its media with their original bytes.

A conversion writes them; a run from raw files gives them on as a reader of the tar would.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds.errors import BadSample, Reason
from bagel_wds.schema import MAX_JSON_BYTES, RESERVED, media_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bagel_wds.images import ImageHeader
    from bagel_wds.schema import SampleKind
    from bagel_wds.sources.rows import Medium, SourceSample


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample ready to be written.

    Attributes:
        key: the sample's key.
        members: (name, content) in the order of the tar.
        media: what the index says of each medium: ext, width, height, frames, bytes.
    """

    key: str
    members: tuple[tuple[str, bytes], ...]
    media: tuple[Mapping[str, Any], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in a tar: a header block a member, and each content padded to whole blocks."""
        block = tarfile.BLOCKSIZE
        return sum(block + len(data) + -len(data) % block for _, data in self.members)


def encode_sample(sample: SourceSample, kind: SampleKind) -> EncodedSample:
    """The members of a sample.

    Raises:
        BadSample: if its fields have no place in a JSON member: too large, or with a key that is ours.
    """
    if RESERVED in sample.fields:
        raise BadSample(Reason.ROW_INVALID, f"the row has a field {RESERVED!r}, which is reserved")
    media = [_describe(medium) for medium in sample.media]
    header: dict[str, Any] = {"kind": kind, "media": media, "source": sample.place.as_json()}
    if sample.repaired:
        header["repaired"] = list(sample.repaired)
    text = _dump({**sample.fields, RESERVED: header})
    if len(text) > MAX_JSON_BYTES:
        raise BadSample(Reason.JSON_TOO_LARGE, f"{len(text)} bytes of JSON; the most is {MAX_JSON_BYTES}")
    return EncodedSample(
        key=sample.key,
        members=((f"{sample.key}.json", text), *_media_members(sample)),
        media=tuple(
            {
                "ext": entry["ext"],
                "width": entry["width"],
                "height": entry["height"],
                "frames": entry.get("frames", 1),
                "bytes": sum(len(file.data) for file in medium.files),
            }
            for entry, medium in zip(media, sample.media, strict=True)
        ),
    )


def describe_header(header: ImageHeader) -> dict[str, Any]:
    """`ext`, `width` and `height` of an image, and `orientation` if that is not 1."""
    height, width = header.size_hw
    orientation = {"orientation": header.orientation} if header.orientation != 1 else {}
    return {"ext": header.ext, "width": width, "height": height, **orientation}


def _media_members(sample: SourceSample) -> Iterator[tuple[str, bytes]]:
    for number, medium in enumerate(sample.media):
        for frame, file in enumerate(medium.files):
            place = frame if medium.is_clip and medium.clip is None else None
            yield media_name(sample.key, number, file.header.ext, place), file.data


def _describe(medium: Medium) -> dict[str, Any]:
    """What `_bagel` says of a medium; of frames in a folder, the sizes are those of the first one."""
    if medium.clip is not None:
        return medium.clip.header.as_json()
    image = medium.images[0]
    frames = {"frames": len(medium.images)} if medium.is_clip else {}
    original = {} if image.original is None else {"original": describe_header(image.original)}
    return {**describe_header(image.header), **frames, **original}


def _dump(value: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as refused:
        # orjson writes no integer of more than 64 bits; Python does. What neither can write is text that is no UTF-8.
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise BadSample(Reason.ROW_INVALID, f"cannot be written as JSON: {refused}") from error
