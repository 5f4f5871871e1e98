"""What an attention layer's masks let through, whichever convention they follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.errors import MaskError
from polymix.mixers.checks import holds

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
    """True where a token is seen: of a boolean mask (True hides where `inverted`), an integer one or added scores.

    Raises MaskError for scores that do more than hide; in a graph, the run fails.
    """
    if mask.is_floating_point():
        seen = mask > _HIDDEN
        if not holds((~seen | (mask == 0)).all(), "takes no scores but 0 and -inf"):
            cure = "A mixer has no logits that a bias could be added to: keep this layer."
            raise MaskError("mask", "added scores that do more than hide", "0 where seen, -inf where hidden", cure)
        return seen
    return ~mask if inverted and mask.dtype == torch.bool else mask != 0


class Split(NamedTuple):
    """A mask as the parts that mixers know: an order, padding (B, M) of the context, or neither, (B, N, M)."""

    causal: bool
    padding: Tensor | None = None
    arbitrary: Tensor | None = None


def split(mask: Tensor, causal: bool | None = None) -> Split:
    """A visibility mask (B, N, M) taken apart; rows of queries that are padding themselves say nothing.

    causal: what the host says of the order, which is then not looked for. In a graph, where values cannot be looked at,
    the mask is taken to be an order (if `causal`) with padding, and a run that finds another one fails.
    """
    n, m = mask.shape[-2:]
    columns = mask.any(-2)
    rows = columns if n == m else mask.new_ones(()).expand(mask.shape[0], n)
    past = torch.ones(n, m, dtype=torch.bool, device=mask.device).tril(m - n)
    compiling = torch.compiler.is_compiling()
    for order in (False, True) if causal is None and not compiling else (bool(causal),):
        expected = columns.unsqueeze(-2) & past if order else columns.unsqueeze(-2).expand_as(mask)
        fits = ((mask == expected) | ~rows.unsqueeze(-1)).all()
        if holds(fits, "takes no mask but of padding and its own order"):
            return Split(order and n > 1, None if not compiling and bool(columns.all()) else columns)
    return Split(False, arbitrary=mask)


def _seen(mask: Tensor, padding: bool, tokens: int, context: int) -> Seen:
    if padding or mask.shape[-2:] != (tokens, context):  # (batch, context), or one row for all queries
        return Seen(False, None if bool(mask.all()) else "padding")
    parts = split(mask.reshape(-1, tokens, context))
    if parts.arbitrary is not None:
        return Seen(False, "arbitrary")
    return Seen(parts.causal, None if parts.padding is None else "padding")
