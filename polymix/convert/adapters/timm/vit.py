"""timm's attention over tokens: the shared Attention (ViT, DeiT, PiT, ViTamin …), EVA and BEiT; and their grids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, path, register_adapter
from polymix.convert.adapters.kernel import KernelAdapter, KernelSpec
from polymix.convert.find import grids, prefix_tokens
from polymix.convert.heads import biased_by, normed
from polymix.convert.masks import for_all_heads, visible
from polymix.convert.spec import AttentionSpec, linear, repeated, thirds
from polymix.errors import MaskError, OptionError
from polymix.mixers import MixerConfig, TokenMixer
from polymix.mixers.inheritance import Projection

Grid = tuple[int, ...]
# What a layer does itself around a mixer that takes its queries, keys and values.
_OWN_STEPS = ("rotary", "qk_norm", "gate")


class HostGridAdapter(Adapter):
    """The base of adapters whose grid is read off the model around them."""

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return layout(host).source

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> Grid:
        return grid_of(module, args, output)


class TokensAdapter(HostGridAdapter):
    """Tokens (B, N, D) -> (B, N, D)."""

    forward_attributes = ("num_heads", "head_dim", "scale")

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        if mixer.capabilities.grids and attention.grid is None and not attention.causal:
            got = "None: the model states none, drops tokens, or has a grid per image"
            raise OptionError("grid", got, "(H, W) of its tokens", "Pass grid=, or choose a mixer without positions.")

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


def described(
    module: Any, host: Host, maps: tuple[Projection, Projection, Projection], drops: dict[str, str] | None = None
) -> AttentionSpec:
    """The spec of an attention with these query, key and value maps and with `proj`, on its host's tokens."""
    query, key, value = maps
    out, place = linear(module, "proj"), layout(host)
    dim = query.weight.shape[1]
    if out.weight.shape[0] != dim:
        allowed = f"{dim} output channels, the same as the input"
        raise OptionError("model", out.weight.shape[0], allowed, "Keep this layer.")
    return AttentionSpec(
        dim=dim, heads=module.num_heads, query=query, key=key, value=value, out=out,
        scale=getattr(module, "scale", None),
        grid=place.grid, prefix=place.prefix, any_length=place.any_length, dropout=module.proj_drop.p,
        drops={**_inside(module), **(drops or {})},
    )  # fmt: skip


def _inside(module: Any) -> dict[str, str]:
    """Parts between the attention's maps that a mixer does not have, with the reason."""
    drops = {"attn_drop": "applies to attention weights, which a mixer does not have"} if module.attn_drop.p else {}
    parts = (getattr(module, name, None) for name in ("norm", "gate"))
    if any(isinstance(part, nn.Module) and not isinstance(part, nn.Identity) for part in parts):
        drops["gate"] = "a gate or a norm before the output map, which this mixer does not have"
    return drops | normed(module)


class KeptAdapter(KernelAdapter):
    """timm's layer around a mixer of queries, keys and values: its norms, its gate and its rotary angles stay."""

    proves_softmax = False  # its code was read, not its call: `convert` compares, where it has one


