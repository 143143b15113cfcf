"""The one home of Pillow: headers, pixels as RGB, and resize.

Two ways to turn an image into RGB. Upright (the default fidelity): EXIF orientation applied, alpha composited over
white in every mode, 16-bit grey scaled to 8, a truncated file refused. As upstream: orientation ignored, alpha of
grey pictures lost, 16-bit grey clipped, a truncated file taken with what there is.
"""

from __future__ import annotations

import io
import struct
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from bagel_wds.errors import BadSample, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PIXELS = 178_956_970
"""An image of more pixels is refused: twice Pillow's own warning level, where Pillow itself refuses."""

_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class ImageHeader:
    """What an image's header says.

    Attributes:
        ext: of a file of this format, for a member name.
        size_hw: height and width of the encoded pixels.
        orientation: EXIF's, 1 to 8; 5 and above swap the edges.
    """

    ext: str
    size_hw: tuple[int, int]
    orientation: int = 1

    @property
    def upright_hw(self) -> tuple[int, int]:
        """Height and width once the orientation is applied."""
        return (self.size_hw[1], self.size_hw[0]) if self.orientation >= 5 else self.size_hw


@dataclass(frozen=True)
class EncodedImage:
    """An image in memory, still encoded.

    Attributes:
        data: the file's bytes.
        upright: apply EXIF orientation, composite alpha, scale 16-bit; False is as upstream.
        header: known from elsewhere; None reads it from the bytes when it is asked for.
    """

    data: bytes
    upright: bool = True
    header: ImageHeader | None = None

    @cached_property
    def _read_header(self) -> ImageHeader:
        return self.header or read_header(self.data)

    @cached_property
    def _decoded_hw(self) -> tuple[int, int]:
        image = decode_rgb_as_upstream(self.data)
        return image.height, image.width

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width in pixels, as `rgb` will have them.

        Raises:
            BadSample: for a broken header; as upstream, which opens images before it plans, also for pixels that
                cannot be decoded.
        """
        return self._read_header.upright_hw if self.upright else self._decoded_hw

    @property
    def num_bytes(self) -> int:
        """Size of the encoded image."""
        return len(self.data)

    def rgb(self) -> Image.Image:
        """The pixels, decoded.

        Raises:
            BadSample: if they cannot be decoded, or are not of the size that the header gave.
        """
        image = decode_rgb(self.data) if self.upright else decode_rgb_as_upstream(self.data)
        if (image.height, image.width) != self.size_hw:
            raise BadSample(
                Reason.IMAGE_UNREADABLE, f"decoded to {image.height}x{image.width}, planned as {self.size_hw}"
            )
        return image


@dataclass(frozen=True)
class DecodedImage:
    """An image that an earlier stage decoded (an eager `wds.decode("pil")`); it offers what `EncodedImage` does."""

    image: Image.Image
    upright: bool = True

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.height, self.image.width

    @property
    def num_bytes(self) -> int:
        """Size of the decoded pixels, in bytes."""
        return self.image.height * self.image.width * len(self.image.getbands())

    def rgb(self) -> Image.Image:
        """The pixels as RGB."""
        return to_rgb(self.image) if self.upright else pil_img2rgb(self.image)


def _open(data: bytes) -> Image.Image:
    """Open an image without decoding it."""
    if not data:
        raise BadSample(Reason.IMAGE_EMPTY, "zero bytes")
    try:
        image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise BadSample(Reason.IMAGE_TOO_LARGE, str(error)) from error
    except UnidentifiedImageError as error:
        raise BadSample(
            Reason.IMAGE_UNREADABLE, f"no image format that is known starts with {data[:12]!r}"
        ) from error
    except ValueError as error:
        # Pillow's limits on compressed text and profiles (MAX_TEXT_CHUNK) come as ValueError.
        raise BadSample(Reason.IMAGE_TOO_LARGE, str(error)) from error
    except (OSError, SyntaxError, struct.error, EOFError, IndexError, TypeError) as error:
        raise BadSample(Reason.IMAGE_UNREADABLE, str(error)) from error
    if image.width * image.height > MAX_PIXELS:
        raise BadSample(Reason.IMAGE_TOO_LARGE, f"{image.width}x{image.height} is over {MAX_PIXELS} pixels")
    return image


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, from what is known without decoding; a broken EXIF block counts as none."""
    raw = image.info.get("exif")
    try:
        exif = Image.Exif()
        if raw:
            exif.load(raw)
        elif image.format == "TIFF":
            exif = image.getexif()
        value = exif.get(_ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, struct.error, KeyError, IndexError, TypeError):
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


