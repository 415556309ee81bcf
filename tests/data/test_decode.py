"""Every mode and every kind of damage, from files made here with known pixels."""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps, PngImagePlugin

from visualtokens.data import BadImage, read_image
from visualtokens.data.decode import MAX_PIXELS, as_rgb
from visualtokens.errors import UserError

WHITE, BLACK, RED = (255, 255, 255), (0, 0, 0), (255, 0, 0)


def pixels(path: Path) -> list[tuple[int, ...]]:
    """The pixels of a decoded file, row by row."""
    image = read_image(path)
    assert image.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]


def from_pixels(mode: str, values: list) -> Image.Image:
    image = Image.new(mode, (len(values), 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    return image


@pytest.mark.parametrize(
    ("mode", "values", "suffix", "expected"),
    [
        ("RGB", [(1, 2, 3), (250, 128, 0)], ".png", [(1, 2, 3), (250, 128, 0)]),
        ("RGB", [(1, 2, 3), (250, 128, 0)], ".bmp", [(1, 2, 3), (250, 128, 0)]),
        ("RGB", [(1, 2, 3), (250, 128, 0)], ".ppm", [(1, 2, 3), (250, 128, 0)]),
        ("RGB", [(1, 2, 3), (250, 128, 0)], ".tiff", [(1, 2, 3), (250, 128, 0)]),
        ("L", [0, 7, 255], ".png", [BLACK, (7, 7, 7), WHITE]),
        ("1", [0, 255], ".png", [BLACK, WHITE]),
        ("1", [0, 255], ".tiff", [BLACK, WHITE]),
        # Alpha a lays a colour c on white as c·a + 255·(1 − a).
        ("LA", [(0, 255), (0, 0), (100, 51)], ".png", [BLACK, WHITE, (224, 224, 224)]),
        ("RGBA", [(*RED, 255), (*RED, 0), (*RED, 51)], ".png", [RED, WHITE, (255, 204, 204)]),
        ("RGBA", [(*RED, 255), (*RED, 0), (*RED, 51)], ".tiff", [RED, WHITE, (255, 204, 204)]),
        # Full magenta and yellow make red; half black makes grey.
        ("CMYK", [(0, 255, 255, 0), (0, 0, 0, 127), (0, 0, 0, 255)], ".tiff", [RED, (128,) * 3, BLACK]),
        # v·255/65535, rounded: 128 is 0.498 and 129 is 0.502. Clipping would turn all above 255 white.
        ("I;16", [0, 128, 129, 257, 32896, 65535], ".png", [(v,) * 3 for v in (0, 0, 1, 1, 128, 255)]),
        ("I;16", [0, 129, 32896, 65535], ".tiff", [(v,) * 3 for v in (0, 1, 128, 255)]),
        ("I;16B", [0, 129, 32896, 65535], ".tiff", [(v,) * 3 for v in (0, 1, 128, 255)]),
        ("I", [0, 129, 32896, 65535], ".pgm", [(v,) * 3 for v in (0, 1, 128, 255)]),
        ("I", [0, 129, 32896, 65535], ".tiff", [(v,) * 3 for v in (0, 1, 128, 255)]),
    ],
)
def test_modes(
    tmp_path: Path, mode: str, values: list, suffix: str, expected: list[tuple[int, int, int]]
) -> None:
    path = tmp_path / f"image{suffix}"
    from_pixels(mode, values).save(path)
    assert pixels(path) == expected


def palette_image() -> Image.Image:
    image = from_pixels("P", [0, 1, 2])
    image.putpalette([10, 20, 30, 255, 0, 0, 0, 0, 255])
    return image


def test_palette(tmp_path: Path) -> None:
    palette_image().save(tmp_path / "p.png")
    assert pixels(tmp_path / "p.png") == [(10, 20, 30), RED, (0, 0, 255)]


def test_palette_with_a_transparent_colour_shows_white_there(tmp_path: Path) -> None:
    for name in ("p.png", "p.gif"):
        palette_image().save(tmp_path / name, transparency=1)
        assert pixels(tmp_path / name) == [(10, 20, 30), WHITE, (0, 0, 255)]


def test_palette_with_half_transparent_colours(tmp_path: Path) -> None:
    palette_image().save(tmp_path / "p.png", transparency=bytes((255, 51, 0)))
    assert pixels(tmp_path / "p.png") == [(10, 20, 30), (255, 204, 204), WHITE]


@pytest.mark.parametrize(
    ("mode", "values", "key", "expected"),
    [
        ("L", [5, 6], 5, [WHITE, (6, 6, 6)]),
        ("RGB", [RED, (1, 2, 3)], RED, [WHITE, (1, 2, 3)]),
        ("I;16", [32896, 257], 32896, [WHITE, (1, 1, 1)]),
    ],
)
def test_colour_keyed_png(tmp_path: Path, mode: str, values: list, key: object, expected: list) -> None:
    from_pixels(mode, values).save(tmp_path / "key.png", transparency=key)
    assert pixels(tmp_path / "key.png") == expected


def test_cmyk_jpeg_is_not_inverted(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "c.jpg", quality=100)
    assert np.abs(np.array(pixels(tmp_path / "c.jpg")) - RED).max() <= 4


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.png", "a.tiff", "a.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
        assert set(pixels(tmp_path / name)) == {RED}, name


# What EXIF says about the first row and first column of the stored pixels, as array operations.
TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("suffix", [".png", ".tiff", ".webp"])
def test_exif_orientation(tmp_path: Path, orientation: int, suffix: str) -> None:
    stored = np.random.default_rng(0).integers(0, 256, (2, 3, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(stored).save(tmp_path / f"e{suffix}", exif=exif, lossless=True)
    image = read_image(tmp_path / f"e{suffix}")
    np.testing.assert_array_equal(np.asarray(image), TURNS[orientation](stored))
    assert not image.getexif()  # so that nobody turns it a second time


def exif_block(*entries: bytes) -> bytes:
    ifd = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", 0)
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + ifd


def test_a_photo_with_odd_metadata_is_still_turned(tmp_path: Path) -> None:
    turn = struct.pack("<HHIHH", ExifTags.Base.Orientation, 3, 1, 6, 0)
    text_for_a_number = struct.pack("<HHI4s", ExifTags.Base.ImageWidth, 2, 4, b"abc\0")
    path = tmp_path / "odd.jpg"
    Image.new("RGB", (16, 8)).save(path, exif=exif_block(turn, text_for_a_number))
    with pytest.raises(struct.error), Image.open(path) as image:  # why Pillow's own function is not used
        ImageOps.exif_transpose(image)
    assert read_image(path).size == (8, 16)


def test_the_result_is_free_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.new("RGB", (2, 2), RED).save(path)
    image = read_image(str(path))
    path.unlink()
    assert pickle.loads(pickle.dumps(image)).getpixel((0, 0)) == RED


@pytest.mark.parametrize(
    ("mode", "value", "reason"),
    [("F", 0.5, "float pixels"), ("I", -1, "from -1 to -1"), ("I", 65536, "to 65536")],
)
def test_pixels_without_a_defined_white_are_refused(
    tmp_path: Path, mode: str, value: float, reason: str
) -> None:
    Image.new(mode, (2, 2), value).save(tmp_path / "x.tiff")
    with pytest.raises(BadImage, match=reason):
        read_image(tmp_path / "x.tiff")
    with pytest.raises(UserError, match=reason):
        as_rgb(Image.new(mode, (2, 2), value))


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises a size and holds no pixels at all."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


def test_too_many_pixels_are_refused_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "big.png"
    path.write_bytes(png_header(8001, 8000))
    with pytest.raises(BadImage, match="8001×8000 is more than 64 megapixels"):
        read_image(path)
    path.write_bytes(png_header(8000, MAX_PIXELS // 8000))  # just allowed, so it is the pixels that lack
    with pytest.raises(BadImage, match="damaged"):
        read_image(path)


def test_decompression_bombs(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(50_000, 50_000))
    with pytest.raises(BadImage, match="too large"):
        read_image(path)
    notes = PngImagePlugin.PngInfo()
    notes.add_text("note", "x" * 10_000_000, zip=True)
    Image.new("RGB", (2, 2)).save(path, pnginfo=notes)
    with pytest.raises(BadImage, match="too large"):
        read_image(path)


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_a_bomb_where_warnings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(10_000, 10_000))
    with pytest.raises(BadImage, match="too large"):
        read_image(tmp_path / "bomb.png")


def test_files_that_are_not_images(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("just words")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "script.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, reason in {
        "empty.jpg": "empty file",
        "text.jpg": "not an image",
        "folder.jpg": "is a folder",
        "script.jpg": "not an image",
        "pipe.jpg": "not a regular file",
        "missing.jpg": "no such file",
        "nul\0.jpg": "no such file",
    }.items():
        with pytest.raises(BadImage, match=reason) as caught:
            read_image(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
        assert reason in caught.value.reason
        assert "\n" not in str(caught.value)


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.png"
    Image.new("RGB", (2, 2)).save(path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("PIL.Image.open", refuse)  # file modes do not stop root, who runs some test machines
    with pytest.raises(BadImage, match="permission denied"):
        read_image(path)


def test_a_mistake_of_the_caller_is_not_called_a_bad_image() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        read_image(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".tiff", ".webp", ".bmp"])
def test_truncated(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadImage) as caught:
        read_image(path)
    assert caught.value.path == str(path)
    assert caught.value.reason


def test_bad_image_survives_pickling() -> None:
    bad = pickle.loads(pickle.dumps(BadImage("a/b.jpg", "empty file")))
    assert (type(bad), bad.path, bad.reason) == (BadImage, "a/b.jpg", "empty file")
    assert str(bad) == "cannot read a/b.jpg: empty file"
    assert isinstance(bad, UserError)
