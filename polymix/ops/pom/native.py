"""PoM in C for the CPU: the pooled powers, forward and backward, and the causal form, forward only.

x is (B, N, D) in float32 or bfloat16. All arithmetic is float32: results per token are rounded once to the dtype of
x; sums and gradients of weights stay float32. Where `arrays.in_pairs` says so, the processor multiplies bfloat16
and sums in float32: products of tokens lose nothing, what other products of a forward read is rounded to bfloat16.
Memory besides the results: the packed weights, a few blocks of 128 tokens per thread and, in the backward, copies
of the weights' gradients: one per thread as long as they fit in 32 MiB, then fewer, which threads share
(native/gradients.h). A weight that needs no gradient costs nothing in the backward. Cost: the forward takes the map
once, the backward three times.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from polymix.ops.native.arrays import (
    KINDS,
    Needs,
    dense,
    full,
    hidden,
    in_pairs,
    linear_of,
    rooms_like,
    sizes_of,
    tokens,
)
from polymix.ops.native.library import call
from polymix.ops.pom.eager import PomOptions, PomState, PomWeights
from polymix.ops.shared.blocks import output


def powers(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int) -> Tensor:
    """Σ_n h_n^p, (B, degree, E)."""
    sizes = sizes_of(x, weight.shape[0], activation=activation, degree=degree, pairs=in_pairs(x, weight))
    x, weight, bias, mask = dense(x), full(weight), full(bias), hidden(mask)
    sums = weight.new_empty(x.shape[0], degree, weight.shape[0])
    call("linear_powers", tokens(x), linear_of(weight, bias), mask, sums, sizes)
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
    sizes = sizes_of(x, weight.shape[0], activation=activation, degree=degree, pairs=in_pairs(x, weight))
    grad, x, weight, bias, mask = full(grad), dense(x), full(weight), full(bias), hidden(mask)
    grad_x, grad_w, grad_b = rooms_like((x, weight, bias), needs)
    call("linear_powers_backward", grad, tokens(x), linear_of(weight, bias), mask, tokens(grad_x),
         grad_w, grad_b, sizes)  # fmt: skip
    return grad_x, grad_w, grad_b


def causal(x: Tensor, weights: PomWeights, options: PomOptions, mask: Tensor | None = None) -> Tensor:
    """PoM with H_i over the tokens up to i, in one pass and without gradients: x (B, N, D), mask (B, N) -> (B, N, D).

    The result does not depend on the number of threads, to the bit.
    """
    pairs = in_pairs(x, weights.poly[0], weights.gate[0])
    x, mask, alpha = dense(x), hidden(mask), full(weights.alpha.t())
    maps = [(full(weight), full(bias)) for weight, bias in (weights.poly, weights.gate, weights.proj)]
    y, (degree, width) = output(x), alpha.shape
    sizes = sizes_of(x, width, out=x.shape[2], activation=options.activation, degree=degree, pairs=pairs)
    gating, mean = KINDS.index(options.gate), int(options.reduction == "mean")
    linears = (linear_of(*linear) for linear in maps)
    call("pom_causal", tokens(x), *linears, alpha, mask, tokens(y), gating, mean, sizes)
    return y


class _Step(ctypes.Structure):
    """The struct Step of pom_step.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "degree", "act", "gate", "mean", "bf16", "threads"))


def step(x: Tensor, state: PomState, weights: PomWeights, options: PomOptions) -> tuple[Tensor, PomState]:
    """One more token x (B, 1, D) of each sequence, for at most `few_rows.native.MOST_ROWS` of them, without gradients.

    x and all weights have one dtype and are contiguous. Every weight is read once, as it is. Intermediate results are
    float32, except for the input of the last map, which is rounded to the dtype of x.
    """
    x, count = x.contiguous(), state.count + 1
    after, (width, degree) = torch.empty_like(state.total), weights.alpha.shape
    gated, y = x.new_empty(x.shape[0], width), torch.empty_like(x)
    sizes = _Step(x.shape[0], degree, KINDS.index(options.activation), KINDS.index(options.gate),
                  options.reduction == "mean", x.dtype == torch.bfloat16, torch.get_num_threads())  # fmt: skip
    maps = (linear_of(*part) for part in (weights.poly, weights.gate, weights.proj))
    call("pom_step", x, *maps, weights.alpha, state.total.contiguous(), count, after, gated, y, sizes)
    return y, PomState(after, count)
