"""One sequence on many processes: each holds some of its tokens, and mixers exchange states or edges."""

from polymix.parallel.layout import ORDERS, shard
from polymix.parallel.style import SequenceParallel, parallelize

__all__ = ["ORDERS", "SequenceParallel", "parallelize", "shard"]
