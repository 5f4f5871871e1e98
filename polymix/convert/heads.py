"""Attention for which a layer asks in its own forward: one form of the question, and the answers to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import CapabilityError
from polymix.mixers import TokenMixer
from polymix.mixers.registry import missing_capability
from polymix.ops.related.attention import softmax_attention

LOGITS = "acts on attention's logits, which a mixer does not have"
NORMED = "norms of queries and keys, which this mixer does not have"
MERGED = "biases for offsets in a window; merged windows have none"


def biased_by(names: Iterable[str], why: str = LOGITS) -> dict[str, str]:
    """What a layer loses with the biases in these parts: the parts, and their one name in `convert(drop=)`, if any."""
    named = tuple(names)
    return dict.fromkeys((*named, "position_bias"), why) if named else {}


_NORMS = re.compile(r"(q|k|query|key)_(layer_?)?norm$|norm_(q|k|query|key)$")


def normed(module: nn.Module) -> dict[str, str]:
    """What a layer loses with norms of its queries and keys: their one name in `convert(drop=)`, if it has any."""
    parts = (part for name, part in module.named_children() if _NORMS.match(name))
    return {"qk_norm": NORMED} if any(not isinstance(part, nn.Identity) for part in parts) else {}


HeadsMap = tuple[Tensor, Tensor | None]  # a weight (h, h) and a bias (h,)


class Talking(NamedTuple):
    """Maps across heads, of the logits before softmax and of the weights after it: talking heads (arXiv 2003.02436)."""

    before: HeadsMap | None = None
    after: HeadsMap | None = None


def across(x: Tensor, heads_map: HeadsMap | None) -> Tensor:
    """W x + b over the heads of x (B, h, N, M)."""
    if heads_map is None:
        return x
    weight, bias = heads_map
    return F.linear(x.movedim(1, -1), weight, bias).movedim(-1, 1)


class Heads(NamedTuple):
    """Queries (B, h, N, d), keys (B, h, M, d), values (B, h, M, e), who sees whom, and what acts on the logits.

    padding: (B, M). pairs: (B, N, M), where it is neither padding nor the causal order. position_bias: added to the
    logits after their soft_cap. sinks: (h,), logits that take a part of the weight and give it to nothing. talking:
    what heads exchange, with the biases in it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None = None
    pairs: Tensor | None = None
    causal: bool = False
    position_bias: Tensor | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    talking: Talking | None = None

    @property
    def shape(self) -> torch.Size:
        """That of tokens: (B, N, h · d)."""
        batch, heads, tokens, width = self.q.shape
        return torch.Size((batch, tokens, heads * width))

    @property
    def mask(self) -> Tensor | None:
        return self.padding if self.pairs is None else self.pairs

    def under(self, mask: Tensor | None, causal: bool) -> Heads:
        """The same under a mask (B, M) or (B, N, M)."""
        if mask is not None and mask.ndim == 3:
            return self._replace(pairs=mask, causal=causal)
        return self._replace(padding=mask, causal=causal)


def scaled(q: Tensor, k: Tensor, v: Tensor, scale: Any = None) -> Heads:
    """Keys and values for each head, of groups too, and queries with a factor, so that the logits are q kᵀ / √d."""
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    usual = q.shape[-1] ** -0.5
    if scale is not None and (isinstance(scale, Tensor) or scale != usual):
        q = q * (scale / usual)
    return Heads(q, k, v)


def softmax(heads: Heads) -> Tensor:
    """The answer (B, h, N, e) of softmax attention: softmax(c tanh(q kᵀ / √d c) + bias) v with a soft cap c.

    With talking heads, it is W₂ softmax(W₁ (q kᵀ / √d + bias)) v, where W₁ and W₂ act on the heads.
    """
    q, k, v, mask, scale, bias = *heads[:3], heads.mask, heads.q.shape[-1] ** -0.5, heads.position_bias
    talking = heads.talking or Talking()
    plain = heads.soft_cap is None and heads.sinks is None and heads.talking is None
    if plain and bias is None:
        return softmax_attention(q, k, v, scale=scale, mask=mask, causal=int(heads.causal))
    hidden = None if mask is None else ~(mask[:, None] if mask.ndim == 3 else mask[:, None, None])
    if heads.causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        hidden = later if hidden is None else hidden | later
    if plain and bias is not None:
        bias = bias if hidden is None else bias.where(~hidden, torch.finfo(bias.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    logits = q * scale @ k.transpose(-1, -2)
    logits = logits if heads.soft_cap is None else heads.soft_cap * torch.tanh(logits / heads.soft_cap)
    logits = across(logits if bias is None else logits + bias, talking.before)
    logits = logits if hidden is None else logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    if heads.sinks is None:
        return across(logits.softmax(-1), talking.after) @ v
    sinks = heads.sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits)
    return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1] @ v


def attended(
    mixer: TokenMixer, heads: Heads, *, cross: bool, argument: str = "attn_mask", **options: Any
) -> tuple[Tensor, Any]:
    """The answer (B, h, N, e) of a mixer of queries, keys and values, without what acts on the logits; and its state.

    argument: the name of the mask in the layer's call. options: a state, or packed segments.
    """
    can = mixer.capabilities
    if heads.causal and not can.causal:
        raise missing_capability(mixer.name, "causal", "is_causal", "causal order")
    for kind, part in (("padding", heads.padding), ("arbitrary", heads.pairs)):
        if part is not None and not can.has(kind):
            what = "padding masks" if kind == "padding" else "a mask other than causal order and padding"
            raise missing_capability(mixer.name, kind, argument, what)
    widths = heads.q.shape[-1], heads.v.shape[-1]
    if mixer.config.equal_widths and widths[0] != widths[1]:
        got = f"{mixer.name}, for queries of {widths[0]} channels and values of {widths[1]}"
        raise CapabilityError("mixer", got, "a mixer for heads of two widths, such as linear", "Keep this layer.")
    return mixer.attend(*heads[:3], mask=heads.mask, causal=heads.causal, cross=cross, **options)
