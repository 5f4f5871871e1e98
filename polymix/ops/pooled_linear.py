"""Linear maps of tokens and what becomes of their outputs, pooled or multiplied with what was pooled, as one operator.

PoM pools powers of one map, Poly-SA and Poly-NL the product of two, and PoM and Poly-SA multiply a third with that.
As operators they never hold the maps' outputs, nor keep them for the backward, which computes them again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.blocked.common import fast_types
from polymix.ops.common import ACTIVATIONS, GATES, accumulator
from polymix.ops.library import Operator

FUNCTIONS = {**ACTIVATIONS, **GATES}


def wide(x: Tensor) -> str | None:
    """What the kernels in C, which multiply in float32, have against the type of x on this machine."""
    fast = x.dtype == torch.bfloat16 and x.dtype in fast_types()
    return "this processor multiplies bfloat16 itself" if fast else None


def _hide(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def _by_channel(p: Tensor, width: int) -> Tensor:
    """p (heads, N), a number for each head, as (N, width) for each channel."""
    return p.t().repeat_interleave(width // p.shape[0], dim=1)


def _powers(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int
) -> Tensor:
    """Σ_n h_n^p for p = 1 … degree with h = act(x Wᵀ + b), (B, degree, E) in float32 at least."""
    h = power = _hide(FUNCTIONS[activation](F.linear(x, weight, bias)), mask)
    dtype = accumulator(x.dtype)
    sums = [h.sum(1, dtype=dtype)]
    for _ in range(1, degree):
        power = power * h
        sums.append(power.sum(1, dtype=dtype))
    return torch.stack(sums, dim=1)


def _pairs(x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ_n p_n ⊙ (x_n W_1ᵀ + b_1) ⊙ (x_n W_2ᵀ + b_2), (B, E) in float32 at least."""
    first, second = F.linear(x, weight, bias).chunk(2, dim=-1)
    product = first * second
    product = product if p is None else product * _by_channel(p, product.shape[-1]).to(product.dtype)
    return _hide(product, mask).sum(1, dtype=accumulator(x.dtype))


def _gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, p: Tensor | None, last: Tensor | None,
    last_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """(act(x Wᵀ + b) ⊙ gate ⊙ p_n) W_oᵀ + b_o, (B, N, D) in the type of x."""
    u = FUNCTIONS[activation](F.linear(x, weight, bias)) * gate.unsqueeze(1).to(x.dtype)
    u = u if p is None else u * _by_channel(p, u.shape[-1]).to(u.dtype)
    return u if last is None else F.linear(u, last, last_bias)


def _scaled(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None) -> Tensor:
    """(x ⊙ scale) Wᵀ + b + rest x, (B, N, D) in the type of x."""
    y = F.linear(x * scale.unsqueeze(1).to(x.dtype), weight, bias)
    return y if rest is None else y + rest * x


_MAP = "Tensor x, Tensor weight, Tensor? bias"
# x (B, N, D); weight (E, D), for pairs (2E, D): W_1, then W_2; bias as long; mask (B, N); p (heads, N), a number for
# each head's share of the E channels; gate (B, E); scale (B, D); rest a number; last (D', E) and last_bias (D'), which
# may be None for no map.
linear_powers = Operator(
    "linear_powers", f"({_MAP}, Tensor? mask, str activation, int degree) -> Tensor", _powers,
    "pooled_linear.powers", (0, 1, 2),
)  # fmt: skip
linear_pairs = Operator(
    "linear_pairs", f"({_MAP}, Tensor? p, Tensor? mask) -> Tensor", _pairs, "pooled_linear.pairs", (0, 1, 2, 3)
)
linear_gated = Operator(
    "linear_gated", f"({_MAP}, Tensor gate, Tensor? p, Tensor? last, Tensor? last_bias, str activation) -> Tensor",
    _gated, "pooled_linear.gated", (0, 1, 2, 3, 4, 5, 6),
)  # fmt: skip
linear_scaled = Operator(
    "linear_scaled", "(Tensor x, Tensor scale, Tensor weight, Tensor? bias, Tensor? rest) -> Tensor", _scaled,
    "poly_nl.scaled", (0, 1, 2, 3, 4),
)  # fmt: skip
