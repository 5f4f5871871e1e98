"""timm's image encoder of Segment Anything: attention in windows, and in some blocks on the whole feature map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter
from polymix.convert.adapters.timm.vit import described
from polymix.convert.heads import biased_by
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.convert.windows import MapAdapter, in_map


@register_adapter("timm.models.vision_transformer_sam.Attention")
class SamAdapter(MapAdapter):
    """(B, H, W, D) -> (B, H, W, D): a window, or the feature map."""

    forward_attributes = ("num_heads", "head_dim", "scale")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        block: Any = host.above()
        drops = biased_by(name for name in ("rel_pos_h", "rel_pos_w") if hasattr(module, name))
        drops |= {} if module.rope is None else {"rotary": "rotary positions, which a mixer does not have"}
        attention = described(module, host, thirds(linear(module, "qkv")), drops)
        return in_map(replace(attention, prefix=0), host, getattr(block, "window_size", 0))

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "norm1", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix_map(x)
