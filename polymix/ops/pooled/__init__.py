"""Poly-SA and Poly-NL, which multiply every token with one pooled vector, with any implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from polymix.ops.dispatch import KERNELS, choose
from polymix.ops.gated import gated
from polymix.ops.operator import Operator
from polymix.ops.pooled import blocked, eager
from polymix.ops.shared.activations import sigma as apply_sigma
from polymix.ops.shared.blocks import slower_than_pytorch
from polymix.ops.shared.signature import Signature
from polymix.ops.shared.tensors import Linear, autocast_dtype, count_real, project, scaled_linear, share

_SAME_TOKENS = "computes everything from the same tokens"
_NATIVE, _TRITON = "polymix.ops.pooled.native", "polymix.ops.pooled.triton"
pooled_product = Operator(
    "pooled_product", "(Tensor k, Tensor? v, Tensor? p_2, Tensor? mask) -> Tensor", eager.product, (0, 1, 2),
    Signature("k: B, N, H, D; v: B, N, H, D; p_2: H, N; mask: B, N", "B, H, D"), triton=f"{_TRITON}:product",
)  # fmt: skip
gate_tokens = Operator(
    "gate_tokens", "(Tensor q, Tensor gate, Tensor? p_1) -> Tensor", eager.gate_tokens, (0, 1, 2),
    Signature("q: B, N, H, D; gate: B, H, D; p_1: H, N", "=: B, N, H, D"),
    sums=(1,), triton=f"{_TRITON}:gate_tokens",
)  # fmt: skip
linear_pairs = Operator(
    "linear_pairs", "(Tensor x, Tensor weight, Tensor? bias, Tensor? p, Tensor? mask) -> Tensor", eager.pairs,
    (0, 1, 2, 3),
    Signature("x: B, N, D; weight: W, D; bias: W; p: H, N; mask: B, N", "B, W // 2", "W % 2 == 0",
              "p is None or W // 2 % H == 0"),
    native=f"{_NATIVE}:pairs",
)  # fmt: skip
linear_scaled = Operator(
    "linear_scaled", "(Tensor x, Tensor scale, Tensor weight, Tensor? bias, Tensor? rest) -> Tensor", eager.scaled,
    (0, 1, 2, 3, 4),
    Signature("x: B, N, D; scale: B, D; weight: E, D; bias: E; rest: ...", "=: B, N, E",
              "rest is None or (rest.numel() == 1 and E == D)"),
    sums=(1,), native=f"{_NATIVE}:scaled",
)  # fmt: skip
moments = Operator(
    "moments", "(Tensor x, Tensor? mask) -> (Tensor, Tensor)", eager.moments, (0,),
    Signature("x: B, N, D; mask: B, N", "B, D; B, D, D"), native=f"{_NATIVE}:moments",
)  # fmt: skip


def poly_sa(
    x: Tensor,
    qkv: Linear,
    proj: Linear | None,
    p_1: Tensor | None,
    p_2: Tensor | None,
    *,
    heads: int,
    sigma: str,
    mask: Tensor | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute Q ⊙ p_1 σ(p_2ᵀ(K ⊙ V)) for each head, then apply W_o (Poly-SA, Eq. 18; with a mean, Eq. 16).

    Args:
        x: (B, N, D).
        qkv: W_q, W_k and W_v in one map (3D, D).
        proj: W_o; None to skip the projection.
        p_1: (heads, N), a factor per token; None for ones.
        p_2: (heads, N), pooling weights; None for the mean over the real tokens. Pass both or neither.
        heads: the number of heads.
        sigma: "softmax" over each head's channels, "sigmoid", "tanh" or "identity".
        mask: (B, N), True for real tokens.
        keys: (B, N, D), what K and, without values, V are computed from, if not from x.
        values: (B, N, D), what V is computed from. With keys or values eager or triton runs.
        impl: "auto", "eager", "blocked", "native" or "triton".
    Returns:
        (B, N, D) in the dtype of x. Cost: 4 N D² multiply-adds, or 3 N D² without `proj`.
    Raises:
        CapabilityError: the implementation requested by name does not support the call.
    """
    dim = x.shape[-1]
    apart = keys is not None or values is not None
    unsupported = {name: _SAME_TOKENS if apart and name != "triton" else None for name in KERNELS}
    impl = choose("poly_sa", impl, (x, *qkv, *(proj or ()), p_1, p_2, keys, values), unsupported,
                  slower={"native": slower_than_pytorch(x)}, in_blocks=("native", "blocked"))  # fmt: skip
    if impl == "blocked":
        return blocked.poly_sa(x, qkv, proj, p_1, p_2, heads=heads, kind=sigma, mask=mask)
    if impl == "triton" or apart:
        parts = project(qkv, x, x if keys is None else keys, values)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts)
        gate = eager.gate_of_sum(k, pooled_product(k, v, p_2, mask, impl=impl), p_2, sigma, mask)
        y = gate_tokens(q, gate, p_1, impl=impl).flatten(2)
        return y if proj is None else F.linear(y, *proj)
    pooled = linear_pairs(x, *share(qkv, dim, 3 * dim), p_2, mask, impl=impl).unflatten(-1, (heads, -1))
    gate = eager.gate_of_sum(x, pooled, p_2, sigma, mask).flatten(1)
    return gated(x, share(qkv, 0, dim), gate, proj, "identity", p=p_1, impl=impl)


