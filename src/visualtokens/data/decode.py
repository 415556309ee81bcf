"""Safe decoding: any file becomes an RGB image or a mask of class numbers, or raises :class:`BadImage`."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from visualtokens.errors import UserError
from visualtokens.files import one_line

# Pillow also opens formats that run other programs (EPS) or parse far more than pixels.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM")
EXTENSIONS = frozenset(
    (
        *(".jpg", ".jpeg", ".webp", ".avif", ".jp2", ".png", ".gif", ".bmp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm"),
    )
)
MASK_FORMATS = ("PNG", "GIF", "BMP", "TIFF", "PPM")  # lossless ones
MASK_EXTENSIONS = frozenset((".png", ".gif", ".bmp", ".tif", ".tiff", ".pgm", ".ppm"))
MASK_MODES = ("L", "P", "1", "I;16", "I;16B", "I;16L", "I")  # one number per pixel
MAX_PIXELS = 64_000_000  # of an image that is decoded, unless the environment variable below is set
MAX_PIXELS_VARIABLE = "VTOK_MAX_PIXELS"
# Some decoders read the whole file into memory. 16 bits in four channels take 8 bytes per pixel.
MAX_FILE_BYTES_PER_PIXEL, MAX_METADATA_BYTES = 8, 64_000_000
TILE = 512  # side of the parts in which an image is converted, which bounds the memory for copies

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


_SIDEWAYS = {_UPRIGHT[orientation] for orientation in (5, 6, 7, 8)}  # these swap width and height


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


def max_pixels() -> int:
    """The largest image that is decoded, in pixels: ``VTOK_MAX_PIXELS`` or 64 megapixels."""
    given = os.environ.get(MAX_PIXELS_VARIABLE, "")
    if not given:
        return MAX_PIXELS
    try:
        limit = int(given)
    except ValueError:
        limit = 0
    if limit < 1:
        raise UserError(
            f"{MAX_PIXELS_VARIABLE}={given[:40]} is not a number of pixels; give a whole number of at least 1"
        )
    return limit


def read_image(path: str | Path) -> Image.Image:
    """The image at ``path``, upright and in RGB; anything else raises :class:`BadImage`.

    The first frame of an animation is used, and transparent pixels are blended with white. An image of more
    than :func:`max_pixels` is rejected from its header, before decoding.
    """
    return decode_image(Path(path), str(path))


def decode_image(source: Path | BinaryIO, name: str) -> Image.Image:
    """Like :func:`read_image`, from a file or from a stream of bytes; ``name`` appears in messages."""
    limit = max_pixels()
    with _damage_as_bad_image(name, f"a known format ({', '.join(FORMATS)})"):
        # Each step replaces the image, so that no more than two versions of it are in memory.
        image, turn = _load(source, name, limit)
        if turn is not None:
            image = image.transpose(turn)
        image = _eight_bits(image)
        if image.has_transparency_data:
            pixels = _blend(image)
            del image
            image = Image.fromarray(pixels)
        image = image.convert("RGB") if image.mode != "RGB" else image
        image.info = {}  # it still holds the EXIF orientation, which must not be applied twice
        return image


class Header(NamedTuple):
    """What the first bytes of an image file say about it."""

    format: str  # one of FORMATS
    size: tuple[int, int]  # width and height of the upright image


def read_header(path: str | Path) -> Header:
    """Format and size of the image at ``path``, without decoding it; other files raise :class:`BadImage`."""
    name, limit = str(path), max_pixels()
    with (
        _damage_as_bad_image(name, f"a known format ({', '.join(FORMATS)})"),
        _opened(Path(path), name, FORMATS, limit) as image,
    ):
        width, height = image.size
        # The method of a PNG file decodes the pixels, to find what stands behind them.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
        size = (height, width) if _UPRIGHT.get(orientation) in _SIDEWAYS else (width, height)
        return Header(str(image.format), size)


def read_mask(
    path: str | Path,
    *,
    image_id: str | None = None,
    colours: Literal["refuse", "grey", "rgb"] = "refuse",
) -> NDArray[np.integer]:
    """The numbers ``(H, W)`` in a mask file; of a palette these are the indices, not the colours.

    Colours without a palette are refused by default. ``"grey"`` converts them to numbers, as in a mask of
    white and black. ``"rgb"`` returns them as they are, ``(H, W, 3)``, with those of a palette; transparency
    is dropped. Anything else raises :class:`BadAnnotation` of the image ``image_id`` (by default the file's
    stem).
    """
    file, name, limit = Path(path), str(path), max_pixels()
    image_id = file.stem if image_id is None else image_id
    try:
        with (
            _damage_as_bad_image(name, f"a lossless format ({', '.join(MASK_FORMATS)})"),
            _opened(file, name, MASK_FORMATS, limit) as image,
        ):
            if image.mode == "P" and colours == "rgb":
                return _colours(image)
            if image.mode in MASK_MODES:
                return _numbers(image)
            if image.mode == "F":
                why = "F holds float pixels; save one number per pixel (a grey or palette PNG)"
                raise BadAnnotation(name, image_id, "mode", why)
            if colours == "refuse":
                why = (
                    f"{image.mode} holds colours; save one number per pixel (a grey or palette PNG) or give "
                    "the colour of every class (--data_args.colors)"
                )
                raise BadAnnotation(name, image_id, "mode", why)
            return _colours(image) if colours == "rgb" else _numbers(image.convert("L"))
    except BadAnnotation:
        raise
    except BadImage as bad:
        raise BadAnnotation(name, image_id, "file", bad.reason) from bad


def as_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB: 16-bit values are scaled (not clipped), transparent pixels blended with white.

    Floats and integers beyond 16 bits have no defined white and raise :class:`UserError`.
    """
    image = _eight_bits(image)
    if image.has_transparency_data:
        return Image.fromarray(_blend(image))
    return image if image.mode == "RGB" else image.convert("RGB")


