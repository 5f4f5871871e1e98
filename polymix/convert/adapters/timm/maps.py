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
from polymix.mixers.inheritance import Projection, Smoothing
from polymix.mixers.registry import mixer_class


@register_adapter("timm.models.metaformer.Attention")
class MetaFormerAdapter(TokensAdapter):
    """(x): the tokens of a stage's feature map."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        return described(module, host, thirds(linear(module, "qkv")))


@register_adapter("timm.models.xcit.XCA", "timm.models.edgenext.CrossCovarianceAttn")
class XcaAdapter(TokensAdapter):
    """(x). XCiT adds its class token after the last of these layers; EdgeNeXt has none."""

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        attention = described(module, host, thirds(linear(module, "qkv")))
        equivalent = _equivalent(module, "xca", lambda: dict(module.state_dict()), num_heads=module.num_heads)
        return replace(attention, prefix=0, equivalent=equivalent)


@register_adapter("timm.models.efficientvit_mit.LiteMLA")
class LiteMlaAdapter(Adapter):
    """Feature maps (B, C, H, W) -> (B, C, H, W). The norm after the output map is kept, as a part of the adapter."""

    channel_axis = 1
    copied_modules = ("proj.norm",)
    replaced_part = "proj.conv"
    norm: nn.Module

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        dim, out = module.qkv.conv.in_channels, module.proj.conv.out_channels
        width = module.qkv.conv.out_channels // 3
        if out != dim:
            raise OptionError("model", out, f"{dim} output channels, the same as the input", "Keep this layer.")
        kinds = [type(part) for part in (module.qkv.norm, module.qkv.act, module.proj.act, module.kernel_func)]
        if kinds != [nn.Identity] * 3 + [nn.ReLU]:
            raise OptionError(
                "model", "a LiteMLA with other norms or activations", "a LiteMLA with timm's defaults",
                "Keep this layer.",
            )  # fmt: skip
        query, key, value = thirds(_grouped(module))
        smoothing = _smoothing(module, width)
        why = "belongs to the multi-scale branches, which this mixer does not have"
        drops = {f"aggreg.{key}": why for key, _ in module.aggreg.named_parameters()}
        drops |= {key: why for branch in smoothing for key in branch.out.keys if "[" in key}
        options = {"heads": width // module.dim, "eps": module.eps}
        equivalent = _equivalent(module, "relu_linear", lambda: _weights(module), **options) if width == dim else None
        return AttentionSpec(
            dim=dim, heads=width // module.dim, query=query, key=key, value=value, out=_out(module, 0, width),
            smoothing=smoothing if width == dim else (), grid=stage_grid(host), equivalent=equivalent, drops=drops,
        )  # fmt: skip

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "pre_norm", None)

    def forward(self, x: Tensor) -> Tensor:
        grid, tokens = tuple(x.shape[2:]), x.flatten(2).transpose(1, 2).contiguous()
        y = self.mix(tokens, grid=grid).transpose(1, 2).contiguous()  # BatchNorm may misread a strided (B, C, H, 1)
        return self.norm(y.unflatten(2, grid))


def _equivalent(module: nn.Module, name: str, weights: Any, **options: Any) -> EquivalentMixer:
    def build() -> TokenMixer:
        kind: Any = mixer_class(name)
        return kind.from_reference(weights(), **options)

    return EquivalentMixer(name, tuple(key for key, _ in module.named_parameters()), build)


def _by_part(module: Any) -> Tensor:
    """The order of LiteMLA's channels that puts (query, key, value) of each head as all queries, keys and values."""
    return torch.arange(module.qkv.conv.out_channels).view(-1, 3, module.dim).transpose(0, 1).flatten()


def _grouped(module: Any) -> Projection:
    """The map to all queries, all keys, all values."""
    return _reordered(module, "qkv.conv", flat=True)


def _reordered(module: Any, name: str, *, flat: bool = False) -> Projection:
    """A convolution to (query, key, value) per head, with its outputs in the order of `_by_part`."""
    conv, order = module.get_submodule(name), _by_part(module)
    weight = conv.weight.flatten(1) if flat else conv.weight
    bias = None if conv.bias is None else conv.bias[order]
    return Projection(weight[order], bias, tuple(f"{name}.{key}" for key, _ in conv.named_parameters()))


def _smoothing(module: Any, width: int) -> tuple[Smoothing, ...]:
    """The multi-scale branches. Their channels are grouped by head, so that reordering the outputs suffices."""
    return tuple(
        Smoothing(_reordered(module, f"aggreg.{i}.0"), _reordered(module, f"aggreg.{i}.1"), _out(module, i + 1, width))
        for i in range(len(module.aggreg))
    )


def _out(module: Any, branch: int, width: int) -> Projection:
    """The output map of the heads of one branch; branch 0 is the tokens themselves."""
    conv = module.proj.conv
    part = f"[{f'smoothed {branch}' if branch else 'plain'}]" if module.aggreg else ""
    keys = (f"proj.conv.{key}{part if key == 'weight' else ''}" for key, _ in conv.named_parameters())
    return Projection(conv.weight.flatten(1)[:, branch * width : (branch + 1) * width], conv.bias, tuple(keys))


def _weights(module: Any) -> dict[str, Tensor]:
    """The state dict without the norm, which the adapter keeps, and with a bias of zero where only others have one."""
    state = {key: value for key, value in module.state_dict().items() if not key.startswith("proj.norm.")}
    if any(key.endswith(".bias") for key in state):
        convs = [key for key in state if key.endswith(".weight")]
        zeros = {f"{key.removesuffix('.weight')}.bias": state[key].new_zeros(len(state[key])) for key in convs}
        state = {**zeros, **state}
    return state
