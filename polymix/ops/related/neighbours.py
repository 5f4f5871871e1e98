"""The k nearest tokens of every token, and what can be made of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.tensors import accumulator, without_autocast

METRICS = ("dot", "cosine", "euclidean")


def nearest(
    q: Tensor, k: Tensor, visible: Tensor | None, *, count: int, metric: str, dilation: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` keys nearest to each query among those that it sees; every `dilation`-th with a dilation.

    Args:
        q: (…, M, d). k: (…, N, d). visible: boolean (…, M, N), or None.
        metric: nearest is the greatest q·k, the greatest cosine, or the least Euclidean distance.
    Returns:
        products q·k (…, M, N), float32 at least; different indices (…, M, count), nearest first; and which of them are
        real, for a query may see fewer (the others stand for nothing, and may be N or more). Cost: M N d multiply-adds.
    """
    dtype, n = accumulator(q.dtype), k.shape[-2]
    with without_autocast(q.device):
        q, k = q.to(dtype), k.to(dtype)
        products = q @ k.transpose(-1, -2)
    with torch.no_grad():  # what is constant for a query does not change its order
        rank = products.detach()
        if metric == "cosine":
            rank = rank / torch.linalg.vector_norm(k, dim=-1).clamp_min(torch.finfo(dtype).tiny).unsqueeze(-2)
        elif metric == "euclidean":
            rank = rank - k.square().sum(-1).unsqueeze(-2) / 2
        if visible is not None:
            rank = rank.masked_fill(~visible, -torch.inf)
        wanted = count * dilation
        short = wanted if torch.compiler.is_compiling() else max(0, wanted - n)  # a traced N cannot be compared
        value, index = F.pad(rank, (0, short), value=-torch.inf).topk(wanted, dim=-1)
        value, index = value[..., ::dilation], index[..., ::dilation]
    return products, index, value > -torch.inf


def nearest_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, count: int, metric: str, dilation: int = 1
) -> Tensor:
    """softmax(q·k / √d) over the nearest keys of each query alone, times v: (…, M, d). Zero where none is seen.

    The weights stand as (…, M, N), zero but for the nearest: cost M N d twice.
    """
    products, index, real = nearest(q, k, visible, count=count, metric=metric, dilation=dilation)
    n = products.shape[-1]
    blank = F.pad(torch.zeros_like(products, dtype=torch.bool), (0, count * dilation))  # room for indices beyond N
    chosen = blank.scatter(-1, index, real)[..., :n]
    some = chosen.any(-1, keepdim=True)
    logits = (products * q.shape[-1] ** -0.5).masked_fill(~(chosen | ~some), -torch.inf)
    weights = logits.softmax(-1).masked_fill(~some, 0.0)
    return weights.to(v.dtype) @ v


def nearest_features(
    x: Tensor, context: Tensor, visible: Tensor | None, *, count: int, metric: str, aggregate: str, dilation: int = 1
) -> Tensor:
    """Of the nearest tokens j of each token i the mean of x_j, or "max_relative", max_j (x_j - x_i) a channel.

    x (B, M, D), context (B, N, D) -> (B, M, D); zero where none is seen. Memory: B M count D.
    """
    _, index, real = nearest(x, context, visible, count=count, metric=metric, dilation=dilation)
    flat = index.clamp_max(context.shape[1] - 1).flatten(1).unsqueeze(-1)
    near = context.gather(1, flat.expand(-1, -1, context.shape[-1])).unflatten(1, index.shape[1:])  # (B, M, count, D)
    real = real.unsqueeze(-1)
    if aggregate == "mean":
        total = near.masked_fill(~real, 0.0).sum(2, dtype=accumulator(x.dtype))
        return (total / real.sum(2).clamp_min(1)).to(x.dtype)
    most = (near - x.unsqueeze(2)).masked_fill(~real, -torch.inf).amax(2)
    return most.masked_fill(~real.any(2), 0.0)