class PolyNlWeights(NamedTuple):
    """The parameters of a Poly-NL layer."""

    product: Linear  # W_1, W_2 and, with order="2+3", W_p, in one map
    proj: Linear  # W_3
    alpha: Tensor
    beta: Tensor
    into: Linear | None = None  # W_in of a bottleneck
    out: Linear | None = None  # W_out of a bottleneck
    merged: Linear | None = None  # W_3 and W_out as one map, if merged

    def last(self) -> Linear:
        """W_3, followed by W_out with a bottleneck, as one map."""
        weight, bias = self.proj
        if self.out is None:
            return weight, bias
        return self.merged or (self.out[0] @ weight, None if bias is None else F.linear(bias, *self.out))


def poly_sa_summary(x: Tensor, qkv: Linear, p_2: Tensor | None, *, mask: Tensor | None = None) -> Tensor:
    """The sum of p_2 ⊙ K ⊙ V over the real tokens of x (B, N, D), (B, D) in float32 or wider; see `poly_sa`."""
    return linear_pairs(x, *share(qkv, x.shape[-1], 3 * x.shape[-1]), p_2, mask, impl="eager")


def poly_sa_read(
    x: Tensor, pooled: Tensor, count: Tensor, qkv: Linear, proj: Linear, p_1: Tensor | None, *, heads: int, sigma: str
) -> Tensor:
    """What `poly_sa` gives for tokens x of a whole; pooled: its p_2ᵀ(K ⊙ V) (B, D); count: its real tokens (B)."""
    gate = (
        apply_sigma(pooled.unflatten(-1, (heads, -1)), sigma).masked_fill((count == 0)[:, None, None], 0.0).flatten(1)
    )
    return gated(x, share(qkv, 0, x.shape[-1]), gate, proj, "identity", p=p_1, impl="eager")


