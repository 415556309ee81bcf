"""Predictions for large amounts of images: finding them, batches, and files of results. Needs no torch."""

from visualtokens.predict.batches import Outcome, predict_images
from visualtokens.predict.formats import make_format
from visualtokens.predict.images import Images, find_images
from visualtokens.predict.results import Merged, Results

__all__ = ["Images", "Merged", "Outcome", "Results", "find_images", "make_format", "predict_images"]
