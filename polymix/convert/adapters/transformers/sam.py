"""Attention of the image encoder of Segment Anything, in windows, and in some layers on the whole feature map."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter, register_refusal
from polymix.convert.adapters.transformers.encoders import NO_WEIGHTS
from polymix.convert.find import grids
from polymix.convert.heads import biased_by
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.convert.windows import MapAdapter, in_map
from polymix.errors import CapabilityError, OptionError

_PATH = "transformers.models.sam.modeling_sam.SamVision"


@register_adapter(f"{_PATH}Attention", f"{_PATH}SdpaAttention")
class SamAdapter(MapAdapter):
    """(B, H, W, D) -> ((B, H, W, D), None): a window, or the feature map."""

    forward_attributes = ("num_attention_heads", "scale")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        layer: Any = host.above()
        query, key, value = thirds(linear(module, "qkv"))
        drops = biased_by(name for name in ("rel_pos_h", "rel_pos_w") if hasattr(module, name))
        drops |= {"dropout": NO_WEIGHTS} if module.dropout else {}
        embed = next(filter(None, (getattr(part, "patch_embed", None) for part in host.chain())), None)
        grid = None if embed is None else next(grids(embed), None)
        attention = AttentionSpec(
            dim=module.proj.out_features, heads=module.num_attention_heads, query=query, key=key, value=value,
            out=linear(module, "proj"), scale=module.scale, grid=grid, drops=drops,
        )  # fmt: skip
        return in_map(attention, host, getattr(layer, "window_size", 0))

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "layer_norm1", None)

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = None) -> tuple[Tensor, None]:
        if output_attentions:
            cure = "A mixer has no attention weights. Call with output_attentions=False."
            raise OptionError("output_attentions", output_attentions, "False", cure)
        return self.mix_map(hidden_states), None


@register_adapter("transformers.models.sam2.modeling_sam2.Sam2MultiScaleAttention")
class Sam2Adapter(MapAdapter):
    """(B, H, W, D) -> (B, H, W, D) in SAM 2's image encoder: a window, or the feature map.

    The first layer of a stage makes its queries fewer and its channels more; such a layer is kept.
    """

    @classmethod
    def by_default(cls, module: Any, host: Host) -> bool:
        return not module.query_stride and module.dim == module.dim_out

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        if not cls.by_default(module, host):
            got = f"a layer that goes from {module.dim} to {module.dim_out} channels and pools its queries"
            raise CapabilityError("host", got, "a layer as wide as its input, with all queries", "Keep it.")
        layer: Any = host.above()
        query, key, value = thirds(linear(module, "qkv"))
        attention = AttentionSpec(
            dim=module.dim, heads=module.num_attention_heads, query=query, key=key, value=value,
            out=linear(module, "proj"), scale=module.scale,
        )  # fmt: skip
        return in_map(attention, host, getattr(layer, "window_size", 0))

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "layer_norm1", None)

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = None, **others: Any) -> Tensor:
        if output_attentions:
            cure = "A mixer has no attention weights. Call with output_attentions=False."
            raise OptionError("output_attentions", output_attentions, "False", cure)
        return self.mix_map(hidden_states)


register_refusal(
    "the mask decoder computes it at a lower width than its own, between tokens and the image",
    *(
        f"transformers.models.{name}.modeling_{name}.{kind}Attention"
        for name, kind in (("sam", "Sam"), ("sam2", "Sam2"))
    ),
)
