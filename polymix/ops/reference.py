"""The specification: every mixer as its equation, written to be read beside the paper, with N×N objects and loops.

Each function takes a mixer's `matrices()` by the paper's letters. Nothing here is fast, and nothing else in the
package calls it: it is what everything else is held against. `x` is (B, N, D); a right matrix acts on row tokens, X B;
a token map is (N, N), or (D, N, N) when every channel has its own; a bias is None where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polymix.ops.common import ACTIVATIONS, GATES, sigma

NORM_EPS = 1e-6


def mix_tokens(a: Tensor, x: Tensor) -> Tensor:
    """A X, or channel by channel where A is (D, N, N)."""
    return torch.einsum("mn,bnd->bmd", a, x) if a.ndim == 2 else torch.einsum("dmn,bnd->bmd", a, x)


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def normalise(y: Tensor, kind: str | None, heads: int) -> Tensor:
    """RMS or layer norm of each head's channels, without learned scales."""
    if kind is None:
        return y
    y = y.unflatten(-1, (heads, -1))
    if kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    return (y / (y.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()).flatten(-2)


def coefficients(basis: str, i: int) -> tuple[float, float]:
    """a_i and b_i of T_{i+1} = a_i y T_i - b_i T_{i-1}."""
    return {"monomial": (1, 0), "chebyshev": (2, 1), "legendre": ((2 * i + 1) / (i + 1), i / (i + 1)),
            "hermite": (1, i)}[basis]  # fmt: skip


def padre(
    x: Tensor,
    A: Sequence[Tensor], B: Sequence[Tensor], C: Sequence[Tensor], D: Sequence[Tensor],
    b_A: Sequence[Tensor | None], b_B: Sequence[Tensor | None],
    b_C: Sequence[Tensor | None], b_D: Sequence[Tensor | None],
    W: Sequence[Tensor], L: Tensor | None, U: Tensor | None = None, V: Tensor | None = None,
    Q: Sequence[Tensor] = (), S: Tensor | None = None,
    *, normalize: str | None = None, heads: int = 1, basis: str = "monomial", eps: float = 1e-3,
    pattern: str | None = None, contexts: Sequence[Tensor] = (), degrees: bool = False,
) -> Tensor | list[Tensor]:  # fmt: skip
    """PADRe, Eq. 1-7, with contexts 11-14, rational 15-20. With `degrees` the list Z_1 … Z_d instead of the output."""
    d = len(W)
    inputs = dict(zip("abcdefghijklmnop", (x, *contexts), strict=False))
    letters = pattern or "a" * len(A)
    Y = [
        normalise(plus(mix_tokens(A[i], plus(inputs[letters[i]] @ B[i], b_B[i])), b_A[i]), normalize, heads)
        for i in range(len(A))
    ]  # Eq. 1, 15

    def chain(first: int, count: int, at: int) -> list[Tensor]:
        """Z_1 … Z_count of Y from `first` on, with the C and D from `at` on."""
        Z = [torch.ones_like(Y[0]), Y[first]]
        for i in range(1, count):  # Eq. 2, 3
            j = at + i - 1
            a, b = coefficients(basis, i)
            mixed = plus(mix_tokens(C[j], plus(Z[i] @ D[j], b_D[j])), b_C[j])
            Z.append(a * mixed * Y[first + i] - b * Z[i - 1])
        return Z[1:]

    Z = chain(0, d, 0)
    if degrees:
        return Z
    P = torch.stack([W[i] * Z[i] for i in range(d)]).sum(0)  # Eq. 6
    P = plus(P, L)
    if S is not None:  # Eq. 18-20
        below = chain(d, len(Q), d - 1)
        R = torch.stack([Q[k] * below[k] for k in range(len(Q))]).sum(0) + S
        P = P / (R**2 + eps)
    if U is not None:  # Eq. 7
        P = mix_tokens(U, P)
    return P if V is None else P @ V


def turn(x: Tensor, position: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate the pairs (k, k + width/2) of x (B, N, width) by position (B or 1, N) times their frequency."""
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for k in range(half):
        angle = position.to(torch.float64) * frequencies[k]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        out[..., k] = x[..., k] * cos - x[..., k + half] * sin
        out[..., k + half] = x[..., k + half] * cos + x[..., k] * sin
    return out


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


def heads_of(x: Tensor, W: Tensor, b: Tensor | None, heads: int) -> Tensor:
    """X W + b as (B, heads, N, d)."""
    return plus(x @ W, b).unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(y: Tensor, W_o: Tensor, b_o: Tensor | None) -> Tensor:
    return plus(y.transpose(1, 2).flatten(-2) @ W_o, b_o)


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


def weights(q: Tensor, k: Tensor, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √d + bias) over the visible keys (B, N, M), zeros where there are none."""
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + (0.0 if bias is None else bias)
    return logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)


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


def qt(
    x: Tensor, context: Tensor, visible: Tensor, heads: int,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
    alpha: Tensor | None, beta: Tensor | None, gamma: Tensor | None,
    *, order: int = 2, guard: float = 1e-3,
) -> Tensor:  # fmt: skip
    """QT: Σ_j sim(q, k_j) v_j / Σ_j sim(q, k_j); alpha, beta, gamma (heads,) in the compact form, None in the full."""
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


def poly_nl(
    x: Tensor, real: Tensor,
    W_1: Tensor, W_2: Tensor | None, W_3: Tensor,
    b_1: Tensor | None, b_2: Tensor | None, b_3: Tensor | None,
    alpha: Tensor, beta: Tensor,
    W_in: Tensor | None = None, b_in: Tensor | None = None, W_out: Tensor | None = None, b_out: Tensor | None = None,
    W_p: Tensor | None = None, b_p: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Poly-NL, Eq. 9: Z = αX + βY, Y = (Ψ(XW₁ ⊙ XW₂) ⊙ X) W₃ [+ XW_p ⊙ X], between W_in and W_out where there are."""
    inner = x if W_in is None else plus(x @ W_in, b_in)
    product = plus(inner @ W_1, b_1)
    if W_2 is not None:
        product = product * plus(inner @ W_2, b_2)
    pooled = (product * real[..., None]).sum(1, keepdim=True) / real.sum(1).clamp_min(1)[:, None, None]
    y = plus((pooled * inner) @ W_3, b_3)
    if W_p is not None:
        y = y + plus(inner @ W_p, b_p) * inner
    return alpha * x + beta * (y if W_out is None else plus(y @ W_out, b_out))


def poly_sa(
    x: Tensor, heads: int,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
    p_1: Tensor, p_2: Tensor,
    *, kind: str = "softmax", real: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Poly-SA, Eq. 18, p_1 and p_2 (heads, N); W_o is (D, N, N) where a depthwise convolution mixes the heads.

    With `real` (B, N) the pooling is Eq. 16's mean over the real tokens instead of p_2.
    """
    q, k, v = (heads_of(x, W, b, heads) for W, b in ((W_q, b_q), (W_k, b_k), (W_v, b_v)))
    if real is None:
        pooled = torch.einsum("hn,bhnd->bhd", p_2, k * v)
    else:
        pooled = torch.einsum("bn,bhnd->bhd", real / real.sum(1, keepdim=True), k * v)
    y = q * torch.einsum("hn,bhd->bhnd", p_1, sigma(pooled, kind))
    if W_o.ndim == 2:
        return joined(y, W_o, b_o)
    return plus(mix_tokens(W_o, y.transpose(1, 2).flatten(-2)), b_o)


def linear_floor(
    x: Tensor,
    W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor,
    b_q: Tensor | None, b_k: Tensor | None, b_v: Tensor | None, b_o: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention's four projections without the attention: (Q + K + V) W_o."""
    return plus(plus(x @ W_q, b_q) @ W_o + plus(x @ W_k, b_k) @ W_o + plus(x @ W_v, b_v) @ W_o, b_o)


__all__ = ["linear_floor", "local", "padre", "poly_nl", "poly_sa", "pom", "qt", "softmax"]
