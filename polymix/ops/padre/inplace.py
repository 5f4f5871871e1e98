"""PADRe on a CPU without gradients: neighbouring maps are merged, and products are taken in place.

It takes dense channel maps and convolutions over the tokens. The maps are applied by `blocked` or `native`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.padre.eager import Convolution, PadreMaps, PadreTerms
from polymix.ops.shared.blocks import MAX_KEPT_BYTES, Product, blocks, computed_in, output
from polymix.ops.shared.prefix import PrefixMap
from polymix.ops.shared.tensors import Linear, cast

# apply(token, channel, x, times, grid) applies the channel map to x (B, N, D), then the token map, and multiplies the
# result into `times` if given. It never returns x. None is the identity. Channel maps have the dtype of x.
Apply = Callable[[Convolution | None, Linear | None, Tensor, Tensor | None, tuple[int, ...]], Tensor]


def polynomial(x: Tensor, maps: PadreMaps, terms: PadreTerms, grid: tuple[int, ...], apply: Apply) -> Tensor:
    """Compute Σ_i W_i ⊙ Z_i + L.

    Memory besides x and the output: two arrays of the size of x, or three from degree 3 on.
    """
    dtype = x.dtype if x.dtype == torch.float32 else computed_in(x)  # every processor multiplies float32
    dim, d, shared = x.shape[-1], terms.degree, maps.shared
    # `PadreMaps.unsupported` is None, so token maps are convolutions or identities, and channel maps are dense.
    A, C = (typing.cast("list[Convolution | None]", list(tokens)) for tokens in (maps.A, maps.C))
    D = typing.cast("list[Linear | None]", list(maps.D))
    assert shared is not None
    # Merging the maps costs D³ once and saves N D².
    if x.shape[0] * x.shape[1] >= 2 * dim and (merged := merged_first(maps, terms)) is not None:
        shared, D[0] = merged, None
    if any(part is not None and part.dtype != dtype for linear in (shared, *D) if linear for part in linear):
        shared, D = cast(shared, dtype), [linear and cast(linear, dtype) for linear in D]
    weight, bias = shared
    biases = [None] * len(A) if bias is None else bias.chunk(len(A))
    B = list(zip(weight.chunk(len(A)), biases, strict=True))
    last = terms.weight[-1] if terms.weight is not None and d in terms.terms else None
    merges_last = d > 1 and last is not None and last.ndim == 1
    if merges_last:  # merging W_d into the last maps of X saves a pass
        assert last is not None
        B[d - 1], A[d - 1] = _scaled(B[d - 1], A[d - 1], last.to(dtype))
    # If Z_1 = X B_1 is used only for C_1 Z_1, both maps are applied together, and Z_1 itself is never stored.
    joined = d > 1 and A[0] is None and D[0] is None and 1 not in terms.terms

    x_cast = x if x.dtype == dtype else x.to(dtype)
    z = apply(C[0] if joined else A[0], B[0], x_cast, None, grid)
    total: Tensor | None = None
    for i in range(1, d + 1):
        if i > 1:
            z = z if i == 2 and joined else apply(C[i - 2], D[i - 2], z, None, grid)
            z = apply(A[i - 1], B[i - 1], x_cast, z, grid)
        if i not in terms.terms:
            continue
        # `total` may be the z of the degree before, which is no longer needed.
        if terms.weight is None or (i == d and merges_last):
            total = z if total is None else total.add_(z)
        else:
            factor = terms.weight[terms.terms.index(i)].to(dtype)
            total = factor * z if total is None else total.addcmul_(factor.expand_as(z), z)
    assert total is not None
    p = total.to(x.dtype)
    return p if terms.constant is None else p + terms.constant


def merged_first(maps: PadreMaps, terms: PadreTerms) -> Linear | None:
    """The shared map with B_1 D_1 in place of B_1, if Z_1 = X B_1 is used only for Z_1 D_1; else None."""
    plain = terms.basis == "monomial" or terms.degree == 2
    mergeable = plain and terms.degree > 1 and 1 not in terms.terms and terms.normalize is None and terms.heads == 1
    if not mergeable or maps.shared is None or maps.A[0] is not None or not isinstance(maps.D[0], tuple):
        return None
    (weight, bias), (last, last_bias) = maps.shared, maps.D[0]
    dim = last.shape[1]
    merged = torch.cat((last @ weight[:dim], weight[dim:]))
    if bias is None:
        return merged, None
    return merged, torch.cat((F.linear(bias[:dim], last, last_bias), bias[dim:]))


def _scaled(channel: Linear, token: Convolution | None, factor: Tensor) -> tuple[Linear, Convolution | None]:
    """Multiply the outputs of a channel map followed by a token map with `factor` (D), by scaling one of the maps."""
    if token is not None:
        bias = None if token.bias is None else token.bias * factor
        scale = factor.view(-1, *(1,) * (token.weight.ndim - 1))
        prefix = None if token.prefix is None else PrefixMap(token.prefix.own * factor, token.prefix.mean * factor)
        return channel, token._replace(weight=token.weight * scale, bias=bias, prefix=prefix)
    weight, bias = channel
    return (weight * factor.unsqueeze(-1), None if bias is None else bias * factor), None


def pointwise(channel: Linear | None, x: Tensor, times: Tensor | None = None) -> Tensor:
    """Apply a channel map (D, D) in the dtype of x, and multiply into `times` if given; never returns x."""
    if channel is None:
        return x.clone() if times is None else times.mul_(x)
    if times is not None:
        product = Product(channel, x.dtype)
        for block in blocks(x):
            block.of(times).mul_(block.split(product(block.rows(x, x.dtype))))
        return times
    if x.nbytes <= MAX_KEPT_BYTES:
        return F.linear(x, *channel)
    (weight, bias), y = channel, output(x)
    rows = torch.mm(x.flatten(0, 1), weight.t(), out=y.view(-1, y.shape[-1]))
    if bias is not None:
        rows.add_(bias)
    return y
