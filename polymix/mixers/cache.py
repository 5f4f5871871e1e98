"""A mixer's state in a cache of transformers, beside the keys and values of the attention layers that were kept."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polymix.errors import CapabilityError, MaskError, StateError
from polymix.mixers.checks import holds


class StateLayer:
    """One layer of a cache: what a mixer remembers of the tokens so far, whose size does not depend on their number.

    state: what `prefill` returned; None where the tokens were counted alone. seen: tokens, padding included, from
        which the host derives positions and masks. real: (B,) those that were no padding; None: all were.
    """

    is_compileable = is_croppable = is_sliding = supports_early_init = False
    keys = values = None

    def __init__(self) -> None:
        self.state: Any = None
        self.seen = 0
        self.real: Tensor | None = None

    def follows(self, before: Tensor | None) -> None:
        """Raise where the tokens that a mask lets through of the earlier ones, (B,), are not those in the state."""
        if before is None and self.real is None:
            return
        claimed = self.seen if before is None else before
        same = torch.as_tensor(claimed == (self.seen if self.real is None else self.real)).all()
        if not holds(same, "takes no mask that shows other earlier tokens than the state has"):
            cure = "Pass the whole attention_mask in every call: a state cannot forget, nor see again."
            raise MaskError("attention_mask", "other earlier tokens than the cache was filled with", "those", cure)

    def advance(self, state: Any, tokens: int, padding: Tensor | None) -> None:
        """Keep the state after `tokens` more, of which `padding` (B, tokens) hides some."""
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
        """Every tensor of a state has the batch first."""
        self.state, self.real = tree_map_only(Tensor, change, (self.state, self.real))

    def offload(self) -> None:
        """Nothing: a state is small."""

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            cure = "Generate without what takes tokens back: no assistant_model, no prompt_lookup_num_tokens."
            raise CapabilityError("past_key_values", "crop", "a cache without a mixer's state, which only grows", cure)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        got = "a mixer's state in the place of keys and values"
        raise StateError("past_key_values", got, "the cache of a model with attention in this layer", "Use a new one.")

    update = lazy_initialization


@torch.compiler.assume_constant_result
def _known_to_transformers() -> bool:
    """Its caches ask of a layer whether it counts tokens by its class alone."""
    from transformers.cache_utils import CacheLayerMixin

    CacheLayerMixin.register(StateLayer)
    return True


def state_layer(cache: Any, index: int | None) -> StateLayer:
    """Layer `index` of a cache, which becomes a StateLayer while it is empty."""
    cache = getattr(cache, "self_attention_cache", cache)  # of an encoder-decoder's two
    layers, add = getattr(cache, "layers", None), getattr(cache, "layer_class_to_replicate", None)
    if layers is None or index is None:
        got = f"a {type(cache).__name__} for layer {index}"
        raise CapabilityError("past_key_values", got, "a cache made of layers, and a number", "Pass use_cache=False.")
    while add is not None and len(layers) <= index:
        layers.append(add())
    old = layers[index]
    if isinstance(old, StateLayer):
        return old
    if getattr(old, "is_compileable", False):
        cure = "Leave cache_implementation out: a mixer's state has a fixed size in any cache."
        raise CapabilityError("past_key_values", f"a {type(cache).__name__} of fixed length", "a DynamicCache", cure)
    if old.get_seq_length():
        got = f"keys and values of {old.get_seq_length()} tokens in layer {index}"
        raise StateError("past_key_values", got, "an empty cache, or one that this model filled", "Use a new one.")
    _known_to_transformers()
    layers[index] = new = StateLayer()
    return new
