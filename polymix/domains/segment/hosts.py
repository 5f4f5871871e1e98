"""The hosts: a small encoder over squares of pixels, EfficientViT-Seg's head on a model of timm, and SegFormer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate

from polymix.blocks import MixerBlock
from polymix.compat import cure_torchvision
from polymix.convert.adapters.libraries import load_library
from polymix.domains.segment.recipe import STRIDE, SegmentRecipe
from polymix.mixers import MixerConfig
from polymix.models.vit import PatchStem, sine_positions
from polymix.train.data.backbones import places_of_maps
from polymix.train.hosts import put_mixers
from polymix.train.recipe import KEEP

HEAD_PREFIXES = ("head.classify", "decode_head.classifier")  # prefixes of what other classes need anew
STRIDES = (8, 16, 32)  # of the maps that EfficientViT-Seg's head takes
# SegFormer (Xie et al. 2021, Table 6): channels and blocks of the four stages, and the decoder's channels.
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "tiny": ((8, 16, 24, 32), (1, 1, 1, 1), 16), "b0": ((32, 64, 160, 256), (2, 2, 2, 2), 256),
    "b1": ((64, 128, 320, 512), (2, 2, 2, 2), 256), "b2": ((64, 128, 320, 512), (3, 4, 6, 3), 768),
    "b3": ((64, 128, 320, 512), (3, 4, 18, 3), 768), "b4": ((64, 128, 320, 512), (3, 8, 27, 3), 768),
    "b5": ((64, 128, 320, 512), (3, 6, 40, 3), 768),
}  # fmt: skip


class PatchSegmenter(nn.Module):
    """Mixers over squares of 8 × 8 pixels; nothing but them joins pixels of different squares.

    Three convolutions of 2 × 2 with stride 2 make a token of a square, the encoder mixes the tokens, and three
    transposed convolutions go back to pixels, each with the features of the same size added, as in U-Net.

    Args:
        mixers: of the encoder layers.
        side: of the square images, in pixels; a multiple of 8.
        classes: how many there are.
        dim: channels of the encoder, a multiple of 4.
    """

    def __init__(self, mixers: Sequence[MixerConfig], *, side: int, classes: int, dim: int) -> None:
        super().__init__()
        self.options = {  # the arguments that build the same model again
            "mixers": tuple(mixers), "side": side, "classes": classes, "dim": dim,
        }  # fmt: skip
        self.grid = (side // STRIDE, side // STRIDE)
        widths = (dim // 4, dim // 2, dim)
        self.pixels = nn.Conv2d(3, widths[0], 1)
        self.down = PatchStem(3, dim)
        self.position = nn.Parameter(sine_positions(self.grid, dim)[None].clone())
        configs = [mixer.for_grid(self.grid, 0) for mixer in mixers]
        self.calls = [config.call_options(self.grid) for config in configs]
        self.blocks = nn.ModuleList(MixerBlock(dim, config, mlp_ratio=2.0) for config in configs)
        self.norm = nn.LayerNorm(dim)
        above = (widths[1], widths[0], widths[0])
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in zip(widths[::-1], above, strict=True))
        self.head = nn.ModuleDict({"classify": nn.Conv2d(widths[0], classes, 1)})

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, S, S) from -1 to 1 to logits (B, classes, S, S)."""
        skips = [self.pixels(images), *self.down(images)]
        x = skips.pop().flatten(2).transpose(1, 2) + self.position
        for block, call in zip(self.blocks, self.calls, strict=True):
            x = block(x, **call)
        x = self.norm(x).transpose(1, 2).unflatten(2, self.grid)
        for conv in self.up:
            x = gelu(conv(x) + skips.pop())
        return self.head["classify"](x)


