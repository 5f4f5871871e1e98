"""The k nearest tokens of every token, attention over them, and features pooled from them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.tensors import accumulator, without_autocast

METRICS = ("dot", "cosine", "euclidean")


def nearest(
    q: Tensor, k: Tensor, visible: Tensor | None, *, count: int, metric: str, dilation: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the `count` nearest keys of each query among the keys that it sees.

    Args:
        q: (…, M, d).
        k: (…, N, d).
        visible: boolean (…, M, N), or None if every query sees every key.
        count: the number of neighbours.
        metric: "dot" (the largest q·k), "cosine" (the largest cosine) or "euclidean" (the smallest distance).
        dilation: take every dilation-th of the count · dilation nearest keys.
    Returns:
        The products q·k (…, M, N) in float32 or wider; the indices (…, M, count), nearest first; and a mask of the
        valid indices, because a query may see fewer keys. Invalid indices may be N or more.
        Cost: M N d multiply-adds.
    """
    dtype, n = accumulator(q.dtype), k.shape[-2]
    with without_autocast(q.device):
        q, k = q.to(dtype), k.to(dtype)
        products = q @ k.transpose(-1, -2)
    with torch.no_grad():  # terms that are constant for a query are left out, because they do not change the order
        rank = products.detach()
        if metric == "cosine":
            rank = rank / torch.linalg.vector_norm(k, dim=-1).clamp_min(torch.finfo(dtype).tiny).unsqueeze(-2)
        elif metric == "euclidean":
            rank = rank - k.square().sum(-1).unsqueeze(-2) / 2
        if visible is not None:
            rank = rank.masked_fill(~visible, -torch.inf)
        candidates = count * dilation
        missing = candidates if torch.compiler.is_compiling() else max(0, candidates - n)  # a graph cannot compare N
        value, index = F.pad(rank, (0, missing), value=-torch.inf).topk(candidates, dim=-1)
        value, index = value[..., ::dilation], index[..., ::dilation]
    return products, index, value > -torch.inf


def nearest_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, count: int, metric: str, dilation: int = 1
) -> Tensor:
    """Compute softmax(q·k / √d) v over the nearest keys of each query, (…, M, d); zero if a query sees none.

    Arguments as in `nearest`, with v (…, N, d). The weights are a full matrix (…, M, N). Cost: 2 M N d multiply-adds.
    """
    products, index, real = nearest(q, k, visible, count=count, metric=metric, dilation=dilation)
    n = products.shape[-1]
    blank = F.pad(torch.zeros_like(products, dtype=torch.bool), (0, count * dilation))  # room for indices beyond N
    is_nearest = blank.scatter(-1, index, real)[..., :n]
    has_any = is_nearest.any(-1, keepdim=True)
    logits = (products * q.shape[-1] ** -0.5).masked_fill(~(is_nearest | ~has_any), -torch.inf)
    weights = logits.softmax(-1).masked_fill(~has_any, 0.0)
    return weights.to(v.dtype) @ v


def nearest_features(
    x: Tensor, context: Tensor, visible: Tensor | None, *, count: int, metric: str, aggregate: str, dilation: int = 1
) -> Tensor:
    """Pool the features of the nearest tokens j of each token i.

    Args:
        x: (B, M, D).
        context: (B, N, D).
        visible: see `nearest`.
        count: see `nearest`.
        metric: see `nearest`.
        aggregate: "mean" for the mean of x_j, or "max_relative" for max_j (x_j - x_i) of each channel.
        dilation: see `nearest`.
    Returns:
        (B, M, D); zero for a token that sees none. Cost: M N D multiply-adds. Memory: B M count D.
    """
    _, index, real = nearest(x, context, visible, count=count, metric=metric, dilation=dilation)
    flat = index.clamp_max(context.shape[1] - 1).flatten(1).unsqueeze(-1)
    near = context.gather(1, flat.expand(-1, -1, context.shape[-1])).unflatten(1, index.shape[1:])  # (B, M, count, D)
    real = real.unsqueeze(-1)
    if aggregate == "mean":
        total = near.masked_fill(~real, 0.0).sum(2, dtype=accumulator(x.dtype))
        return (total / real.sum(2).clamp_min(1)).to(x.dtype)
    largest = (near - x.unsqueeze(2)).masked_fill(~real, -torch.inf).amax(2)
    return largest.masked_fill(~real.any(2), 0.0)
