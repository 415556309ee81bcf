"""Datasets, safe decoding, augmentation and loading of images."""

from visualtokens.data.base import Encoded, ImageDataset, ImageStream, Share, Split, derive_seed, generator
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
