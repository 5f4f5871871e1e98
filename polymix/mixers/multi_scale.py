"""Multi-scale attention (EfficientViT): further heads on smoothed copies of the queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError, check_grid_option, check_int
from polymix.mixers.checks import check_grid
from polymix.mixers.inheritance import Smoothing, Sources, add_sources, copy_map
from polymix.structured.base import init_
from polymix.structured.conv import conv_after_prefix_matrix
from polymix.structured.cost import Op


class MultiScale(nn.Module):
    """Smoothed copies of [Q | K | V]: for each size s an s × s depthwise convolution, then a d × d map per head.

        [Q_s | K_s | V_s] = conv_s([Q | K | V]) W_s,   W_s block-diagonal with 3 · heads blocks

    Each copy brings as many heads as there were. Tokens in front of the grid are 1 × 1 maps of their own.

    Shapes: (B, N, 3D) -> three of (B, (1 + S) heads, N, d) for S scales; the first heads are those of Q, K and V.
    """

    def __init__(self, dim: int, heads: int, scales: Sequence[int], bias: bool, **kw: Any) -> None:
        super().__init__()
        self.heads, self.scales, wide = heads, tuple(scales), 3 * dim
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(wide, wide, size, padding=size // 2, groups=wide, bias=bias, **kw),
                nn.Conv2d(wide, wide, 1, groups=3 * heads, bias=bias, **kw),
            )
            for size in self.scales
        )
        for conv in self.modules():
            if isinstance(conv, nn.Conv2d):
                init_(conv.weight, conv.weight[0].numel())
                if conv.bias is not None:
                    nn.init.zeros_(conv.bias)

    def forward(self, qkv: Tensor, grid: tuple[int, ...], prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.transpose(1, 2)
        copies = torch.cat([qkv, *(smooth(branch, qkv, grid, prefix) for branch in self.branches)], dim=1)
        parts = copies.unflatten(1, (1 + len(self.scales), 3, self.heads, -1)).transpose(-1, -2)
        q, k, v = (part.flatten(1, 2) for part in parts.unbind(2))
        return q, k, v

    @torch.no_grad()
    def inherit(self, smoothing: Sequence[Smoothing]) -> Sources:
        """Copy the convolutions and maps of an attention's own branches, which have the same sizes."""
        sources: Sources = {}
        for i, (branch, theirs) in enumerate(zip(self.branches, smoothing, strict=True)):
            assert isinstance(branch, nn.Sequential)
            for j, (layer, source) in enumerate(zip(branch.children(), (theirs.conv, theirs.mix), strict=True)):
                assert isinstance(layer, nn.Conv2d)
                add_sources(sources, f"branches.{i}.{j}", copy_map(source, layer.weight, layer.bias))
        return sources

    def named_matrices(self, grid: tuple[int, ...], prefix: int) -> dict[str, list[Tensor | None]]:
        """For each scale M (3D, N, N) and W_M (3D, 3D), which act on [Q | K | V], and their biases b_M and c_M."""
        matrices: dict[str, list[Tensor | None]] = {"M": [], "b_M": [], "W_M": [], "c_M": []}
        for branch in self.branches:
            conv, mix = branch.children()
            assert isinstance(conv, nn.Conv2d) and isinstance(mix, nn.Conv2d)
            matrices["M"].append(smoothing_matrix(conv.weight, grid, prefix))
            matrices["b_M"].append(conv.bias)
            matrices["W_M"].append(torch.block_diag(*mix.weight.flatten(1).unflatten(0, (3 * self.heads, -1)).mT))
            matrices["c_M"].append(mix.bias)
        return matrices


def smooth(branch: nn.Module, x: Tensor, grid: tuple[int, ...], prefix: int) -> Tensor:
    """Apply a branch to x (B, C, N), whose tokens after the first `prefix` lie on the grid."""
    y = branch(x[:, :, prefix:].unflatten(2, grid)).flatten(2)
    if not prefix:
        return y
    alone = branch(x[:, :, :prefix].transpose(1, 2).flatten(0, 1)[..., None, None])
    return torch.cat((alone.flatten(1).unflatten(0, (-1, prefix)).transpose(1, 2), y), dim=2)


def smoothing_matrix(weight: Tensor, grid: tuple[int, ...], prefix: int) -> Tensor:
    """The depthwise convolution of a branch, weight (C, 1, s, s), as matrices (C, N, N) over all tokens."""
    whole, centre = conv_after_prefix_matrix(weight, grid, prefix).clone(), weight.shape[-1] // 2
    for j in range(prefix):
        whole[:, j, j] = weight[:, 0, centre, centre]
    return whole


def smoothing_ops(n: int, dim: int, heads: int, scales: Sequence[int], grid: tuple[int, ...], prefix: int) -> list[Op]:
    """The convolutions and maps of the branches, for `cost_ops`."""
    ops: list[Op] = []
    for size in scales:
        ops += [Op("depthwise", (1, 1), (size, size), 3 * dim)] * prefix
        ops.append(Op("depthwise", grid, (size, size), 3 * dim))
        ops.append(Op("linear", (n, 3 * dim, 3 * dim, 3 * heads)))
    return ops


def scale_grid(mixer: Any, n: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
    """The grid of n tokens for the branches, as given or as built. Raises ShapeError if there is none."""
    return called_grid(check_grid(mixer, grid, n - mixer.config.num_prefix_tokens))


def called_grid(grid: tuple[int, ...] | None) -> tuple[int, ...]:
    """The grid of a call. Raises ShapeError if it has none."""
    if grid is None:
        cure = "Pass it: scales need rows and columns."
        raise ShapeError("grid", None, "grid=(H, W) in the call or the options", cure)
    return grid


def check_scales(scales: Any, grid: tuple[int, ...] | None, num_prefix_tokens: int) -> None:
    """Check the options of a mixer with scales. Raises OptionError."""
    check_int("num_prefix_tokens", num_prefix_tokens, 0)
    if not isinstance(scales, (tuple, list)):
        raise OptionError("scales", repr(scales), "a tuple of odd sizes", "Pass scales=(5,), for example.")
    for size in scales:
        check_int("scales", size, 1)
        if size % 2 == 0:
            raise OptionError("scales", size, "odd sizes", f"Pass {size + 1}, for example.")
    if grid is not None:
        check_grid_option(grid, (2,))
    if not scales and (grid is not None or num_prefix_tokens):
        got = f"() with grid={grid}, num_prefix_tokens={num_prefix_tokens}"
        raise OptionError("scales", got, "scales, as positions do not matter without them", "Leave the others out.")
