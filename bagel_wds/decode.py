"""A webdataset sample becomes a `RawSample`: its JSON is parsed, its images stay encoded behind handles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from PIL import Image

from bagel_wds.clips import ClipHeader, EncodedClip
from bagel_wds.errors import BadSample, Reason
from bagel_wds.images import DecodedImage, EncodedImage, ImageHeader
from bagel_wds.records import RawSample, SampleRef
from bagel_wds.schema import MAX_JSON_BYTES, REJECTED, VIDEO_EXTENSIONS, media_fields, read_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bagel_wds.records import Picture


def decode_sample(sample: Mapping[str, Any], *, upright: bool = True) -> RawSample:
    """Parse a sample's JSON and wrap its images, without decoding a pixel.

    Values that an earlier stage decoded are taken as they are: JSON as a dict, images as PIL images. A sample of another
    tool that has a text, `txt`, and no JSON has that as its only field.

    Args:
        sample: a webdataset dict, from any reader.
        upright: EXIF orientation applied, alpha composited, 16-bit scaled; False is as upstream.

    Raises:
        BadSample: if the JSON is missing, broken or too large, or media that it speaks of are missing; the verdict itself
            of a raw row that had one when it was read.
    """
    rejected = sample.get(REJECTED)
    if isinstance(rejected, BadSample):
        raise rejected
    fields, header = read_header(_fields(sample))
    media = media_fields(sample)
    described = header.get("media") or []
    if not isinstance(described, list):
        raise BadSample(Reason.ROW_INVALID, f"the JSON's `media` is {type(described).__name__}, not a list")
    if described and len(described) != len(media):
        raise BadSample(
            Reason.IMAGE_MISSING, f"the JSON describes {len(described)} media, the tar has {len(media)}"
        )
    ref = sample.get("__ref__")
    return RawSample(
        key=sample["__key__"],
        url=sample.get("__url__", ""),
        fields=fields,
        media=tuple(
            _clip(names[0], sample[names[0]], described[number] if described else None)
            if _is_video(names[0])
            else tuple(
                _picture(name, sample[name], _header_of(described, number, is_clip=is_clip), upright)
                for name in names
            )
            for number, (is_clip, names) in enumerate(media)
        ),
        is_clip=tuple(is_clip for is_clip, _ in media),
        dataset=sample.get("__dataset__", ""),
        ref=ref if isinstance(ref, SampleRef) else None,
        indexes=sample.get("__data_indexes__", ()),
    )


def _fields(sample: Mapping[str, Any]) -> dict[str, Any]:
    text = sample.get("txt")
    if text is None or sample.get("json") is not None:
        return _parse(sample.get("json"))
    if len(text) > MAX_JSON_BYTES:
        raise BadSample(Reason.JSON_TOO_LARGE, f"{len(text)} bytes of text; the most is {MAX_JSON_BYTES}")
    try:
        return {"txt": text.decode() if isinstance(text, bytes) else text}
    except UnicodeDecodeError as error:
        raise BadSample(Reason.ROW_INVALID, f"the text of the sample is no UTF-8: {error}") from error


def _parse(value: object) -> dict[str, Any]:
    if value is None:
        raise BadSample(Reason.ROW_INVALID, "the sample has no json member")
    if isinstance(value, bytes | str):
        if len(value) > MAX_JSON_BYTES:
            raise BadSample(
                Reason.JSON_TOO_LARGE, f"{len(value)} bytes of JSON; the most is {MAX_JSON_BYTES}"
            )
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadSample(Reason.ROW_INVALID, f"broken JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadSample(Reason.ROW_INVALID, f"the JSON is {type(value).__name__}, not an object")
    return value


def _header_of(described: Sequence[Mapping[str, Any]], number: int, *, is_clip: bool) -> ImageHeader | None:
    """What our JSON says of an image, so that its bytes need not be looked at; frames in a folder say for themselves."""
    if is_clip or not described:
        return None
    entry = described[number]
    try:
        header = ImageHeader(
            entry["ext"], (int(entry["height"]), int(entry["width"])), int(entry.get("orientation", 1))
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadSample(
            Reason.ROW_INVALID, f"the JSON's description of medium {number} is broken: {error!r}"
        ) from error
    if min(header.size_hw) < 1 or not 1 <= header.orientation <= 8:
        raise BadSample(Reason.ROW_INVALID, f"the JSON says of medium {number}: {header}")
    return header


def _picture(
    name: str, value: object, header: ImageHeader | None, upright: bool
) -> EncodedImage | DecodedImage:
    if isinstance(value, bytes):
        return EncodedImage(value, upright=upright, header=header)
    if isinstance(value, Image.Image):
        return DecodedImage(value, upright=upright)
    raise BadSample(
        Reason.IMAGE_UNREADABLE,
        f"{name} is {type(value).__name__}; pass encoded bytes, or decode with wds.decode('pil')",
    )


def _is_video(name: str) -> bool:
    return name.rpartition(".")[2] in VIDEO_EXTENSIONS


def _clip(name: str, value: object, entry: Any) -> Sequence[Picture]:
    """A clip that is a file; what our JSON says of it spares looking at its bytes."""
    if not isinstance(value, bytes):
        raise BadSample(Reason.VIDEO, f"{name} is {type(value).__name__}; pass encoded bytes")
    if entry is None:
        return EncodedClip(value)
    try:
        return EncodedClip(value, ClipHeader.of_json(entry))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadSample(
            Reason.ROW_INVALID, f"the JSON's description of {name} is broken: {error!r}"
        ) from error
