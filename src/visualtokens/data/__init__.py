"""Datasets, safe decoding, augmentation and loading of images."""

from typing import TYPE_CHECKING

from visualtokens.lazy import lazy_names

if TYPE_CHECKING:
    from visualtokens.data.base import (
        Encoded,
        ImageDataset,
        ImageStream,
        Share,
        Split,
        derive_seed,
        generator,
    )
    from visualtokens.data.batch import BadImages, Batch
    from visualtokens.data.catalog import open_dataset, open_detection, open_segmentation
    from visualtokens.data.decode import BadImage, read_image
    from visualtokens.data.inspection import DataReport, Splits, check, open_splits
    from visualtokens.data.loader import Loader, create_loader
    from visualtokens.data.scenes import DigitScenes, Scene
    from visualtokens.data.transforms import PRESETS, Augment, Mix, Preprocess

__all__ = [
    "PRESETS",
    "Augment",
    "BadImage",
    "BadImages",
    "Batch",
    "DataReport",
    "DigitScenes",
    "Encoded",
    "ImageDataset",
    "ImageStream",
    "Loader",
    "Mix",
    "Preprocess",
    "Scene",
    "Share",
    "Split",
    "Splits",
    "check",
    "create_loader",
    "derive_seed",
    "generator",
    "open_dataset",
    "open_detection",
    "open_segmentation",
    "open_splits",
    "read_image",
]

# Predicting with exported models needs no torch, and so imports parts of this package only.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "PRESETS": "visualtokens.data.transforms:",
        "Augment": "visualtokens.data.transforms:",
        "BadImage": "visualtokens.data.decode:",
        "BadImages": "visualtokens.data.batch:",
        "Batch": "visualtokens.data.batch:",
        "DataReport": "visualtokens.data.inspection:",
        "DigitScenes": "visualtokens.data.scenes:",
        "Encoded": "visualtokens.data.base:",
        "ImageDataset": "visualtokens.data.base:",
        "ImageStream": "visualtokens.data.base:",
        "Loader": "visualtokens.data.loader:",
        "Mix": "visualtokens.data.transforms:",
        "Preprocess": "visualtokens.data.preprocess:",
        "Scene": "visualtokens.data.scenes:",
        "Share": "visualtokens.data.walk:",
        "Split": "visualtokens.data.base:",
        "Splits": "visualtokens.data.inspection:",
        "check": "visualtokens.data.inspection:",
        "create_loader": "visualtokens.data.loader:",
        "derive_seed": "visualtokens.data.base:",
        "generator": "visualtokens.data.base:",
        "open_dataset": "visualtokens.data.catalog:",
        "open_detection": "visualtokens.data.catalog:",
        "open_segmentation": "visualtokens.data.catalog:",
        "open_splits": "visualtokens.data.inspection:",
        "read_image": "visualtokens.data.decode:",
    },
)
