"""Attention of the image encoders ViT and its relatives, YOLOS, CLIP, SigLIP, BEiT and CvT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter
from polymix.convert.adapters.transformers.encoders import EncoderAdapter, classes, read
from polymix.convert.find import grids, prefix_tokens
from polymix.convert.heads import LOGITS
from polymix.convert.spec import AttentionSpec
from polymix.mixers import TokenMixer

_VIT = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters",
        "dpt": "DPTViT"}  # fmt: skip


@register_adapter(*classes(_VIT))
class VitAdapter(EncoderAdapter):
    """(hidden_states, attention_mask) -> (output, None), or the output alone, as the layer returned it."""

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        self.bare = hasattr(module, "attention") and "output_attentions" not in self.names

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        embeddings = _embeddings(host)
        if embeddings is None:
            return read(module)[1]
        return replace(read(module)[1], grid=next(grids(embeddings), None), prefix=prefix_tokens(embeddings))

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        embeddings = _embeddings(host)
        return None if embeddings is None else embeddings.get_submodule("patch_embeddings.projection")

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        arguments = self.named(args, kwargs)
        y = self.alone(arguments["hidden_states"], arguments)
        return y if self.bare else (y, None)


def _embeddings(host: Host) -> nn.Module | None:
    """The module that makes tokens from an image."""
    candidates = (getattr(module, "embeddings", None) for module in host.chain())
    return next((part for part in candidates if hasattr(part, "patch_embeddings")), None)


@register_adapter(*classes({"yolos": "Yolos"}))
class YolosAdapter(VitAdapter):
    """(hidden_states) -> output. The detection tokens stand behind the patches; a mixer gets all others in front."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        attention, embeddings = super().describe(module, host), _embeddings(host)
        count = 0 if embeddings is None else embeddings.get_parameter("detection_tokens").shape[1]
        return replace(attention, prefix=1 + count)

    def alone(self, x: Tensor, arguments: dict[str, Any], cache: Any = None, values: Tensor | None = None) -> Tensor:
        behind = self.prefix - 1
        front, patches, detections = x[:, :1], x[:, 1 : x.shape[1] - behind], x[:, x.shape[1] - behind :]
        y = super().alone(torch.cat((front, detections, patches), 1), arguments, cache, values)
        return torch.cat((y[:, :1], y[:, self.prefix :], y[:, 1 : self.prefix]), 1)


