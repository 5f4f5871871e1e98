"""timm's attention whose weights are no softmax of Q Kᵀ alone: ConViT's, CoaT's, MobileViT 2's and VOLO's outlook."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter
from polymix.convert.adapters.timm.vit import Grid, TokensAdapter, described, stage_grid
from polymix.convert.heads import biased_by
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.convert.windows import MapAdapter, in_map
from polymix.mixers.inheritance import Projection


@register_adapter("timm.models.convit.GPSA")
class GpsaAdapter(TokensAdapter):
    """(x). ConViT adds its class token after the last of these layers. A part of the weights is of positions alone."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        both = linear(module, "qk")
        size = both.weight.shape[0] // 2
        query, key = (
            both.rows(first, first + size)._replace(keys=tuple(f"{key}[{name}]" for key in both.keys))
            for name, first in (("query", 0), ("key", size))
        )
        drops = biased_by(["pos_proj.weight", "pos_proj.bias", "gating_param"], "weights of positions alone")
        return replace(described(module, host, (query, key, linear(module, "v")), drops), prefix=0)


@register_adapter("timm.models.coat.FactorAttnConvRelPosEnc")
class CoatAdapter(TokensAdapter):
    """(x, size), with a class token. The convolution of values by relative position is lost."""

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        own = [f"crpe.{key}" for key, _ in module.crpe.named_parameters()]
        drops = biased_by(own, "a convolution of the values for each query, which a mixer does not have")
        return described(module, host, thirds(linear(module, "qkv")), drops)

    def forward(self, x: Tensor, size: Grid | None = None) -> Tensor:
        return self.mix(x, grid=None if size is None else tuple(size))


@register_adapter("timm.models.mobilevit.LinearSelfAttention")
class SeparableAdapter(TokensAdapter):
    """(x, x_prev): maps (B, C, P, N) with a sequence of N tokens for each of the P positions in a patch.

    The host's keys are what its weights sum, so that they are the values here. Its ReLU of values is a gate.
    """

    channel_axis = 1

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        dim, fused = module.embed_dim, _flat(module, "qkv_proj")
        values = fused.rows(1, 1 + dim)._replace(keys=tuple(f"{key}[key]" for key in fused.keys))
        drops = {"gate": "a ReLU of each token, times what is summed, which a mixer does not have"}
        return AttentionSpec(
            dim=dim, heads=1, value=values, out=_flat(module, "out_proj"), any_length=True,
            dropout=module.out_drop.p, drops=drops, cost=lambda tokens: 2 * tokens * dim * (3 * dim + 1),
        )  # fmt: skip

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return None

    def forward(self, x: Tensor, x_prev: Tensor | None = None) -> Tensor:
        tokens, context = (None if part is None else part.permute(0, 2, 3, 1).flatten(0, 1) for part in (x, x_prev))
        assert tokens is not None
        return self.mix(tokens, context).unflatten(0, (x.shape[0], x.shape[2])).permute(0, 3, 1, 2)


@register_adapter("timm.models.volo.OutlookAttention")
class OutlookAdapter(MapAdapter):
    """Feature maps (B, H, W, C). Outlook attention weighs the neighbours of a place by that place alone: no Q, no K."""

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        value, out = linear(module, "v"), linear(module, "proj")
        size, around = out.weight.numel(), module.kernel_size**2
        per_place = module.attn.weight.numel() // module.stride**2 + 2 * size + 2 * around**2 * len(out.weight)
        attention = AttentionSpec(
            dim=len(out.weight), heads=module.num_heads, value=value, out=out, grid=stage_grid(host),
            dropout=module.proj_drop.p, cost=lambda tokens: 2 * tokens * per_place,
        )  # fmt: skip
        return in_map(attention, host, 0)

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "norm1", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix_map(x)


def _flat(module: nn.Module, name: str) -> Projection:
    """A convolution of single places as a linear map."""
    part = linear(module, name)
    return part._replace(weight=part.weight.flatten(1))
