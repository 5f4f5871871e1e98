"""Softmax attention, full and local, and the linear floor, written for reading. Used by tests only.

The matrices come from a mixer's `matrices()`. Tokens are rows: x is (B, N, D), and a channel map multiplies from the
right, X W. A missing bias is None.
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
    """softmax(Q Kᵀ / √d + bias) V over the visible tokens; a query that sees none gets zeros before W_o.

    `bias` is (heads, N, M). `turn` (N, d, d) holds the rotation matrix of each position, applied to queries and keys.
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
    """Softmax attention of each token over the last `window` tokens that it sees, including itself.

    `visible` (B, N, N) is True for real past tokens of the same segment. `position` (B or 1, N) and `frequencies`
    (d / 2,) give the rotation of queries and keys.
    """
    q, k, v = heads_of(x, W_q, b_q, heads), heads_of(x, W_k, b_k, heads), heads_of(x, W_v, b_v, heads)
    if position is not None and frequencies is not None:
        q, k = (turn(part, position[:, None], frequencies) for part in (q, k))
    remaining = visible.flip(-1).cumsum(-1).flip(-1)  # the number of visible tokens from each token on
    return joined(weights(q, k, visible & (remaining <= window)) @ v, W_o, b_o)


def linear_floor(
    x: Tensor,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
) -> Tensor:  # fmt: skip
    """The four projections of attention without the attention: (Q + K + V) W_o."""
    return plus(plus(x @ W_q, b_q) @ W_o + plus(x @ W_k, b_k) @ W_o + plus(x @ W_v, b_v) @ W_o, b_o)
