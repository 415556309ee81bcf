"""Datasets, safe decoding and loading of images."""

from visualtokens.data.augment import PRESETS, Augment
from visualtokens.data.bad_images import BadImages
from visualtokens.data.base import ImageDataset, Split
from visualtokens.data.catalog import open_dataset
from visualtokens.data.decode import BadImage, read_image
from visualtokens.data.loader import Batch, Loader, create_loader
from visualtokens.data.preprocess import Preprocess
from visualtokens.data.scenes import DigitScenes, Scene

__all__ = [
    "PRESETS",
    "Augment",
    "BadImage",
    "BadImages",
    "Batch",
    "DigitScenes",
    "ImageDataset",
    "Loader",
    "Preprocess",
    "Scene",
    "Split",
    "create_loader",
    "open_dataset",
    "read_image",
]
