"""diffusers: the Attention of DiT, PixArt and the transformers in U-Nets, and how models are rebuilt from a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, path, register_adapter
from polymix.convert.masks import visible
from polymix.convert.model_recipes import Recipe, class_path, decode, encode, is_plain, model_class
from polymix.convert.spec import AttentionSpec, linear
from polymix.errors import OptionError, ShapeError

_MODELS = "diffusers.models.transformers."
_MAPS = {  # model class: the modules that may make the feature map whose pixels are the tokens
    _MODELS + "dit_transformer_2d.DiTTransformer2DModel": ("pos_embed.proj",),
    _MODELS + "pixart_transformer_2d.PixArtTransformer2DModel": ("pos_embed.proj",),
    _MODELS + "transformer_2d.Transformer2DModel": ("pos_embed.proj", "norm"),
}
_PLAIN = {"AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor", "AttnProcessorNPU"}
_NORMS = {"norm_q": "normalises queries, which a mixer does not", "norm_k": "normalises keys, which a mixer does not"}
_BESIDE = ("group_norm", "spatial_norm", "norm_cross", "add_k_proj", "add_q_proj")


@register_adapter("diffusers.models.attention_processor.Attention")
class AttentionAdapter(Adapter):
    """(hidden_states, encoder_hidden_states, attention_mask) -> tokens.

    Masks (B, M), (B, 1, M) or (B, N, M) hide tokens by -10000 or -inf, or by False. Other arguments are ignored, as
    diffusers' own processors ignore them. There is no processor to set.
    """

    forward_attributes = ("heads", "query_dim", "inner_dim", "cross_attention_dim", "is_cross_attention")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        _check(module)
        normed = module.norm_q is not None or module.norm_k is not None
        cross = module.is_cross_attention
        return AttentionSpec(
            dim=module.query_dim, heads=module.heads, scale=module.scale, dropout=module.dropout, cross=cross,
            query=None if normed else linear(module, "to_q"), key=None if normed else linear(module, "to_k"),
            value=linear(module, "to_v"), out=linear(module, "to_out.0"), grid=None if cross else _grid(host),
            drops={name: why for name, why in _NORMS.items() if getattr(module, name) is not None},
        )  # fmt: skip

    @classmethod
    def feature_map(cls, module: Any, host: Host) -> nn.Module | None:
        return None if module.is_cross_attention else _source(host)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, attention_mask: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor:  # fmt: skip
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        seen: Tensor | None = None
        padding: Tensor | None = None
        if attention_mask is not None:
            seen = visible(attention_mask, inverted=False)
            seen = seen.unsqueeze(1) if seen.ndim == 2 else seen
            if seen.ndim != 3 or (seen.shape[0], seen.shape[2]) != (context.shape[0], context.shape[1]):
                allowed = f"({context.shape[0]}, 1 or {hidden_states.shape[1]}, {context.shape[1]})"
                raise ShapeError("attention_mask", tuple(attention_mask.shape), allowed, "All heads share one mask.")
            seen, padding = (None, seen[:, 0]) if seen.shape[1] == 1 else (seen, None)
        return self.mix(hidden_states, encoder_hidden_states, **self.mask_options(seen, padding))


def _check(module: Any) -> None:
    """Raise OptionError where the layer does more than attention."""
    cure = "Keep this layer."
    if type(module.processor).__name__ not in _PLAIN:
        got = f"the processor {type(module.processor).__name__}"
        raise OptionError("model", got, f"one of {', '.join(sorted(_PLAIN))}", cure)
    for name in _BESIDE:
        if getattr(module, name, None) is not None:
            raise OptionError("model", f"attention with {name}", "attention with to_q, to_k and to_v alone", cure)
    if module.residual_connection or module.rescale_output_factor != 1:
        raise OptionError(
            "model", "attention with a residual connection or a rescaled output", "attention without them", cure
        )
    widths = {module.query_dim, module.cross_attention_dim, module.out_dim}
    if module.inner_kv_dim != module.inner_dim:
        raise OptionError("model", "heads that share keys and values", "separate keys and values for each head", cure)
    if len(widths) > 1:
        raise OptionError(
            "model", f"{sorted(widths)}", "the same number of channels in tokens, context and output", cure
        )
    maps = {"to_q": module.to_q, "to_k": module.to_k, "to_v": module.to_v, "to_out": module.to_out and module.to_out[0]}
    for name, part in maps.items():
        if type(part) is not nn.Linear:
            got = f"{name}, a {type(part).__name__}"
            raise OptionError("model", got, "an nn.Linear", "First merge additions such as LoRA.")


def _host(host: Host) -> tuple[Any, tuple[str, ...]]:
    """The nearest model around the layer that is in _MAPS, and the names of the modules listed there."""
    around = ((part, _MAPS.get(path(type(part)))) for part in host.chain())
    return next(((part, names) for part, names in around if names), (None, ()))


def _source(host: Host) -> nn.Module | None:
    part, names = _host(host)
    modules = dict(part.named_modules()) if names else {}
    return next((modules[name] for name in names if name in modules), None)


def _grid(host: Host) -> tuple[int, ...] | None:
    """The grid for latents of the size that the model was built for, if it was built for one."""
    part, _ = _host(host)
    embed = getattr(part, "pos_embed", None)
    return None if embed is None else (embed.height, embed.width)


def read_recipes(model: Any) -> Iterator[Recipe]:
    """The model's config."""
    config = {key: value for key, value in model.config.items() if not key.startswith("_") and is_plain(value)}
    yield {"class": class_path(model), "config": encode(config)}


def build_model(recipe: Recipe, _: dict[str, Any]) -> nn.Module:
    """The model of a config, with untrained weights."""
    return model_class(recipe).from_config(decode(recipe["config"]))
