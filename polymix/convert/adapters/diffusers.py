"""diffusers: the Attention of DiT, PixArt and the transformers in U-Nets, and how models are rebuilt from a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, path
from polymix.convert.adapters import kernel
from polymix.convert.adapters.kernel import KernelAdapter, KernelSpec
from polymix.convert.masks import visible
from polymix.convert.model_recipes import Recipe, class_path, decode, encode, is_plain, model_class
from polymix.convert.spec import AttentionSpec, linear
from polymix.errors import MaskError, OptionError, ShapeError
from polymix.mixers import TokenMixer

_MODELS = "diffusers.models.transformers."
_MAPS = {  # model class: the modules that may make the feature map whose pixels are the tokens
    _MODELS + "dit_transformer_2d.DiTTransformer2DModel": ("pos_embed.proj",),
    _MODELS + "pixart_transformer_2d.PixArtTransformer2DModel": ("pos_embed.proj",),
    _MODELS + "transformer_2d.Transformer2DModel": ("pos_embed.proj", "norm"),
}
_PLAIN_PROCESSORS = {
    "AttnProcessor",
    "AttnProcessor2_0",
    "SlicedAttnProcessor",
    "XFormersAttnProcessor",
    "AttnProcessorNPU",
}
_EXTRA_LAYERS = ("norm_q", "norm_k", "group_norm", "spatial_norm", "norm_cross", "add_k_proj", "add_q_proj")


class AttentionAdapter(Adapter):
    """(hidden_states, encoder_hidden_states, attention_mask) -> tokens.

    Masks (B, M), (B, 1, M) or (B, N, M) hide tokens by -10000 or -inf, or by False. Other arguments are ignored, as
    diffusers' own processors ignore them. There is no processor to set.
    """

    forward_attributes = ("heads", "query_dim", "inner_dim", "cross_attention_dim", "is_cross_attention")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        _check(module)
        cross = module.is_cross_attention
        return AttentionSpec(
            dim=module.query_dim, heads=module.heads, scale=module.scale, dropout=module.dropout, cross=cross,
            query=linear(module, "to_q"), key=linear(module, "to_k"), value=linear(module, "to_v"),
            out=linear(module, "to_out.0"), grid=None if cross else _grid(host),
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
            seen = (
                seen.unsqueeze(1) if seen.ndim == 2 else seen[:, 0] if seen.ndim == 4 and seen.shape[1] == 1 else seen
            )
            seen = seen.expand(context.shape[0], -1, -1) if seen.ndim == 3 and len(seen) == 1 else seen
            if seen.ndim != 3 or (seen.shape[0], seen.shape[2]) != (context.shape[0], context.shape[1]):
                allowed = f"({context.shape[0]}, 1 or {hidden_states.shape[1]}, {context.shape[1]})"
                raise ShapeError("attention_mask", tuple(attention_mask.shape), allowed, "All heads share one mask.")
            seen, padding = (None, seen[:, 0]) if seen.shape[1] == 1 else (seen, None)
        return self.mix(hidden_states, encoder_hidden_states, **self.mask_options(seen, padding))


def _check(module: Any) -> None:
    """Raise OptionError where a linear map has additions such as LoRA."""
    maps = {"to_q": module.to_q, "to_k": module.to_k, "to_v": module.to_v, "to_out": module.to_out and module.to_out[0]}
    for name, part in maps.items():
        if type(part) is not nn.Linear:
            got = f"{name}, a {type(part).__name__}"
            raise OptionError("model", got, "an nn.Linear", "First merge additions such as LoRA.")


def _plain(module: Any) -> bool:
    """Whether a layer is attention by to_q, to_k and to_v alone, between tokens, context and output of one width."""
    beside = any(getattr(module, name, None) is not None for name in _EXTRA_LAYERS)
    after = module.residual_connection or module.rescale_output_factor != 1 or module.inner_kv_dim != module.inner_dim
    widths = {module.query_dim, module.cross_attention_dim, module.out_dim}
    return type(module.processor).__name__ in _PLAIN_PROCESSORS and not beside and not after and len(widths) == 1


class JointAdapter(KernelAdapter):
    """Any other attention of diffusers: with rotary angles, or joint, of pictures and texts as in SD3 and Flux.

    text_mask: (B, T), True for real tokens of the text, which diffusers' own layers do not take:
    `joint_attention_kwargs={"text_mask": mask}`. A layer that sees no text leaves it out.
    """

    joined: str | None = None  # where one argument has both, whether "text" or "picture" comes first

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        if type(module).__name__ == "FluxAttention" and module.pre_only:
            self.joined = "text"

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        return KernelSpec(dim=1, heads=1, any_length=True, grid=_grid(host))

    def forward(self, *args: Any, text_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return self.answered(args, kwargs, None if text_mask is None else self._real(text_mask, args, kwargs))

    def _real(self, text_mask: Tensor, args: Any, kwargs: Any) -> Tensor | None:
        """Which tokens of text and picture are real, (B, T + N) in the layer's order; None for a layer without text."""
        arguments = {**dict(zip(self.parameter_names, args, strict=False)), **kwargs}
        text, picture = arguments.get("encoder_hidden_states"), arguments["hidden_states"]
        if text_mask.ndim != 2 or text_mask.dtype != torch.bool or len(text_mask) != len(picture):
            got = f"{text_mask.dtype} {tuple(text_mask.shape)}"
            raise MaskError("text_mask", got, f"booleans ({len(picture)}, T), True for real tokens", "")
        if text is None and self.joined is None:
            return None
        count = picture.shape[1] - (text_mask.shape[1] if text is None else 0)
        if count < 0 or (text is not None and text.shape[1] != text_mask.shape[1]):
            got = f"{tuple(text_mask.shape)} for {picture.shape[1] if text is None else text.shape[1]} tokens"
            raise MaskError("text_mask", got, "a column for each token of the text", "")
        if text is not None and not self.tokens:
            got = "a mask of the text for a layer in which its place beside the picture is unknown"
            raise MaskError("text_mask", got, "None", "Leave it out, or keep this layer.")
        ones = text_mask.new_ones(len(text_mask), count)
        first = self.joined == "text" if text is None else self.tokens[:1] == ["encoder_hidden_states"]
        return torch.cat((text_mask, ones) if first else (ones, text_mask), dim=1)


def any_adapter(module: Any) -> type[Adapter] | None:
    """The adapter of a layer: its kind shows in its parts and its processor."""
    name = path(type(module))
    if name == "diffusers.models.attention_processor.Attention" and _plain(module):
        return AttentionAdapter
    return JointAdapter if kernel.any_adapter(module) is not None else None


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
    embed: Any = getattr(part, "pos_embed", None)
    return (embed.height, embed.width) if hasattr(embed, "height") else None


def read_recipes(model: Any) -> Iterator[Recipe]:
    """The model's config."""
    config = {key: value for key, value in model.config.items() if not key.startswith("_") and is_plain(value)}
    yield {"class": class_path(model), "config": encode(config)}


def build_model(recipe: Recipe, _: dict[str, Any]) -> nn.Module:
    """The model of a config, with untrained weights."""
    return model_class(recipe).from_config(decode(recipe["config"]))