@register_adapter(*classes({"clip": "CLIP"}))
class ClipAdapter(VitAdapter):
    """(hidden_states, attention_mask) -> (output, None), in CLIP's image encoder, as in LLaVA, or its text encoder."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        inner, attention = read(module)
        embeddings = _clip_embeddings(host)
        if embeddings is None:  # text, read in order
            longest = getattr(inner.config, "max_position_embeddings", None)
            return replace(attention, causal=True, any_length=True, max_tokens=longest)
        return replace(attention, grid=next(grids(embeddings), None), prefix=1)

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        embeddings = _clip_embeddings(host)
        return None if embeddings is None else embeddings.get_submodule("patch_embedding")


def _clip_embeddings(host: Host) -> nn.Module | None:
    """The module that makes tokens from an image; None in the text encoder."""
    candidates = (getattr(module, "embeddings", None) for module in host.chain())
    return next((part for part in candidates if hasattr(part, "patch_embedding")), None)


@register_adapter(*classes({"siglip": "Siglip", "siglip2": "Siglip2"}))
class SiglipAdapter(VitAdapter):
    """(hidden_states, attention_mask) -> (output, None), in the encoder of images or of text, which is not causal.

    SigLIP 2 packs images of any proportions into rows of patches; its mixers see a sequence without a grid.
    """

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        inner, attention = read(module)
        embeddings = _clip_embeddings(host)
        if embeddings is None:
            longest = getattr(inner.config, "max_position_embeddings", None)
            return replace(attention, any_length=True, max_tokens=longest)
        flat = not isinstance(embeddings.get_submodule("patch_embedding"), nn.Conv2d)
        return replace(attention, any_length=True) if flat else replace(attention, grid=next(grids(embeddings), None))

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        embeddings = _clip_embeddings(host)
        projection = None if embeddings is None else embeddings.get_submodule("patch_embedding")
        return projection if isinstance(projection, nn.Conv2d) else None


@register_adapter(*classes({"beit": "Beit"}))
class BeitAdapter(VitAdapter):
    """Relative position biases are not applied. Where a layer has its own, they are not computed either."""

    checks_masks = False  # the mask argument holds the relative position biases

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        attention, config = super().describe(module, host), read(module)[0].config
        if not config.use_relative_position_bias and not config.use_shared_relative_position_bias:
            return attention
        return replace(attention, drops={**attention.drops, "position_bias": LOGITS})

    def host_settings(self, host: Host) -> list[tuple[Any, str, Any]]:
        own = getattr(host.above(), "relative_position_bias", None) is not None
        return [(host.above(), "relative_position_bias", None)] if own else []

    def alone(self, x: Tensor, arguments: dict[str, Any], cache: Any = None, values: Tensor | None = None) -> Tensor:
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            arguments = {**arguments, "attention_mask": mask > torch.finfo(mask.dtype).min / 2}
        return super().alone(x, arguments, cache, values)


_CVT = "attention.convolution_projection_"


@register_adapter(*classes({"cvt": "Cvt"}))
class CvtAdapter(EncoderAdapter):
    """(tokens, height, width) -> output. Queries, keys and values come from CvT's own convolutions.

    A mixer with a separate context and values of their own reads all three, keys and values from fewer places where
    CvT's convolutions have a stride. Poly-SA, whose keys stand in the places of the queries, reads all three with
    stride 1. A mixer that makes queries and keys from the same tokens reads the convolutions of queries and values, and
    a mixer with one input that of the values, all with stride 1.
    """

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        if not mixer.capabilities.cross:
            for name in self.copies(mixer):
                convolution: Any = self.get_submodule(f"{name.rpartition('.')[2]}.convolution_projection.convolution")
                convolution.stride = (1, 1)

    @classmethod
    def copies(cls, mixer: TokenMixer) -> tuple[str, ...]:
        can = mixer.capabilities
        if not can.has("values"):
            return (f"{_CVT}value",)
        keys = (f"{_CVT}key",) if can.keys or (can.cross and mixer.config.reads_keys) else ()
        return (f"{_CVT}query", *keys, f"{_CVT}value")

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        inner, attention = read(module)
        parts = [f"{_CVT}{name}" for name in ("query", "key")]
        lost = [f"{part}.{key}" for part in parts for key, _ in module.get_submodule(part).named_parameters()]
        why = dict.fromkeys(lost, "the mixer has no input of its own for it")
        return replace(attention, prefix=int(inner.with_cls_token), any_length=True, drops={**attention.drops, **why})

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        stage = next((part for part in host.chain() if type(part).__name__ == "CvtStage"), None)
        return None if stage is None else stage.get_submodule("embedding")

    def forward(self, hidden_state: Tensor, height: int, width: int) -> Tensor:
        front, places = hidden_state.split([self.prefix, height * width], dim=1)
        image = places.transpose(1, 2).unflatten(2, (height, width))
        parts = {
            name.removeprefix(_CVT): torch.cat((front, self.get_submodule(name.rpartition(".")[2])(image)), dim=1)
            for name in self.copies(self.mixer)
        }
        value = parts["value"]
        x = parts.get("query", value)
        how = self.grid_options(x, (height, width))
        if "query" not in parts:
            return self.mixer(x, **how)
        if not self.mixer.capabilities.cross:
            return self.mixer(x, parts.get("key"), values=value, **how)
        return self.mixer(x, parts["key"], values=value, **how) if "key" in parts else self.mixer(x, value, **how)