_EXTENSIONS = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tiff",
    "PPM": "ppm",
}


def read_header(data: bytes) -> ImageHeader:
    """Read an image's header; the pixels are not decoded.

    Raises:
        BadSample: `image_empty`, `image_unreadable` or `image_too_large`.
    """
    image = _open(data)
    ext = _EXTENSIONS.get(image.format or "", "img")
    return ImageHeader(ext=ext, size_hw=(image.height, image.width), orientation=_orientation(image))


def decode_rgb(data: bytes) -> Image.Image:
    """Decode to upright RGB.

    Raises:
        BadSample: also `image_truncated`, where the pixels end too early.
    """
    image = _open(data)
    orientation = _orientation(image)
    _load(image)
    image = to_rgb(image)
    return image.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else image


def decode_rgb_as_upstream(data: bytes) -> Image.Image:
    """Decode to RGB as upstream does: truncated files are taken, orientation is not applied."""
    image = _open(data)
    with _truncated_images_taken():
        _load(image)
    return pil_img2rgb(image)


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except (OSError, SyntaxError, struct.error, EOFError, IndexError, ValueError, TypeError) as error:
        raise BadSample(Reason.IMAGE_TRUNCATED, str(error)) from error


_truncated_lock = threading.Lock()


@contextmanager
def _truncated_images_taken() -> Iterator[None]:
    """Pillow's switch for truncated files has no local form: set it for one call, under a lock, and restore it."""
    with _truncated_lock:
        before = ImageFile.LOAD_TRUNCATED_IMAGES
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = before


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB of an image of any mode: alpha over white, greys of more than 8 bits scaled.

    16-bit greys are divided by 257 and rounded; 32-bit integer greys that stay within 16 bits likewise; float greys
    within 0..1 are multiplied by 255. Other ranges have no stated white and are refused.

    Raises:
        BadSample: for a grey whose range has no stated white.
    """
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(np.asarray(image), image.mode)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        # Premultiplied La has no direct way to RGBA.
        straight = image.convert("LA") if image.mode == "La" else image
        return _over_white(straight.convert("RGBA"))
    return image.convert("RGB")


def _eight_bits(grey: np.ndarray, mode: str) -> np.ndarray:
    low, high = float(grey.min()), float(grey.max())
    white = 1.0 if mode == "F" else 65535.0
    if low < 0 or high > white:
        raise BadSample(
            Reason.IMAGE_UNREADABLE, f"grey mode {mode} with values {low:g}..{high:g} has no stated white"
        )
    return np.rint(grey.astype(np.float64) * (255.0 / white)).astype(np.uint8)


def _over_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.split()[3])
    return white


def pil_img2rgb(image: Image.Image) -> Image.Image:
    """Convert a PIL image to RGB as upstream does.

    An RGBA image, or one with a transparent colour, is composited on white. Any other is converted as it is:
    grey with alpha loses its alpha, 16-bit grey is clipped at 255, EXIF orientation does nothing.
    """
    if image.mode == "RGBA" or image.info.get("transparency") is not None:
        return _over_white(image.convert("RGBA"))
    return image.convert("RGB")


def resize(image: Image.Image, size_hw: tuple[int, int]) -> Image.Image:
    """Bicubic with antialiasing, Pillow's: what torchvision does to a PIL image."""
    height, width = size_hw
    return (
        image
        if (image.height, image.width) == size_hw
        else image.resize((width, height), Image.Resampling.BICUBIC)
    )
