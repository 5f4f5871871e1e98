"""Softmax attention after the tokens in a cache: the one layer whose memory grows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polymix.errors import StateError
from polymix.mixers import SoftmaxMixer
from polymix.mixers.cache import StateLayer
from polymix.models.language.order import Order
from polymix.ops.related.attention import softmax_attention
from polymix.ops.shared.rotary import rotary, rotate


def attend(mixer: SoftmaxMixer, x: Tensor, order: Order, cache: Any, index: int) -> Tensor:
    """The mixer on x (B, N, D), causal, each token seeing those of its sequence in this call and in the cache.

    As `mixer(x, causal=True)` where there is neither cache nor padding. Cost: N (past + N) D multiply-adds, twice.
    """
    q, k, v = (part.transpose(1, 2) for part in mixer.qkv(x, x))
    if mixer.config.rotary is not None:
        turns = rotary(order.place, q.shape[-1], axes=1, heads=None, base=mixer.config.rotary)
        q, k = (rotate(part, (turns[0][:, None], turns[1][:, None]), axes=1) for part in (q, k))
    if cache is not None:
        if len(cache.layers) > index and isinstance(cache.layers[index], StateLayer):
            raise StateError("past_key_values", "a mixer's state for attention", "this model's cache", "Use a new one.")
        k, v = cache.update(k, v, index)
    scale, n, m = q.shape[-1] ** -0.5, q.shape[2], k.shape[2]
    if m == n:
        y = softmax_attention(q, k, v, scale=scale, mask=order.mask, causal=1, segments=order.segments)
    else:
        past = torch.ones(n, m, dtype=torch.bool, device=x.device).tril(m - n)[None] if n > 1 else None
        mask = order.mask if past is None else past if order.mask is None else past & order.mask[:, None]
        y = softmax_attention(q, k, v, scale=scale, mask=None if mask is None else mask.expand(len(x), *mask.shape[1:]))
    return mixer.drop(mixer.proj(y.transpose(1, 2).flatten(-2)))
