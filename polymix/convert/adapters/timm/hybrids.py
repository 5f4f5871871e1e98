"""timm's hybrids of convolutions and attention: EfficientFormer, FastViT and SwiftFormer. EdgeNeXt has XCiT's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.adapters.timm.vit import described, stage_grid
from polymix.convert.heads import biased_by
from polymix.convert.spec import AttentionSpec, additive_spec, linear, thirds
from polymix.errors import OptionError
from polymix.mixers.inheritance import Projection


@register_adapter("timm.models.efficientformer.Attention")
class EfficientFormerAdapter(Adapter):
    """(x): the tokens of the last stage, on the one grid that its biases are made for."""

    forward_attributes = ("num_heads", "scale", "key_dim")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        fused, out = linear(module, "qkv"), linear(module, "proj")
        rows = torch.arange(len(fused.weight)).view(module.num_heads, -1)  # query, key and value of each head
        sizes = (module.key_dim, module.key_dim, module.val_dim)
        maps = []
        for name, part in zip(("query", "key", "value"), rows.split(sizes, dim=1), strict=True):
            order, keys = part.flatten(), tuple(f"{key}[{name}]" for key in fused.keys)
            maps.append(Projection(fused.weight[order], None if fused.bias is None else fused.bias[order], keys))
        tokens = module.attention_biases.shape[1]
        side = math.isqrt(tokens)
        if side**2 != tokens:
            raise OptionError("model", f"biases of {tokens} offsets", "those of a square grid", "Keep this layer.")
        return AttentionSpec(
            dim=out.weight.shape[0], heads=module.num_heads, query=maps[0], key=maps[1], value=maps[2], out=out,
            scale=module.scale, grid=(side, side), drops=biased_by(["attention_biases"]),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


@register_adapter("timm.models.fastvit.Attention")
class FastVitAdapter(Adapter):
    """Feature maps (B, C, H, W) -> (B, C, H, W)."""

    channel_axis = 1
    forward_attributes = ("num_heads", "head_dim", "scale")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        return described(module, host, thirds(linear(module, "qkv")))

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "norm", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix_map(x)


@register_adapter("timm.models.swiftformer.EfficientAdditiveAttention")
class SwiftFormerAdapter(Adapter):
    """Feature maps (B, C, H, W) -> (B, C, H, W)."""

    channel_axis = 1

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        dim, width = module.to_query.in_features, module.to_query.out_features
        if width != dim or module.final.out_features != dim:
            got = f"queries of {width} channels for {dim}"
            raise OptionError("model", got, "one head as wide as the input", "Keep this layer.")
        return replace(additive_spec(module), grid=stage_grid(host))

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "local_representation", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix_map(x)
