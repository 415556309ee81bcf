"""The limits of decoding: pixels and bytes of a file, and the memory that an image within them takes."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from visualtokens.data import BadImage, Preprocess, create_loader, decode, open_dataset, read_image
from visualtokens.data.decode import MAX_PIXELS, as_rgb, read_mask
from visualtokens.errors import UserError

PREPROCESS = Preprocess((8, 8), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def png_header(width: int, height: int) -> bytes:
    """A PNG with a header of the given size and no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


def test_too_many_pixels_are_rejected_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "big.png"
    path.write_bytes(png_header(8001, 8000))
    with pytest.raises(BadImage, match=r"8001×8000 is more than 64 megapixels.* VTOK_MAX_PIXELS=64008000$"):
        read_image(path)
    path.write_bytes(png_header(8000, MAX_PIXELS // 8000))  # allowed, but without pixels
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


def test_the_limit_is_adjustable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.png"
    Image.new("L", (20, 10)).save(path)
    monkeypatch.setenv("VTOK_MAX_PIXELS", "199")
    for read in (read_image, read_mask, partial(read_mask, colours="rgb")):
        with pytest.raises(BadImage, match=r"20×10 is more than 0\.000199 megapixels; .*VTOK_MAX_PIXELS=200"):
            read(path)
    monkeypatch.setenv("VTOK_MAX_PIXELS", "200")
    assert read_image(path).size == (20, 10)
    assert read_mask(path).shape == (10, 20)
    for value in ("0", "-5", "many", "1e6", "9" * 5000):
        monkeypatch.setenv("VTOK_MAX_PIXELS", value)
        with pytest.raises(UserError, match=f"VTOK_MAX_PIXELS={value[:40]} is not a number") as caught:
            read_image(path)
        assert not isinstance(caught.value, BadImage)  # all images would be
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="is not a number of pixels"):  # before any worker starts
        create_loader(open_dataset("digits", "val"), PREPROCESS, batch=4, train=False, workers=1)


def test_the_limit_applies_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, side in (("train", 4), ("train", 20), ("val", 4)):
        (tmp_path / split / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, 10)).save(tmp_path / split / "a" / f"{side}.png")
    monkeypatch.setenv("VTOK_MAX_PIXELS", "199")
    dataset = open_dataset(f"folder:{tmp_path}", "train")
    (batch,) = create_loader(dataset, PREPROCESS, batch=2, train=False, workers=1)
    assert len(batch.images) == 1
    assert [Path(bad.path).name for bad in batch.bad] == ["20.png"]
    assert "raise the limit with VTOK_MAX_PIXELS=200" in batch.bad[0].reason


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_a_raised_limit_replaces_that_of_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a thread, and Pillow's own is the same afterwards."""
    for suffix in (".png", ".webp", ".gif", ".tiff"):
        Image.new("RGB", (30, 30)).save(tmp_path / f"x{suffix}")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadImage, match="too large"):
        read_image(tmp_path / "x.png")
    monkeypatch.setattr(decode, "MAX_PIXELS", 100)
    monkeypatch.setenv("VTOK_MAX_PIXELS", "900")
    with ThreadPoolExecutor(4) as threads:
        sizes = list(threads.map(lambda path: read_image(path).size, [*tmp_path.iterdir()] * 20))
    assert set(sizes) == {(30, 30)}
    assert Image.MAX_IMAGE_PIXELS == 100
    (tmp_path / "bomb.png").write_bytes(png_header(50_000, 50_000))
    with pytest.raises(BadImage, match=r"too large.*VTOK_MAX_PIXELS"):
        read_image(tmp_path / "bomb.png")
    assert Image.MAX_IMAGE_PIXELS == 100


def test_files_larger_than_any_image_are_not_read(tmp_path: Path) -> None:
    """Pillow would read all of a WebP file into memory."""
    path = tmp_path / "x.webp"
    Image.new("RGB", (4, 4)).save(path)
    os.truncate(path, 200_000_000_000)  # a sparse file
    with pytest.raises(BadImage, match="too large: a file of 200,000 MB"):
        read_image(path)


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_where_warnings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(10_000, 10_000))
    with pytest.raises(BadImage, match="too large"):
        read_image(tmp_path / "bomb.png")


