"""PoM's causal mean with decay: token j has the weight λ^(i-j) for token i, with one λ per head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.pom.eager import PomState
from polymix.ops.shared.sequences import without_padding
from polymix.ops.shared.tensors import accumulator, without_autocast

BLOCK = 32  # tokens summed by one product with a triangular matrix of powers of λ


def decayed_mean(terms: Tensor, times: Tensor, mask: Tensor | None, state: PomState | None) -> tuple[Tensor, PomState]:
    """Compute y_i = Σ_{j ≤ i} λ^(i-j) t_j / Σ_{j ≤ i} λ^(i-j) over the real tokens.

    The distance i - j counts real tokens only.

    Args:
        terms: t, (B, N, E), zero at padding.
        times: (heads), with λ = exp(-exp(-time)).
        mask: (B, N), True for real tokens.
        state: the sums and weights before the first token; None for none.
    Returns:
        y (B, N, E) in float32 or wider, and the state after the last real token: the sums (B, E) and the weights
        (B, heads). Cost: 32 N E multiply-adds.
    """
    dtype, heads = accumulator(terms.dtype), len(times)
    final: list[Tensor] = []

    def run(t: Tensor, real: Tensor | None) -> Tensor:
        log_decay = -(-times.to(dtype)).exp()
        split = t.to(dtype).unflatten(-1, (heads, -1))
        ones = split.new_ones(split.shape[:3]) if real is None else real.unsqueeze(-1).expand(split.shape[:3]).to(dtype)
        y = _blocks(torch.cat((split, ones.unsqueeze(-1)), dim=-1), log_decay)
        before = y.new_zeros(y.shape[0], *y.shape[2:]) if state is None else _joined(state, heads)
        y = y + _powers(log_decay, y.shape[1]) * before.unsqueeze(1)
        final.append(y[:, -1] if real is None else _after(torch.cat((before[:, None], y), dim=1), real.sum(1)))
        return (y[..., :-1] / y[..., -1:].clamp_min(torch.finfo(dtype).tiny)).flatten(2)

    with without_autocast(terms.device):
        mean = without_padding(terms, mask, run)
    return mean, PomState(final[0][..., :-1].flatten(1), final[0][..., -1].clone())


def decay_over(times: Tensor, count: Tensor | int, batch: int, dtype: torch.dtype) -> Tensor:
    """λ^n after n real tokens, (B, heads): what they leave of earlier sums; count: (B, 1), or one for all rows."""
    log_decay = -(-times.to(dtype)).exp()
    return (log_decay * count).exp().expand(batch, -1)


def _joined(state: PomState, heads: int) -> Tensor:
    """The state's sums with the weight appended, (B, heads, E / heads + 1)."""
    return torch.cat((state.total.unflatten(-1, (heads, -1)), state.count.unsqueeze(-1)), dim=-1)


def _after(y: Tensor, count: Tensor) -> Tensor:
    """The entry of y (B, 1 + N, heads, e) after `count` (B) tokens of each row."""
    index = count[:, None, None, None].expand(-1, 1, *y.shape[2:])
    return y.gather(1, index)[:, 0]


def _blocks(x: Tensor, log_decay: Tensor) -> Tensor:
    """Compute y_i = Σ_{j ≤ i} λ^(i-j) x_j for x (B, N, heads, e).

    Sums within a block are products. The sums that blocks pass on form the same problem with N / 32
    tokens and decay λ^32, which is solved recursively.
    """
    n, traced = x.shape[1], torch.compiler.is_compiling()
    size = BLOCK if traced else min(n, BLOCK)
    count = (n + size - 1) // size + traced  # one extra in a graph, which must not branch on the count
    parts = F.pad(x, (0, 0, 0, 0, 0, count * size - n)).unfold(1, size, size).movedim(-1, 2)  # (B, count, size, …)
    y = _whole(parts, log_decay)
    if traced or count > 1:
        ends, slower = y[:, :, -1], size * log_decay
        carried = _whole(ends, slower) if traced else _blocks(ends, slower)
        before = F.pad(carried, (0, 0, 0, 0, 1, 0))[:, :count]
        y = y + _powers(log_decay, size) * before.unsqueeze(2)
    y = y.flatten(1, 2)
    return y.index_select(1, torch.arange(n, device=y.device)) if traced else y[:, :n]


def _whole(x: Tensor, log_decay: Tensor) -> Tensor:
    """The sums of `_blocks` for x (…, N, heads, e) by one product with a triangular matrix."""
    return torch.einsum("hij,...jhe->...ihe", _triangle(log_decay, x.shape[-3]), x)


def _powers(log_decay: Tensor, n: int) -> Tensor:
    """λ^1 … λ^n, (n, heads, 1)."""
    exponent = torch.arange(1, n + 1, device=log_decay.device, dtype=log_decay.dtype)
    return (exponent[:, None] * log_decay).exp().unsqueeze(-1)


def _triangle(log_decay: Tensor, n: int) -> Tensor:
    """λ^(i-j) for j ≤ i and 0 elsewhere, (heads, n, n)."""
    index = torch.arange(n, device=log_decay.device)
    distance = (index[:, None] - index).to(log_decay.dtype)
    return (distance.clamp_min(0) * log_decay[:, None, None]).exp() * (distance >= 0)
