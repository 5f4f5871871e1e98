"""The building blocks of Poly-SA and Poly-NL in plain PyTorch: pooled products, and tokens multiplied with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.gated.eager import by_head
from polymix.ops.shared.activations import sigma
from polymix.ops.shared.tensors import accumulator, autocast_dtype, count_real, scaled_linear, without_empty

# -- definitions of the operators


def pairs(x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ_n p_n ⊙ (x_n W_1ᵀ + b_1) ⊙ (x_n W_2ᵀ + b_2), (B, E) in float32 or wider; p is (heads, N)."""
    first, second = F.linear(x, weight, bias).chunk(2, dim=-1)
    return _sum_real(by_head(first * second, p), mask)


def product(k: Tensor, v: Tensor | None, p_2: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ_n p_2[n] k_n ⊙ v_n over the real tokens: k and v (B, N, h, d), p_2 (h, N), mask (B, N) -> (B, h, d)."""
    x = k if v is None else k * v
    x = x if p_2 is None else x * p_2.t()[..., None].to(x.dtype)
    return _sum_real(x.flatten(2), mask).unflatten(-1, k.shape[2:])


def _sum_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Σ_n x_n over the real tokens, (B, E) in float32 or wider."""
    x = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
    return x.sum(1, dtype=accumulator(x.dtype))


def gate_tokens(q: Tensor, gate: Tensor, p_1: Tensor | None) -> Tensor:
    """q ⊙ gate ⊙ p_1[n]: q (B, N, h, d), gate (B, h, d), p_1 (h, N) -> (B, N, h, d)."""
    y = q * gate[:, None].to(q.dtype)
    return y if p_1 is None else y * p_1.t()[..., None].to(q.dtype)


def scaled(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None) -> Tensor:
    """(x ⊙ scale) Wᵀ + b + rest x, (B, N, D) in the dtype of x; scale is (B, D), rest a scalar."""
    y = scaled_linear(x, scale.unsqueeze(1).to(x.dtype), weight, bias)
    return y if rest is None else y + rest * x


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean μ (B, D) of the real tokens of x (B, N, D), and Σ (x_n - μ)(x_n - μ)ᵀ over them (B, D, D)."""
    hidden = None if mask is None else ~mask.unsqueeze(-1)
    centre = (x if hidden is None else x.masked_fill(hidden, 0.0)).sum(1) / count_real(x, mask)
    centred = x - centre.unsqueeze(1)
    centred = centred if hidden is None else centred.masked_fill(hidden, 0.0)
    return centre, centred.mT @ centred


# -- from the sums to the gate


def moments_pay(x: Tensor, width: int, dtype: torch.dtype) -> bool:
    """Whether to compute a mean of products from the second moment, for tokens x (B, N, …) of this width and dtype.

    It must be faster, which takes N ≥ 2 width tokens, and exact enough, which excludes bfloat16 and float16.
    """
    if torch.compiler.is_compiling() or autocast_dtype(x.device):  # a graph must not depend on the number of tokens
        return False
    return dtype == accumulator(dtype) and x.shape[1] >= 2 * width


def mean_from_moments(
    centre: Tensor, moment: Tensor, count: Tensor | int, weight: Tensor, bias: Tensor | None, mask: Tensor | None
) -> Tensor:
    """mean(X W_1 ⊙ X W_2) = w_1ᵀ S w_2 / count + (w_1ᵀμ + b_1)(w_2ᵀμ + b_2), from μ and S.

    Args:
        centre: μ (B, D), from `moments`.
        moment: S (B, D, D), from `moments`.
        count: the number of real tokens, from `count_real`.
        weight: W_1, then W_2, (2E, D).
        bias: (2E) or None.
        mask: (B, N), True for real tokens.
    Returns:
        (B, E). Cost: D³ multiply-adds per sample.
    """
    w_1, w_2 = weight.chunk(2)
    covariance = (w_1 @ moment * w_2).sum(-1) / count
    first, second = F.linear(centre, weight, bias).chunk(2, dim=-1)
    return covariance + without_empty(first * second, mask)  # without real tokens the biases must not remain


def gate_of_sum(x: Tensor, pooled: Tensor, p_2: Tensor | None, kind: str, mask: Tensor | None) -> Tensor:
    """Apply σ to `pooled` (B, h, d), the sum of K ⊙ V over the tokens of x (B, N, …); without p_2, to their mean."""
    if p_2 is None:
        pooled = pooled / count_real(x, mask, ndim=3)
    return without_empty(sigma(pooled, kind), mask)  # the softmax of zeros would be 1/d, not 0
