"""PoM without gradients on a CPU, where every token sees the whole context."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.blocked.common import IN_PLACE, Linear, Product, blocks, count_real, working_type, zeros


def pom(
    x: Tensor,
    context: Tensor,
    poly: Linear,
    gate: Linear,
    proj: Linear,
    alpha: Tensor,
    *,
    activation: str,
    gating: str,
    reduction: str,
    mask: Tensor | None = None,
) -> Tensor:
    """W_o [σ(W_s x_i + b_s) ⊙ H] + b_o with H = reduce_j Σ_p α_p ⊙ h(W_h c_j + b_h)^p.

    x (B, N, D), context (B, M, D), mask (B, M). Returns (B, N, D). Memory beside it: three blocks.
    """
    dtype = working_type(x.dtype)
    pooled = _pool(context, Product(poly, dtype), alpha, activation, mask)
    if reduction == "mean":
        pooled = pooled / count_real(context, mask)
    ask, tell, y = Product(gate, dtype), Product(proj, dtype), torch.empty_like(x)
    pooled = pooled.to(dtype).view(x.shape[0], 1, ask.width, -1)  # (B, 1, gates, channels a gate)
    for block in blocks(x):
        gates = block.split(IN_PLACE[gating](ask(block.rows(x, dtype)))).unsqueeze(-1)
        mean = pooled[block.samples]
        asked = gates.mul_(mean) if mean.shape[-1] == 1 else gates * mean
        tell.into(y, block, asked.flatten(2).flatten(0, 1))
    return y


def _pool(context: Tensor, into: Product, alpha: Tensor, activation: str, mask: Tensor | None) -> Tensor:
    """Σ_j Σ_p α_p ⊙ h_j^p, (B, E) in float32 at least: a sum for each power, α afterwards."""
    width, degree = alpha.shape
    sums = zeros(context, degree, context.shape[0], width, dtype=into.dtype)
    powers = into.buffer
    for block in blocks(context):
        h = block.hide(IN_PLACE[activation](into(block.rows(context, into.dtype))), mask)
        powers = powers if powers.shape[0] >= h.shape[0] else torch.empty_like(h)
        block.add_sums(sums[0], h)
        power = h
        for p in range(1, degree):
            power = torch.mul(power, h, out=powers[: h.shape[0]])
            block.add_sums(sums[p], power)
    return (sums * alpha.t()[:, None]).sum(0)
