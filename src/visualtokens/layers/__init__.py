"""Modules made of the operations."""

from visualtokens.layers.conv_norm import PixelConv, TokenConv
from visualtokens.layers.paca import ConvClustering, PaCaAttention
from visualtokens.layers.projector import Projector
from visualtokens.layers.token_mixers import TokenGraphConv, TokenLinear, TokenTransformer
from visualtokens.layers.tokenizers import (
    ClusterTokenizer,
    FilterTokenizer,
    PoolTokenizer,
    RecurrentTokenizer,
)

__all__ = [
    "ClusterTokenizer",
    "ConvClustering",
    "FilterTokenizer",
    "PaCaAttention",
    "PixelConv",
    "PoolTokenizer",
    "Projector",
    "RecurrentTokenizer",
    "TokenConv",
    "TokenGraphConv",
    "TokenLinear",
    "TokenTransformer",
]
