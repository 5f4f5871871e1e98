"""Names that moved."""

from polymix.structured.base import init_
from polymix.structured.dense import BlockDiagonal, Dense, linear

__all__ = ["BlockDiagonal", "Dense", "init_", "linear"]
