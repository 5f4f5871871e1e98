"""Dense maps, and block-diagonal ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import check_divides, check_int
from polymix.ops import decode
from polymix.ops.decode import ACTIVATIONS, try_feed_forward, try_linear
from polymix.ops.shared.tensors import Linear
from polymix.structured.base import Grid, Site, StructuredMap, init_
from polymix.structured.cost import Op, linear_op


class Dense(StructuredMap, nn.Linear):  # type: ignore[misc]
    """A dense channel map of one group, with zero biases and an init that keeps the variance.

    It is an nn.Linear, so that tools that look for linear layers (quantisation, adapters) find it.

    Cost: N D D' multiply-adds.
    """

    kind = "dense"
    rectangular = True
    blocks = 1

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **kw: Any) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, **kw)
        self.site = Site("channel", in_features, in_features, out_features)

    def reset_parameters(self) -> None:
        init_(self.weight, self.in_features)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, grid: Grid = None, mask: Tensor | None = None, **kw: Any
    ) -> Tensor:
        return super().forward(x, grid, mask, **kw) if kw else decode.linear(x, self.weight, self.bias)

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        return v @ (self.weight if transposed else self.weight.t())

    def matrix(self, n: int, out: int) -> Tensor:
        return self.weight[None]

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        return [linear_op(rows, self)]

    def scale_(self, gain: float) -> bool:
        self.weight.data.mul_(gain)
        return True

    def extra_repr(self) -> str:
        return nn.Linear.extra_repr(self)


class BlockDiagonal(StructuredMap):
    """`blocks` independent dense maps in each group: block g of the output reads block g of the input.

    weight is (groups · blocks, out / blocks, in / blocks). With one block, each group has a dense map. Causal: the
    lower triangle.

    Cost: in · out / blocks multiply-adds per vector.
    """

    kind = "block_diagonal"
    rectangular = True
    causal_form = True

    def __init__(self, site: Site, *, blocks: int = 4, **kw: Any) -> None:
        super().__init__(site)
        check_int("blocks", blocks, 1)
        n, out = site.size or 0, site.out or 0
        for size in (n, out):
            check_divides("blocks", blocks, "the size of a block-diagonal map", size)
        self.blocks = site.groups * blocks
        self.in_features, self.out_features = site.groups * n, site.groups * out
        self.weight = nn.Parameter(torch.empty(self.blocks, out // blocks, n // blocks, **kw))
        init_(self.weight, n // blocks)
        if site.causal:  # row i keeps i + 1 entries
            rows = torch.arange(1, n // blocks + 1, device=self.weight.device)
            self.weight.data.mul_((n // blocks / rows).sqrt().to(self.weight)[:, None])

    @property
    def _weight(self) -> Tensor:
        return self.weight.tril() if self.site.causal else self.weight

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        weight = self._weight if transposed else self._weight.transpose(-1, -2)  # (G · blocks, in, out)
        if self.blocks == self.site.groups:
            return v @ weight
        v = v.unflatten(-1, (self.blocks // self.site.groups, -1)).transpose(-2, -3)  # (…, G, blocks, R, n / blocks)
        return (v @ weight.unflatten(0, (self.site.groups, -1))).transpose(-2, -3).flatten(-2)

    def matrix(self, n: int, out: int) -> Tensor:
        groups = self._weight.unflatten(0, (self.site.groups, -1))
        return torch.stack([torch.block_diag(*group) for group in groups])

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        if self.site.side == "channel":
            return [linear_op(rows, self)]
        _, outside, inside = self.weight.shape
        return [Op("matmul", (self.blocks, rows, inside, outside))]

    def scale_(self, gain: float) -> bool:
        self.weight.data.mul_(gain)
        return True

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, blocks={self.blocks}, bias={self.bias is not None}"


def affine(layer: Any) -> Linear:
    """The weight and the bias of a dense or block-diagonal layer.

    For a layer that wraps one of ours, such as LoRA, they are computed by its forward on zero and the unit vectors.
    """
    if isinstance(layer, (Dense, BlockDiagonal)):
        return layer.weight, layer.bias
    units = torch.eye(layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype)
    bias = layer(units.new_zeros(1, layer.in_features))
    return (layer(units) - bias).t(), bias[0]


def apply_linear(layer: nn.Module, x: Tensor, activation: str = "identity", factor: Tensor | None = None) -> Tensor:
    """act(layer(x)) ⊙ f for a linear layer, by `decode.linear` where its kernel runs.

    The layer itself is called if something wraps or observes it (LoRA, hooks, parametrizations, offloading).
    """
    if _is_plain(layer):
        y = try_linear(x, layer.weight, layer.bias, activation, factor)  # type: ignore[arg-type]
        if y is not None:
            return y
    y = ACTIVATIONS[activation](layer(x))
    return y if factor is None else y * factor


def apply_feed_forward(
    up: nn.Module, down: nn.Module, x: Tensor, activation: str, gate: nn.Module | None = None
) -> Tensor:
    """down(act(up(x))), or down(act(gate(x)) ⊙ up(x)) with a gate: one kernel for a few rows, where it runs.

    Layers that something wraps or observes are called, as in `apply_linear`.
    """
    layers = (up, down) if gate is None else (up, down, gate)
    if all(map(_is_plain, layers)):
        maps = [(layer.weight, layer.bias) for layer in layers]
        y = try_feed_forward(x, maps[0], maps[1], activation, *maps[2:])  # type: ignore[arg-type]
        if y is not None:
            return y
    if gate is None:
        return apply_linear(down, apply_linear(up, x, activation))
    return apply_linear(down, apply_linear(gate, x, activation, apply_linear(up, x)))


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a linear map that nothing wraps or observes."""
    return type(layer) in (nn.Linear, Dense) and not (layer._forward_hooks or layer._forward_pre_hooks)


def linear(in_features: int, out_features: int, blocks: int = 1, bias: bool = True, **kw: Any) -> Dense | BlockDiagonal:
    """A channel map: dense for one block, else block-diagonal."""
    if blocks == 1:
        return Dense(in_features, out_features, bias, **kw)
    site = Site("channel", in_features, in_features // blocks, out_features // blocks, groups=blocks)
    layer = BlockDiagonal(site, blocks=1, **kw)
    if bias:
        layer.add_bias(**kw)
    return layer


__all__ = ["BlockDiagonal", "Dense", "affine", "apply_feed_forward", "apply_linear", "linear"]
