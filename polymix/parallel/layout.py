"""Which process holds which tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from polymix.errors import check_choice

ORDERS = ("contiguous", "head_tail")


@dataclass(frozen=True)
class Part:
    """Neighbouring tokens on one process: first … last - 1 of the whole, which begin at `offset` of its own."""

    rank: int
    first: int
    last: int
    offset: int


def parts_of(lengths: list[int], order: str) -> list[Part]:
    """The parts of a sequence in its order, of processes with so many tokens each.

    "contiguous": process r holds the r-th part. "head_tail": of 2 P parts it holds r and 2 P - 1 - r, the first longer
    by at most one, as torch's context parallelism balances causal attention.
    """
    if order == "contiguous":
        pieces = [(rank, length, 0) for rank, length in enumerate(lengths)]
    else:
        pieces = [(rank, (length + 1) // 2, 0) for rank, length in enumerate(lengths)]
        pieces += [(rank, length // 2, (length + 1) // 2) for rank, length in reversed([*enumerate(lengths)])]
    parts, first = [], 0
    for rank, length, offset in pieces:
        parts.append(Part(rank, first, first + length, offset))
        first += length
    return parts


def shard(x: Tensor, group: dist.ProcessGroup, *, order: str = "contiguous", dim: int = 1) -> Tensor:
    """This process's tokens of a whole batch: of tokens, masks, positions or labels alike.

    Raises: OptionError for an unknown order.
    """
    check_choice("order", order, ORDERS)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if order == "contiguous":
        return x.tensor_split(size, dim)[rank]
    parts = x.tensor_split(2 * size, dim)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]), dim)
