"""Quadratic-Taylor attention on a CPU without gradients, non-causal only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from polymix.ops.qt.eager import GUARD
from polymix.ops.shared.blocks import Block, Product, blocks, computed_in, output, zeros
from polymix.ops.shared.tensors import Linear, accumulator, count_real, share


def qt(
    x: Tensor,
    context: Tensor,
    qkv: Linear,
    proj: Linear,
    scale: Tensor | None,
    *,
    heads: int,
    form: str,
    order: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute φ(Q)(φ(K)ᵀV) / (φ(Q) Σφ(K)) for each head, then W_o, with φ of `polymix.ops.qt.eager.taylor_features`.

    Linear and quadratic features are pooled and queried one after the other. They have no coefficients; all
    coefficients are multiplied into the pooled moments.

    Args:
        x: (B, M, D).
        context: (B, N, D).
        qkv: W_q, W_k and W_v in one map.
        proj: W_o.
        scale: α, β, γ of the compact form, (3, heads, 1, 1); None for the full form.
        heads: the number of heads.
        form: "compact" or "full".
        order: 0, 1 or 2.
        mask: (B, N), True for real context tokens.
    Returns:
        (B, M, D).
    """
    dtype, dim = computed_in(x), x.shape[-1]
    d, sum_dtype = dim // heads, accumulator(dtype)
    first, *rest = _coefficients(d, form, order, scale, sum_dtype, x.device)
    values, moments = _pool(context, Product(share(qkv, dim, 3 * dim), dtype), heads, form, order, mask)
    seen = torch.as_tensor(count_real(context, mask), device=x.device).reshape(-1, 1, 1, 1)
    least, constant = (GUARD * seen.to(dtype)).expand(x.shape[0], -1, -1, -1), (first * values).to(dtype)
    count = (first * seen.to(sum_dtype)).to(dtype).expand(x.shape[0], heads, -1, -1)
    scaled = [(m * c.unsqueeze(-1)).to(dtype) for m, c in zip(moments, rest, strict=True)]
    value_moments, key_moments = [m[..., :d].contiguous() for m in scaled], [m[..., d:] for m in scaled]
    queries, out, y = Product(share(qkv, 0, dim), dtype), Product(proj, dtype), output(x)
    for block in blocks(x):
        q, s = _by_head(block, queries(block.rows(x, dtype)), heads), block.samples
        numerator, denominator = constant[s].expand(-1, -1, block.length, -1), count[s]
        for i, features in enumerate(_features(q, form, order)):
            moment = value_moments[i][s]
            numerator = features @ moment if i == 0 else _plus_product(numerator, features, moment)
            denominator = denominator + features @ key_moments[i][s]
        numerator = numerator.add_(constant[s]) if order else numerator
        joined = x.new_empty(block.number, block.length, heads, d, dtype=dtype)
        torch.div(numerator, torch.maximum(denominator, least[s]), out=joined.transpose(1, 2))
        out.into(y, block, joined.flatten(2).flatten(0, 1))
    return y


def _plus_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right, in place."""
    total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return total


def _by_head(block: Block, rows: Tensor, heads: int) -> Tensor:
    """Split rows into heads, (samples, heads, tokens, d)."""
    return block.split(rows).unflatten(-1, (heads, -1)).transpose(1, 2)


def _features(x: Tensor, form: str, order: int) -> Iterator[Tensor]:
    """Yield the linear features of x, then the quadratic ones, without coefficients. Overwrites x."""
    if order >= 1:
        yield x
    if order == 2 and form == "compact":
        yield x.mul_(x)
    elif order == 2:
        row, column = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
        yield x[..., row] * x[..., column]


def _coefficients(
    d: int, form: str, order: int, scale: Tensor | None, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The coefficients of the constant, linear and quadratic products in φ(q)·φ(k), (heads or 1, features) each."""
    if scale is not None:
        alpha, beta, gamma = scale[..., 0].to(dtype).square()
        return [gamma.unsqueeze(-1), beta * (4 / d) ** 0.5, alpha][: order + 1]
    row, column = torch.triu_indices(d, d, device=device)
    pairs = torch.where(row == column, 0.5, 1.0).to(dtype) / d
    one = torch.ones(1, 1, dtype=dtype, device=device)
    return [one.unsqueeze(-1), one * d**-0.5, pairs[None]][: order + 1]


def _pool(
    context: Tensor, keys_values: Product, heads: int, form: str, order: int, mask: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Σ_j v_j (B, heads, 1, d), and Σ_j φ(k_j) ⊗ [v_j, 1] (B, heads, F, d + 1) for each group of features."""
    batch, d, dtype = context.shape[0], keys_values.width // 2 // heads, keys_values.dtype
    quadratic = d if form == "compact" else d * (d + 1) // 2
    value_sum = zeros(context, batch, heads, 1, d, dtype=dtype)
    moments = [zeros(context, batch, heads, f, d + 1, dtype=dtype) for f in (d, quadratic)[:order]]
    for block in blocks(context):
        k, v = block.hide(keys_values(block.rows(context, dtype)), mask).chunk(2, dim=-1)
        keys, values = _by_head(block, k, heads), _by_head(block, v, heads)
        value_sum[block.samples] += values.sum(2, keepdim=True, dtype=value_sum.dtype)
        for features, moment in zip(_features(keys, form, order), moments, strict=True):
            part = moment[block.samples]
            part[..., :d] += features.transpose(-1, -2) @ values
            part[..., d] += features.sum(2, dtype=moment.dtype)
    return value_sum, moments
