"""Decoding: every pixel mode with known pixels, masks of class numbers, and damaged files."""

from __future__ import annotations

import functools
import io
import os
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from visualtokens.data import BadImage, read_image
from visualtokens.data.decode import BadAnnotation, as_rgb, read_header, read_mask
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
        ("L", [0, 7, 255], ".png", [BLACK, (7, 7, 7), WHITE]),
        ("1", [0, 255], ".png", [BLACK, WHITE]),
        # Opacity a blends a colour c with white to c·a + 255·(1 − a).
        ("LA", [(0, 255), (0, 0), (100, 51)], ".png", [BLACK, WHITE, (224, 224, 224)]),
        ("RGBA", [(*RED, 255), (*RED, 0), (*RED, 51)], ".png", [RED, WHITE, (255, 204, 204)]),
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


def test_a_transparent_palette_colour_becomes_white(tmp_path: Path) -> None:
    for name in ("p.png", "p.gif"):
        palette_image().save(tmp_path / name, transparency=1)
        assert pixels(tmp_path / name) == [(10, 20, 30), WHITE, (0, 0, 255)]


def test_translucent_palette_colours_are_blended_with_white(tmp_path: Path) -> None:
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
def test_a_transparent_colour_key_becomes_white(
    tmp_path: Path, mode: str, values: list, key: object, expected: list
) -> None:
    from_pixels(mode, values).save(tmp_path / "key.png", transparency=key)
    assert pixels(tmp_path / "key.png") == expected


def test_cmyk_jpeg_is_not_inverted(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "c.jpg", quality=100)
    assert np.abs(np.array(pixels(tmp_path / "c.jpg")) - RED).max() <= 4


