"""Datasets, safe decoding and loading of images."""

from visualtokens.data.augment import PRESETS, Augment
from visualtokens.data.bad_images import BadImages
from visualtokens.data.base import Encoded, ImageDataset, ImageStream, Split
from visualtokens.data.batch import Batch
from visualtokens.data.catalog import open_dataset
from visualtokens.data.decode import BadImage, read_image
from visualtokens.data.epochs import Loader
from visualtokens.data.loader import create_loader
from visualtokens.data.mix import Mix
from visualtokens.data.preprocess import Preprocess
from visualtokens.data.randomness import derive_seed, generator
from visualtokens.data.scenes import DigitScenes, Scene
from visualtokens.data.share import Share

__all__ = [
    "PRESETS",
    "Augment",
    "BadImage",
    "BadImages",
    "Batch",
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
    "create_loader",
    "derive_seed",
    "generator",
    "open_dataset",
    "read_image",
]