def poly_nl(
    x: Tensor, weights: PolyNlWeights, *, order: int | str = 3, mask: Tensor | None = None,
    values: Tensor | None = None, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Compute Z = αX + βY with Y = (Ψ(X W_1 ⊙ X W_2) ⊙ X) W_3 (Poly-NL, Eq. 9).

    Ψ is the mean over the real tokens. With a bottleneck, Y is computed from X W_in and mapped back by W_out.

    Args:
        x: (B, N, D).
        weights: the maps and α, β.
        order: 3; 2 leaves out X W_2; "2+3" adds X W_p ⊙ X to Y.
        mask: (B, N), True for real tokens.
        values: (B, N, D), what W_2 reads in place of X. Eager or triton then runs.
        impl: "auto", "eager", "blocked", "native" or "triton".
    Returns:
        (B, N, D) in the dtype of x. Cost: 3 N D² multiply-adds; from N = 2 D tokens on 2 N D², because the mean is
        then computed from the second moment of the tokens.
    Raises:
        CapabilityError: the implementation requested by name does not support the call.
    """
    why = _SAME_TOKENS if values is not None else None if order == 3 else "supports order=3 only"
    tensors = (x, values, *weights.product, *weights.proj, weights.alpha, weights.beta,
               *(weights.into or ()), *(weights.out or ()))  # fmt: skip
    impl = choose("poly_nl", impl, tensors, {"blocked": why, "native": why, "triton": None},
                  slower={"native": slower_than_pytorch(x)}, in_blocks=("native", "blocked"))  # fmt: skip
    if impl == "blocked":
        alpha, beta = weights.alpha.item(), weights.beta.item()
        return blocked.poly_nl(x, weights.into, weights.product, weights.last(), alpha, beta, mask)
    inner = x if weights.into is None else F.linear(x, *weights.into)
    if order == 3 and impl != "triton" and values is None:
        mean = _mean_of_products(inner, weights.product, mask, impl)
        weight, bias = weights.last()
        bias, lowered = None if bias is None else weights.beta * bias, autocast_dtype(x.device) is not None
        rest = None if lowered or weights.into is not None else weights.alpha  # autocast leaves αX in the dtype of X
        y = linear_scaled(inner, weights.beta * mean, weight, bias, rest, impl=impl)
        if rest is not None:
            return y
        return y.addcmul_(x, weights.alpha) if impl == "native" and not lowered else y + weights.alpha * x
    parts = list(F.linear(inner, *weights.product).split(inner.shape[-1], dim=-1))  # X W_1, X W_2, X W_p
    if values is not None:
        other, width = values if weights.into is None else F.linear(values, *weights.into), inner.shape[-1]
        parts[1] = F.linear(other, *share(weights.product, width, 2 * width))
    mean = mean_over_tokens(parts[0], mask, parts[1] if len(parts) > 1 else None, impl=impl)
    return _gated_by_mean(x, inner, mean, parts[2] if order == "2+3" else None, weights, impl)


def poly_nl_summary(x: Tensor, weights: PolyNlWeights, *, order: int | str = 3, mask: Tensor | None = None) -> Tensor:
    """The sum of X W_1 ⊙ X W_2 over the real tokens of x (B, N, D), (B, E) in float32 or wider; see `poly_nl`."""
    inner = x if weights.into is None else F.linear(x, *weights.into)
    width = inner.shape[-1]
    if order == 2:
        return eager.product(F.linear(inner, *weights.product).unsqueeze(2), None, None, mask).squeeze(1)
    return linear_pairs(inner, *share(weights.product, 0, 2 * width), None, mask, impl="eager")


def poly_nl_read(x: Tensor, mean: Tensor, weights: PolyNlWeights, *, order: int | str = 3) -> Tensor:
    """What `poly_nl` gives for tokens x of a whole whose mean of X W_1 ⊙ X W_2 is `mean` (B, E)."""
    inner = x if weights.into is None else F.linear(x, *weights.into)
    width = inner.shape[-1]
    extra = F.linear(inner, *share(weights.product, 2 * width, 3 * width)) if order == "2+3" else None
    return _gated_by_mean(x, inner, mean.unsqueeze(1), extra, weights, "eager")


def _gated_by_mean(
    x: Tensor, inner: Tensor, mean: Tensor, extra: Tensor | None, weights: PolyNlWeights, impl: str
) -> Tensor:
    """αX + βY from the mean (B, 1, E); extra: X W_p, which multiplies X."""
    last = weights.merged or weights.proj
    if impl == "triton":
        y = F.linear(gate_tokens(inner.unsqueeze(2), mean, None, impl=impl).squeeze(2), *last)
    else:
        y = scaled_linear(inner, mean.to(inner.dtype), *last)
    if extra is not None:
        y = y + extra * inner
    if weights.out is not None and weights.merged is None:
        y = F.linear(y, *weights.out)
    return weights.alpha * x + weights.beta * y


def _mean_of_products(x: Tensor, product: Linear, mask: Tensor | None, impl: str) -> Tensor:
    """mean(X W_1 ⊙ X W_2) over the real tokens of x (B, N, D): (B, E), by the second moment if that is faster."""
    weight, bias = product
    if eager.moments_pay(x, x.shape[2], x.dtype):
        centre, moment = moments(x, mask, impl=impl)
        return eager.mean_from_moments(centre, moment, count_real(x, mask), weight, bias, mask)
    return linear_pairs(x, weight, bias, None, mask, impl=impl) / count_real(x, mask)


def mean_over_tokens(x: Tensor, mask: Tensor | None, times: Tensor | None = None, *, impl: str = "eager") -> Tensor:
    """The mean of x ⊙ times (B, N, D) over the real tokens, (B, 1, D); zero if there are none. Cost: N D."""
    x, times = x.unsqueeze(2), None if times is None else times.unsqueeze(2)
    return pooled_product(x, times, None, mask, impl=impl) / count_real(x, mask, ndim=3)


__all__ = [
    "PolyNlWeights", "gate_tokens", "linear_pairs", "linear_scaled", "mean_over_tokens", "moments", "poly_nl",
    "poly_nl_read", "poly_nl_summary", "poly_sa", "poly_sa_read", "poly_sa_summary", "pooled_product",
]  # fmt: skip
