"""Modules built from the operations in :mod:`visualtokens.ops`."""

from visualtokens.layers.attention import SuperTokenAttention
from visualtokens.layers.convolutions import ConvFFN, PixelConv, ResidualConv, TokenConv
from visualtokens.layers.paca import Clustering, PaCaAttention, make_clustering
from visualtokens.layers.token_mixers import Projector, TokenGraphConv, TokenLinear, TokenTransformer
from visualtokens.layers.tokenizers import (
    ClusterTokenizer,
    FilterTokenizer,
    PoolTokenizer,
    RecurrentTokenizer,
    register_tokenizer,
)

__all__ = [
    "ClusterTokenizer",
    "Clustering",
    "ConvFFN",
    "FilterTokenizer",
    "PaCaAttention",
    "PixelConv",
    "PoolTokenizer",
    "Projector",
    "RecurrentTokenizer",
    "ResidualConv",
    "SuperTokenAttention",
    "TokenConv",
    "TokenGraphConv",
    "TokenLinear",
    "TokenTransformer",
    "make_clustering",
    "register_tokenizer",
]
