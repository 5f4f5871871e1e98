"""PoM in C for the CPU: the pooled powers, forward and backward; the whole mixer and its causal form, forward only.

x is (B, N, D) in float32 or bfloat16. All arithmetic is float32: results per token are rounded once to the dtype of
x; sums and gradients of weights stay float32. Where `arrays.in_pairs` says so, the processor multiplies bfloat16
and sums in float32: products of tokens lose nothing, what other products read is rounded to bfloat16.
Memory besides the results: the packed weights, a few blocks of 128 tokens per thread and, in the backward, copies
of the weights' gradients: one per thread as long as they fit in 32 MiB, then fewer, which threads share
(native/gradients.h). A weight that needs no gradient costs nothing in the backward. Cost: the forward takes the map
once, the backward three times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.native.arrays import (
    KINDS,
    Needs,
    Sizes,
    as_read,
    dense,
    full,
    hidden,
    in_pairs,
    rooms_like,
    sizes_of,
)
from polymix.ops.native.library import call
from polymix.ops.pom.eager import PomOptions, PomState, PomWeights
from polymix.ops.shared.blocks import output
from polymix.ops.shared.tensors import Linear


def powers(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int) -> Tensor:
    """Σ_n h_n^p, (B, degree, E)."""
    pairs = in_pairs(x, weight)
    sizes = sizes_of(x, weight.shape[0], activation=activation, degree=degree, pairs=pairs)
    sums = x.new_empty(x.shape[0], degree, weight.shape[0], dtype=torch.float32)
    call("linear_powers", dense(x), as_read((weight, bias), pairs), hidden(mask), sums, sizes)
    return sums


def powers_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    activation: str,
    degree: int,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """The gradients of `powers`: with du = act'(u) Σ_p p g_p h^(p-1), dx = du W, dW = Σ duᵀ x, db = Σ du."""
    pairs = in_pairs(x, weight)
    sizes = sizes_of(x, weight.shape[0], activation=activation, degree=degree, pairs=pairs)
    grads = rooms_like((x, weight, bias), needs)
    call("linear_powers_backward", full(grad), dense(x), as_read((weight, bias), pairs), hidden(mask), *grads, sizes)
    return tuple(grads)


def pooled(x: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None = None) -> Tensor:
    """PoM with H over all tokens of x (B, N, D), or the real ones of mask (B, N), without gradients, in one call."""
    sizes, maps = _sizes_and_maps(x, weights, options)
    y = output(x)
    call("pom_pooled", dense(x), *maps, full(weights.alpha), hidden(mask), y, *_gating(options), sizes)
    return y


def _sizes_and_maps(x: Tensor, weights: PomWeights, options: PomOptions) -> tuple[Sizes, list[Linear]]:
    """The sizes of a whole PoM, and its maps as the kernels take them."""
    linears, (width, degree) = (weights.poly, weights.gate, weights.proj), weights.alpha.shape
    pairs = in_pairs(x, *(weight for weight, _ in linears))
    sizes = sizes_of(x, width, out=x.shape[2], activation=options.activation, degree=degree, pairs=pairs)
    return sizes, [as_read(linear, pairs) for linear in linears]


def _gating(options: PomOptions) -> tuple[int, int]:
    return KINDS.index(options.gate), int(options.reduction == "mean")


def causal(
    x: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None = None, state: PomState | None = None
) -> tuple[Tensor, PomState]:
    """PoM with H_i over the tokens up to i, and those of `state`, in one pass and without gradients.

    x (B, N, D) with at least one token, mask (B, N) -> (B, N, D), and the state after the last token, in float32. The
    result does not depend on the number of threads, to the bit.
    """
    sizes, maps = _sizes_and_maps(x, weights, options)
    x, mask, alpha = dense(x), hidden(mask), full(weights.alpha.t())
    (batch, n), y = x.shape[:2], output(x)
    start, seen = (None, None) if state is None else (full(state.total), state.count.contiguous())
    end = x.new_empty(batch, sizes.width, dtype=torch.float32)
    call("pom_causal", x, *maps, alpha, mask, start, seen, end, y, *_gating(options), sizes)
    count = torch.full((batch,), n, device=x.device) if mask is None else mask.sum(1)
    return y, PomState(end, count if seen is None else count + seen)
