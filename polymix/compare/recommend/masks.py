"""What an attention layer's masks let through, whichever convention they follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_HIDDEN = -50.0  # added scores below this hide: -inf, the type's least, or the -100 of shifted windows


class Seen(NamedTuple):
    """Whether each token sees its past alone, and what is hidden beside: nothing, padding, or anything else."""

    causal: bool
    kind: str | None


def seen_through(module: nn.Module, given: Mapping[str, Any], tokens: int, context: int) -> Seen:
    """What the arguments of a call, and the layer itself, say of who sees whom."""
    masks = {name: value for name, value in given.items() if "mask" in name and isinstance(value, Tensor)}
    parts = [
        _seen(visible(value, inverted=isinstance(module, nn.MultiheadAttention)), "padding" in name, tokens, context)
        for name, value in masks.items()
        if value.ndim >= 2 and value.shape[-1] == context
    ]
    said = bool(given.get("is_causal") or given.get("causal"))
    silent = not parts and given.get("is_causal") is None and getattr(module, "is_causal", False) is True
    causal = said or silent or any(part.causal for part in parts)
    kinds = {part.kind for part in parts}
    return Seen(causal, next((kind for kind in ("arbitrary", "padding") if kind in kinds), None))


def visible(mask: Tensor, *, inverted: bool) -> Tensor:
    """True where a token is seen: of a boolean mask (True hides where `inverted`), an integer one or added scores."""
    if mask.is_floating_point():
        return mask > _HIDDEN
    return ~mask if inverted and mask.dtype == torch.bool else mask != 0


def _seen(mask: Tensor, padding: bool, tokens: int, context: int) -> Seen:
    if padding or mask.shape[-2:] != (tokens, context):  # (batch, context), or one row for all queries
        return Seen(False, None if bool(mask.all()) else "padding")
    columns = mask.any(-2, keepdim=True)
    kind = None if bool(columns.all()) else "padding"
    if torch.equal(mask, columns.expand_as(mask)):
        return Seen(False, kind)
    past = torch.ones(tokens, context, dtype=torch.bool, device=mask.device).tril()
    if tokens == context and torch.equal(mask, past & columns):
        return Seen(True, kind)
    return Seen(False, "arbitrary")
