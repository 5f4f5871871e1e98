"""Attention of the image encoder of Segment Anything, in windows, and in some layers on the whole feature map."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter
from polymix.convert.adapters.transformers.encoders import NO_WEIGHTS
from polymix.convert.find import grids
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.convert.windows import MapAdapter, in_map
from polymix.errors import OptionError

_PATH = "transformers.models.sam.modeling_sam.SamVision"


@register_adapter(f"{_PATH}Attention", f"{_PATH}SdpaAttention")
class SamAdapter(MapAdapter):
    """(B, H, W, D) -> ((B, H, W, D), None): a window, or the feature map."""

    forward_attributes = ("num_attention_heads", "scale")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        layer: Any = host.above()
        query, key, value = thirds(linear(module, "qkv"))
        why = "positions in queries and keys, which a mixer does not have"
        drops = {name: why for name in ("rel_pos_h", "rel_pos_w") if hasattr(module, name)}
        drops |= {"dropout": NO_WEIGHTS} if module.dropout else {}
        embed = next(filter(None, (getattr(part, "patch_embed", None) for part in host.chain())), None)
        grid = None if embed is None else next(grids(embed), None)
        found = AttentionSpec(
            dim=module.proj.out_features, heads=module.num_attention_heads, query=query, key=key, value=value,
            out=linear(module, "proj"), scale=module.scale, grid=grid, drops=drops,
        )  # fmt: skip
        return in_map(found, host, getattr(layer, "window_size", 0))

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "layer_norm1", None)

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = None) -> tuple[Tensor, None]:
        if output_attentions:
            cure = "A mixer has no attention weights. Call with output_attentions=False."
            raise OptionError("output_attentions", output_attentions, "False", cure)
        return self.mix_map(hidden_states), None
