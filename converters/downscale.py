"""Pictures made smaller on the way into a shard: which, to what size, and how they are written.

Only if `max_side` is given; without it, a picture's bytes are never touched.
"""

from __future__ import annotations

from enum import StrEnum

from bagel_wds.errors import ConfigError
from bagel_wds.images import decode_own_mode, encode_jpeg, encode_png, read_header, shrink
from bagel_wds.sources import SourceImage

MAX_SIDE = 65_500
"""A JPEG has no longer edge."""


class Encoder(StrEnum):
    """How a picture that was scaled down is written."""

    PNG = "png"
    """Without loss."""
    JPEG = "jpeg"
    """Quality 95, colour in full; pictures with alpha, which a JPEG has not, as PNG."""


def check_max_side(max_side: int) -> int:
    """A length of the longest edge that can be asked for, as it is.

    Raises:
        ConfigError: for any other.
    """
    if not 1 <= max_side <= MAX_SIDE:
        raise ConfigError(
            f"max_side={max_side} must be 1 to {MAX_SIDE} pixels; leave it out to keep every picture"
        )
    return max_side


def downscale(image: SourceImage, max_side: int, encoder: Encoder) -> SourceImage | None:
    """A picture scaled down to `max_side`, or None where neither of its edges is longer: it stays as it is.

    It is turned upright first, so the new one asks for no orientation; alpha, grey and a fitting ICC profile stay, EXIF
    and all frames but the first go. The same picture gives the same bytes, with the same versions of the libraries.

    Args:
        image: with its header.
        max_side: of its longest edge, in pixels.
        encoder: how it is written.

    Raises:
        BadSample: as `decode_rgb`, if it cannot be decoded.
    """
    size_hw = scaled_hw(image.header.upright_hw, max_side)
    if size_hw == image.header.upright_hw:
        return None
    small = shrink(decode_own_mode(image.data), size_hw)
    opaque = small.mode in ("L", "RGB")
    data = encode_jpeg(small) if encoder is Encoder.JPEG and opaque else encode_png(small)
    return SourceImage(data, read_header(data), original=image.header)


def scaled_hw(size_hw: tuple[int, int], max_side: int) -> tuple[int, int]:
    """Height and width with the longest edge at most `max_side`, the other in proportion, rounded, 1 at least.

    >>> scaled_hw((3000, 4000), 1024)
    (768, 1024)
    """
    longest = max(size_hw)
    if longest <= max_side:
        return size_hw
    height, width = (max(1, (2 * side * max_side + longest) // (2 * longest)) for side in size_hw)
    return height, width
