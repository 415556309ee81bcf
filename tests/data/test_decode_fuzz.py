"""Damaged files of every format: the outcome is an RGB image or BadImage, never another error."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from visualtokens.data import BadImage, read_image

DAMAGED_FILES = 120  # per sample


def encode(image: Image.Image, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, **options)
    return out.getvalue()


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


def damage(whole: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return whole[: rng.randrange(1, len(whole))]
    data = bytearray(whole)
    reach = len(data) if rng.random() < 0.5 else min(len(data), 200)  # headers are where it gets odd
    for _ in range(rng.choice((1, 1, 2, 4, 10))):
        data[rng.randrange(reach)] = rng.choice((0, 255, rng.randrange(256), 1 << rng.randrange(8)))
    return bytes(data)


@pytest.mark.filterwarnings("ignore")  # Pillow warns of much of this damage too
@pytest.mark.parametrize("name", samples())
def test_damaged_files(name: str, tmp_path: Path) -> None:
    whole, rng, path = samples()[name], random.Random(name), tmp_path / name
    path.write_bytes(whole)
    assert read_image(path).mode == "RGB"
    refused: list[BadImage] = []
    for _ in range(DAMAGED_FILES):
        path.write_bytes(damage(whole, rng))
        try:
            image = read_image(path)
        except BadImage as bad:
            refused.append(bad)
        else:
            assert image.mode == "RGB"
            assert min(image.size) >= 1
    assert refused  # the damage was real
    assert all(bad.path == str(path) and bad.reason for bad in refused)
