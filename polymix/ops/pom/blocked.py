"""PoM on a CPU without gradients, for full or causal context."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.pom.eager import PomOptions, PomWeights
from polymix.ops.shared.activations import IN_PLACE
from polymix.ops.shared.blocks import Product, SampleProduct, blocks, computed_in, output, zeros
from polymix.ops.shared.tensors import count_real

STRIDE = 32  # tokens in each of the parallel chunks of a running sum


def pom(x: Tensor, context: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None = None) -> Tensor:
    """W_o [σ(W_s x_i + b_s) ⊙ H] + b_o with H = reduce_j Σ_p α_p ⊙ h(W_h c_j + b_h)^p over the whole context.

    x is (B, N, D), context (B, M, D), mask (B, M). Returns (B, N, D). Memory besides the output: three blocks.
    """
    dtype, (weight, bias) = computed_in(x), weights.proj
    pooled = _pool(context, weights, options, mask, dtype)
    if options.reduction == "mean":
        pooled = pooled / count_real(context, mask)
    gate, y = Product(weights.gate, dtype), output(x)
    merged = (pooled.unsqueeze(-1) * weight.t()).unflatten(1, (gate.width, -1)).sum(2)  # W_o scaled by H, (B, gates, D)
    out = SampleProduct(merged.to(dtype), bias)
    for block in blocks(x):
        out.into(y, block, block.split(IN_PLACE[options.gate](gate(block.rows(x, dtype)))))
    return y


def _pool(context: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Σ_j Σ_p α_p ⊙ h_j^p, (B, E) in float32 or wider: sums each power over the tokens first, then applies α."""
    poly, (width, degree) = Product(weights.poly, dtype), weights.alpha.shape
    sums = zeros(context, degree, context.shape[0], width, dtype=dtype)
    for block in blocks(context):
        h = block.hide(IN_PLACE[options.activation](poly(block.rows(context, dtype))), mask)
        block.add_sums(sums[0], h)
        power = h if degree <= 2 else h.clone()
        for p in range(1, degree):
            block.add_sums(sums[p], power.mul_(h))
    return (sums * weights.alpha.t()[:, None]).sum(0)


def causal(x: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None = None) -> Tensor:
    """Like `pom`, with H_i over the tokens up to i: one pass that carries the sums from block to block."""
    dtype, y = computed_in(x), output(x)
    poly, gate, proj = (Product(linear, dtype) for linear in weights[:3])
    factors = weights.alpha.t().to(dtype)
    real = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    seen = real.cumsum(1).clamp_min(1).to(dtype).unsqueeze(-1)
    for block in blocks(x):
        if block.tokens.start == 0:
            carry = zeros(x, block.number, poly.width, dtype=dtype)
        rows = block.rows(x, dtype)
        h = block.hide(IN_PLACE[options.activation](poly(rows)), mask)
        terms = h * factors[-1]
        for factor in factors[:-1].flip(0):
            terms.add_(factor).mul_(h)
        running, carry = _running(block.split(terms), carry)
        if options.reduction == "mean":
            running = running.div_(block.of(seen))
        gates = block.split(IN_PLACE[options.gate](gate(rows))).unsqueeze(-1)
        gated = running.to(dtype).unflatten(-1, (gate.width, -1)).mul_(gates)
        proj.into(y, block, gated.flatten(2).flatten(0, 1))
    return y


def _running(terms: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """The running sum of terms (B, n, E) on top of carry (B, E), in place if possible, and the new carry.

    On a CPU, PyTorch's cumsum over any axis but the last is serial. This sums chunks of STRIDE tokens in parallel.
    """
    n = terms.shape[1]
    chunks = F.pad(terms, (0, 0, 0, -n % STRIDE)).to(carry.dtype).unflatten(1, (-1, STRIDE))
    for step in range(1, STRIDE):
        chunks[:, :, step] += chunks[:, :, step - 1]
    before = torch.cat((carry.unsqueeze(1), chunks[:, :, -1]), dim=1).cumsum(1)
    chunks += before[:, :-1].unsqueeze(2)
    return chunks.flatten(1, 2)[:, :n], before[:, -1]
