"""Modules made of the operations."""

from visualtokens.layers.paca import ConvClustering, PaCaAttention

__all__ = ["ConvClustering", "PaCaAttention"]
