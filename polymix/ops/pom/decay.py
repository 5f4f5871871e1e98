"""PoM's causal mean when it forgets: what token j adds counts λ^(i-j) for token i, one λ a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.pom.eager import PomState
from polymix.ops.shared.sequences import without_padding
from polymix.ops.shared.tensors import accumulator, without_autocast

BLOCK = 32  # tokens summed by one product with a triangle of powers


def decayed_mean(terms: Tensor, times: Tensor, mask: Tensor | None, state: PomState | None) -> tuple[Tensor, PomState]:
    """y_i = Σ_{j ≤ i} λ^(i-j) t_j / Σ_{j ≤ i} λ^(i-j) over the real tokens, among which i - j is counted.

    terms (B, N, E), zero at padding; times (heads), λ = exp(-exp(-time)); mask (B, N). Returns (B, N, E) in float32 at
    least, and what the sums and the counts (B, heads) are after the last real token. Cost: 32 N E multiply-adds.
    """
    dtype, heads = accumulator(terms.dtype), len(times)
    left: list[Tensor] = []

    def run(t: Tensor, real: Tensor | None) -> Tensor:
        log_decay = -(-times.to(dtype)).exp()
        split = t.to(dtype).unflatten(-1, (heads, -1))
        ones = split.new_ones(split.shape[:3]) if real is None else real.unsqueeze(-1).expand(split.shape[:3]).to(dtype)
        y = _blocks(torch.cat((split, ones.unsqueeze(-1)), dim=-1), log_decay)
        before = y.new_zeros(y.shape[0], *y.shape[2:]) if state is None else _joined(state, heads)
        y = y + _powers(log_decay, y.shape[1]) * before.unsqueeze(1)
        left.append(y[:, -1] if real is None else _at_last(torch.cat((before[:, None], y), dim=1), real.sum(1)))
        return (y[..., :-1] / y[..., -1:].clamp_min(torch.finfo(dtype).tiny)).flatten(2)

    with without_autocast(terms.device):
        mean = without_padding(terms, mask, run)
    return mean, PomState(left[0][..., :-1].flatten(1), left[0][..., -1].clone())


def _joined(state: PomState, heads: int) -> Tensor:
    """(B, heads, E / heads + 1): sums, and the count behind them."""
    return torch.cat((state.total.unflatten(-1, (heads, -1)), state.count.unsqueeze(-1)), dim=-1)


def _at_last(y: Tensor, place: Tensor) -> Tensor:
    """y (B, 1 + N, heads, e) after the `place`-th token of each row."""
    index = place[:, None, None, None].expand(-1, 1, *y.shape[2:])
    return y.gather(1, index)[:, 0]


def _blocks(x: Tensor, log_decay: Tensor) -> Tensor:
    """y_i = Σ_{j ≤ i} λ^(i-j) x_j of x (B, N, heads, e): products within blocks; what the blocks leave to the next is
    such a sum again, of N / 32 tokens that decay by λ^32."""
    n, traced = x.shape[1], torch.compiler.is_compiling()
    size = BLOCK if traced else min(n, BLOCK)
    count = (n + size - 1) // size + traced  # a graph must not ask whether there is more than one
    parts = F.pad(x, (0, 0, 0, 0, 0, count * size - n)).unfold(1, size, size).movedim(-1, 2)  # (B, count, size, …)
    y = _whole(parts, log_decay)
    if traced or count > 1:
        ends, slower = y[:, :, -1], size * log_decay
        left = _whole(ends, slower) if traced else _blocks(ends, slower)
        before = F.pad(left, (0, 0, 0, 0, 1, 0))[:, :count]
        y = y + _powers(log_decay, size) * before.unsqueeze(2)
    y = y.flatten(1, 2)
    return y.index_select(1, torch.arange(n, device=y.device)) if traced else y[:, :n]


def _whole(x: Tensor, log_decay: Tensor) -> Tensor:
    """The same of x (…, N, heads, e) by one triangle."""
    return torch.einsum("hij,...jhe->...ihe", _triangle(log_decay, x.shape[-3]), x)


def _powers(log_decay: Tensor, n: int) -> Tensor:
    """λ^1 … λ^n, (n, heads, 1)."""
    place = torch.arange(1, n + 1, device=log_decay.device, dtype=log_decay.dtype)
    return (place[:, None] * log_decay).exp().unsqueeze(-1)


def _triangle(log_decay: Tensor, n: int) -> Tensor:
    """λ^(i-j) for j ≤ i, else 0: (heads, n, n)."""
    place = torch.arange(n, device=log_decay.device)
    behind = (place[:, None] - place).to(log_decay.dtype)
    return (behind.clamp_min(0) * log_decay[:, None, None]).exp() * (behind >= 0)