class _MaskedAdapter(TokensAdapter):
    """Serves attention whose maps are known; `KeptAdapter` what does more between them, where the mixer can have it."""

    @classmethod
    def forms(cls) -> tuple[type[Adapter], ...]:
        return cls, KeptAdapter

    @classmethod
    def serving(cls, config: MixerConfig, spec: AttentionSpec) -> tuple[type[Adapter], AttentionSpec]:
        if not spec.lends(config):
            return cls, spec
        assert spec.projected is not None
        heads, width, _ = spec.projected
        drops = {name: why for name, why in spec.drops.items() if name not in _OWN_STEPS}
        maps = (spec.query, spec.key, spec.value, spec.out)
        size = sum(part.weight.numel() for part in maps if part is not None)
        return KeptAdapter, KernelSpec(
            dim=heads * width, heads=heads, causal=spec.causal, masks=spec.masks, grid=spec.grid, prefix=spec.prefix,
            any_length=spec.any_length, drops=drops, tokens=("x",),
            cost=lambda count: 2 * count * (size + 2 * count * heads * width),
        )  # fmt: skip

    @classmethod
    def lending(cls, module: Any, spec: AttentionSpec) -> AttentionSpec:
        """The spec with what the layer projects, if it does more with that, or in other widths, than a mixer would."""
        heads, width = module.num_heads, module.head_dim
        grouped = getattr(module, "num_kv_groups", 1) > 1
        does_more = grouped or heads * width != spec.dim or any(name in spec.drops for name in _OWN_STEPS)
        return replace(spec, projected=(heads, width, width)) if does_more else spec

    def under(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Mix under a mask that broadcasts to (B, heads, N, N): boolean, True where seen, or added to the logits."""
        if attn_mask is None:
            return self.mix(x, causal=is_causal or None)
        if is_causal:
            raise MaskError("attn_mask", "a mask and is_causal=True", "one of the two", "Make the mask causal.")
        seen = visible(attn_mask, inverted=False)
        seen = seen[(None,) * (4 - seen.ndim)]
        seen = for_all_heads(seen, 1, "attn_mask").expand(x.shape[0], -1, -1)
        return self.mix(x, **(self.mask_options(None, seen[:, 0]) if seen.shape[1] == 1 else self.mask_options(seen)))


@register_adapter(
    "timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"
)  # its place in older versions
class AttentionAdapter(_MaskedAdapter):
    """(x, attn_mask, is_causal)."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        return cls.lending(module, described(module, host, thirds(linear(module, "qkv"))))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.under(x, attn_mask, is_causal)


@register_adapter("timm.layers.attention.AttentionRope", "timm.models.eva.EvaAttention")
class RopeAdapter(_MaskedAdapter):
    """(x, rope, attn_mask, is_causal). The rotary positions reach mixers of queries, keys and values alone."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        ropes = [part.rope for part in host.chain() if hasattr(part, "rope")]
        unturned = ropes and all(rope is None for rope in ropes)
        drops = {} if unturned else {"rotary": "rotary positions of queries and keys, which a mixer does not have"}
        return cls.lending(module, described(module, host, _maps(module), drops))

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self.under(x, attn_mask, is_causal)


@register_adapter("timm.models.beit.Attention")
class BeitAdapter(TokensAdapter):
    """(x, shared_rel_pos_bias). Biases between pairs of tokens are not applied."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        shared = next((part.rel_pos_bias for part in host.chain() if hasattr(part, "rel_pos_bias")), None)
        tables = {"relative_position_bias_table": module.relative_position_bias_table, "shared_rel_pos_bias": shared}
        drops = biased_by(name for name, table in tables.items() if table is not None)
        return described(module, host, _maps(module), drops)

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.mix(x)


def _maps(module: Any) -> tuple[Projection, Projection, Projection]:
    """The query, key and value maps, whether they are one module or three."""
    if module.qkv is None:
        groups, size = getattr(module, "num_kv_groups", 1), module.head_dim
        key, value = (repeated(linear(module, name), groups, size) for name in ("k_proj", "v_proj"))
        return linear(module, "q_proj"), key, value
    query, key, value = thirds(linear(module, "qkv"))
    if getattr(module, "q_bias", None) is not None:  # keys have the constant 0
        query = query._replace(bias=module.q_bias, keys=(*query.keys, "q_bias"))
        value = value._replace(bias=module.v_bias, keys=(*value.keys, "v_bias"))
    return query, key, value


# Where the tokens of a layer are


class Layout(NamedTuple):
    """Where the tokens of a layer are.

    source: the module that makes the feature map. grid, prefix: the tokens' grid and the number of tokens in front of
    it, as the model was built. any_length: whether it was built for images of any size.
    """

    source: nn.Module | None = None
    grid: Grid | None = None
    prefix: int = 0
    any_length: bool = False


def layout(host: Host) -> Layout:
    """The layout, from the nearest module around the layer that determines it."""
    for part in host.chain():
        if read_layout := _LAYOUTS.get(path(type(part))):
            return read_layout(part, host)
        if isinstance(getattr(part, "patch_embed", None), nn.Module):
            return _embedded(part)
    return Layout(grid=host.grid(), prefix=host.prefix())


def stage_grid(host: Host) -> Grid | None:
    """The feature map's grid in the layer's stage, for images of the size that the model was built for."""
    around: list[Any] = list(host.chain())
    for model in around:
        size: Any = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
        stages = getattr(model, "feature_info", None)
        for stage in stages if size and isinstance(stages, list) else ():
            if model.get_submodule(stage["module"]) in around:
                return tuple(-(-side // stage["reduction"]) for side in size[-2:])
    return None


def grid_of(module: Any, args: Any, output: Any) -> Grid:
    """The grid in a call of `Layout.source`."""
    if isinstance(output, tuple) and not isinstance(output[1], Tensor):  # (tokens, size)
        return tuple(output[1])
    if len(args) == 2 and not isinstance(args[1], Tensor):  # (tokens, size) as arguments
        return tuple(args[1])
    output = output[0] if isinstance(output, tuple) else output
    if output.ndim == 4:
        return tuple(output.shape[1:3] if getattr(module, "output_fmt", None) == "NHWC" else output.shape[2:])
    size = getattr(module, "dynamic_feat_size", None)
    return tuple(module.grid_size if size is None else size(args[0].shape[-2:]))


def _embedded(model: Any) -> Layout:
    embed, prefix = model.patch_embed, prefix_tokens(model)
    if getattr(getattr(model, "patch_drop", None), "prob", 0):  # the remaining tokens have no grid
        return Layout(prefix=prefix, any_length=True)
    return Layout(embed, next(grids(embed), None), prefix, getattr(embed, "strict_img_size", True) is False)


def _pit(model: Any, host: Host) -> Layout:
    around = list(host.chain())
    place = next(i for i, stage in enumerate(model.transformers) if stage in around)
    pool, size = model.transformers[place].pool, model.patch_embed.grid_size
    grid = tuple(-(-side // 2**place) for side in size)
    return Layout(model.patch_embed if pool is None else pool, grid, prefix_tokens(model))


def _crossvit(model: Any, host: Host) -> Layout:
    around = list(host.chain())
    branch = next(i for block in model.blocks for i, part in enumerate(block.blocks) if part in around)
    return Layout(None, next(grids(model.patch_embed[branch])), 1)


def _coat(model: Any, host: Host) -> Layout:
    stage = next(int(part[-1]) for part in reversed(host.name.split(".")) if part[-1].isdigit() and not part.isdigit())
    embed = getattr(model, f"patch_embed{stage}")
    return Layout(embed, embed.grid_size, 1)


_LAYOUTS: dict[str, Any] = {
    "timm.models.coat.CoaT": _coat,
    "timm.models.crossvit.CrossVit": _crossvit,
    "timm.models.csatv2.TransformerBlock": lambda block, host: Layout(block.pos_embed),
    "timm.models.edgenext.SplitTransposeBlock": lambda block, host: Layout(block.convs[-1], stage_grid(host)),
    "timm.models.fastvit.FastVitStage": lambda stage, host: Layout(grid=stage_grid(host)),
    "timm.models.metaformer.MetaFormerStage": lambda stage, host: Layout(stage.downsample, stage_grid(host)),
    "timm.models.mobilevit.MobileVitBlock": lambda block, host: Layout(),  # one sequence for each position in a patch
    "timm.models.naflexvit.NaFlexVit": lambda model, host: Layout(prefix=prefix_tokens(model), any_length=True),
    "timm.models.pit.PoolingVisionTransformer": _pit,
}
