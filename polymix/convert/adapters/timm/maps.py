"""timm's attention on feature maps (MetaFormer, EfficientViT's LiteMLA) and XCiT's attention between channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.adapters.timm.vit import TokensAdapter, described, stage_grid
from polymix.convert.spec import AttentionSpec, EquivalentMixer, linear, thirds
from polymix.errors import OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.inheritance import Projection
from polymix.mixers.registry import mixer_class

_EPS = 1e-5  # eps of relu_linear's BatchNorm


@register_adapter("timm.models.metaformer.Attention")
class MetaFormerAdapter(TokensAdapter):
    """(x): the tokens of a stage's feature map."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        return described(module, host, thirds(linear(module, "qkv")))


@register_adapter("timm.models.xcit.XCA")
class XcaAdapter(TokensAdapter):
    """(x). Class tokens are added after the last of these layers."""

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        found = described(module, host, thirds(linear(module, "qkv")))
        equivalent = _equivalent(module, "xca", lambda: dict(module.state_dict()), num_heads=module.num_heads)
        return replace(found, prefix=0, equivalent=equivalent)


@register_adapter("timm.models.efficientvit_mit.LiteMLA")
class LiteMlaAdapter(Adapter):
    """Feature maps (B, C, H, W) -> (B, C, H, W)."""

    channel_axis = 1

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        dim, out = module.qkv.conv.in_channels, module.proj.conv.out_channels
        width = module.qkv.conv.out_channels // 3
        if out != dim:
            raise OptionError("model", out, f"{dim} output channels, the same as the input", "Keep this layer.")
        kinds = [type(part) for part in (module.qkv.norm, module.qkv.act, module.proj.act, module.kernel_func)]
        plain = kinds == [nn.Identity] * 3 + [nn.ReLU] and isinstance(module.proj.norm, (nn.Identity, nn.BatchNorm2d))
        if not plain:
            raise OptionError(
                "model",
                "a LiteMLA with other norms or activations",
                "a LiteMLA with timm's defaults",
                "Keep this layer.",
            )
        query, key, value = thirds(_grouped(module))
        why = "smooths queries, keys and values, which a mixer does not"
        drops = {f"aggreg.{key}": why for key, _ in module.aggreg.named_parameters()}
        if module.aggreg:
            drops["proj.conv.weight[smoothed]"] = why
        options = {"heads": width // module.dim, "eps": module.eps}
        equivalent = _equivalent(module, "relu_linear", lambda: _weights(module), **options) if width == dim else None
        return AttentionSpec(
            dim=dim, heads=width // module.dim, query=query, key=key, value=value, out=_out(module, width),
            grid=stage_grid(host), equivalent=equivalent, drops=drops,
        )  # fmt: skip

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "pre_norm", None)

    def forward(self, x: Tensor) -> Tensor:
        grid, tokens = tuple(x.shape[2:]), x.flatten(2).transpose(1, 2).contiguous()
        return self.mix(tokens, grid=grid).transpose(1, 2).unflatten(2, grid)


def _equivalent(module: nn.Module, name: str, weights: Any, **options: Any) -> EquivalentMixer:
    def build() -> TokenMixer:
        kind: Any = mixer_class(name)
        return kind.from_reference(weights(), **options)

    return EquivalentMixer(name, tuple(key for key, _ in module.named_parameters()), build)


def _grouped(module: Any) -> Projection:
    """The fused map reordered from (query, key, value) per head to all queries, all keys, all values."""
    conv = module.qkv.conv
    keys = tuple(f"qkv.conv.{key}" for key, _ in conv.named_parameters())
    order = torch.arange(conv.out_channels).view(-1, 3, module.dim).transpose(0, 1).flatten()
    bias = None if conv.bias is None else conv.bias[order]
    return Projection(conv.weight.flatten(1)[order], bias, keys)


def _out(module: Any, width: int) -> Projection:
    """The output map for the tokens that are not smoothed, with its BatchNorm in evaluation mode folded in."""
    conv, norm = module.proj.conv, module.proj.norm
    part = "[plain]" if module.aggreg else ""
    keys = [f"proj.conv.{key}{part if key == 'weight' else ''}" for key, _ in conv.named_parameters()]
    weight, bias = conv.weight.flatten(1)[:, :width], conv.bias
    if not isinstance(norm, nn.Identity):
        gain = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = -norm.running_mean if bias is None else bias - norm.running_mean
        weight, bias = gain[:, None] * weight, norm.bias + gain * shift
        keys += ["proj.norm.weight", "proj.norm.bias"]
    return Projection(weight, bias, tuple(keys))


def _weights(module: Any) -> dict[str, Tensor]:
    """The state dict, with the BatchNorm's weight adjusted for relu_linear's eps (exact in evaluation)."""
    found = dict(module.state_dict())
    norm = module.proj.norm
    if not isinstance(norm, nn.Identity):
        found["proj.norm.weight"] = norm.weight * ((norm.running_var + _EPS) / (norm.running_var + norm.eps)).sqrt()
    return found
