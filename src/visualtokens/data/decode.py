"""Safe decoding: whatever is on disk, the outcome is an RGB image or a :class:`BadImage`."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from visualtokens.errors import UserError

if TYPE_CHECKING:
    from visualtokens.data.batch import Batch

# Pillow also opens formats that run other programs (EPS) or parse far more than pixels. These are enough.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM")
_PHOTOS = {".jpg", ".jpeg", ".webp", ".avif", ".jp2"}
_OTHERS = {".png", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
EXTENSIONS = frozenset(_PHOTOS | _OTHERS)
MAX_PIXELS = 64_000_000

# What Pillow raises for damaged files, found by flipping and cutting bytes of every format above.
# OSError and SyntaxError are meant that way; the others escape from its parsers of headers and metadata.
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
    """An image that cannot be read: which one, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot read {path}: {reason}")
        self.path = path
        self.reason = reason

    # An exception pickles its message only, and this one travels home from worker processes.
    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str]]:
        return BadImage, (self.path, self.reason)


def read_image(path: str | Path) -> Image.Image:
    """The image at ``path``, upright and in RGB; :class:`BadImage` for everything that is not one.

    Of several frames the first is taken, and transparency is laid on white. An image of more than 64
    megapixels is refused from its header, before any of it is decoded.
    """
    return decode_image(Path(path), str(path))


def decode_image(source: Path | BinaryIO, name: str) -> Image.Image:
    """What :func:`read_image` gives, from a file or from bytes that ``name`` tells people about."""
    try:
        if isinstance(source, Path):
            check_file(source, name)
        with Image.open(source, formats=FORMATS) as image:
            check_pixels(image, name)
            image.load()
            rgb = as_rgb(_upright(image))
            rgb.info = {}  # it still tells the way the camera was held, and nobody is to turn it again
            return rgb
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(name, f"too large: {error}") from error
    except UnidentifiedImageError as error:
        raise BadImage(name, f"not an image in a known format ({', '.join(FORMATS)})") from error
    except PermissionError as error:
        raise BadImage(name, "permission denied") from error
    except DAMAGE as error:
        raise BadImage(name, f"damaged or unsupported: {error or type(error).__name__}") from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Any mode as RGB: 16 bits are scaled (not clipped), transparency is laid on white.

    Pixels whose white is not defined, floats and integers beyond 16 bits, are refused.
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


def check_file(path: Path, name: str) -> None:
    """:class:`BadImage` for what is no file to read from."""
    if not path.exists():
        raise BadImage(name, "no such file")
    if path.is_dir():
        raise BadImage(name, "is a folder")
    if not path.is_file():  # opening a pipe would wait for a writer for ever
        raise BadImage(name, "not a regular file")
    if path.stat().st_size == 0:
        raise BadImage(name, "empty file")


def check_pixels(image: Image.Image, name: str) -> None:
    """:class:`BadImage` for an image that would take too much memory, from its header."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        limit = MAX_PIXELS // 1_000_000
        raise BadImage(
            name, f"too large: {width}×{height} is more than {limit} megapixels; make it smaller first"
        )


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation says, as a copy that is free of its file.

    ``ImageOps.exif_transpose`` also writes the metadata anew, which fails on tags that only cameras
    understand although the pixels are sound.
    """
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    method = _UPRIGHT.get(orientation)
    return image.copy() if method is None else image.transpose(method)


# Keeping count of the images that cannot be read.

_SHOWN = 3
T = TypeVar("T")


class Others(Protocol):
    """The processes that read other shares of the same dataset."""

    def gather(self, item: T) -> list[T]:
        """What every one of them gives, in the same order everywhere."""


class BadImages:
    """Collects ``Batch.bad`` over a run and stops it once too much of the dataset is missing.

    >>> bad = BadImages(len(dataset))
    >>> for batch in loader:
    ...     bad.add(batch)   # UserError once more than 5 % of the images turned out unreadable

    Several processes use ``collect``, tell each other ``new``, and ``check`` the sum.
    """

    def __init__(self, total: int, *, share: float = 0.05) -> None:
        if total < 1:
            raise UserError(f"total={total} is not the number of images of a dataset")
        if not 0 <= share <= 1:
            raise UserError(f"share={share} is not between 0 and 1")
        self.total = total
        self.share = share
        self._known: dict[str, BadImage] = {}  # to all processes
        self._new: dict[str, BadImage] = {}

    def __len__(self) -> int:
        return len(self._known) + self.new

    @property
    def new(self) -> int:
        """How many this process has found that the others may not know of."""
        return len(self._new)

    @property
    def images(self) -> tuple[BadImage, ...]:
        """Each unreadable image once, in the order they were met."""
        return (*self._known.values(), *self._new.values())

    def add(self, batch: Batch) -> None:
        self.collect(batch.bad)
        self._check(len(self))

    def collect(self, found: Iterable[BadImage]) -> None:
        for bad in found:
            if bad.path not in self._known:
                self._new.setdefault(bad.path, bad)

    def check(self, others: Others, new: int) -> None:
        """Raise in every process if there are too many; ``new`` is the sum over all of them."""
        if self._too_many(len(self._known) + new):
            self.merge(others)
            self._check(len(self))

    def merge(self, others: Others) -> None:
        """Let every process know what each has found."""
        for found in others.gather(list(self._new.values())):
            for bad in found:
                self._known.setdefault(bad.path, bad)
        self._new.clear()

    def _too_many(self, count: int) -> bool:
        return count / self.total > self.share

    def _check(self, count: int) -> None:
        if self._too_many(count):
            first = "; ".join(f"{bad.path} ({bad.reason})" for bad in self.images[:_SHOWN])
            raise UserError(
                f"{count} of {self.total} images cannot be read, more than the {self.share:.1%} allowed: "
                f"{first}{'; …' if count > _SHOWN else ''}. Repair or remove them, or allow a larger share"
            )
