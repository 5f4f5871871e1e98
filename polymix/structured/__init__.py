"""Linear maps with structure, on either side of X: apply, transpose, `dense()`, cost; one file a family."""

from polymix.structured.base import Site, StructuredMap
from polymix.structured.compose import Identity, Prefixed, Product, Sum, Transposed
from polymix.structured.conv import DepthwiseConv
from polymix.structured.cost import Cost, Op
from polymix.structured.dense import BlockDiagonal, Dense
from polymix.structured.fanout import Fanout
from polymix.structured.low_rank import LowRank, Mean, RankOne
from polymix.structured.monarch import Monarch
from polymix.structured.registry import create_map, list_maps, token_map
from polymix.structured.sparse import Banded, Diagonal, Sparse
from polymix.structured.toeplitz import Circulant, Toeplitz

__all__ = [
    "Banded", "BlockDiagonal", "Circulant", "Cost", "Dense", "DepthwiseConv", "Diagonal", "Fanout", "Identity",
    "LowRank", "Mean", "Monarch", "Op", "Prefixed", "Product", "RankOne", "Site", "Sparse", "StructuredMap", "Sum",
    "Toeplitz", "Transposed", "create_map", "list_maps", "token_map",
]  # fmt: skip
