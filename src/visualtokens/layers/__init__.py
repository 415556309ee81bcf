"""Modules made of the operations."""

from visualtokens.layers.cluster_count import set_clusters
from visualtokens.layers.clustering import (
    Clustering,
    ConvClustering,
    DepthwiseClustering,
    LinearClustering,
    MLPClustering,
    make_clustering,
)
from visualtokens.layers.conv_ffn import ConvFFN
from visualtokens.layers.conv_norm import PixelConv, TokenConv
from visualtokens.layers.paca import PaCaAttention
from visualtokens.layers.projector import Projector
from visualtokens.layers.residual_conv import ResidualConv
from visualtokens.layers.self_attention import SelfAttention
from visualtokens.layers.super_token_attention import SuperTokenAttention
from visualtokens.layers.token_mixers import TokenGraphConv, TokenLinear, TokenTransformer
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
    "set_clusters",
]
