"""Softmax attention, whole and local, and the linear floor as their equations.

Written to be read beside the paper: N×N objects and loops. It takes a mixer's `matrices()` by the paper's letters; x is
(B, N, D); a right matrix acts on row tokens, X B; a token map is (N, N), or (D, N, N) where every channel has its own;
a bias is None where there is none. Only tests call it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.shared.reference import heads_of, joined, plus, turn, weights


def softmax(
    x: Tensor, context: Tensor, visible: Tensor, heads: int,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
    bias: Tensor | None = None, turn: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(Q Kᵀ / √d + bias) V over the visible tokens; a query that sees nothing gets zeros before W_o.

    bias (heads, N, M). turn (N, d, d): the rotation of each position, which queries and keys are multiplied with.
    """
    q, k, v = heads_of(x, W_q, b_q, heads), heads_of(context, W_k, b_k, heads), heads_of(context, W_v, b_v, heads)
    if turn is not None:
        q, k = (torch.einsum("nij,bhnj->bhni", turn, part) for part in (q, k))
    return joined(weights(q, k, visible, bias) @ v, W_o, b_o)


def local(
    x: Tensor, visible: Tensor, heads: int, window: int,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
    position: Tensor | None = None, frequencies: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of each token over the last `window` of the tokens that it sees, itself among them.

    visible (B, N, N): real tokens of the past, and of the token's own segment. position (B or 1, N): where queries and
    keys are turned to, by the frequencies (d / 2,).
    """
    q, k, v = heads_of(x, W_q, b_q, heads), heads_of(x, W_k, b_k, heads), heads_of(x, W_v, b_v, heads)
    if position is not None and frequencies is not None:
        q, k = (turn(part, position[:, None], frequencies) for part in (q, k))
    from_it_on = visible.flip(-1).cumsum(-1).flip(-1)  # how many of them do not lie before each
    return joined(weights(q, k, visible & (from_it_on <= window)) @ v, W_o, b_o)


def linear_floor(
    x: Tensor,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention's four projections without the attention: (Q + K + V) W_o."""
    return plus(plus(x @ W_q, b_q) @ W_o + plus(x @ W_k, b_k) @ W_o + plus(x @ W_v, b_v) @ W_o, b_o)
