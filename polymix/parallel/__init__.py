"""One sequence on many processes: each holds some of its tokens, and mixers exchange states or edges."""

from polymix.parallel.collectives import guard
from polymix.parallel.layout import ORDERS, gather, mean_loss, positions, shard
from polymix.parallel.stream import Stream, stream
from polymix.parallel.style import SequenceParallel, alone, parallelize

__all__ = [
    "ORDERS", "SequenceParallel", "Stream", "alone", "gather", "guard", "mean_loss", "parallelize", "positions",
    "shard", "stream",
]  # fmt: skip
