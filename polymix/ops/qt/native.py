"""QT's compact form in C for the CPU: pooling and querying, forward and backward; the causal form, and both in
one call, forward only.

x is (B, N, D) in float32 or bfloat16. All arithmetic is float32; results per token are rounded once to the dtype of
x. Where `arrays.in_pairs` says so, the processor multiplies bfloat16 and sums in float32: products of tokens lose
nothing, what other products read is rounded to bfloat16. Memory besides the results: the packed weights and, per
thread, a few blocks of 128 tokens, the sums of three samples and, in the backward, copies of the weights'
gradients, at most 32 MiB or one of them (native/gradients.h). A weight that needs no gradient costs nothing in the
backward. Cost: the forward takes each product once; the backward takes the inner maps and the numerators three
times and all other products twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.native.arrays import (
    Needs,
    Sizes,
    as_read,
    dense,
    full,
    hidden,
    in_pairs,
    rooms_like,
    sizes_of,
)
from polymix.ops.native.library import call
from polymix.ops.qt.eager import factors, least
from polymix.ops.shared.blocks import output
from polymix.ops.shared.tensors import Linear


def _sizes(x: Tensor, weight: Tensor, heads: int, order: int, last: Tensor | None = None, out: int = 0) -> Sizes:
    return sizes_of(x, x.shape[2], out=out, degree=order, heads=heads, pairs=in_pairs(x, weight, last))


def pool(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int, order: int) -> Tensor:
    """Σ_n [1, k_n, k_n ⊙ k_n] ⊗ [v_n, 1], (B, heads, 1 + order · d, d + 1)."""
    sizes, d = _sizes(x, weight, heads, order), x.shape[2] // heads
    sums = x.new_empty(x.shape[0], heads, 1 + order * d, d + 1, dtype=torch.float32)
    call("qt_pool", dense(x), as_read((weight, bias), sizes.pairs), hidden(mask), sums, sizes)
    return sums


def pool_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    heads: int,
    order: int,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """The gradients of `pool`: with G_0, G_1, G_2 the row groups of grad,

    dv = G_0 + k G_1 + k² G_2,  dk = [v, 1] G_1ᵀ + 2 k ⊙ ([v, 1] G_2ᵀ).
    """
    sizes = _sizes(x, weight, heads, order)
    grads = rooms_like((x, weight, bias), needs)
    call("qt_pool_backward", full(grad), dense(x), as_read((weight, bias), sizes.pairs), hidden(mask), *grads, sizes)
    return tuple(grads)


def _order(moments: Tensor) -> int:
    """The order of moments (B, heads, 1 + order · d, d + 1)."""
    return (moments.shape[2] - 1) // (moments.shape[3] - 1)


def spread(
    x: Tensor, weight: Tensor, bias: Tensor | None, moments: Tensor, least: Tensor, last: Tensor,
    last_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """W_o (numerator / denominator) + b_o, (B, M, D')."""
    sizes = _sizes(x, weight, moments.shape[1], _order(moments), last, last.shape[0])
    y, pairs = output(x, last.shape[0]), sizes.pairs
    call("qt_spread", dense(x), as_read((weight, bias), pairs), full(moments), full(least),
         as_read((last, last_bias), pairs), y, sizes)  # fmt: skip
    return y


def spread_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, moments: Tensor, least: Tensor, last: Tensor,
    last_bias: Tensor | None, needs: Needs,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of `spread`: with dz = grad W_o and z = numerator / denominator,

    dnumerator = dz / denominator,  ddenominator = -Σ z ⊙ dz / denominator over the channels of a head.
    """
    sizes = _sizes(x, weight, moments.shape[1], _order(moments), last, grad.shape[2])
    grad, x, moments, least = dense(grad), dense(x), full(moments), full(least)
    inner, outer = (as_read(linear, sizes.pairs) for linear in ((weight, bias), (last, last_bias)))
    grad_x, grad_w, grad_b, grad_last, grad_last_b = rooms_like(
        (x, weight, bias, last, last_bias), (*needs[:3], *needs[4:])
    )
    grad_m = torch.empty_like(moments)
    call("qt_spread_backward", grad, x, inner, moments, least, outer, grad_x, grad_w, grad_b, grad_m, grad_last,
         grad_last_b, sizes)  # fmt: skip
    return grad_x, grad_w, grad_b, grad_m if needs[3] else None, grad_last, grad_last_b


def whole(
    x: Tensor, qkv: Linear, proj: Linear, scale: Tensor, mask: Tensor | None, heads: int, order: int
) -> Tensor:  # fmt: skip
    """QT of all tokens of x (B, N, D), or the real ones of mask (B, N), without gradients, in one call.

    The other arguments are those of `causal`; the order may be 0, too.
    """
    sizes = _sizes(x, qkv[0], heads, order, proj[0], proj[0].shape[0])
    counts = x.new_full((x.shape[0],), x.shape[1], dtype=torch.float32) if mask is None else mask.sum(1)
    y = output(x, sizes.out)
    call("qt_whole", dense(x), as_read(qkv, sizes.pairs), full(scale), hidden(mask), least(counts, torch.float32),
         as_read(proj, sizes.pairs), y, sizes)  # fmt: skip
    return y


def causal(
    x: Tensor, qkv: Linear, proj: Linear, scale: Tensor, mask: Tensor | None, heads: int, order: int, seen: Tensor,
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """QT in causal order with its maps, without gradients, in one pass that stores no sums, queries, keys or values.

    Args:
        x: (B, N, D) with at least one token.
        qkv: W_q, W_k and W_v in one map.
        proj: W_o.
        scale: α, β, γ, (3, heads, 1, 1).
        mask: (B, N), True for real tokens.
        heads: the number of heads.
        order: 1 or 2.
        seen: (B, N), the number of real tokens up to each token, those of earlier calls included.
        start: the moments before the first token, (B, heads, 1 + order · d, d + 1).
    Returns:
        The output (B, N, D), and the moments after the last token in float32. Neither depends on the number of threads,
        to the bit.
    """
    sizes, d = _sizes(x, qkv[0], heads, order, proj[0], proj[0].shape[0]), x.shape[2] // heads
    of_heads = factors(scale, d, 2, torch.float32)[:, [0, 1, 1 + d], 0].contiguous()
    y, end = output(x, sizes.out), x.new_empty(x.shape[0], heads, 1 + order * d, d + 1, dtype=torch.float32)
    call("qt_causal", dense(x), as_read(qkv, sizes.pairs), of_heads, hidden(mask), least(seen, torch.float32),
         full(start), end, as_read(proj, sizes.pairs), y, sizes)  # fmt: skip
    return y, end
