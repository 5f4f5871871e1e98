"""Linear maps with structure: apply, `dense()`, cost. One file a side: channel maps, token maps."""

from polymix.structured.channel import BlockDiagonal, Dense, Fanout, Identity
from polymix.structured.cost import Cost, Op
from polymix.structured.token import DepthwiseConv

__all__ = ["BlockDiagonal", "Cost", "Dense", "DepthwiseConv", "Fanout", "Identity", "Op"]
