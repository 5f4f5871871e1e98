"""PoM, Eq. 1, 2 and 4, written for reading next to the paper. Used by tests only.

The matrices have the paper's letters and come from a mixer's `matrices()`. Tokens are rows: x is (B, N, D), and a
channel map multiplies from the right, X W. A missing bias is None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polymix.ops.shared.activations import ACTIVATIONS, GATES
from polymix.ops.shared.reference import plus, turn


def pom(
    x: Tensor,
    context: Tensor,
    visible: Tensor,
    W_h: Tensor, W_s: Tensor, W_o: Tensor, alpha: Tensor,
    b_h: Tensor | None, b_s: Tensor | None, b_o: Tensor | None,
    decay: Tensor | None = None,
    *, activation: str = "gelu", gate: str = "sigmoid", reduction: str = "mean",
    rotate_gate: Sequence[tuple[slice, Tensor, Tensor]] = (), rotate_terms: Sequence[tuple[slice, Tensor, Tensor]] = (),
) -> Tensor:  # fmt: skip
    """PoM, Eq. 1, 2 and 4.

    Args:
        x: the queries, (B, M, D).
        context: (B, N, D).
        visible: (B, M, N), True where a query sees a context token.
        decay: (heads), the weight λ per later visible token; None for no decay.
        rotate_gate: (features, positions, frequencies) for each axis of the rotary positions of the gate.
        rotate_terms: the same for the terms.
    """
    h = ACTIVATIONS[activation](plus(context @ W_h, b_h))
    terms = torch.stack([alpha[:, p] * h ** (p + 1) for p in range(alpha.shape[1])]).sum(0)  # (B, N, E)
    selection = GATES[gate](plus(x @ W_s, b_s))
    for features, position, frequencies in rotate_terms:
        terms[..., features] = turn(terms[..., features], position, frequencies)
    for features, position, frequencies in rotate_gate:
        selection[..., features] = turn(selection[..., features], position, frequencies)
    weight = visible.unsqueeze(1).to(terms.dtype)  # (B, 1, M, N)
    if decay is not None:  # a token has the weight λ^(number of visible tokens after it)
        weight = weight * decay[:, None, None] ** (visible.sum(-1, keepdim=True) - visible.cumsum(-1)).unsqueeze(1)
    H = weight @ terms.unflatten(-1, (weight.shape[1], -1)).transpose(1, 2)
    if reduction == "mean":
        H = H / weight.sum(-1, keepdim=True).clamp_min(1e-300)
    H = H.transpose(1, 2).flatten(2)
    selection = selection.repeat_interleave(H.shape[-1] // selection.shape[-1], dim=-1)
    return plus((selection * H) @ W_o, b_o)
