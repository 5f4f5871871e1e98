"""Attention of the language models GPT-2 and Llama, with masks, packed sequences and caches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.adapters.transformers.visibility import Seen, grid, in_step, look
from polymix.convert.spec import AttentionSpec, linear, repeated, thirds
from polymix.errors import CapabilityError, MaskError, PolymixError, StateError
from polymix.mixers import SoftmaxMixer
from polymix.mixers.cache import StateLayer, state_layer
from polymix.mixers.inheritance import Projection
from polymix.mixers.registry import missing_capability


class CausalAdapter(Adapter):
    """Attention of a language model: (hidden_states, …) -> (output, None). The cache holds the mixer's state.

    Models pass an empty cache to every layer. A mixer that is not recurrent only counts the tokens in it, and raises an
    error when a later call needs them.
    """

    forward_attributes = ("layer_idx", "config")
    cache_layer: ClassVar[type[StateLayer]] = StateLayer
    layer_idx: int | None = None
    config: Any = None

    @classmethod
    def may_stay(cls, host: Host) -> bool:
        """In a model of images and text, such as LLaVA, mixers without causal order are for the images alone."""
        around = list(host.chain())
        models = [part.vision_tower for part in around if isinstance(getattr(part, "vision_tower", None), nn.Module)]
        return super().may_stay(host) or (bool(models) and not any(vision in around for vision in models))

    def attend(
        self, x: Tensor, mask: Any, cache: Any, others: Mapping[str, Any], values: Tensor | None = None
    ) -> Tensor:
        """Mix x (B, N, D) after the tokens in the cache. values: as in `Adapter.mix`, without a cache."""
        _refuse(others, bool(self.causal))
        layer = None if cache is None else state_layer(cache, self.layer_idx, self.cache_layer)
        past, positions = 0 if layer is None else layer.seen, others.get("position_ids")
        unmasked = "flash" in str(getattr(self.config, "_attn_implementation", None))
        seen = look(mask, positions, x, past, causal=bool(self.causal), unmasked=unmasked, by=self)
        if layer is None:
            return self.mix(x, values=values, **self._options(seen, positions))
        if seen.segments is not None and mask is None:
            raise MaskError(
                "position_ids", "packed sequences with a cache", "one sequence per row", "Pass use_cache=False."
            )
        recurrent = bool(self.causal) and self.mixer.capabilities.recurrent
        if recurrent and seen.in_order and (layer.state is not None or not past):
            layer.follows(seen.before)
            y, state = self.prefill(x, layer.state, seen.padding)
            layer.advance(state, x.shape[1], seen.padding)
            return y
        if past:
            raise self._stopped(layer, recurrent)
        y = self.mix(x, **self._options(seen, positions))
        layer.advance(None, x.shape[1], None)
        return y

    def prefill(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """The mixer's output for the next tokens, and its state after them."""
        return self.mixer.prefill(x, state, mask=mask)

    def _options(self, seen: Seen, positions: Tensor | None) -> dict[str, Any]:
        """Arguments for `mix` in a call without earlier tokens."""
        can, turns = self.mixer.capabilities, self.mixer.config.rotary_base is not None
        if isinstance(self.mixer, SoftmaxMixer) and turns and not in_step(seen, positions):
            got = "positions with gaps or repetitions"
            raise MaskError("position_ids", got, "positions that increase by 1", "Leave position_ids out.")
        if seen.segments is not None:
            if not can.has("segments"):
                raise missing_capability(self.mixer.name, "segments", "position_ids", "packed sequences")
            return {"segments": seen.segments}
        if seen.pairs is not None:
            if not can.has("arbitrary"):
                raise missing_capability(
                    self.mixer.name, "arbitrary", "attention_mask", "a mask other than causal order and padding"
                )
            return {"mask": seen.pairs, "causal": False}
        return {"mask": seen.padding}

    def _stopped(self, layer: StateLayer, recurrent: bool) -> PolymixError:
        """The error for a call that cannot continue from the cache."""
        cure = "Pass use_cache=False, also to generate()."
        if not recurrent:
            error = missing_capability(
                self.mixer.name, "recurrent", "past_key_values", f"continuing after {layer.seen} cached tokens"
            )
            return CapabilityError(error.argument, error.got, error.allowed, cure)
        if layer.state is not None:
            return MaskError("attention_mask", "another mask with a cache", "causal order and padding alone", cure)
        got = f"{layer.seen} tokens without a state, since their mask was not causal order and padding alone"
        return StateError("past_key_values", got, "an empty cache, or one with a state", cure)


