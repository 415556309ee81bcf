"""Weights that the papers' authors released, under the names of this library's models."""

from visualtokens.convert.converter import Converted, convert

__all__ = ["Converted", "convert"]