def test_the_first_frame_of_an_animation_is_used(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.png", "a.tiff", "a.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
        assert set(pixels(tmp_path / name)) == {RED}, name


# EXIF orientations as array operations on the stored pixels.
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
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    stored = np.random.default_rng(0).integers(0, 256, (2, 3, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(stored).save(tmp_path / "e.png", exif=exif)
    image = read_image(tmp_path / "e.png")
    np.testing.assert_array_equal(np.asarray(image), TURNS[orientation](stored))
    assert not image.getexif()  # so that it is not applied twice
    assert read_header(tmp_path / "e.png") == ("PNG", image.size)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.gif", "a.bmp", "a.tiff", "a.webp", "a.ppm"])
def test_headers_have_the_format_and_size(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    Image.new("RGB", (31, 17)).save(path)
    with Image.open(path) as image:
        assert read_header(path) == (image.format, (31, 17))
    if path.suffix != ".webp":  # which Pillow reads whole
        path.write_bytes(path.read_bytes()[:-1])
        assert read_header(path).size == (31, 17)
    path.write_bytes(b"no image")
    with pytest.raises(BadImage, match="not an image in a known format"):
        read_header(path)


def exif_block(*entries: bytes) -> bytes:
    ifd = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", 0)
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + ifd


def test_orientation_is_applied_despite_invalid_metadata(tmp_path: Path) -> None:
    turn = struct.pack("<HHIHH", ExifTags.Base.Orientation, 3, 1, 6, 0)
    text_for_a_number = struct.pack("<HHI4s", ExifTags.Base.ImageWidth, 2, 4, b"abc\0")
    path = tmp_path / "odd.jpg"
    Image.new("RGB", (16, 8)).save(path, exif=exif_block(turn, text_for_a_number))
    with pytest.raises(struct.error), Image.open(path) as image:  # why Pillow's own function is not used
        ImageOps.exif_transpose(image)
    assert read_image(path).size == (8, 16)


def test_the_image_is_independent_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.new("RGB", (2, 2), RED).save(path)
    image = read_image(str(path))
    path.unlink()
    assert pickle.loads(pickle.dumps(image)).getpixel((0, 0)) == RED


@pytest.mark.parametrize(
    ("mode", "value", "reason"),
    [("F", 0.5, "float pixels"), ("I", -1, "from -1 to -1"), ("I", 65536, "to 65536")],
)
def test_pixels_without_a_defined_white_are_rejected(
    tmp_path: Path, mode: str, value: float, reason: str
) -> None:
    Image.new(mode, (2, 2), value).save(tmp_path / "x.tiff")
    with pytest.raises(BadImage, match=reason):
        read_image(tmp_path / "x.tiff")
    with pytest.raises(UserError, match=reason):
        as_rgb(Image.new(mode, (2, 2), value))


def test_other_files_are_rejected(tmp_path: Path) -> None:
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

    monkeypatch.setattr("PIL.Image.open", refuse)  # file modes do not apply to root
    with pytest.raises(BadImage, match="permission denied"):
        read_image(path)


def test_a_wrong_argument_is_not_a_bad_image() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        read_image(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".tiff", ".webp", ".bmp"])
def test_a_truncated_file_is_rejected(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    intact = path.read_bytes()
    path.write_bytes(intact[: len(intact) // 2])
    with pytest.raises(BadImage) as caught:
        read_image(path)
    assert caught.value.path == str(path)
    assert caught.value.reason


def test_errors_can_be_pickled() -> None:
    bad = pickle.loads(pickle.dumps(BadImage("a/b.jpg", "empty file")))
    assert (type(bad), bad.path, bad.reason) == (BadImage, "a/b.jpg", "empty file")
    assert str(bad) == "cannot read a/b.jpg: empty file"
    bad = pickle.loads(pickle.dumps(BadAnnotation("a.png", "a", "size", "3×4")))
    assert (bad.path, bad.image_id, bad.field, bad.why) == ("a.png", "a", "size", "3×4")
    assert str(bad) == "cannot read a.png: annotation of image a, size: 3×4"


DAMAGED_FILES = 40  # per sample


def encode(image: Image.Image, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, **options)
    return out.getvalue()


@functools.cache
def samples() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    rgb = Image.fromarray(noise)
    grey16 = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.ImageDescription] = "noise"
    exif[ExifTags.Base.XResolution] = 72.0
    palette = rgb.convert("P")
    return {
        "jpeg": encode(rgb, format="JPEG", exif=exif),
        "progressive": encode(rgb, format="JPEG", progressive=True),
        "cmyk": encode(rgb.convert("CMYK"), format="JPEG"),
        "png": encode(rgb, format="PNG", exif=exif),
        "palette": encode(palette, format="PNG", transparency=3),
        "png16": encode(grey16, format="PNG"),
        "gif": encode(palette, format="GIF", save_all=True, append_images=[palette.rotate(90)]),
        "bmp": encode(rgb, format="BMP"),
        "tiff": encode(rgb, format="TIFF", exif=exif),
        "tiff-lzw": encode(rgb, format="TIFF", compression="tiff_lzw"),
        "tiff-jpeg": encode(rgb, format="TIFF", compression="jpeg"),
        "fax": encode(rgb.convert("1"), format="TIFF", compression="group4"),
        "webp": encode(rgb, format="WEBP", exif=exif),
        "webp-lossless": encode(rgb, format="WEBP", lossless=True),
        "avif": encode(rgb, format="AVIF", exif=exif),
        "jpeg2000": encode(rgb, format="JPEG2000"),
        "pgm16": encode(grey16.convert("I"), format="PPM"),
    }


def damage(intact: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return intact[: rng.randrange(1, len(intact))]
    data = bytearray(intact)
    reach = len(data) if rng.random() < 0.5 else min(len(data), 200)  # half of the time in the header
    for _ in range(rng.choice((1, 1, 2, 4, 10))):
        data[rng.randrange(reach)] = rng.choice((0, 255, rng.randrange(256), 1 << rng.randrange(8)))
    return bytes(data)


@pytest.mark.filterwarnings("ignore")  # Pillow warns about some of the damage
@pytest.mark.parametrize("name", samples())
def test_a_damaged_file_is_decoded_or_rejected(name: str, tmp_path: Path) -> None:
    intact, rng, path = samples()[name], random.Random(name), tmp_path / name
    path.write_bytes(intact)
    assert read_image(path).mode == "RGB"
    rejected: list[BadImage] = []
    for _ in range(DAMAGED_FILES):
        path.write_bytes(damage(intact, rng))
        try:
            image = read_image(path)
        except BadImage as bad:
            rejected.append(bad)
        else:
            assert image.mode == "RGB"
            assert min(image.size) >= 1
    assert rejected  # the damage was real
    assert all(bad.path == str(path) and bad.reason for bad in rejected)


MASK = np.array([[0, 1, 2], [255, 7, 0]], np.uint8)


@pytest.mark.parametrize("name", ["x.png", "x.bmp", "x.tif"])
@pytest.mark.parametrize("palette", [False, True])
def test_masks_keep_their_numbers(tmp_path: Path, name: str, palette: bool) -> None:
    image = Image.fromarray(MASK)
    if palette:  # of colours unrelated to the numbers
        image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    image.save(tmp_path / name)
    assert read_mask(tmp_path / name).tolist() == MASK.tolist()


def test_masks_of_one_and_of_sixteen_bits(tmp_path: Path) -> None:
    Image.fromarray(MASK > 0).save(tmp_path / "bit.png")
    assert read_mask(tmp_path / "bit.png").tolist() == [[0, 1, 1], [1, 1, 0]]
    deep = np.array([[0, 300], [65535, 2]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert read_mask(tmp_path / "deep.png").tolist() == deep.tolist()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "P with transparency"])
def test_masks_of_colours(tmp_path: Path, mode: str) -> None:
    """Colours are returned as they are: not blended, not averaged."""
    numbers = np.random.default_rng(0).integers(0, 4, (600, 3), dtype=np.uint8)  # more than one tile
    table = np.array([(0, 0, 0), (128, 64, 128), (1, 2, 3), (255, 255, 254)], np.uint8)
    if mode.startswith("P"):
        image = Image.fromarray(numbers)
        image.putpalette(table.tobytes())
    else:
        image = Image.fromarray(table[numbers]).convert(mode)
        if mode == "RGBA":
            image.putalpha(Image.fromarray(numbers * 60))
    options = {"transparency": bytes((0, 100, 255, 255))} if "with" in mode else {}
    image.save(tmp_path / "m.png", **options)
    assert np.array_equal(read_mask(tmp_path / "m.png", colours="rgb"), table[numbers])
    if mode.startswith("P"):
        assert np.array_equal(read_mask(tmp_path / "m.png"), numbers)


def test_grey_masks_are_numbers_even_where_colours_are_expected(tmp_path: Path) -> None:
    Image.fromarray(MASK).save(tmp_path / "m.png")
    assert read_mask(tmp_path / "m.png", colours="rgb").tolist() == MASK.tolist()
    Image.new("F", (2, 2)).save(tmp_path / "f.tif")
    for colours in ("refuse", "grey", "rgb"):
        assert "F holds float pixels" in str(mask_error(tmp_path / "f.tif", colours=colours))


def mask_error(path: Path, **options: str) -> BadAnnotation:
    with pytest.raises(BadAnnotation) as caught:
        read_mask(path, **options)
    assert caught.value.path == str(path)
    assert "\n" not in str(caught.value)
    return caught.value


def test_other_masks_are_rejected_with_image_and_field(tmp_path: Path) -> None:
    missing = mask_error(tmp_path / "x.png")
    assert (missing.image_id, missing.field, missing.why) == ("x", "file", "no such file")

    Image.new("RGB", (4, 4)).save(tmp_path / "rgb.png")
    colours = mask_error(tmp_path / "rgb.png", image_id="000017")
    assert (colours.image_id, colours.field) == ("000017", "mode")
    assert "save one number per pixel" in str(colours)

    Image.fromarray(MASK).save(tmp_path / "photo.jpg")
    assert "a lossless format" in str(mask_error(tmp_path / "photo.jpg"))

    Image.fromarray(MASK).save(tmp_path / "intact.png")
    data = (tmp_path / "intact.png").read_bytes()
    for end in range(0, data.index(b"IDAT") + 8, 5):  # before the pixels are complete
        (tmp_path / "cut.png").write_bytes(data[:end])
        assert mask_error(tmp_path / "cut.png").field == "file"
