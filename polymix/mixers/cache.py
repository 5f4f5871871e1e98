"""The recurrent state of a mixer as one layer of a transformers cache."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polymix.errors import CapabilityError, MaskError, StateError
from polymix.mixers.checks import holds


class StateLayer:
    """One layer of a cache that holds a mixer's state, of fixed size, in place of keys and values.

    Attributes:
        state: what `prefill` returned; None if tokens were only counted.
        seen: number of tokens so far, padding included. The host derives positions and masks from it.
        real: (B,) number of tokens that were not padding; None: no padding so far.
    """

    is_compileable = is_croppable = is_sliding = supports_early_init = False
    keys = values = torch.empty(0)  # none; some models ask how many there are

    def __init__(self) -> None:
        self.state: Any = None
        self.seen = 0
        self.real: Tensor | None = None

    def follows(self, before: Tensor | None) -> None:
        """Raise MaskError if the mask shows other earlier tokens than the state holds.

        before: (B,), number of earlier tokens that the mask shows; None: all.
        """
        if before is None and self.real is None:
            return
        visible = self.seen if before is None else before
        same = torch.as_tensor(visible == (self.seen if self.real is None else self.real)).all()
        if not holds(same, "requires a mask that shows exactly the earlier tokens in the cache"):
            got = "one that shows other earlier tokens than the cache holds"
            cure = "Pass the whole attention_mask in every call: a state cannot drop or add earlier tokens."
            raise MaskError("attention_mask", got, "a mask that agrees with the cache", cure)

    def advance(self, state: Any, tokens: int, padding: Tensor | None) -> None:
        """Store the state after `tokens` more tokens. padding: (B, tokens), True = real token; None: all real."""
        if padding is not None:
            self.real = padding.sum(1) + (self.seen if self.real is None else self.real)
        elif self.real is not None:
            self.real = self.real + tokens
        self.state, self.seen = state, self.seen + tokens

    def __repr__(self) -> str:
        return f"StateLayer(seen={self.seen})"

    @property
    def is_initialized(self) -> bool:
        return self.seen > 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        tokens = len(query_length) if isinstance(query_length, Tensor) else query_length  # positions before 5
        return self.seen + tokens, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5

    def reset(self) -> None:
        self.state, self.seen, self.real = None, 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda t: t[indices.to(t.device)])

    def _each(self, change: Any) -> None:
        """Apply `change` to every tensor of the state; the batch is their first dimension."""
        self.state, self.real = tree_map_only(Tensor, change, (self.state, self.real))

    def offload(self) -> None:
        """Do nothing: a state is small."""

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            cure = "Turn off assisted generation: no assistant_model, no prompt_lookup_num_tokens."
            allowed = "a cache that can drop tokens; a mixer's state only grows"
            raise CapabilityError("past_key_values", "crop", allowed, cure)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        got = "a cache with a mixer's state in this layer"
        allowed = "a cache with keys and values, as this layer is attention"
        raise StateError("past_key_values", got, allowed, "Start with a new cache.")

    update = lazy_initialization


@torch.compiler.assume_constant_result
def _known_to_transformers() -> bool:
    """Register StateLayer as a cache layer: transformers decides by class whether a layer counts tokens."""
    from transformers.cache_utils import CacheLayerMixin

    CacheLayerMixin.register(StateLayer)
    return True


class LentLayer(StateLayer):
    """A StateLayer of a layer that makes keys and values all the same: it gets the new ones back."""

    is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_query_offset(self) -> int:
        return self.seen

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Do nothing: there are no keys to make room for."""


def state_layer(cache: Any, index: int | None, kind: type[StateLayer] = StateLayer) -> StateLayer:
    """Layer `index` of a cache as a StateLayer; an empty layer of another kind is replaced by one of this kind.

    Raises:
        CapabilityError: the cache has no layers, or a fixed length. StateError: the layer holds keys and values.
    """
    cache = getattr(cache, "self_attention_cache", cache)  # an encoder-decoder has two caches
    layers, add = getattr(cache, "layers", None), getattr(cache, "layer_class_to_replicate", None)
    if layers is None or index is None:
        got = f"a {type(cache).__name__} for layer {index}"
        raise CapabilityError(
            "past_key_values", got, "a cache with layers, and a layer number", "Pass use_cache=False."
        )
    while add is not None and len(layers) <= index:
        layers.append(add())
    old = layers[index]
    if isinstance(old, StateLayer):
        return old
    if getattr(old, "is_compileable", False):
        cure = "Leave cache_implementation out: a mixer's state has a fixed size anyway."
        raise CapabilityError("past_key_values", f"a {type(cache).__name__} of fixed length", "a DynamicCache", cure)
    if more := [name for name in ("update_conv_state", "update_indexer") if hasattr(old, name)]:
        got = f"a {type(old).__name__} for layer {index}, which also holds what {more[0]} stores"
        raise CapabilityError("past_key_values", got, "keys and values alone", "Pass use_cache=False.")
    if old.get_seq_length():
        got = f"keys and values of {old.get_seq_length()} tokens in layer {index}"
        raise StateError(
            "past_key_values", got, "an empty cache, or one filled by this model", "Start with a new cache."
        )
    _known_to_transformers()
    layers[index] = new = kind()
    return new