# Conversion.


def _tiles(size: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """The boxes (left, top, right, bottom) of tiles that cover an image of ``size`` (width, height)."""
    width, height = size
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            yield left, top, min(left + TILE, width), min(top + TILE, height)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale an image of 16 bits to 8, with a transparent colour in white; return others unchanged."""
    if image.mode == "F":
        raise UserError("float pixels have no defined white; save the image with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    if image.mode == "I":  # 32 bits, in which Pillow holds 16-bit PGM files
        low, high = image.getextrema()
        if not 0 <= low <= high <= 65535:  # type: ignore[operator]
            raise UserError(
                f"integer pixels from {low} to {high} have no defined white; save the image with 8 or 16 bits"
            )
    transparent = image.info.get("transparency")
    out = Image.new("L", image.size)
    for box in _tiles(image.size):
        values = np.asarray(image.crop(box)).astype(np.uint32)  # (H, W)
        grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
        if transparent is not None:
            grey[values == transparent] = 255
        out.paste(Image.fromarray(grey), box)
    return out


def _blend(image: Image.Image) -> NDArray[np.uint8]:
    """The pixels ``(H, W, 3)`` of an image with transparent pixels, blended with white."""
    out = np.empty((image.height, image.width, 3), np.uint8)
    for box in _tiles(image.size):
        tile = image.crop(box).convert("RGBA")
        opaque = Image.alpha_composite(Image.new("RGBA", tile.size, "white"), tile).convert("RGB")
        left, top, right, bottom = box
        out[top:bottom, left:right] = np.asarray(opaque)
    return out


def _numbers(image: Image.Image) -> NDArray[np.integer]:
    """The pixels ``(H, W)`` of an image with one channel; those of one bit as uint8."""
    tiles = ((box, np.asarray(image.crop(box))) for box in _tiles(image.size))
    out: NDArray[np.integer] | None = None
    for (left, top, right, bottom), tile in tiles:
        if out is None:
            out = np.empty(image.size[::-1], np.uint8 if tile.dtype == np.bool_ else tile.dtype)
        out[top:bottom, left:right] = tile
    assert out is not None  # an image has pixels
    return out


def _colours(image: Image.Image) -> NDArray[np.uint8]:
    """The pixels ``(H, W, 3)`` of an image, without transparency."""
    out = np.empty((image.height, image.width, 3), np.uint8)
    image.load()
    table = np.zeros((256, 3), np.uint8)
    if image.mode == "P":  # Pillow's conversion warns about transparency
        palette = np.array(image.getpalette("RGB") or [], np.uint8).reshape(-1, 3)
        table[: len(palette)] = palette
    for left, top, right, bottom in _tiles(image.size):
        tile = image.crop((left, top, right, bottom))
        pixels = table[np.asarray(tile)] if image.mode == "P" else np.asarray(tile.convert("RGB"))
        out[top:bottom, left:right] = pixels
    return out


# Opening files.


def _load(source: Path | BinaryIO, name: str, limit: int) -> tuple[Image.Image, Image.Transpose | None]:
    """The decoded image, independent of its file, and the operation that turns it upright.

    ``ImageOps.exif_transpose`` also rewrites the metadata, which fails on tags that Pillow cannot encode
    although the pixels are intact.
    """
    with _opened(source, name, FORMATS, limit) as image:
        image.load()
        turn = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
        # ``_new`` is ``copy`` without a copy of the pixels, but not part of Pillow's interface.
        return image._new(image.im) if hasattr(image, "_new") else image.copy(), turn


@contextlib.contextmanager
def _opened(
    source: Path | BinaryIO, name: str, formats: tuple[str, ...], limit: int
) -> Iterator[ImageFile.ImageFile]:
    """Read the header of an image and check its size, before its pixels are decoded."""
    with contextlib.ExitStack() as stack:
        if isinstance(source, Path):
            _check_file(source, name, limit)
            # Given a path, Pillow may map the file into memory; if it shrinks, the process is killed.
            source = stack.enter_context(source.open("rb"))
        stack.enter_context(_pillow_limit(limit))
        image = stack.enter_context(Image.open(source, formats=formats))
        width, height = image.size
        if width * height > limit:
            raise BadImage(
                name,
                f"too large: {width}×{height} is more than {limit / 1e6:g} megapixels; "
                f"downscale it, or raise the limit with {MAX_PIXELS_VARIABLE}={width * height}",
            )
        yield image


_raising = threading.Lock()
_raised: list[int | None] = []  # Pillow's limit before each read that is under way; the first is its own


@contextlib.contextmanager
def _pillow_limit(limit: int) -> Iterator[None]:
    """Raise Pillow's own limit during a read, if that of this module is raised above :data:`MAX_PIXELS`."""
    if limit <= MAX_PIXELS:
        yield
        return
    with _raising:
        before = Image.MAX_IMAGE_PIXELS
        _raised.append(before)
        if before is not None:
            Image.MAX_IMAGE_PIXELS = max(before, limit)
    try:
        yield
    finally:
        with _raising:  # the last of several threads restores it
            own = _raised[0]
            _raised.pop()
            if not _raised:
                Image.MAX_IMAGE_PIXELS = own


@contextlib.contextmanager
def _damage_as_bad_image(name: str, expected: str) -> Iterator[None]:
    """Raise every error that Pillow has for a file it cannot read as :class:`BadImage`."""
    try:
        yield
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = one_line(error).split(", could be")[0]
        hint = f"downscale it, or raise the limit with {MAX_PIXELS_VARIABLE}"
        raise BadImage(name, f"too large: {reason}; {hint}") from error
    except UnidentifiedImageError as error:
        raise BadImage(name, f"not an image in {expected}") from error
    except PermissionError as error:
        raise BadImage(name, "permission denied") from error
    except MemoryError as error:
        raise BadImage(name, "not enough memory to decode it; downscale it") from error
    except DAMAGE as error:
        raise BadImage(name, f"damaged or unsupported: {one_line(error) or type(error).__name__}") from error


def _check_file(path: Path, name: str, limit: int) -> None:
    if not path.exists():
        raise BadImage(name, "no such file")
    if path.is_dir():
        raise BadImage(name, "is a folder")
    if not path.is_file():  # opening a named pipe would block
        raise BadImage(name, "not a regular file")
    size, most = path.stat().st_size, limit * MAX_FILE_BYTES_PER_PIXEL + MAX_METADATA_BYTES
    if size == 0:
        raise BadImage(name, "empty file")
    if size > most:
        raise BadImage(
            name,
            f"too large: a file of {size / 1e6:,.0f} MB is more than the {most / 1e6:,.0f} MB of an image of "
            f"{limit / 1e6:g} megapixels; downscale it, or raise the limit with {MAX_PIXELS_VARIABLE}",
        )
