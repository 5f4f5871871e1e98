"""Depthwise convolution over a grid of tokens, or along the channels."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, check_int
from polymix.limits import check_memory
from polymix.ops.decode import try_convolution
from polymix.ops.shared.depthwise import depthwise_conv, effective_kernel
from polymix.ops.shared.sequences import after_window, next_window
from polymix.ops.shared.tensors import Shape
from polymix.structured.base import Grid, Site, StructuredMap
from polymix.structured.cost import Op


class DepthwiseConv(StructuredMap):
    """A convolution with a kernel per channel over a 1-D, 2-D or 3-D grid of tokens, with zero padding.

    Causal in 1-D. On the channel side, a kernel per group runs along the group's channels. `kernel` is one number or
    one per axis, odd unless causal; None takes the mixer's. With `dilation` δ, taps are δ positions apart.

    Cost: N D taps multiply-adds; taps that cannot reach a small grid do not count.
    State: the last δ (k - 1) tokens (causal).
    """

    kind = "depthwise"
    fixed = False
    causal_form = True
    on_grid = True

    def __init__(
        self, site: Site, *, kernel: int | tuple[int, ...] | None = None, dilation: int = 1, **kw: Any
    ) -> None:
        super().__init__(site)
        axes = len(site.kernel) if site.side == "token" else 1
        kernel = (site.kernel if axes == len(site.kernel) else (11,)) if kernel is None else kernel
        kernel = tuple(kernel) if isinstance(kernel, (tuple, list)) else (kernel,) * axes
        if len(kernel) != axes:
            raise OptionError("kernel", kernel, f"one number, or {axes} of them", "Pass one for each axis of the grid.")
        check_int("dilation", dilation, 1)
        for k in kernel:
            check_int("kernel", k, 1)
            if k % 2 == 0 and not site.causal:
                raise OptionError("kernel", k, "an odd number unless causal", f"Use {k - 1} or {k + 1}.")
        self.kernel, self.dilation = kernel, dilation
        copies = site.channels if site.side == "token" else site.groups
        self.weight = nn.Parameter(torch.empty(copies, 1, *kernel, **kw))
        nn.init.normal_(self.weight, std=math.prod(kernel) ** -0.5)

    @property
    def reach(self) -> int:
        """Number of earlier tokens that a causal map needs."""
        return (self.kernel[0] - 1) * self.dilation

    @property
    def recurrent(self) -> bool:
        return self.site.causal

    def act(self, x: Tensor, grid: Grid, mask: Tensor | None, *, out: int | None, transposed: bool) -> Tensor:
        if self.site.side == "channel":
            return super().act(x, grid, mask, out=out, transposed=transposed)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        if self.site.causal:
            return self._causal(x.flip(1)).flip(1) if transposed else self._causal(x)
        weight = self.weight.flip(tuple(range(2, self.weight.ndim))) if transposed else self.weight
        return depthwise_conv(x, weight, grid or (x.shape[1],), dilation=self.dilation)

    def _causal(self, x: Tensor) -> Tensor:
        return self._after(F.pad(x, (0, 0, self.reach, 0)), x.shape[1])

    def _after(self, seen: Tensor, n: int) -> Tensor:
        """The causal convolution for the last n tokens of `seen`."""
        return depthwise_conv(seen, self.weight, (n,), causal=True, dilation=self.dilation)

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        """The channel side: the entries of v (…, G, R, n) are the sequence, the groups the channels."""
        weight = self.weight.flip(-1) if transposed else self.weight
        n, tokens = v.shape[-1], v.movedim(-3, -1)  # (…, R, n, G)
        y = depthwise_conv(tokens.flatten(0, -3), weight, (n,), dilation=self.dilation)
        return y.reshape(tokens.shape).movedim(-1, -3)

    def matrix(self, n: int, out: int) -> Tensor:
        return conv_matrix(self.weight, (n,), causal=self.site.causal, dilation=self.dilation)

    def dense(self, n: int | None = None, grid: Grid = None, out: int | None = None) -> Tensor:
        if self.site.side == "channel":
            return super().dense(n, grid, out)
        return conv_matrix(self.weight, grid or (n or 0,), causal=self.site.causal, dilation=self.dilation)

    def cost_ops(self, n: int, grid: Grid = None, out: int | None = None) -> list[Op]:
        if self.site.side == "channel":
            return super().cost_ops(n, grid, out)
        grid = grid or (n,)
        return [Op("depthwise", grid, effective_kernel(self.kernel, grid, self.dilation), self.site.channels)]

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        return [Op("depthwise", (rows, n), (1, *self.kernel), self.site.groups)]

    def scale_(self, gain: float) -> bool:
        self.weight.data.mul_(gain)
        return True

    def memory(self, batch: int) -> list[Shape]:
        return [(batch, self.reach, self.site.channels)]

    def scan(self, x: Tensor, past: list[Tensor], real: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        if real is not None:
            x = x.masked_fill(~real.unsqueeze(-1), 0.0)
        elif (step := try_convolution(x, past[0], self.weight, self.dilation)) is not None:
            return step[0], [step[1]]
        seen, n = after_window(x, past[0]), x.shape[1]
        return self._after(seen.to(x.dtype), n), [next_window(seen, n, real)]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kernel={self.kernel}, dilation={self.dilation}"


def conv_matrix(weight: Tensor, grid: tuple[int, ...], *, causal: bool = False, dilation: int = 1) -> Tensor:
    """A depthwise convolution with weight (D, 1, *kernel) as matrices (D, N, N), built from indices alone.

    Raises OptionError where they do not fit into memory, before any index is made.
    """
    tokens = math.prod(grid)
    check_memory("n", f"a convolution of {tokens:,} tokens as matrices", weight.shape[0] * tokens**2 * 8.0)
    kernel = torch.tensor(weight.shape[2:])
    axes = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
    place = torch.stack([axis.flatten() for axis in axes], dim=-1)  # (N, axes)
    centre = (kernel - 1 if causal else kernel // 2) * dilation
    step = place[None, :] - place[:, None] + centre  # position of column n in row m's kernel
    tap = torch.div(step, dilation, rounding_mode="floor")
    inside = ((step % dilation == 0) & (tap >= 0) & (tap < kernel)).all(-1)
    flat = torch.zeros_like(tap[..., 0])
    for axis, size in enumerate(kernel.tolist()):
        flat = flat * size + tap[..., axis]
    flat, inside = (part.to(weight.device) for part in (torch.where(inside, flat, 0), inside))
    return weight.flatten(1)[:, flat] * inside.to(weight)


def conv_after_prefix(x: Tensor, weight: Tensor, grid: tuple[int, ...], prefix: int) -> Tensor:
    """Convolve the tokens (B, N, D) after the prefix on their grid, weight (D, 1, *kernel); zeros for the prefix."""
    y = depthwise_conv(x[:, prefix:], weight, grid)
    return torch.cat((y.new_zeros(x.shape[0], prefix, x.shape[2]), y), dim=1) if prefix else y


def conv_after_prefix_matrix(weight: Tensor, grid: tuple[int, ...], prefix: int = 0) -> Tensor:
    """The same convolution as matrices (D, N, N), with zero rows and columns for the prefix."""
    return F.pad(conv_matrix(weight, grid), (prefix, 0, prefix, 0))
