"""A linear map with gated outputs and a projection, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.activations import FUNCTIONS
from polymix.ops.shared.tensors import scaled_linear


def by_head(x: Tensor, p: Tensor | None) -> Tensor:
    """Multiply x (B, N, E) with p (heads, N), one factor per token and head; None leaves x unchanged."""
    if p is None:
        return x
    # One factor for each channel: a tensor processor's compiler did not finish a view by heads of 16,384 tokens.
    return x * p.t().to(x.dtype).repeat_interleave(x.shape[-1] // p.shape[0], dim=1)


def gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, p: Tensor | None, last: Tensor | None,
    last_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """(act(x Wᵀ + b) ⊙ p ⊙ gate) W_oᵀ + b_o, (B, N, D') in the dtype of x."""
    u = by_head(FUNCTIONS[activation](F.linear(x, weight, bias)), p)
    gate = gate.unsqueeze(1).to(u.dtype)
    return u * gate if last is None else scaled_linear(u, gate, last, last_bias)
