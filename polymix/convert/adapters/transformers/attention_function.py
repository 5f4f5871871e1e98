"""transformers' attention function, exchanged in one layer: queries, keys and values as the layer has made them.

Since 4.48 the layers of most families ask a registry, the `AttentionInterface`, for the function that their config
names. A layer with a config of its own can name ours: norms, rotary angles, gates and grouped heads stay the layer's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polymix.convert.adapters.libraries import load_library
from polymix.convert.adapters.transformers.visibility import grid
from polymix.convert.heads import Heads, scaled, softmax
from polymix.convert.tracing import LayerCall, arguments_of, same, tensors
from polymix.errors import CapabilityError, PolymixError

NAME = "polymix"
REGISTRY_CALLS = ("ALL_ATTENTION_FUNCTIONS", "attention_interface(")  # in the source of a layer that asks the registry
RIDES_ALONG = {  # arguments of the model that reach the function and say nothing of the attention
    "position_ids", "cache_position", "use_cache", "past_key_values", "position_embeddings", "num_items_in_batch",
    "output_hidden_states", "return_dict", "token_type_ids", "mm_token_type_ids", "labels", "logits_to_keep",
    "output_router_logits",
}  # fmt: skip
ON_LOGITS = {"position_bias": "position_bias", "softcap": "soft_cap", "s_aux": "sinks"}  # by names in `convert(drop=)`
PADDED_TOKENS = 2  # tokens that the proof with padding hides


class Answerer(Protocol):
    """Who answers a layer that asks for attention, with (B, heads, N, e)."""

    def answer(self, heads: Heads, mask: Any, others: Mapping[str, Any]) -> Tensor: ...


def asks_registry(module: nn.Module) -> bool:
    """Whether a layer's own forward asks the registry, by the name in its config."""
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return False
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
    return any(name in source for name in REGISTRY_CALLS)


def asking(module: nn.Module, answerer: Answerer) -> nn.Module:
    """A copy of a layer that asks `answerer`."""
    _register()
    config: Any = module.config
    own = copy.copy(config)
    own._attn_implementation_internal = NAME
    other = copy.deepcopy(module, {id(config): own})
    vars(other)[NAME] = answerer
    return other


@contextmanager
def answering(module: nn.Module, answerer: Answerer) -> Iterator[None]:
    """Context manager: the layer asks `answerer`."""
    _register()
    config: Any = module.config
    before = config._attn_implementation_internal
    config._attn_implementation_internal, vars(module)[NAME] = NAME, answerer
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        del vars(module)[NAME]


@cache
def _register() -> None:
    load_library("transformers").AttentionInterface.register(NAME, _answer)


def _answer(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, dropout: float = 0.0,
    scaling: Any = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: (B, heads or groups, ·, ·) each -> (B, N, heads, e)."""
    unknown = [name for name, argument in others.items() if argument is not None and argument is not False]
    if unknown := [name for name in unknown if name not in RIDES_ALONG and name not in ON_LOGITS]:
        got = f"a layer that passes {', '.join(unknown)} to its attention"
        raise CapabilityError("attention", got, "queries, keys, values and masks alone", "Keep this layer.")
    answerer: Answerer = vars(module)[NAME]
    parts: dict[str, Any] = {part: others.get(name) for name, part in ON_LOGITS.items()}
    heads = scaled(query, key, value, scaling)._replace(**parts)
    y = answerer.answer(heads, attention_mask, {"is_causal": is_causal, **others})
    return y.transpose(1, 2).contiguous(), None


class _Softmax:
    """Softmax attention, in proofs. It keeps the sizes (heads, d, e) of each question, and what acts on the logits."""

    def __init__(self, causal: bool) -> None:
        self.causal, self.sizes = causal, list[tuple[int, int, int]]()
        self.parts: dict[str, None] = {}

    def answer(self, heads: Heads, mask: Any, others: Mapping[str, Any]) -> Tensor:
        n, m = heads.q.shape[2], heads.k.shape[2]
        self.sizes.append((heads.q.shape[1], heads.q.shape[-1], heads.v.shape[-1]))
        self.parts |= dict.fromkeys(name for name in ON_LOGITS.values() if getattr(heads, name) is not None)
        seen = None if mask is None else grid(mask, len(heads.q), self)[..., :m]
        ordered = self.causal and (seen is None or seen.ndim == 2) and n == m
        return softmax(heads.under(seen, ordered))


@torch.no_grad()
def proven_sizes(
    module: nn.Module, call: LayerCall, causal: bool, cross: bool
) -> tuple[tuple[int, int, int] | None, tuple[str, ...]]:
    """(heads, d, e) of a layer in evaluation mode whose attention function can be exchanged; None if it cannot be.

    The proof: with softmax attention in that place, the layer's output stays the same, with padding too. Second, what
    acts on the logits there, by its names in `convert(drop=)`.
    """
    if not asks_registry(module):
        return None, ()
    proof = _Softmax(causal)
    try:
        for kwargs in (call.kwargs, *_padded(module, call, causal, cross)):
            theirs = tensors(module(*call.args, **kwargs))[0]
            with answering(module, proof):
                ours = tensors(module(*call.args, **kwargs))[0]
            shown = slice(None) if kwargs is call.kwargs or cross else slice(-PADDED_TOKENS)
            if not same(ours[:, shown], theirs[:, shown]):
                return None, ()
    except (PolymixError, RuntimeError, ValueError, TypeError, IndexError, KeyError):  # it takes no such mask, or more
        return None, ()
    once = len({*proof.sizes}) == 1 and len(proof.sizes) <= 2  # in each of the calls
    return proof.sizes[0] if once else None, tuple(proof.parts)


def _padded(module: nn.Module, call: LayerCall, causal: bool, cross: bool) -> list[dict[str, Any]]:
    """The keyword arguments of a call in which the last tokens are padding, where the layer is called with a mask."""
    mask = call.kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] <= PADDED_TOKENS:
        x = tensors(tuple(arguments_of(module, call.args, call.kwargs).values()))[0]
        tokens = x.shape[1]
        if cross or mask is not None or "attention_mask" not in call.kwargs or tokens <= PADDED_TOKENS or x.ndim != 3:
            return []
        order = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device)
        seen = (order.tril() if causal else order).expand(x.shape[0], 1, -1, -1)
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)
    mask = mask.clone()
    mask[..., -PADDED_TOKENS:] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return [{**call.kwargs, "attention_mask": mask}]
