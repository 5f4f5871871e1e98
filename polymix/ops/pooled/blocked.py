"""Poly-SA and Poly-NL without gradients on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polymix.ops.pooled.eager import gate_of_sum, mean_from_moments, moments_pay
from polymix.ops.shared.blocks import Block, Product, SampleProduct, blocks, computed_in, output, zeros
from polymix.ops.shared.tensors import Linear, cast, count_real, share

Tokens = Callable[[Block], Tensor]  # the tokens of a block, (samples, tokens, channels)


def poly_sa(
    x: Tensor,
    qkv: Linear,
    proj: Linear | None,
    p_1: Tensor | None,
    p_2: Tensor | None,
    *,
    heads: int,
    kind: str,
    mask: Tensor | None = None,
) -> Tensor:
    """Q ⊙ p_1 σ(p_2ᵀ(K ⊙ V)), then W_o where it is a product.

    x (B, N, D), p_1 and p_2 (heads, N), or both None for a mean over the mask (B, N). Returns (B, N, D).
    """
    dtype, dim = computed_in(x), x.shape[-1]
    tell = Product(share(qkv, dim, 3 * dim), dtype)
    pooled = zeros(x, x.shape[0], dim, dtype=dtype)
    for block in blocks(x):
        k, v = tell(block.rows(x, dtype)).chunk(2, dim=-1)
        product = block.hide(k.mul_(v), mask)
        if p_2 is None:
            block.add_sums(pooled, product)
        else:  # every head's weights on all channels, of which it has its own
            every = p_2[:, block.tokens].to(dtype) @ block.split(product)  # (samples, heads, D)
            pooled[block.samples] += every.unflatten(-1, (heads, -1)).diagonal(dim1=1, dim2=2).mT.flatten(1)
    gate = gate_of_sum(x, pooled.unflatten(-1, (heads, -1)), p_2, kind, mask).to(dtype).flatten(1)
    ask, y = Product(share(qkv, 0, dim), dtype), output(x)
    out = None if proj is None else SampleProduct(gate.unsqueeze(-1) * proj[0].t().to(dtype), proj[1])
    for block in blocks(x):
        q = block.split(ask(block.rows(x, dtype)))
        if p_1 is not None:
            q.unflatten(-1, (heads, -1)).mul_(p_1[:, block.tokens].t().to(dtype).unsqueeze(-1))
        if out is None:
            block.of(y).copy_(q.mul_(gate[block.samples, None]))
        else:
            out.into(y, block, q)
    return y


def poly_nl(
    x: Tensor,
    into: Linear | None,
    pair: Linear,
    proj: Linear,
    alpha: float,
    beta: float,
    mask: Tensor | None = None,
) -> Tensor:
    """αX + β((mean(X' W_1 ⊙ X' W_2) ⊙ X') W_3 + b_3), X' = X or `into` of it, `proj` from X' to X; `pair` is W_1, W_2.

    What the tokens are multiplied with in the end is one matrix a sample: αI + β diag(mean) W_3.
    x (B, N, D), mask (B, N). Returns (B, N, D).
    """
    dtype = computed_in(x)
    inner = None if into is None else Product(into, dtype)

    def tokens(block: Block) -> Tensor:
        rows = block.rows(x, dtype)
        return block.split(rows if inner is None else inner(rows))

    pool = _by_moments if moments_pay(x, pair[0].shape[1], dtype) else _by_products
    mean = pool(x, tokens, pair, dtype, mask)
    weight, bias = proj
    matrix = beta * mean.to(dtype).unsqueeze(-1) * weight.t().to(dtype)  # (B, inner, D)
    if inner is None:
        matrix.diagonal(dim1=1, dim2=2).add_(alpha)
    out, y = SampleProduct(matrix, None if bias is None else beta * bias), output(x)
    for block in blocks(x):
        out.into(y, block, tokens(block))
        if inner is not None:
            block.of(y).add_(block.of(x), alpha=alpha)
    return y


def _by_products(x: Tensor, tokens: Tokens, pair: Linear, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """mean(X W_1 ⊙ X W_2) as it is written: 2 N D² multiply-adds."""
    both = Product(pair, dtype)
    total = zeros(x, x.shape[0], both.width // 2, dtype=dtype)
    for block in blocks(x):
        first, second = both(tokens(block).flatten(0, 1)).chunk(2, dim=-1)
        block.add_sums(total, block.hide(first.mul_(second), mask))
    return total / count_real(x, mask)


def _by_moments(x: Tensor, tokens: Tokens, pair: Linear, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """The same by `mean_of_products`: N D² + D³."""
    weight, bias = cast(pair, dtype)
    batch, width = x.shape[0], weight.shape[1]
    centre, moment = zeros(x, batch, width, dtype=dtype), zeros(x, batch, width, width, dtype=dtype)
    for block in blocks(x):
        block.add_sums(centre, _hidden(tokens(block), block, mask).flatten(0, 1))
    count = count_real(x, mask)
    centre = centre / count
    for block in blocks(x):
        apart = _hidden(tokens(block) - centre[block.samples, None], block, mask)
        moment[block.samples] += apart.transpose(1, 2) @ apart
    return mean_from_moments(centre, moment, count, weight, bias, mask)


def _hidden(tokens: Tensor, block: Block, mask: Tensor | None) -> Tensor:
    return tokens if mask is None else tokens.masked_fill(~block.of(mask).unsqueeze(-1), 0.0)
