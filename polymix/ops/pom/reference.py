"""PoM as its equations, 1, 2 and 4.

Written to be read beside the paper: N×N objects and loops. It takes a mixer's `matrices()` by the paper's letters; x is
(B, N, D); a right matrix acts on row tokens, X B; a token map is (N, N), or (D, N, N) where every channel has its own;
a bias is None where there is none. Only tests call it.
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
    """PoM, Eq. 1, 2 and 4: `visible` (B, M, N) says which context tokens each query sees, `decay` how it forgets them.

    `rotate_gate` and `rotate_terms` list (features, positions, frequencies): one entry for 1-D, two for 2-D positions.
    """
    h = ACTIVATIONS[activation](plus(context @ W_h, b_h))
    terms = torch.stack([alpha[:, p] * h ** (p + 1) for p in range(alpha.shape[1])]).sum(0)  # (B, N, E)
    selection = GATES[gate](plus(x @ W_s, b_s))
    for features, position, frequencies in rotate_terms:
        terms[..., features] = turn(terms[..., features], position, frequencies)
    for features, position, frequencies in rotate_gate:
        selection[..., features] = turn(selection[..., features], position, frequencies)
    weight = visible.unsqueeze(1).to(terms.dtype)  # (B, 1, M, N)
    if decay is not None:  # (heads): a token counts by how many visible ones came after it
        weight = weight * decay[:, None, None] ** (visible.sum(-1, keepdim=True) - visible.cumsum(-1)).unsqueeze(1)
    H = weight @ terms.unflatten(-1, (weight.shape[1], -1)).transpose(1, 2)
    if reduction == "mean":
        H = H / weight.sum(-1, keepdim=True).clamp_min(1e-300)
    H = H.transpose(1, 2).flatten(2)
    selection = selection.repeat_interleave(H.shape[-1] // selection.shape[-1], dim=-1)
    return plus((selection * H) @ W_o, b_o)
