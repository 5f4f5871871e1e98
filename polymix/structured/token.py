"""Token maps: left matrices (N × N), A X, linear in N."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from polymix.ops.depthwise import depthwise_conv, effective_kernel
from polymix.ops.pooled import mean_over_tokens
from polymix.structured.cost import Op

TOKEN_MAPS = ("depthwise", "identity")


class DepthwiseConv(nn.Module):
    """A kernel a channel over a 1-D, 2-D or 3-D grid of tokens, zero outside; causal in 1-D if asked.

    The first `num_prefix_tokens` tokens (class token, registers) lie outside the grid: prefix token j becomes
    prefix_self[j] ⊙ itself + prefix_mean[j] ⊙ the mean of the grid tokens; the grid does not see them. The bias is
    added to every token. Cost: tokens · D · taps multiply-adds, where taps
    that a small grid cannot reach do not count.
    """

    def __init__(
        self,
        dim: int,
        kernel: tuple[int, ...],
        *,
        causal: bool = False,
        num_prefix_tokens: int = 0,
        bias: bool = True,
        **kw: Any,
    ) -> None:
        super().__init__()
        self.kernel, self.causal, self.num_prefix_tokens = kernel, causal, num_prefix_tokens
        self.weight = nn.Parameter(torch.empty(dim, 1, *kernel, **kw))
        self.bias = nn.Parameter(torch.empty(dim, **kw)) if bias else None
        if num_prefix_tokens:
            self.prefix_self = nn.Parameter(torch.empty(num_prefix_tokens, dim, **kw))
            self.prefix_mean = nn.Parameter(torch.empty(num_prefix_tokens, dim, **kw))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.prod(self.kernel) ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.num_prefix_tokens:
            nn.init.ones_(self.prefix_self)
            nn.init.ones_(self.prefix_mean)

    @property
    def reach(self) -> int:
        """Earlier tokens that a causal map needs."""
        return self.kernel[0] - 1

    def forward(
        self, x: Tensor, grid: tuple[int, ...], mask: Tensor | None = None, past: Tensor | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D); padding (mask False) reads as zero; `past` (B, reach, D) comes before a causal x."""
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        p = self.num_prefix_tokens
        tokens = x[:, p:] if p else x
        if self.causal:
            first = x.new_zeros(x.shape[0], self.reach, x.shape[2]) if past is None else past.to(x.dtype)
            y = depthwise_conv(torch.cat((first, tokens), dim=1), self.weight, grid, causal=True)
        else:
            y = depthwise_conv(tokens, self.weight, grid)
        if p:
            mean = mean_over_tokens(tokens, None if mask is None else mask[:, p:]).to(x.dtype)
            y = torch.cat(((self.prefix_self * x[:, :p] + self.prefix_mean * mean).to(y.dtype), y), dim=1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dense(self, grid: tuple[int, ...]) -> Tensor:
        """(D, N, N) over the prefix and the grid, from the index arithmetic, not from running the map."""
        axes = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
        place = torch.stack([axis.flatten() for axis in axes], dim=-1)  # (n, axes)
        centre = torch.tensor([k - 1 if self.causal else k // 2 for k in self.kernel])
        tap = place[None, :] - place[:, None] + centre  # which tap of row m's kernel falls on column n
        inside = ((tap >= 0) & (tap < torch.tensor(self.kernel))).all(-1)
        flat = torch.zeros_like(tap[..., 0])
        for axis, size in enumerate(self.kernel):
            flat = flat * size + tap[..., axis]
        flat = torch.where(inside, flat, 0).to(self.weight.device)
        body = self.weight.flatten(1)[:, flat] * inside.to(self.weight)  # (D, n, n)
        p, n = self.num_prefix_tokens, len(place)
        if not p:
            return body
        whole = body.new_zeros(body.shape[0], p + n, p + n)
        whole[:, p:, p:] = body
        whole[:, :p, :p] = torch.diag_embed(self.prefix_self.t())
        whole[:, :p, p:] = (self.prefix_mean.t() / n).unsqueeze(-1)
        return whole

    def op(self, grid: tuple[int, ...]) -> Op:
        return Op("depthwise", grid, effective_kernel(self.kernel, grid), self.weight.shape[0])

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel={self.kernel}, causal={self.causal}, prefix={self.num_prefix_tokens}"
