"""Modules made of the operations."""

from visualtokens.layers.attention import SelfAttention, SuperTokenAttention
from visualtokens.layers.convolutions import ConvFFN, PixelConv, ResidualConv, TokenConv
from visualtokens.layers.paca import (
    Clustering,
    ConvClustering,
    DepthwiseClustering,
    LinearClustering,
    MLPClustering,
    PaCaAttention,
    make_clustering,
)
from visualtokens.layers.token_mixers import Projector, TokenGraphConv, TokenLinear, TokenTransformer
from visualtokens.layers.tokenizers import (
    ClusterTokenizer,
    FilterTokenizer,
    PoolTokenizer,
    RecurrentTokenizer,
)

__all__ = [
    "ClusterTokenizer",
    "Clustering",
    "ConvClustering",
    "ConvFFN",
    "DepthwiseClustering",
    "FilterTokenizer",
    "LinearClustering",
    "MLPClustering",
    "PaCaAttention",
    "PixelConv",
    "PoolTokenizer",
    "Projector",
    "RecurrentTokenizer",
    "ResidualConv",
    "SelfAttention",
    "SuperTokenAttention",
    "TokenConv",
    "TokenGraphConv",
    "TokenLinear",
    "TokenTransformer",
    "make_clustering",
]
