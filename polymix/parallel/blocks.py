"""Blocks within which several processes share a sequence: whole tokens in front of them and behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polymix.errors import ShapeError
from polymix.mixers.mixer import TokenMixer
from polymix.parallel.layout import gather, shard
from polymix.parallel.style import parallelize


def split_blocks(blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Share the sequence x (B, N, D), the first argument of each block, among the processes of a mesh.

    Every process calls the first block with the same whole x and gets the whole from the last one. In between it has
    its own tokens; on a grid, whole rows. All processes compute what is in front of the blocks and behind them; so each
    must begin its backward pass with its part of the loss, which is divided by the number of processes.

    Raises:
        CapabilityError: a mixer cannot be split.
    """
    beginning = _Beginning(mesh)
    for block in blocks:
        parallelize(block, mesh)
        for part in block.modules():
            if isinstance(part, TokenMixer) and part.capabilities.sequence == "halo":
                beginning.whole_rows, beginning.grid = True, part.config.built_grid or beginning.grid
    blocks[0].register_forward_pre_hook(beginning.cut, with_kwargs=True)
    blocks[-1].register_forward_hook(lambda block, arguments, own: gather(own, mesh))


class _Beginning:
    """The beginning of shared blocks. grid: of mixers that need whole rows of it; a call may bring another."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.whole_rows = mesh, False
        self.grid: tuple[int, ...] = (0,)

    def cut(self, block: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        x = arguments[0] if arguments else None
        row = math.prod((options.get("grid") or self.grid)[1:]) if self.whole_rows else 1
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] % row:
            raise ShapeError("x", getattr(x, "shape", type(x)), f"(B, N, D) with whole rows of {row} tokens", "")
        return (shard(x.unflatten(1, (-1, row)), self.mesh).flatten(1, 2), *arguments[1:]), options