def whole_image_as_rgb(image: Image.Image) -> Image.Image:
    """``as_rgb`` by operations on the whole image."""
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
        if "transparency" in image.info:
            grey[values == image.info["transparency"]] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def images_in_all_modes() -> Iterator[tuple[str, Image.Image, dict[str, object]]]:
    """Noise as PNG or TIFF, with the options to save it."""
    noise = np.random.default_rng(0).integers(0, 256, (17, 23, 4), dtype=np.uint8)
    rgba = Image.fromarray(noise)
    rgb = rgba.convert("RGB")
    for mode in ("1", "L", "LA", "RGB", "RGBA"):
        yield ".png", rgba.convert(mode), {}
    yield ".tiff", rgb.convert("CMYK"), {}
    yield ".tiff", rgb.convert("LAB"), {}
    palette = rgb.quantize(16)
    for key in (3, bytes(range(0, 256, 16))):
        yield ".png", palette, {"transparency": key}
    yield ".png", rgb, {"transparency": rgb.getpixel((5, 5))}
    yield ".png", rgb.convert("L"), {"transparency": 7}
    deep = noise[..., 0].astype(np.uint16) * 256 + noise[..., 1]
    yield ".png", Image.fromarray(deep), {"transparency": int(deep[3, 4])}
    yield ".tiff", Image.fromarray(deep.astype(">u2")), {}
    yield ".tiff", Image.fromarray(deep.astype(np.int32)), {}


@pytest.mark.parametrize("tile", [5, 512])
def test_conversion_in_tiles_equals_that_of_the_whole_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile: int
) -> None:
    monkeypatch.setattr(decode, "TILE", tile)
    for number, (suffix, image, options) in enumerate(images_in_all_modes()):
        path = tmp_path / f"{number}{suffix}"
        image.save(path, **options)
        with Image.open(path) as opened:
            opened.load()
            expected = np.asarray(whole_image_as_rgb(opened))
            untouched = opened.tobytes()
            case = f"{path.name} {opened.mode} {opened.info.get('transparency')}"
            np.testing.assert_array_equal(np.asarray(as_rgb(opened)), expected, err_msg=case)
            assert opened.tobytes() == untouched, case
            np.testing.assert_array_equal(np.asarray(read_image(path)), expected, err_msg=case)
            if opened.mode in decode.MASK_MODES:
                assert np.array_equal(read_mask(path), np.asarray(opened)), case


# Reads each file in a process of its own and prints the peak of its memory above that before, in bytes.
PEAKS = """
import os, sys
from visualtokens.data import read_image
from visualtokens.data.decode import read_mask

def memory(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

def peak(read, path):
    before = memory("VmRSS")
    read(path)
    print(max(memory("VmHWM") - before, 0))

read_image(sys.argv[1])  # loads Pillow's plugins
for path in sys.argv[2:]:
    sys.stdout.flush()
    if os.fork() == 0:
        read = (lambda path: read_mask(path, colours="rgb")) if "mask" in path else read_image
        peak(read, path)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_per_pixel(tmp_path: Path) -> None:
    """Pillow holds 4 bytes per pixel of a colour image; a copy of it is made only to turn or convert it."""
    side = 3000
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    most = {}  # bytes per pixel
    for name, mode, options, bytes_per_pixel in [
        ("rgb.png", "RGB", {}, 4),
        ("rgb.jpg", "RGB", {}, 4),
        ("turned.jpg", "RGB", {"exif": exif}, 8),
        ("rgba.png", "RGBA", {}, 7),
        ("key.png", "RGB", {"transparency": (1, 2, 3)}, 7),
        ("la.png", "LA", {}, 7),
        ("palette.png", "P", {"transparency": 0}, 7),
        ("deep.png", "I;16", {}, 5),
        ("deep.pgm", "I", {}, 6),
        ("mask.png", "L", {}, 2),
        ("deep_mask.png", "I;16", {}, 4),
        ("colour_mask.png", "RGB", {}, 7),
        ("palette_mask.png", "P", {}, 4),
    ]:
        Image.new(mode, (side, side)).save(tmp_path / name, **options)
        most[tmp_path / name] = bytes_per_pixel
    command = [sys.executable, "-c", PEAKS, tmp_path / "small.png", *most]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = map(int, done.stdout.split())
    spare = 20_000_000  # for tiles and for the buffers of decoders
    for path, peak in zip(most, peaks, strict=True):
        assert peak <= most[path] * side**2 + spare, f"{path.name}: {peak / side**2:.1f} bytes per pixel"
        assert peak > most[path] * side**2 / 2, f"{path.name}: not measured"
