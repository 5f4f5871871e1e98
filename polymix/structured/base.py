"""StructuredMap: a linear map with structure, on the token side or the channel side of X (N × D)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError
from polymix.ops.shared.tensors import Counts, Shape, accumulator
from polymix.structured.cost import Cost, Op, cost_of

Grid = tuple[int, ...] | None
_LONGER = "Build it for the longer grid, or use depthwise, toeplitz, circulant or mean."


@dataclass(frozen=True)
class Site:
    """Where a map acts: on which axis of (B, N, D), of what length, and in how many groups of channels.

    Args:
        side: "token" (A X) or "channel" (X B).
        channels: D.
        size: number of entries that the map reads: N on the token side (None for any number), D / groups on the
            channel
            side. out: number of entries that it writes.
        groups: number of groups of channels, each with its own matrix (the heads of a mixer).
        causal: a token reads only itself and the past.
        cross: the map connects two sequences, whose lengths may differ.
        kernel: default size of a convolution's kernel, one number per axis of the grid.
    """

    side: Literal["token", "channel"]
    channels: int
    size: int | None = None
    out: int | None = None
    groups: int = 1
    causal: bool = False
    cross: bool = False
    kernel: tuple[int, ...] = (11,)

    @property
    def square(self) -> bool:
        return not self.cross and self.size == self.out


def init_(weight: Tensor, fan_in: int, gain: float = 1.0) -> None:
    """Normal with variance gain² / fan_in, so that inputs of variance 1 give outputs of variance gain²."""
    nn.init.normal_(weight, std=gain * fan_in**-0.5)


class StructuredMap(nn.Module, ABC):
    """y = M v + b along one axis. M itself is built only by `dense`.

    On the token side A = M acts on every channel, (A X)_i = Σ_j M_ij X_j. On the channel side B = Mᵀ acts on row
    tokens, X B. With G groups, M is (G, out, in): a matrix for each D / G neighbouring channels.

    A structure defines how M and Mᵀ multiply vectors (`multiply`), what M is (`matrix`), and its cost (`vector_ops`).
    This class does layout, bias, padding, and sequences shorter than the weights, which use the leading part of M.
    """

    kind: ClassVar[str]
    rectangular: ClassVar[bool] = False  # can read one length and write another
    fixed: ClassVar[bool] = True  # weights belong to positions, so there are at most `size`
    causal_form: ClassVar[bool] = False  # has a lower-triangular form
    keeps_variance: ClassVar[bool] = True  # at init; averages do not
    on_grid: ClassVar[bool] = False  # depends on distances, so prefix tokens are left out

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.check(site)
        self.site = site
        self.bias: nn.Parameter | None = None

    def check(self, site: Site) -> None:
        """Raise OptionError if this structure cannot be used at `site`."""
        if site.causal and not self.causal_form:
            causal = "depthwise, toeplitz, mean, low_rank, rank_one, banded, block_diagonal, sparse, dense or diagonal"
            cure = f"Use {causal}."
            raise OptionError(self.kind, "a causal mixer", "token maps with a lower-triangular form", cure)
        if site.causal and not site.square:
            raise OptionError(
                self.kind, "causal between two lengths", "causal maps within one sequence", "Use causal=False."
            )
        if not site.square and not self.rectangular:
            cure = "Use dense, low_rank, rank_one, sparse or mean."
            between = "two sequences" if site.cross else f"{site.size or 'any number'} to {site.out} entries"
            raise OptionError(self.kind, between, "one length in and out", cure)
        if self.fixed and (site.size is None or site.out is None):
            cure = "Pass grid=(N,), with a context also context_tokens=, or use depthwise, toeplitz, circulant or mean."
            raise OptionError(self.kind, "a sequence of any length", "a number of tokens known at build", cure)

    def add_bias(self, **kw: Any) -> None:
        width = self.site.channels if self.site.side == "token" else (self.site.out or 0) * self.site.groups
        self.bias = nn.Parameter(torch.zeros(width, **kw))

    @abstractmethod
    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        """M v, or Mᵀ v, along the last axis: (…, G, R, n) -> (…, G, R, out). `real` (B, n) is the padding mask."""

    @abstractmethod
    def matrix(self, n: int, out: int) -> Tensor:
        """M as (G or 1, out, n), built from the weights, without running the map."""

    @abstractmethod
    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        """The cost of M for `rows` vectors of n entries in each group."""

    @property
    def recurrent(self) -> bool:
        """Whether a causal token map can continue from a state whose size does not depend on N."""
        return False

    def forward(
        self,
        x: Tensor,
        grid: Grid = None,
        mask: Tensor | None = None,
        *,
        out: int | None = None,
        transposed: bool = False,
    ) -> Tensor:
        """(B, N, D) -> (B, out or N, D) on the token side, (…, D) -> (…, D') on the channel side.

        Args:
            x: the input.
            grid: of the tokens, for convolutions.
            mask: (B, N), True for real tokens; padding reads as zero.
            out: number of tokens that a map between two lengths writes.
            transposed: apply Mᵀ.
        """
        y = self.act(x, grid, mask, out=out, transposed=transposed)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def act(self, x: Tensor, grid: Grid, mask: Tensor | None, *, out: int | None, transposed: bool) -> Tensor:
        """`forward` without the bias."""
        groups = self.site.groups
        if self.site.side == "channel":
            v = x.unflatten(-1, (groups, -1)).transpose(-2, -3)  # (…, G, N, n)
            size = self.site.size if transposed else self.site.out
            assert size is not None
            return self.multiply(v, transposed=transposed, out=size, real=None).transpose(-2, -3).flatten(-2)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        v = x.transpose(1, 2).unflatten(1, (groups, -1))  # (B, G, R, n)
        return self.lead(v, transposed, out, mask).flatten(1, 2).transpose(1, 2)

    def lead(self, v: Tensor, transposed: bool, out: int | None, real: Tensor | None) -> Tensor:
        """`multiply` for a sequence that may be shorter than the weights: pad it with zeros, and cut the output."""
        n = v.shape[-1]
        self.check_length(n, transposed)
        inside, outside = self.lengths(n, transposed)
        out = out or (n if self.site.square else outside)
        if not self.fixed:
            return self.multiply(v, transposed=transposed, out=out, real=real)
        if out > outside:
            raise ShapeError("x", f"{out} tokens", f"at most {outside}, which {self.kind} was built for", _LONGER)
        y = self.multiply(F.pad(v, (0, inside - n)), transposed=transposed, out=outside, real=real)
        return y[..., :out]

    def check_length(self, n: int, transposed: bool = False) -> None:
        inside, _ = self.lengths(n, transposed)
        if self.fixed and n > inside:
            raise ShapeError("x", f"{n} tokens", f"at most {inside}, which {self.kind} was built for", _LONGER)

    def lengths(self, n: int, transposed: bool = False) -> tuple[int, int]:
        size, out = self.site.size or n, self.site.out or n
        return (out, size) if transposed else (size, out)

    def dense(self, n: int | None = None, grid: Grid = None, out: int | None = None) -> Tensor:
        """A (out, n) on the token side, or (D, out, n) if groups differ; B (D, D') on the channel side."""
        if self.site.side == "channel":
            assert self.site.size is not None and self.site.out is not None
            matrix = self.matrix(self.site.size, self.site.out).transpose(-1, -2)
            return torch.block_diag(*matrix.expand(self.site.groups, -1, -1))
        assert n is not None
        self.check_length(n)
        inside, outside = self.lengths(n)
        out = out or (n if self.site.square else outside)
        matrix = (self.matrix(inside, outside) if self.fixed else self.matrix(n, out))[:, :out, :n]
        if matrix.shape[0] == 1:
            return matrix[0]
        return matrix.repeat_interleave(self.site.channels // matrix.shape[0], dim=0)

    def cost_ops(self, n: int, grid: Grid = None, out: int | None = None) -> list[Op]:
        """The products and convolutions for n tokens."""
        if self.site.side == "channel":
            assert self.site.size is not None and self.site.out is not None
            return self.vector_ops(n, self.site.size, self.site.out)
        self.check_length(n)
        inside, outside = self.lengths(n)
        if not self.fixed:
            inside, outside = n, out or (n if self.site.square else outside)
        return self.vector_ops(self.site.channels // self.site.groups, inside, outside)

    def cost(self, n: int, grid: Grid = None, out: int | None = None, dtype: torch.dtype = torch.float32) -> Cost:
        """Parameters, multiply-adds and bytes for n tokens, by formula."""
        return cost_of(self, self.cost_ops(n, grid, out), dtype)

    def transpose(self) -> StructuredMap:
        """The map of Mᵀ with the same weights, without the bias."""
        return Transposed(self)

    def scale_(self, gain: float) -> bool:
        """Multiply M by `gain`, for the init of a mixer. Returns False, and does nothing, if the map has no scale."""
        return False

    def memory(self, batch: int) -> list[Shape]:
        """The shapes of a recurrent map's state."""
        return []

    def start(self, batch: int, like: Tensor) -> list[Tensor]:
        """The state before the first token, at least float32."""
        state = []
        for part in self.memory(batch):
            shape, dtype = (part.shape, torch.int64) if isinstance(part, Counts) else (part, accumulator(like.dtype))
            state.append(like.new_zeros(shape, dtype=dtype))
        return state

    def scan(self, x: Tensor, past: list[Tensor], real: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Apply a causal map to a chunk after the state `past`. Returns the output and the new state.

        real: (B, n), True for real tokens; padding comes last.
        """
        raise NotImplementedError(self.kind)

    def extra_repr(self) -> str:
        site = self.site
        return f"{site.side}, {site.size or 'any'} -> {site.out or 'any'}, groups={site.groups}"


def transposed_site(site: Site) -> Site:
    return replace(site, size=site.out, out=site.size)


class Transposed(StructuredMap):
    """The map of Mᵀ with the weights of another map. A causal map's transpose is not causal."""

    kind = "transposed"
    fixed = False
    rectangular = True

    def __init__(self, inner: StructuredMap) -> None:
        super().__init__(transposed_site(inner.site))
        self.inner = inner

    def check(self, site: Site) -> None:
        """Allowed wherever the inner map is."""

    def act(self, x: Tensor, grid: Grid, mask: Tensor | None, *, out: int | None, transposed: bool) -> Tensor:
        return self.inner.act(x, grid, mask, out=out, transposed=not transposed)

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        return self.inner.multiply(v, transposed=not transposed, out=out, real=real)

    def matrix(self, n: int, out: int) -> Tensor:
        return self.inner.matrix(out, n).transpose(-1, -2)

    def dense(self, n: int | None = None, grid: Grid = None, out: int | None = None) -> Tensor:
        if self.site.square or self.site.side == "channel":
            return self.inner.dense(n, grid).transpose(-1, -2)
        return self.inner.dense(out or self.site.out, grid, n).transpose(-1, -2)

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        return self.inner.vector_ops(rows, out, n)

    def cost_ops(self, n: int, grid: Grid = None, out: int | None = None) -> list[Op]:
        return self.inner.cost_ops(n, grid, out)

    def scale_(self, gain: float) -> bool:
        return self.inner.scale_(gain)

    def transpose(self) -> StructuredMap:
        return self.inner


class Weightless(StructuredMap):
    """A map without parameters; `like` holds the dtype and device of its `matrix`."""

    fixed = False
    causal_form = True
    like: Tensor

    def __init__(self, site: Site, **kw: Any) -> None:
        super().__init__(site)
        self.register_buffer("like", torch.empty(0, **kw), persistent=False)


__all__ = ["Grid", "Site", "StructuredMap", "Transposed", "Weightless", "init_", "transposed_site"]
