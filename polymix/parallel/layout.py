"""Which process holds which tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polymix.errors import check_choice
from polymix.parallel.collectives import Processes

Group = dist.ProcessGroup | DeviceMesh
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


def padded(x: Tensor, length: int) -> Tensor:
    """x (B, n, …) with zeros behind it, up to so many tokens."""
    wide = x.new_zeros(x.shape[0], length, *x.shape[2:])
    wide[:, : x.shape[1]] = x
    return wide


def joined(own: Sequence[Tensor], parts: list[Part]) -> Tensor:
    """The whole (B, N, …) from the tokens of each process (B, n, …), which may have padding behind them."""
    return torch.cat([own[p.rank][:, p.offset : p.offset + p.last - p.first] for p in parts], dim=1)


def shard(x: Tensor, group: Group, *, order: str = "contiguous", dim: int = 1) -> Tensor:
    """This process's tokens of a whole batch: of tokens, masks, segments, positions or labels alike.

    Args:
        group: the process group that shares the sequence, or its mesh.
        dim: of the tokens.
    Raises: OptionError for an unknown order.
    """
    check_choice("order", order, ORDERS)
    group = group_of(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if order == "contiguous":
        return x.tensor_split(size, dim)[rank]
    parts = x.tensor_split(2 * size, dim)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]), dim)


def gather(x: Tensor, group: Group, *, order: str = "contiguous", dim: int = 1) -> Tensor:
    """The whole of what each process has a part of; the parts may differ in length, and be empty.

    Gradients of all processes add up. Where each computes the same loss from the whole, divide it by their number.
    """
    check_choice("order", order, ORDERS)
    processes = Processes(group_of(group))
    rows = x.movedim(dim, 0)
    lengths = [row[0] for row in processes.agree((len(rows),), None, x.device)]
    whole = joined(processes.collect(rows[None], lengths), parts_of(lengths, order))
    return whole[0].movedim(0, dim)


def positions(length: int, group: Group, *, order: str = "contiguous", device: Any = None) -> Tensor:
    """The places (n) in the whole of this process's tokens, whose number is `length`: for tables and rotary angles."""
    check_choice("order", order, ORDERS)
    processes = Processes(group_of(group))
    lengths = [row[0] for row in processes.agree((length,), None, torch.device(device or "cpu"))]
    own = sorted((p for p in parts_of(lengths, order) if p.rank == processes.rank), key=lambda p: p.offset)
    return torch.cat([torch.arange(p.first, p.last, device=device) for p in own])


def mean_loss(total: Tensor, count: Tensor | int, group: Group, *, averaged: bool = False) -> Tensor:
    """The mean over the tokens of all processes: its value on each, with the gradients of this one's tokens.

        (Σ_p total_p) / (Σ_p count_p)

    Args:
        total: the sum of the losses of this process's tokens; 0 if it has none, but with gradients.
        count: their number. A process may have none.
        group: all processes whose tokens count, such as the flattened ("dp", "cp") mesh.
        averaged: gradients will be averaged over `group`, as DDP and FSDP do, and not added up.
    """
    processes = Processes(group_of(group))
    sums = torch.stack((total.detach().double(), torch.as_tensor(count, device=total.device).double()))
    whole, tokens = processes.total(sums).unbind()
    tokens = tokens.clamp_min(1)
    own = total * ((processes.size if averaged else 1) / tokens).to(total.dtype)
    return own + ((whole / tokens).to(total.dtype) - own).detach()


def group_of(group: Group) -> dist.ProcessGroup:
    """The process group of a mesh, or the group itself."""
    return group.get_group() if isinstance(group, DeviceMesh) else group
