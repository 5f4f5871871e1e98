"""timm's attention over tokens: the shared Attention (ViT, DeiT, PiT, ViTamin …), and those of EVA and BEiT."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.adapters.timm.layout import Grid, grid_of, layout
from polymix.convert.attention import Attention, linear, thirds
from polymix.convert.masks import visible
from polymix.errors import MaskError, OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.checks import holds
from polymix.mixers.inheritance import Projection

_INSIDE = {
    "q_norm": "a mixer does not normalise its queries", "k_norm": "a mixer does not normalise its keys",
    "norm": "a mixer does not normalise between values and output", "gate": "a mixer has no gate on its output",
}  # fmt: skip


class TokensAdapter(Adapter):
    """Called with tokens (B, N, D)."""

    carries = ("num_heads", "head_dim", "scale")

    def __init__(self, mixer: TokenMixer, attention: Attention, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        if mixer.capabilities.grids and attention.grid is None and not attention.causal:
            got = "None: the model does not say, or drops some of its tokens, or has a grid for each image"
            raise OptionError("grid", got, "(H, W) of its tokens", "Pass grid=, or choose a mixer without positions.")

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return layout(host).source

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> Grid:
        return grid_of(module, args, output)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


def described(
    module: Any, host: Host, maps: tuple[Projection, Projection, Projection], drops: dict[str, str] | None = None
) -> Attention:
    """An attention of queries, keys and values, and `proj`, with the tokens that its host gives it."""
    query, key, value = maps
    out, place = linear(module, "proj"), layout(host)
    dim = query.weight.shape[1]
    if out.weight.shape[0] != dim:
        got = f"{out.weight.shape[0]} channels out for {dim}"
        raise OptionError("model", got, "as many out as in", "Keep this layer.")
    return Attention(
        dim=dim, heads=module.num_heads, query=query, key=key, value=value, out=out,
        scale=getattr(module, "scale", None),
        grid=place.grid, prefix=place.prefix, any_length=place.any_length, dropout=module.proj_drop.p,
        drops={**_inside(module), **(drops or {})},
    )  # fmt: skip


def _inside(module: Any) -> dict[str, str]:
    """What an attention does between its maps, and no mixer does."""
    drops = {"attn_drop": "of attention weights, which a mixer does not have"} if module.attn_drop.p else {}
    for name, why in _INSIDE.items():
        part = getattr(module, name, None)
        if isinstance(part, nn.Module) and not isinstance(part, nn.Identity):
            drops.update({f"{name}.{key}": why for key, _ in part.named_parameters()} or {name: why})
    return drops


class _MaskedAdapter(TokensAdapter):
    def under(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """The mixer under a mask that broadcasts to (B, heads, N, N), True where seen or added to the scores."""
        if attn_mask is None:
            return self.mix(x, causal=is_causal or None)
        if is_causal:
            raise MaskError("attn_mask", "a mask and is_causal=True", "one of the two", "Put the order in the mask.")
        seen = visible(attn_mask, inverted=False)
        seen = seen[(None,) * (4 - seen.ndim)]
        if seen.shape[1] > 1 and not holds((seen == seen[:, :1]).all(), "takes no mask that differs by head"):
            raise MaskError("attn_mask", "a mask that differs by head", "one for all heads", "A mixer has one mask.")
        seen = seen[:, 0].expand(x.shape[0], -1, -1)
        return self.mix(x, **(self.seen(None, seen[:, 0]) if seen.shape[1] == 1 else self.seen(seen)))


@register_adapter("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")  # where it was before
class AttentionAdapter(_MaskedAdapter):
    """(x, attn_mask, is_causal)."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> Attention:
        return described(module, host, thirds(linear(module, "qkv")))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.under(x, attn_mask, is_causal)


@register_adapter("timm.layers.attention.AttentionRope", "timm.models.eva.EvaAttention")
class RopeAdapter(_MaskedAdapter):
    """(x, rope, attn_mask, is_causal); queries and keys are not turned."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> Attention:
        ropes = [part.rope for part in host.chain() if hasattr(part, "rope")]
        unturned = ropes and all(rope is None for rope in ropes)
        drops = {} if unturned else {"rope": "turns queries and keys by their places, which a mixer does not"}
        return described(module, host, _maps(module), drops)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self.under(x, attn_mask, is_causal)


@register_adapter("timm.models.beit.Attention")
class BeitAdapter(TokensAdapter):
    """(x, shared_rel_pos_bias); biases of pairs of tokens, the class token among them, are not added."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> Attention:
        shared = next((part.rel_pos_bias for part in host.chain() if hasattr(part, "rel_pos_bias")), None)
        tables = {"relative_position_bias_table": module.relative_position_bias_table, "shared_rel_pos_bias": shared}
        why = "added to the scores of pairs of tokens, which a mixer does not have"
        drops = {name: why for name, table in tables.items() if table is not None}
        return described(module, host, _maps(module), drops)

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.mix(x)


def _maps(module: Any) -> tuple[Projection, Projection, Projection]:
    """Queries, keys and values of one map or three, with biases apart from it."""
    if module.qkv is None:
        return linear(module, "q_proj"), linear(module, "k_proj"), linear(module, "v_proj")
    query, key, value = thirds(linear(module, "qkv"))
    if getattr(module, "q_bias", None) is not None:  # a key's is a constant 0
        query = query._replace(bias=module.q_bias, keys=(*query.keys, "q_bias"))
        value = value._replace(bias=module.v_bias, keys=(*value.keys, "v_bias"))
    return query, key, value
