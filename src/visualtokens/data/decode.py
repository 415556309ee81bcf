"""Safe decoding: any file becomes an RGB image or a mask of class numbers, or raises :class:`BadImage`."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from visualtokens.errors import UserError

# Pillow also opens formats that run other programs (EPS) or parse far more than pixels.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM")
EXTENSIONS = frozenset(
    (
        *(".jpg", ".jpeg", ".webp", ".avif", ".jp2", ".png", ".gif", ".bmp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm"),
    )
)
MASK_FORMATS = ("PNG", "BMP", "TIFF", "PPM")  # lossless ones
MASK_EXTENSIONS = frozenset((".png", ".bmp", ".tif", ".tiff", ".pgm"))
MASK_MODES = ("L", "P", "1", "I;16", "I;16B", "I;16L", "I")  # one number per pixel
MAX_PIXELS = 64_000_000

# Raised by Pillow for damaged files; found by flipping and cutting bytes of every format above. OSError and
# SyntaxError are documented; the others escape from its parsers of headers and metadata.
DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
    OverflowError,
    struct.error,
)

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(UserError):
    """An image that cannot be read, with its path and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot read {path}: {reason}")
        self.path = path
        self.reason = reason

    # Exceptions pickle their message only, and this one is sent by worker processes.
    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str]]:
        return BadImage, (self.path, self.reason)


class BadAnnotation(BadImage):
    """An annotation that cannot be used: its file, its image, the field, and the reason."""

    def __init__(self, path: str, image_id: str, field: str, why: str) -> None:
        super().__init__(path, f"annotation of image {image_id}, {field}: {why}")
        self.image_id = image_id
        self.field = field
        self.why = why

    def __reduce__(self) -> tuple[type[BadAnnotation], tuple[str, str, str, str]]:  # type: ignore[override]
        return BadAnnotation, (self.path, self.image_id, self.field, self.why)


def read_image(path: str | Path) -> Image.Image:
    """The image at ``path``, upright and in RGB; anything else raises :class:`BadImage`.

    The first frame of an animation is used, and transparent pixels are blended with white. An image of more
    than 64 megapixels is rejected from its header, before decoding.
    """
    return decode_image(Path(path), str(path))


def decode_image(source: Path | BinaryIO, name: str) -> Image.Image:
    """Like :func:`read_image`, from a file or from a stream of bytes; ``name`` appears in messages."""
    with _damage_as_bad_image(name, f"a known format ({', '.join(FORMATS)})"):
        if isinstance(source, Path):
            _check_file(source, name)
        with Image.open(source, formats=FORMATS) as image:
            _check_pixels(image, name)
            image.load()
            rgb = as_rgb(_upright(image))
            rgb.info = {}  # it still holds the EXIF orientation, which must not be applied twice
            return rgb


def read_mask(path: str | Path, *, image_id: str | None = None) -> NDArray[np.integer]:
    """The numbers ``(H, W)`` in a mask file (palette indices, not colours).

    Anything else raises :class:`BadAnnotation` of the image ``image_id`` (by default the file's stem).
    """
    file, name = Path(path), str(path)
    image_id = file.stem if image_id is None else image_id
    try:
        with _damage_as_bad_image(name, f"a lossless format ({', '.join(MASK_FORMATS)})"):
            _check_file(file, name)
            with Image.open(file, formats=MASK_FORMATS) as image:
                _check_pixels(image, name)
                if image.mode not in MASK_MODES:
                    why = f"{image.mode} holds colours; save one number per pixel (a grey or palette PNG)"
                    raise BadAnnotation(name, image_id, "mode", why)
                values = np.asarray(image)
    except BadAnnotation:
        raise
    except BadImage as bad:
        raise BadAnnotation(name, image_id, "file", bad.reason) from bad
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def as_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB: 16-bit values are scaled (not clipped), transparent pixels blended with white.

    Floats and integers beyond 16 bits have no defined white and raise :class:`UserError`.
    """
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    if image.mode == "F":
        raise UserError("float pixels have no defined white; save the image with 8 or 16 bits")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)  # (H, W); mode "I" holds 16-bit PGM files in 32 bits
    if values.min() < 0 or values.max() > 65535:
        raise UserError(
            f"integer pixels from {values.min()} to {values.max()} have no defined white; "
            "save the image with 8 or 16 bits"
        )
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """A copy of the image with its EXIF orientation applied, independent of the open file.

    ``ImageOps.exif_transpose`` also rewrites the metadata, which fails on tags that Pillow cannot encode
    although the pixels are intact.
    """
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    method = _UPRIGHT.get(orientation)
    return image.copy() if method is None else image.transpose(method)


@contextlib.contextmanager
def _damage_as_bad_image(name: str, expected: str) -> Iterator[None]:
    """Raise every error that Pillow has for a file it cannot read as :class:`BadImage`."""
    try:
        yield
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(name, f"too large: {error}") from error
    except UnidentifiedImageError as error:
        raise BadImage(name, f"not an image in {expected}") from error
    except PermissionError as error:
        raise BadImage(name, "permission denied") from error
    except DAMAGE as error:
        raise BadImage(name, f"damaged or unsupported: {error or type(error).__name__}") from error


def _check_file(path: Path, name: str) -> None:
    if not path.exists():
        raise BadImage(name, "no such file")
    if path.is_dir():
        raise BadImage(name, "is a folder")
    if not path.is_file():  # opening a named pipe would block
        raise BadImage(name, "not a regular file")
    if path.stat().st_size == 0:
        raise BadImage(name, "empty file")


def _check_pixels(image: Image.Image, name: str) -> None:
    """Reject an image that would take too much memory; only its header has been read."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        limit = MAX_PIXELS // 1_000_000
        raise BadImage(name, f"too large: {width}×{height} is more than {limit} megapixels; downscale it")
