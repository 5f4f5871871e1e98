"""Poly-NL, Eq. 9, and Poly-SA, Eq. 18, written for reading next to the papers. Used by tests only.

The matrices have the papers' letters and come from a mixer's `matrices()`. Tokens are rows: x is (B, N, D), and a
channel map multiplies from the right, X W. A token map is (D, N, N), with one matrix per channel. A missing bias is
None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.shared.activations import sigma
from polymix.ops.shared.reference import heads_of, joined, mix_tokens, plus


def poly_nl(
    x: Tensor, real: Tensor,
    W_1: Tensor, W_2: Tensor | None, W_3: Tensor,
    b_1: Tensor | None, b_2: Tensor | None, b_3: Tensor | None,
    alpha: Tensor, beta: Tensor,
    W_in: Tensor | None = None, b_in: Tensor | None = None, W_out: Tensor | None = None, b_out: Tensor | None = None,
    W_p: Tensor | None = None, b_p: Tensor | None = None, *, inside: bool = True,
) -> Tensor:  # fmt: skip
    """Poly-NL, Eq. 9: Z = αX + βY with Y = (Ψ(XW₁ ⊙ XW₂) ⊙ X) W₃ [+ XW_p ⊙ X].

    `real` (B, N) is True for real tokens. With W_in and W_out, Z is computed in a bottleneck, or with
    inside=False only Y.
    """
    inner = x if W_in is None else plus(x @ W_in, b_in)
    product = plus(inner @ W_1, b_1)
    if W_2 is not None:
        product = product * plus(inner @ W_2, b_2)
    pooled = (product * real[..., None]).sum(1, keepdim=True) / real.sum(1).clamp_min(1)[:, None, None]
    y = plus((pooled * inner) @ W_3, b_3)
    if W_p is not None:
        y = y + plus(inner @ W_p, b_p) * inner
    if W_out is None:
        return alpha * x + beta * y
    if inside:
        return plus((alpha * inner + beta * y) @ W_out, b_out)
    return alpha * x + beta * plus(y @ W_out, b_out)


def poly_sa(
    x: Tensor, heads: int,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
    p_1: Tensor, p_2: Tensor,
    *, kind: str = "softmax", real: Tensor | None = None, keys: Tensor | None = None, values: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Poly-SA, Eq. 18, with p_1 and p_2 (heads, N); keys and values: what K and V are computed from, if not from x.

    If a depthwise convolution mixes the heads, W_o is its token map (D, N, N). With `real` (B, N), the pooling is the
    mean over the real tokens of Eq. 16 instead of p_2.
    """
    keys = x if keys is None else keys
    values = keys if values is None else values
    q, k, v = (heads_of(y, W, b, heads) for y, W, b in ((x, W_q, b_q), (keys, W_k, b_k), (values, W_v, b_v)))
    if real is None:
        pooled = torch.einsum("hn,bhnd->bhd", p_2, k * v)
    else:
        pooled = torch.einsum("bn,bhnd->bhd", real / real.sum(1, keepdim=True), k * v)
    y = q * torch.einsum("hn,bhd->bhnd", p_1, sigma(pooled, kind))
    if W_o.ndim == 2:
        return joined(y, W_o, b_o)
    return plus(mix_tokens(W_o, y.transpose(1, 2).flatten(-2)), b_o)
