"""Example photos: digits for a model of digits, otherwise the photos that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from visualtokens.data import open_dataset
from visualtokens.tasks import Checkpoint

DIGITS = [str(digit) for digit in range(10)]
COUNT = 4


def is_of_digits(checkpoint: Checkpoint) -> bool:
    """Return whether a model was trained on handwritten digits, as that of the demo."""
    return list(checkpoint.classes) == DIGITS


def write_examples(folder: Path, checkpoint: Checkpoint) -> list[Path]:
    """Write a few photos of the kind that a model was made for, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_of_digits(checkpoint):
        digits = open_dataset("digits", "val")
        images = {f"digit_{digits[i][1]}.png": digits[i][0] for i in range(COUNT)}
    else:
        from sklearn.datasets import load_sample_images

        found = load_sample_images()
        images = {
            Path(name).name: Image.fromarray(pixels)
            for name, pixels in zip(found.filenames, found.images, strict=True)
        }
    files = []
    for name, image in images.items():
        file = folder / name
        image.save(file)
        files.append(file)
    return files
