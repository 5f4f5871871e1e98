"""The layout of a call's tokens: padding, positions and packed sequences, worked out once for all layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from polymix.errors import CapabilityError, MaskError, ShapeError, StateError
from polymix.mixers.cache import StateLayer
from polymix.mixers.checks import holds
from polymix.ops.shared.masks import positions


class SequenceLayout(NamedTuple):
    """The N tokens of a call and those before them in a cache.

    past: tokens in the cache. mask: (B, past + N), True = a token; None: no padding. segments: (B, N) ids of packed
    sequences. place: (B or 1, N) the position of each token among the real ones of its sequence.
    """

    past: int
    mask: Tensor | None
    segments: Tensor | None
    place: Tensor

    @property
    def padding(self) -> Tensor | None:
        """(B, N) the mask of the call's own tokens."""
        return None if self.mask is None else self.mask[:, self.past :]

    @property
    def before(self) -> Tensor | None:
        """(B,) the number of real tokens in the cache; None: all are."""
        return None if self.mask is None or not self.past else self.mask[:, : self.past].sum(1)


def tokens_in(cache: Any, layers: int, batch: int) -> int:
    """The number of tokens of each row in a cache.

    Raises StateError or CapabilityError: the cache is of another kind or model, or has other than `batch` rows.
    """
    if cache is None:
        return 0
    held = getattr(cache, "layers", None)
    if held is None:
        cure = "Leave it out, or pass DynamicCache()."
        raise StateError("past_key_values", f"a {type(cache).__name__}", "a DynamicCache of transformers", cure)
    if any(getattr(layer, "is_compileable", False) for layer in held):
        cure = "Leave cache_implementation out: a mixer's state has a fixed size anyway."
        raise CapabilityError("past_key_values", f"a {type(cache).__name__} of fixed length", "a DynamicCache", cure)
    seen = [int(layer.get_seq_length()) for layer in held]
    if not any(seen):
        return 0
    if seen != seen[:1] * layers:
        got = f"a cache with layers of {', '.join(map(str, seen))} tokens"
        raise StateError("past_key_values", got, f"one that this model filled, of {layers} layers", "Use a new one.")
    rows = _rows(held)
    if rows not in (None, batch):
        got, cure = f"a cache of {rows} rows for {batch} rows of tokens", "Use a new one, or reorder_cache."
        raise StateError("past_key_values", got, f"one of {batch} rows", cure)
    return seen[0]


def _rows(layers: Any) -> int | None:
    """The batch size of a cache, by its first tensor with numbers; None where there is none, as in quantised ones."""
    for layer in layers:
        for part in tree_leaves(layer.state if isinstance(layer, StateLayer) else layer.keys):
            if isinstance(part, Tensor) and part.numel():
                return part.shape[0]
    return None


def sequence_layout(
    x: Tensor, mask: Any, place: Tensor | None, segments: Tensor | None, past: int, cached: bool
) -> SequenceLayout:
    """The layout of tokens x (B, N, D) with attention_mask (B, past + N), position_ids and segment_ids (B, N).

    Without a mask, position ids that start again within a row mean packed sequences, as in transformers.
    Raises ShapeError or MaskError: wrong shapes, packed sequences with a cache, masks that say more than padding.
    """
    batch, n = x.shape[:2]
    mask = None if mask is None else _padding(mask, batch, past + n)
    for name, ids in (("position_ids", place), ("segment_ids", segments)):
        if ids is not None and (ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != n):
            raise ShapeError(name, tuple(ids.shape), f"({batch}, {n}), as input_ids", "Pass one id per token.")
    if segments is None and place is not None and mask is None and not past:
        segments = _packed(place)
    if segments is not None:
        if past:
            cure = "Pass use_cache=False, and each packed row whole."
            raise MaskError("segment_ids", f"packed sequences after {past} cached tokens", "no cache", cure)
        if cached:
            cure = "A state is of one sequence: pass use_cache=False."
            raise MaskError("past_key_values", "a cache beside packed sequences", "none", cure)
        segments = segments.expand(batch, n)
    if place is None:
        place = _places(n, mask, segments, past, x.device)
    return SequenceLayout(past, mask, segments, place if place.ndim == 2 else place[None])


def _places(n: int, mask: Tensor | None, segments: Tensor | None, past: int, device: torch.device) -> Tensor:
    if segments is None and mask is None:
        return torch.arange(past, past + n, device=device)
    return positions(past + n, mask, segments, device)[:, past:]


def _padding(mask: Any, batch: int, tokens: int) -> Tensor | None:
    """(B, tokens), True = a token; None without padding, so that the mixers need no mask."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != (batch, tokens):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        cure = "A mask marks padding only. The model is causal by itself; segment_ids keep packed sequences apart."
        raise MaskError("attention_mask", got, f"(batch, tokens so far) = ({batch}, {tokens})", cure)
    seen = mask if mask.dtype == torch.bool else mask > 0
    return None if not torch.compiler.is_compiling() and bool(seen.all()) else seen


def _packed(place: Tensor) -> Tensor | None:
    """(B or 1, N) the sequence of each token, where positions that do not rise start a new one; None: one."""
    ids = F.pad((place.diff(dim=1) < 1).cumsum(1), (1, 0))
    return None if holds((ids == 0).all(), "takes packed sequences by segment_ids alone") else ids