def _convolution(channels: int, out: int, kernel: int = 1, groups: int = 1, active: bool = True) -> nn.Sequential:
    """A convolution, batch norm and (if active) hard swish."""
    parts = [nn.Conv2d(channels, out, kernel, padding=kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(out)]
    return nn.Sequential(*parts, *([nn.Hardswish()] if active else []))


class MBConv(nn.Module):
    """An inverted bottleneck with a shortcut: 1 × 1 to `expand` times the channels, 3 × 3 by channel, 1 × 1 back."""

    def __init__(self, channels: int, expand: int) -> None:
        super().__init__()
        wide = channels * expand
        self.body = nn.Sequential(
            _convolution(channels, wide), _convolution(wide, wide, 3, wide), _convolution(wide, channels, active=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class SegHead(nn.Module):
    """The head of EfficientViT-Seg (Cai et al. 2023, Section 3.2): the maps of strides 8, 16 and 32 to logits.

    Each map is brought to `width` channels by a 1 × 1 convolution and to stride 8 by bicubic interpolation. Their sum
    passes `depth` MBConv blocks, a 1 × 1 convolution to `widen` times the channels unless that is None, and one to the
    classes. Source: the authors' SegHead; a golden test holds the whole network to its outputs.
    """

    def __init__(
        self, channels: Sequence[int], classes: int, *, width: int, depth: int, expand: int, widen: int | None
    ) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(own, width, 1, bias=False), nn.BatchNorm2d(width)) for own in channels
        )
        self.blocks = nn.Sequential(*(MBConv(width, expand) for _ in range(depth)))
        self.widen = nn.Identity() if widen is None else _convolution(width, width * widen)
        self.classify = nn.Conv2d(width * (widen or 1), classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (B, C, h, w), the finest first, to logits (B, classes, h, w) of the finest."""
        size = maps[0].shape[2:]
        first, *rest = (interpolate(part(x), size, mode="bicubic") for part, x in zip(self.inputs, maps, strict=True))
        x: Tensor = sum(rest, first)
        return self.classify(self.widen(self.blocks(x)))


class EfficientSegmenter(nn.Module):
    """The head of EfficientViT-Seg on a backbone of timm that returns maps of strides 8, 16 and 32."""

    def __init__(self, backbone: nn.Module, head: SegHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        return interpolate(self.head(self.backbone(images)), images.shape[2:], mode="bicubic")


class Segformer(nn.Module):
    """transformers' SegFormer, with its logits brought to the size of the images. Its weights have the same names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.segformer, self.decode_head = model.segformer, model.decode_head

    def forward(self, images: Tensor) -> Tensor:
        maps = self.segformer(images, output_hidden_states=True, return_dict=True).hidden_states
        return interpolate(self.decode_head(maps), images.shape[2:], mode="bilinear")


def check(recipe: SegmentRecipe) -> None:
    """Raise what `build` would raise about the recipe, before any picture is read."""
    with torch.device("meta") if recipe.host == "patches" else nullcontext():
        build(recipe, 2)


def build(recipe: SegmentRecipe, classes: int) -> nn.Module:
    """The host with fresh weights and the recipe's mixers: images (B, 3, S, S) from -1 to 1 to logits of this size."""
    if recipe.host == "patches":
        configs = list(
            recipe.mixers_for(recipe.block_names(), recipe.dim if recipe.match_parameters else None).values()
        )
        return PatchSegmenter(configs, side=recipe.crop, classes=classes, dim=recipe.dim)
    if recipe.host == "efficientvit":
        backbone, channels = _backbone(recipe.backbone)
        _replace(backbone, recipe)
        head = SegHead(
            channels, classes, width=recipe.head_width, depth=recipe.head_depth, expand=recipe.head_expand,
            widen=recipe.head_widen,
        )  # fmt: skip
        return EfficientSegmenter(backbone, head)
    model = segformer(recipe.size, classes)
    if recipe.host_init == "published":
        _start_as_published(model)
    _replace(model, recipe)
    return Segformer(model)


def _backbone(name: str) -> tuple[nn.Module, list[int]]:
    """A model of timm that returns its maps of strides 8, 16 and 32, and their channels."""
    places = places_of_maps(name, STRIDES)
    timm = load_library("timm")
    model: Any = timm.create_model(name, pretrained=False, features_only=True, out_indices=places)
    return model, list(model.feature_info.channels())


def segformer(size: str, classes: int) -> Any:
    """transformers' SegFormer of a size with fresh weights."""
    cure_torchvision()
    transformers: Any = load_library("transformers")
    channels, depths, decoder = SIZES[size]
    config = transformers.SegformerConfig(
        num_labels=classes, hidden_sizes=list(channels), depths=list(depths), decoder_hidden_size=decoder
    )
    return transformers.SegformerForSemanticSegmentation(config)


def _start_as_published(model: Any) -> None:
    """SegFormer's fresh weights as in the authors' code, in which its convolutions and head are larger."""
    for layer in model.segformer.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        elif isinstance(layer, nn.Conv2d):
            nn.init.normal_(
                layer.weight, std=math.sqrt(2 * layer.groups / (layer.weight[0, 0].numel() * len(layer.weight)))
            )
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    head = model.decode_head
    for layer in (head.classifier, *(part.proj for part in head.linear_projections)):
        layer.reset_parameters()
    nn.init.kaiming_normal_(head.linear_fuse.weight, mode="fan_out", nonlinearity="relu")


def _replace(model: nn.Module, recipe: SegmentRecipe) -> None:
    """Put the recipe's mixer in place of a host's attention, where its plan says."""
    if recipe.mixer != KEEP:
        put_mixers(model, recipe, torch.zeros(1, 3, recipe.crop, recipe.crop), recipe.match_parameters)
