"""What the causal mixers of sequences share: padding taken out and put back, convolutions that go on from a window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polymix.ops.shared.depthwise import depthwise_conv
from polymix.ops.shared.masks import compact
from polymix.ops.shared.tensors import accumulator


def take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, N, D) at the tokens index (B, M): (B, M, D)."""
    return x.gather(1, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def without_padding(
    x: Tensor, mask: Tensor | None, run: Callable[[Tensor, Tensor | None], Tensor], *, prefix: int = 0
) -> Tensor:
    """`run(x, real)` on the real tokens of every row brought to its front, zeros and real=False behind them.

    The first `prefix` tokens stay where they are. Each output goes back to where its token was; padding gets zeros.
    Without a mask just `run(x, None)`.
    """
    if mask is None:
        return run(x, None)
    order = compact(mask[:, prefix:]) + prefix
    if prefix:
        order = torch.cat((torch.arange(prefix, device=mask.device).expand(len(mask), prefix), order), dim=1)
    real = mask.gather(1, order)
    y = run(take(x, order).masked_fill(~real.unsqueeze(-1), 0.0), real).masked_fill(~real.unsqueeze(-1), 0.0)
    return torch.empty_like(y).scatter(1, order.unsqueeze(-1).expand_as(y), y)


def next_window(seen: Tensor, n: int, real: Tensor | None) -> Tensor:
    """The last tokens that a chunk of n leaves behind, of seen (B, reach + n, D) = its window and the chunk.

    With `real` (B, n) the chunk's real tokens come first, and the new window ends where they do.
    """
    reach = seen.shape[1] - n
    if real is None:
        return seen[:, n:].clone()  # a view would keep the whole chunk alive
    return take(seen, torch.arange(reach, device=seen.device) + real.sum(1, keepdim=True))


def after_window(u: Tensor, window: Tensor) -> Tensor:
    """`window` (B, reach, D) and the chunk u (B, N, D) behind it, in float32 at least."""
    wide = accumulator(u.dtype)
    return torch.cat((window.to(wide), u.to(wide)), dim=1)


def causal_conv(u: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution of u (B, N, D) with weight (D, 1, k) after `window` (B, k - 1, D), or zeros.

    Returns the output (B, N, D), and `after_window`, from which `next_window` takes what is to be kept.
    """
    if window is None:
        window = u.new_zeros(u.shape[0], weight.shape[-1] - 1, u.shape[2])
    seen = after_window(u, window)
    y = depthwise_conv(seen.to(u.dtype), weight, (u.shape[1],), causal=True)
    return (y if bias is None else y + bias.to(y.dtype)), seen
