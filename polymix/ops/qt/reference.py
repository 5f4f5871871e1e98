"""Quadratic-Taylor attention with the full N×N similarity, written for reading. Used by tests only.

The matrices come from a mixer's `matrices()`. Tokens are rows: x is (B, N, D), and a channel map multiplies from the
right, X W. A missing bias is None.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polymix.ops.shared.reference import heads_of, joined


def qt(
    x: Tensor, context: Tensor, visible: Tensor, heads: int,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
    alpha: Tensor | None, beta: Tensor | None, gamma: Tensor | None,
    *, order: int = 2, guard: float = 1e-3,
) -> Tensor:  # fmt: skip
    """QT: Σ_j sim(q, k_j) v_j / Σ_j sim(q, k_j).

    `visible` (B, M, N) is True where a query sees a key. alpha, beta and gamma (heads,) are None in the full form.
    """
    q, k, v = heads_of(x, W_q, b_q, heads), heads_of(context, W_k, b_k, heads), heads_of(context, W_v, b_v, heads)
    d = q.shape[-1]
    dot = q @ k.transpose(-1, -2)
    if alpha is None or beta is None or gamma is None:
        s = dot / math.sqrt(d)
        terms = [torch.ones_like(s), s, s**2 / 2]
    else:
        squares = q.square() @ k.square().transpose(-1, -2)
        a, b, c = (letter[:, None, None] for letter in (alpha, beta, gamma))
        terms = [c**2 * torch.ones_like(dot), b**2 * (4 / d) ** 0.5 * dot, a**2 * squares]
    similarity = torch.stack(terms[: order + 1]).sum(0) * visible[:, None]
    floor = guard * visible.sum(-1).clamp_min(1)[:, None, :, None].to(similarity.dtype)
    return joined(similarity @ v / torch.maximum(similarity.sum(-1, keepdim=True), floor), W_o, b_o)
