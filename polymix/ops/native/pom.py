"""PoM without gradients on a CPU, where every token sees all of the past: in C, as `polymix.ops.blocked.pom` has it.

x (B, N, D) of float32 or bf16; all is computed in float32 and rounded once to x's type. Memory beside the result: the
packed weights, and for each thread three blocks of 128 tokens. Cost in products: that of the three maps.
"""

from __future__ import annotations

from torch import Tensor

from polymix.ops.blocked.common import output
from polymix.ops.blocked.pom import Parts
from polymix.ops.native.build import call, dense, tokens
from polymix.ops.native.pooled_linear import KINDS, full, hidden, linear_of, sizes_of


def pom_causal(x: Tensor, parts: Parts, mask: Tensor | None = None) -> Tensor:
    """W_o [σ(W_s x_i + b_s) ⊙ H_i] + b_o with H_i = reduce Σ_p α_p ⊙ h(W_h x_j + b_h)^p over the tokens j up to i.

    x (B, N, D), mask (B, N). Returns (B, N, D), the same bits for any number of threads.
    """
    x, mask, alpha = dense(x), hidden(mask), full(parts.alpha.t())
    maps = [(full(weight), full(bias)) for weight, bias in (parts.poly, parts.gate, parts.proj)]
    y, (degree, width) = output(x), alpha.shape
    sizes = sizes_of(x, width, out=x.shape[2], activation=parts.activation, degree=degree)
    gating, mean = KINDS.index(parts.gating), int(parts.reduction == "mean")
    linears = (linear_of(*linear) for linear in maps)
    call("pom_causal", tokens(x), *linears, alpha, mask, tokens(y), gating, mean, sizes)
    return y
