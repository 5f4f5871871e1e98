"""PoM without gradients on a CPU, where every token sees the whole context or all of the past."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.pom.eager import PomOptions, PomWeights
from polymix.ops.shared.activations import IN_PLACE
from polymix.ops.shared.blocks import Product, SampleProduct, blocks, computed_in, output, zeros
from polymix.ops.shared.tensors import count_real

STRIDE = 32  # tokens between the walks of a running sum


def pom(x: Tensor, context: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None = None) -> Tensor:
    """W_o [σ(W_s x_i + b_s) ⊙ H] + b_o with H = reduce_j Σ_p α_p ⊙ h(W_h c_j + b_h)^p.

    x (B, N, D), context (B, M, D), mask (B, M). Returns (B, N, D). Memory beside it: three blocks.
    """
    dtype, (weight, bias) = computed_in(x), weights.proj
    pooled = _pool(context, weights, options, mask, dtype)
    if options.reduction == "mean":
        pooled = pooled / count_real(context, mask)
    ask, y = Product(weights.gate, dtype), output(x)
    asked = (pooled.unsqueeze(-1) * weight.t()).unflatten(1, (ask.width, -1)).sum(2)  # (B, gates, D): H in W_o
    out = SampleProduct(asked.to(dtype), bias)
    for block in blocks(x):
        out.into(y, block, block.split(IN_PLACE[options.gate](ask(block.rows(x, dtype)))))
    return y


def _pool(context: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Σ_j Σ_p α_p ⊙ h_j^p, (B, E) in float32 at least: a sum for each power, α afterwards."""
    into, (width, degree) = Product(weights.poly, dtype), weights.alpha.shape
    sums = zeros(context, degree, context.shape[0], width, dtype=dtype)
    for block in blocks(context):
        h = block.hide(IN_PLACE[options.activation](into(block.rows(context, dtype))), mask)
        block.add_sums(sums[0], h)
        power = h if degree <= 2 else h.clone()
        for p in range(1, degree):
            block.add_sums(sums[p], power.mul_(h))
    return (sums * weights.alpha.t()[:, None]).sum(0)


def causal(x: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None = None) -> Tensor:
    """The same with H_i over the tokens up to i: one pass, the sums so far carried from block to block."""
    dtype, y = computed_in(x), output(x)
    into, ask, tell = (Product(linear, dtype) for linear in weights[:3])
    factors = weights.alpha.t().to(dtype)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    seen = real.cumsum(1).clamp_min(1).to(dtype).unsqueeze(-1)
    for block in blocks(x):
        if block.tokens.start == 0:
            carry = zeros(x, block.number, into.width, dtype=dtype)
        rows = block.rows(x, dtype)
        h = block.hide(IN_PLACE[options.activation](into(rows)), mask)
        terms = h * factors[-1]
        for factor in factors[:-1].flip(0):
            terms.add_(factor).mul_(h)
        running, carry = _running(block.split(terms), carry)
        if options.reduction == "mean":
            running = running.div_(block.of(seen))
        gates = block.split(IN_PLACE[options.gate](ask(rows))).unsqueeze(-1)
        asked = running.to(dtype).unflatten(-1, (ask.width, -1)).mul_(gates)
        tell.into(y, block, asked.flatten(2).flatten(0, 1))
    return y


def _running(terms: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Running sum of terms (B, n, E) on top of carry (B, E), in place if it can be, and the new carry.

    PyTorch's cumsum over any but the last axis walks it serially on a CPU; here STRIDE walks go side by side.
    """
    n = terms.shape[1]
    chunks = F.pad(terms, (0, 0, 0, -n % STRIDE)).to(carry.dtype).unflatten(1, (-1, STRIDE))
    for place in range(1, STRIDE):
        chunks[:, :, place] += chunks[:, :, place - 1]
    before = torch.cat((carry.unsqueeze(1), chunks[:, :, -1]), dim=1).cumsum(1)
    chunks += before[:, :-1].unsqueeze(2)
    return chunks.flatten(1, 2)[:, :n], before[:, -1]
