"""Attention masks in one form, whichever convention a library follows, and their parts: causal order and padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.errors import MaskError
from polymix.mixers.checks import holds

HIDDEN = -50.0  # lower scores hide a token: -inf, the dtype's minimum, or the -100 of shifted windows


class Seen(NamedTuple):
    """What a call's masks do. kind: "padding" or "arbitrary", beyond the causal order; None: neither."""

    causal: bool
    kind: str | None


def seen_through(module: nn.Module, arguments: Mapping[str, Any], tokens: int, context: int) -> Seen:
    """What the arguments of a call, and the layer itself, say about who sees whom."""
    own = isinstance(module, nn.MultiheadAttention)
    masks = {name: value for name, value in arguments.items() if "mask" in name and isinstance(value, Tensor)}
    parts = [
        _seen(visible(value, inverted=own, shares=not own), "padding" in name, tokens, context)
        for name, value in masks.items()
        if value.ndim >= 2 and value.shape[-1] == context
    ]
    stated = bool(arguments.get("is_causal") or arguments.get("causal"))
    silent = not parts and arguments.get("is_causal") is None and getattr(module, "is_causal", False) is True
    causal = stated or silent or any(part.causal for part in parts)
    kinds = {part.kind for part in parts}
    return Seen(causal, next((kind for kind in ("arbitrary", "padding") if kind in kinds), None))


def visible(mask: Tensor, *, inverted: bool, shares: bool = False) -> Tensor:
    """A mask as a boolean tensor that is True where a token is seen.

    mask: boolean (with `inverted`, True hides), integer (0 hides), scores that are added to the logits, or with
        `shares` also 1.0 where seen and 0.0 where hidden, as some families of transformers pass them.

    Raises MaskError for scores other than 0 and -inf. In a compiled graph the run fails instead.
    """
    if mask.is_floating_point():
        seen = mask > HIDDEN
        if not holds((~seen | (mask == 0)).all(), "takes no scores but 0 and -inf"):
            if shares and bool(((mask == 0) | (mask == 1)).all()):
                return mask == 1
            cure = "A mixer has no logits to which a bias could be added. Keep this layer."
            raise MaskError("mask", "scores that do more than hide tokens", "0 where seen, -inf where hidden", cure)
        return seen
    return ~mask if inverted and mask.dtype == torch.bool else mask != 0


def for_all_heads(mask: Tensor, axis: int, argument: str) -> Tensor:
    """A mask without its axis of heads. Raises MaskError where they differ."""
    if mask.shape[axis] > 1 and not holds((mask == mask.narrow(axis, 0, 1)).all(), "takes one mask for all heads"):
        raise MaskError(argument, "a mask that differs between heads", "one mask for all heads", "")
    return mask.select(axis, 0)


class Split(NamedTuple):
    """A mask in the parts that mixers support: causal order, padding (B, M) of the context, or arbitrary (B, N, M)."""

    causal: bool
    padding: Tensor | None = None
    arbitrary: Tensor | None = None


def split(mask: Tensor, causal: bool | None = None) -> Split:
    """Split a visibility mask (B, N, M) into causal order and padding. Rows of padded queries are ignored.

    causal: the order, where the host states it; None: found from the mask. In a compiled graph, where values are not
    known, the mask is taken as causal order (if `causal`) with padding, and a run with any other mask fails.

    Raises MaskError where no token sees itself: so looks a mask whose True hides a token, as MPT's does.
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
    if n == m > 1 and not compiling and not mask.diagonal(dim1=-2, dim2=-1).any():
        cure = "If True hides a token in this model's masks, keep its layers."
        raise MaskError("mask", "a mask in which no token sees itself", "True where a token is seen", cure)
    return Split(False, arbitrary=mask)


def _seen(mask: Tensor, padding: bool, tokens: int, context: int) -> Seen:
    if padding or mask.shape[-2:] != (tokens, context):  # (batch, context), or one row for all queries
        return Seen(False, None if bool(mask.all()) else "padding")
    parts = split(mask.reshape(-1, tokens, context))
    if parts.arbitrary is not None:
        return Seen(False, "arbitrary")
    return Seen(parts.causal, None if parts.padding is None else "padding")
