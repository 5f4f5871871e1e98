"""Blocks within which several processes share a sequence: whole tokens in front of them and behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polymix.errors import CapabilityError, ShapeError
from polymix.mixers.mixer import TokenMixer
from polymix.parallel.collectives import Processes
from polymix.parallel.layout import shard
from polymix.parallel.style import parallelize


def split_blocks(blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Share the sequence x (B, N, D), the first argument of each block, among the processes of a mesh.

    Every process calls the first block with the same whole x and gets the whole from the last one. In between it has
    its own tokens; on a grid, whole rows. All processes compute what is in front of the blocks and behind them; so each
    must begin its backward pass with its part of the loss, which is divided by the number of processes.

    Raises:
        CapabilityError: a mixer cannot be split.
    """
    group = mesh.get_group()
    ends = Ends(Processes(group))
    for block in blocks:
        parallelize(block, mesh)
        for part in block.modules():
            ends.drops |= isinstance(part, nn.Dropout) and part.p > 0
            if isinstance(part, TokenMixer):
                ends.take(part)
    blocks[0].register_forward_pre_hook(ends.cut, with_kwargs=True)
    blocks[-1].register_forward_hook(ends.join)


class Ends:
    """The two ends of shared blocks. grid: of mixers that need whole rows. row: tokens that stay together."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.row, self.length = processes, 1, 0
        self.whole_rows, self.drops, self.grid = False, False, (0,)

    def take(self, mixer: TokenMixer) -> None:
        """Note what a mixer needs."""
        config = mixer.config
        if mixer.capabilities.sequence == "halo":
            self.whole_rows, self.grid = True, config.built_grid or self.grid

    def cut(self, block: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        x = arguments[0] if arguments else None
        if self.whole_rows:
            self.row = math.prod((options.get("grid") or self.grid)[1:])
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] % self.row:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError("x", got, f"(B, N, D) with whole rows of {self.row} tokens", "")
        self.length = x.shape[1]
        if self.drops and block.training and self.length // self.row % self.processes.size:
            got = f"dropout in {self.length} tokens on {self.processes.size} processes"
            raise CapabilityError("dropout", got, "parts of one length, or 0", "Or the processes would draw apart.")
        own = shard(x.unflatten(1, (-1, self.row)), self.processes.group).flatten(1, 2)
        return (own, *arguments[1:]), options

    def join(self, block: nn.Module, arguments: tuple[Any, ...], own: Tensor) -> Tensor:
        rows, size = self.length // self.row, self.processes.size
        lengths = [(rows // size + (rank < rows % size)) * self.row for rank in range(size)]
        padded = own.new_zeros(own.shape[0], max(lengths), own.shape[2])
        padded[:, : own.shape[1]] = own
        parts = self.processes.gather(padded)
        return torch.cat([parts[rank, :, :length] for rank, length in enumerate(lengths)], dim=1)
