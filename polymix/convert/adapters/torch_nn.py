"""torch.nn.MultiheadAttention: alone, in nn.TransformerEncoderLayer and nn.TransformerDecoderLayer, or elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.masks import visible
from polymix.convert.model_recipes import Recipe
from polymix.convert.model_recipes import build_class as build_model
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.errors import MaskError, OptionError, ShapeError
from polymix.mixers import TokenMixer
from polymix.mixers.checks import holds
from polymix.mixers.inheritance import Projection

__all__ = ["MultiheadAttentionAdapter", "build_model", "read_recipes"]

_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # whose keys are their values
_DROPS = {"bias_k": "an extra key beside the tokens'", "bias_v": "an extra value beside the tokens'"}


@register_adapter(nn.MultiheadAttention)
class MultiheadAttentionAdapter(Adapter):
    """(query, key, value, masks) -> (output, None). There are no attention weights to return.

    Boolean masks hide tokens where they are True, as in nn.MultiheadAttention. A `key` equal to
    `query` is self-attention, also where it is another tensor, as in attention(x + positions, x + positions, x). The
    attributes below keep nn.TransformerEncoderLayer off its fused path, which would not call the mixer.
    """

    forward_attributes = ("batch_first", "num_heads", "embed_dim")
    masks_alone = True
    in_proj_weight = in_proj_bias = None
    _qkv_same_embed_dim = False

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        assert isinstance(module, nn.MultiheadAttention)
        if module.kdim != module.embed_dim or module.vdim != module.embed_dim:
            got = f"{module.kdim} and {module.vdim}"
            allowed = f"{module.embed_dim} channels in key and value, the same as in the query"
            raise OptionError("model", got, allowed, "Keep this layer.")
        assert module.in_proj_weight is not None
        keys = ("in_proj_weight",) if module.in_proj_bias is None else ("in_proj_weight", "in_proj_bias")
        query, key, value = thirds(Projection(module.in_proj_weight, module.in_proj_bias, keys))
        drops = {name: why for name, why in _DROPS.items() if getattr(module, name) is not None}
        if module.add_zero_attn:
            drops["add_zero_attn"] = "an extra key and value of zeros"
        if drops:
            drops["sinks"] = "an extra key and value, which a mixer does not have"
        if module.dropout:
            drops["dropout"] = "applies to attention weights, which a mixer does not have"
        inside = isinstance(host.above(), nn.TransformerDecoderLayer)
        cross = inside and host.name.endswith("multihead_attn")
        stock = any(getattr(type(host.above()), "forward", None) is kind.forward for kind in _TRANSFORMER_LAYERS)
        return AttentionSpec(
            dim=module.embed_dim, heads=module.num_heads, query=query, key=key, value=value,
            out=linear(module, "out_proj"), cross=cross, causal=inside and not cross,
            grid=None if inside else host.grid(), prefix=0 if inside else host.prefix(), drops=drops,
            own_values=False if stock else None,
        )  # fmt: skip

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        self.causal = False  # unless a call's masks are causal
        self.cross = attention.cross

    def host_settings(self, host: Host) -> list[tuple[nn.Module, str, Any]]:
        """Turn off nested tensors, which mixers do not support."""
        encoders = [module for module in host.chain() if isinstance(module, nn.TransformerEncoder)]
        return [(encoder, "use_nested_tensor", False) for encoder in encoders]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if query.is_nested:
            raise ShapeError("query", "a nested tensor", "a padded tensor", "Mark the padding in key_padding_mask.")
        x, context, values = (self._in(t) for t in (query, key, value))
        padding = None
        if key_padding_mask is not None:
            padding = visible(key_padding_mask, inverted=True).reshape(-1, context.shape[1])
        seen = None if attn_mask is None or is_causal else self._visible(attn_mask, x.shape[0])
        how = self.mask_options(seen, padding, causal=True if is_causal else None)
        itself = key is query or (not self.cross and self._equal(query, key))
        y = self.mix(x, None if itself else context, values=None if value is key else values, **how)
        return (y[0] if query.ndim == 2 else y if self.batch_first else y.transpose(0, 1)), None

    def _equal(self, query: Tensor, key: Tensor) -> bool:
        """Whether two tensors are the same tokens, as x + positions is, computed twice.

        In a compiled graph, where values are not known, only for mixers that read no context; the graph checks it.
        """
        if query.shape != key.shape:
            return False
        alone = not self.mixer.capabilities.cross
        if query.is_meta or (torch.compiler.is_compiling() and not alone):
            return alone
        if not torch.compiler.is_compiling() and torch.equal(query, key):
            return True
        same = (query == key) | (query.isnan() & key.isnan())  # padding may hold NaN
        return holds(same.all(), "takes queries that are the keys")

    def _in(self, t: Tensor) -> Tensor:
        return t[None] if t.ndim == 2 else t if self.batch_first else t.transpose(0, 1)

    def _visible(self, mask: Tensor, batch: int) -> Tensor:
        """A mask (N, M) or (B · heads, N, M) that hides where True or -inf, as (B, N, M), True where seen."""
        seen = visible(mask, inverted=True)
        if seen.ndim == 2:
            return seen.expand(batch, -1, -1)
        heads = seen.unflatten(0, (batch, self.num_heads))
        if not holds((heads == heads[:, :1]).all(), "takes one attn_mask for all heads"):
            raise MaskError("attn_mask", "a mask that differs between heads", "one mask for all heads", "")
        return heads[:, 0]


def read_recipes(model: nn.Module) -> Iterator[Recipe]:
    """No recipes: modules of torch.nn do not keep their arguments."""
    yield from ()
