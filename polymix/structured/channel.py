"""Channel maps: right matrices (D × D'), X B + b, that act on every token alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def init_(weight: Tensor, fan_in: int, gain: float = 1.0) -> None:
    """Normal with variance gain² / fan_in: unit-variance inputs give outputs of variance gain²."""
    nn.init.normal_(weight, std=gain * fan_in**-0.5)


class Dense(nn.Linear):
    """A dense map, nn.Linear with an init that keeps variance and zero biases. Cost N · D · D' multiply-adds."""

    blocks = 1

    def reset_parameters(self) -> None:
        init_(self.weight, self.in_features)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def dense(self) -> Tensor:
        """The matrix as it acts on row tokens, (D, D')."""
        return self.weight.t()


class BlockDiagonal(nn.Module):
    """`blocks` independent dense maps side by side: block g of the output reads block g of the input alone.

    weight (blocks, D'/blocks, D/blocks). Cost N · D · D' / blocks multiply-adds.
    """

    def __init__(self, in_features: int, out_features: int, blocks: int, bias: bool = True, **kw: Any) -> None:
        super().__init__()
        self.in_features, self.out_features, self.blocks = in_features, out_features, blocks
        self.weight = nn.Parameter(torch.empty(blocks, out_features // blocks, in_features // blocks, **kw))
        self.bias = nn.Parameter(torch.empty(out_features, **kw)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_(self.weight, self.weight.shape[-1])
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (self.blocks, -1)).transpose(-2, -3)  # (B, blocks, N, D / blocks)
        y = (blocks @ self.weight.transpose(-1, -2)).transpose(-2, -3).flatten(-2)
        return y if self.bias is None else y + self.bias

    def dense(self) -> Tensor:
        return torch.block_diag(*self.weight.transpose(-1, -2))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, blocks={self.blocks}, bias={self.bias is not None}"


class Identity(nn.Identity):
    """No map at all: no parameters, no bias, no cost."""

    bias = None

    def dense(self) -> Tensor | None:
        return None


def linear(in_features: int, out_features: int, blocks: int = 1, bias: bool = True, **kw: Any) -> Dense | BlockDiagonal:
    """Dense, or block-diagonal where there is more than one block."""
    if blocks == 1:
        return Dense(in_features, out_features, bias, **kw)
    return BlockDiagonal(in_features, out_features, blocks, bias, **kw)


def channel_map(kind: str, dim: int, heads: int, bias: bool, **kw: Any) -> Dense | BlockDiagonal | Identity:
    """A channel map by its name in CHANNEL_MAPS, in `heads` independent blocks."""
    return Identity() if kind == "identity" else linear(dim, dim, heads, bias, **kw)


CHANNEL_MAPS = ("dense", "identity")


class Fanout(nn.Module):
    """Several channel maps of one input, Y_i = X B_i + b_i; those that are dense share a single product.

    The shared map's output is laid out (heads, maps, D / heads) so that its blocks are the heads.
    """

    def __init__(self, kinds: tuple[str, ...], dim: int, heads: int, bias: bool, **kw: Any) -> None:
        super().__init__()
        self.kinds, self.dim, self.heads = kinds, dim, heads
        self.count = kinds.count("dense")
        self.maps = linear(dim, self.count * dim, heads, bias, **kw) if self.count else None

    def forward(self, x: Tensor) -> list[Tensor]:
        dense: list[Tensor] = []
        if self.maps is not None:
            split = self.maps(x).unflatten(-1, (self.heads, self.count, -1))
            dense = [part.flatten(-2) for part in split.unbind(-2)]
        rest = iter(dense)
        return [next(rest) if kind == "dense" else x for kind in self.kinds]

    def scale_(self, index: int, gain: float) -> None:
        """Multiply the weight of map `index` by `gain` (used once, by the init of its mixer)."""
        if self.kinds[index] == "dense":
            assert self.maps is not None
            with torch.no_grad():
                place = self.kinds[:index].count("dense")
                self.maps.weight.view(self.heads, self.count, -1, self.dim // self.heads)[:, place] *= gain

    def dense(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """Matrix (D, D) and bias (D) of map `index`; None for an identity."""
        if self.kinds[index] != "dense":
            return None, None
        assert self.maps is not None
        place = self.kinds[:index].count("dense")
        weight = self.maps.weight.view(self.heads, self.count, -1, self.dim // self.heads)[:, place]
        bias = None if self.maps.bias is None else self.maps.bias.view(self.heads, self.count, -1)[:, place].flatten()
        return torch.block_diag(*weight.transpose(-1, -2)), bias


__all__ = ["CHANNEL_MAPS", "BlockDiagonal", "Dense", "Fanout", "Identity", "channel_map", "init_", "linear"]
