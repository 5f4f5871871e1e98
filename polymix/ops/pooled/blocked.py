"""Poly-SA and Poly-NL on a CPU without gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polymix.ops.pooled.eager import gate_of_sum, mean_from_moments, moments_pay
from polymix.ops.shared.blocks import Block, Product, SampleProduct, blocks, computed_in, output, zeros
from polymix.ops.shared.tensors import Linear, cast, count_real, share

Tokens = Callable[[Block], Tensor]  # returns the tokens of a block, (samples, tokens, channels)


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
    """Q ⊙ p_1 σ(p_2ᵀ(K ⊙ V)) for each head, then W_o if given; arguments as in `polymix.ops.poly_sa`."""
    dtype, dim = computed_in(x), x.shape[-1]
    keys_values = Product(share(qkv, dim, 3 * dim), dtype)
    pooled = zeros(x, x.shape[0], dim, dtype=dtype)
    for block in blocks(x):
        k, v = keys_values(block.rows(x, dtype)).chunk(2, dim=-1)
        product = block.hide(k.mul_(v), mask)
        if p_2 is None:
            block.add_sums(pooled, product)
        else:  # one product with all heads' weights, then each head keeps its own channels
            all_heads = p_2[:, block.tokens].to(dtype) @ block.split(product)  # (samples, heads, D)
            pooled[block.samples] += all_heads.unflatten(-1, (heads, -1)).diagonal(dim1=1, dim2=2).mT.flatten(1)
    gate = gate_of_sum(x, pooled.unflatten(-1, (heads, -1)), p_2, kind, mask).to(dtype).flatten(1)
    queries, y = Product(share(qkv, 0, dim), dtype), output(x)
    out = None if proj is None else SampleProduct(gate.unsqueeze(-1) * proj[0].t().to(dtype), proj[1])
    for block in blocks(x):
        q = block.split(queries(block.rows(x, dtype)))
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
    """Compute αX + β((mean(X' W_1 ⊙ X' W_2) ⊙ X') W_3 + b_3).

    The tokens of a sample are multiplied with a single matrix, αI + β diag(mean) W_3.

    Args:
        x: (B, N, D).
        into: W_in, with X' = X W_in; None for X' = X.
        pair: W_1 and W_2 in one map.
        proj: W_3, followed by W_out with a bottleneck.
        alpha: α.
        beta: β.
        mask: (B, N), True for real tokens.
    Returns:
        (B, N, D).
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
    """mean(X W_1 ⊙ X W_2), computed directly: 2 N D² multiply-adds."""
    both = Product(pair, dtype)
    total = zeros(x, x.shape[0], both.width // 2, dtype=dtype)
    for block in blocks(x):
        first, second = both(tokens(block).flatten(0, 1)).chunk(2, dim=-1)
        block.add_sums(total, block.hide(first.mul_(second), mask))
    return total / count_real(x, mask)


def _by_moments(x: Tensor, tokens: Tokens, pair: Linear, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """mean(X W_1 ⊙ X W_2) from the second moment (see `mean_from_moments`): N D² + D³ multiply-adds."""
    weight, bias = cast(pair, dtype)
    batch, width = x.shape[0], weight.shape[1]
    centre, moment = zeros(x, batch, width, dtype=dtype), zeros(x, batch, width, width, dtype=dtype)
    for block in blocks(x):
        block.add_sums(centre, _hidden(tokens(block), block, mask).flatten(0, 1))
    count = count_real(x, mask)
    centre = centre / count
    for block in blocks(x):
        centred = _hidden(tokens(block) - centre[block.samples, None], block, mask)
        moment[block.samples] += centred.transpose(1, 2) @ centred
    return mean_from_moments(centre, moment, count, weight, bias, mask)


def _hidden(tokens: Tensor, block: Block, mask: Tensor | None) -> Tensor:
    """Zero the padding in the tokens of a block."""
    return tokens if mask is None else tokens.masked_fill(~block.of(mask).unsqueeze(-1), 0.0)
