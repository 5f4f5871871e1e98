"""Attention of BERT and its relatives, and what the adapters of all encoders share.

Projections and arguments have moved between releases of transformers, so both are found by name.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter
from polymix.convert.adapters.transformers.causal import CausalAdapter
from polymix.convert.adapters.transformers.visibility import grid
from polymix.convert.spec import AttentionSpec, linear
from polymix.errors import OptionError
from polymix.mixers import TokenMixer

_MAPS = (  # the attention module inside the layer; query, key, value and output maps
    ("", "q_proj", "k_proj", "v_proj", "o_proj"),
    ("", "q_proj", "k_proj", "v_proj", "out_proj"),
    ("self", "self.query", "self.key", "self.value", "output.dense"),
    ("", "q_content_proj", "k_content_proj", "v_proj", "o_proj"),
    ("attention", "attention.query", "attention.key", "attention.value", "output.dense"),
    ("attention", *(f"attention.projection_{name}" for name in ("query", "key", "value")), "output.dense"),
)
_BERT = {"bert": "Bert", "roberta": "Roberta", "xlm_roberta": "XLMRoberta", "camembert": "Camembert",
         "electra": "Electra"}  # fmt: skip
NO_WEIGHTS = "applies to attention weights, which a mixer does not have"
_CURES = {
    "output_attentions": "A mixer has no attention weights. Call with output_attentions=False.",
    "head_mask": "A mixer has no attention weights to mask. Leave it out.",
    "cu_seq_lens_q": "Pass one sequence per row, and an attention_mask.",
}


def classes(models: dict[str, str]) -> list[str]:
    """Paths of attention classes, from {"bert": "Bert"}: the model's file and the class name's start."""
    return [f"transformers.models.{file}.modeling_{file}.{name}Attention" for file, name in models.items()]


def read(module: nn.Module) -> tuple[Any, AttentionSpec]:
    """The attention module inside a layer, and its spec: maps, heads, scale, dropout."""
    parts = dict(module.named_modules())
    place, *names = next(maps for maps in _MAPS if {*maps} <= parts.keys())
    inner: Any = parts[place]
    query, key, value, out = (linear(module, name) for name in names)
    size = getattr(inner, "head_dim", None) or getattr(inner, "attention_head_size", None)
    lost = getattr(inner, "attention_dropout", getattr(inner, "dropout", 0.0))
    return inner, AttentionSpec(
        dim=out.weight.shape[0], heads=query.weight.shape[0] // size if size else inner.num_heads,
        query=query, key=key, value=value, out=out, scale=getattr(inner, "scaling", getattr(inner, "scale", None)),
        dropout=getattr(parts.get("output.dropout"), "p", 0.0),
        drops={"dropout": NO_WEIGHTS} if getattr(lost, "p", lost) else {},
    )  # fmt: skip


class NamedArguments:
    """The arguments of the layer that an adapter replaces, by name."""

    names: tuple[str, ...]
    config: Any

    def read_signature(self, module: nn.Module) -> None:
        """Keep the names of the layer's arguments, and its config."""
        self.names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        self.config = getattr(read(module)[0], "config", None)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name. Raises OptionError for those that a mixer does not support."""
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        used = {**arguments, "output_attentions": arguments.get("output_attentions") or self._recorded()}
        for name, cure in _CURES.items():
            if used.get(name) is not None and used[name] is not False:
                raise OptionError(name, "a tensor" if isinstance(used[name], Tensor) else used[name], "None", cure)
        return arguments

    def _recorded(self) -> bool:
        """Whether the model collects attention weights by hooks, without passing an argument."""
        return bool(getattr(self.config, "output_attentions", False))


class EncoderAdapter(NamedArguments, CausalAdapter):
    """Takes the arguments of the layer that it replaces, by name."""

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        self.read_signature(module)

    def alone(self, x: Tensor, arguments: dict[str, Any], cache: Any = None, values: Tensor | None = None) -> Tensor:
        """Self-attention: mix x, after the tokens in the cache. values: as in `Adapter.mix`."""
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] == 1 < mask.shape[3]:
            mask = mask[:, 0, 0]  # one row for all queries
        flash = "flash" in str(getattr(self.config, "_attn_implementation", None))
        positions = arguments.get("position_ids") if flash else None  # other implementations ignore them
        return self.attend(x, mask, cache, {"is_causal": arguments.get("is_causal"), "position_ids": positions}, values)

    def across(self, x: Tensor, context: Tensor, mask: Any, values: Tensor | None = None) -> Tensor:
        """Cross-attention: mix x with a context under a mask (B, 1, N or 1, M) or (B, M)."""
        seen = None if mask is None else grid(mask, x.shape[0], self)
        if seen is not None and seen.ndim == 3 and seen.shape[1] == 1:
            seen = seen[:, 0]
        how = self.mask_options(seen, causal=False) if seen is None or seen.ndim == 3 else {"mask": seen}
        return self.mix(x, context, values=values, **how)


@register_adapter(*classes(_BERT))
class BertAdapter(EncoderAdapter):
    """(hidden_states, masks, context, cache) -> (LayerNorm(input + output), None).

    In a decoder the cache holds the mixer's state, as in a language model.
    """

    copied_modules = ("output.LayerNorm",)
    replaced_part = "output.dense"
    LayerNorm: nn.Module

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        self.cross, self.layer_idx = attention.cross, getattr(module.self, "layer_idx", None)
        self.nothing = (
            () if "past_key_value" in self.names else None
        )  # older versions return an empty tuple without a cache

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        inner, attention = read(module)
        cross = host.name.endswith("crossattention")
        causal = not cross and bool(getattr(inner, "is_causal", getattr(inner, "is_decoder", False)))
        config = getattr(inner, "config", None)
        return replace(
            attention, cross=cross, causal=causal, any_length=True,
            max_tokens=getattr(config, "max_position_embeddings", None),
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[()] | None]:
        arguments = self.named(args, kwargs)
        x = arguments["hidden_states"]
        if self.cross:
            mask = arguments.get("encoder_attention_mask", arguments.get("attention_mask"))
            y = self.across(x, arguments["encoder_hidden_states"], mask)
        else:
            y = self.alone(x, arguments, arguments.get("past_key_values", arguments.get("past_key_value")))
        return self.LayerNorm(x + y), self.nothing


@register_adapter(*classes({"patchtst": "PatchTST"}))
class PatchTstAdapter(EncoderAdapter):
    """(hidden_states) -> (output, None), over the patches of a series or, with channel_attention, over its channels."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        return replace(read(module)[1], any_length=True)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        arguments = self.named(args, kwargs)
        return self.alone(arguments["hidden_states"], arguments), None
