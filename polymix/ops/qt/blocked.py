"""Quadratic-Taylor attention without gradients on a CPU, where every token sees the whole context."""

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
    """φ(Q)(φ(K)ᵀV) / (φ(Q) Σφ(K)), heads joined by W_o, for φ as in `polymix.ops.qt.eager.taylor_features`.

    The linear and the quadratic features are pooled and asked one after the other and without their coefficients,
    which all go into the pooled moments. x (B, M, D), context (B, N, D), mask (B, N), scale (3, heads, 1, 1) in the
    compact form. Returns (B, M, D).
    """
    dtype, dim = computed_in(x), x.shape[-1]
    d, wide = dim // heads, accumulator(dtype)
    first, *rest = _coefficients(d, form, order, scale, wide, x.device)
    values, moments = _pool(context, Product(share(qkv, dim, 3 * dim), dtype), heads, form, order, mask)
    seen = torch.as_tensor(count_real(context, mask), device=x.device).reshape(-1, 1, 1, 1)
    least, bare = (GUARD * seen.to(dtype)).expand(x.shape[0], -1, -1, -1), (first * values).to(dtype)
    count = (first * seen.to(wide)).to(dtype).expand(x.shape[0], heads, -1, -1)
    weighed = [(m * c.unsqueeze(-1)).to(dtype) for m, c in zip(moments, rest, strict=True)]
    tops, bottoms = [m[..., :d].contiguous() for m in weighed], [m[..., d:] for m in weighed]
    ask, out, y = Product(share(qkv, 0, dim), dtype), Product(proj, dtype), output(x)
    for block in blocks(x):
        q, s = _by_head(block, ask(block.rows(x, dtype)), heads), block.samples
        top, below = bare[s].expand(-1, -1, block.length, -1), count[s]
        for i, features in enumerate(_features(q, form, order)):
            top = features @ tops[i][s] if i == 0 else _plus_product(top, features, tops[i][s])
            below = below + features @ bottoms[i][s]
        top = top.add_(bare[s]) if order else top
        joined = torch.empty(block.number, block.length, heads, d, dtype=dtype)
        torch.div(top, torch.maximum(below, least[s]), out=joined.transpose(1, 2))
        out.into(y, block, joined.flatten(2).flatten(0, 1))
    return y


def _plus_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right, in place."""
    total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return total


def _by_head(block: Block, rows: Tensor, heads: int) -> Tensor:
    """(samples, heads, tokens, d)."""
    return block.split(rows).unflatten(-1, (heads, -1)).transpose(1, 2)


def _features(x: Tensor, form: str, order: int) -> Iterator[Tensor]:
    """The linear features of x, then the quadratic ones, each without its coefficients; x is used up."""
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
    """What the constant, linear and quadratic products φ(q)·φ(k) are multiplied with: (heads or 1, features)."""
    if scale is not None:
        alpha, beta, gamma = scale[..., 0].to(dtype).square()
        return [gamma.unsqueeze(-1), beta * (4 / d) ** 0.5, alpha][: order + 1]
    row, column = torch.triu_indices(d, d, device=device)
    pairs = torch.where(row == column, 0.5, 1.0).to(dtype) / d
    one = torch.ones(1, 1, dtype=dtype, device=device)
    return [one.unsqueeze(-1), one * d**-0.5, pairs[None]][: order + 1]


def _pool(
    context: Tensor, tell: Product, heads: int, form: str, order: int, mask: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Σ v (B, heads, 1, d), and for each group of features Σ_j φ(k_j) ⊗ [v_j, 1] (B, heads, F, d + 1)."""
    batch, d = context.shape[0], tell.width // 2 // heads
    quadratic = d if form == "compact" else d * (d + 1) // 2
    values = zeros(context, batch, heads, 1, d, dtype=tell.dtype)
    moments = [zeros(context, batch, heads, f, d + 1, dtype=tell.dtype) for f in (d, quadratic)[:order]]
    for block in blocks(context):
        k, v = block.hide(tell(block.rows(context, tell.dtype)), mask).chunk(2, dim=-1)
        keys, told = _by_head(block, k, heads), _by_head(block, v, heads)
        values[block.samples] += told.sum(2, keepdim=True, dtype=values.dtype)
        for features, moment in zip(_features(keys, form, order), moments, strict=True):
            into = moment[block.samples]
            into[..., :d] += features.transpose(-1, -2) @ told
            into[..., d] += features.sum(2, dtype=moment.dtype)
    return values, moments