def _recording() -> bool:
    """Whether the model collects attention weights of its layers by hooks, as transformers 5 does."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = None if torch.compiler.is_compiling() else getattr(capturing, "_active_collector", None)
    return any("attentions" in name for name in (None if collector is None else collector.get()) or ())


def _refuse(others: Mapping[str, Any], causal: bool) -> None:
    """Raise an error for arguments that a mixer does not support."""
    if _recording():
        cure = "Leave output_attentions out, also in the config."
        raise CapabilityError("output_attentions", True, "False: a mixer has no attention weights", cure)
    for name in ("head_mask", "output_attentions", "position_bias", "cache"):
        if others.get(name) is not None and others[name] is not False:
            raise CapabilityError(
                name, "a value", "None: a mixer has no attention weights, keys or values", "Keep this layer."
            )
    for name in ("past_key_value", "layer_past"):
        if others.get(name) is not None:
            cure = "Upgrade transformers, or pass use_cache=False."
            raise CapabilityError(name, "a cache of transformers before 4.56", "past_key_values", cure)
    if others.get("is_causal") not in (None, causal):
        raise MaskError("is_causal", others["is_causal"], f"{causal}, as at the conversion", "Leave it out.")


@register_adapter("transformers.models.gpt2.modeling_gpt2.GPT2Attention")
class GPT2Adapter(CausalAdapter):
    """Self-attention, or cross-attention to `encoder_hidden_states`, which needs no cache: every call passes them."""

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        config, heads, cross = module.config, module.num_heads, module.is_cross_attention
        fused, out = linear(module, "c_attn", transposed=True), linear(module, "c_proj", transposed=True)
        query, key, value = (linear(module, "q_attn", transposed=True), *_halves(fused)) if cross else thirds(fused)
        scale = (query.weight.shape[0] // heads) ** -0.5 if config.scale_attn_weights else 1.0
        return AttentionSpec(
            dim=module.embed_dim, heads=heads, query=query, key=key, value=value, out=out, cross=cross,
            scale=scale / (module.layer_idx + 1) if config.scale_attn_by_inverse_layer_idx else scale,
            causal=not cross and getattr(config, "is_causal", True), any_length=True,
            max_tokens=config.max_position_embeddings, dropout=config.resid_pdrop,
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None, encoder_attention_mask: Any = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if encoder_hidden_states is None:
            return self.attend(hidden_states, attention_mask, past_key_values, others), None
        _refuse(others, False)
        seen = None if encoder_attention_mask is None else grid(encoder_attention_mask, hidden_states.shape[0], self)
        padded = seen is not None and seen.ndim == 2
        how = {"mask": seen} if padded else self.mask_options(seen, causal=False)
        return self.mix(hidden_states, encoder_hidden_states, **how), None


def _halves(fused: Projection) -> tuple[Projection, Projection]:
    size = fused.weight.shape[0] // 2
    key, value = fused.rows(0, size), fused.rows(size, 2 * size)
    return (
        key._replace(keys=tuple(f"{name}[key]" for name in fused.keys)),
        value._replace(keys=tuple(f"{name}[value]" for name in fused.keys)),
    )


@register_adapter("transformers.models.llama.modeling_llama.LlamaAttention")
class LlamaAdapter(CausalAdapter):
    """Repeats grouped keys and values for all heads. Only softmax and local attention use the rotary angles."""

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        config, groups = module.config, module.num_key_value_groups
        query, key, value, out = (linear(module, f"{name}_proj") for name in "qkvo")
        heads = query.weight.shape[0] // module.head_dim
        base, kind = rope(config)
        drops = {} if kind == "default" else {"rotary": f"rotary angles scaled by {kind!r}, which no mixer has"}
        return AttentionSpec(
            dim=config.hidden_size, heads=heads, query=query, key=repeated(key, groups, module.head_dim),
            value=repeated(value, groups, module.head_dim), out=out, scale=module.scaling,
            causal=getattr(config, "is_causal", True), any_length=True, max_tokens=config.max_position_embeddings,
            rotary=None if drops else base or 1e4, drops=drops,
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
        past_key_values: Any = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        return self.attend(hidden_states, attention_mask, past_key_values, others), None


def rope(config: Any) -> tuple[float | None, str]:
    """Base and type of the rotary angles: in one dict, or before transformers 5 in two places. None: it has none."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    base = rope.get("rope_theta") or getattr(config, "rope_theta", None)
    return None if base is None else float(base), str(rope.get("rope_type") or rope.get("type") or "default")
