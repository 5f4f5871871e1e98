"""A vision transformer with any mixer in place of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from polymix.blocks import MixerBlock
from polymix.devices import check_place
from polymix.errors import OptionError, ShapeError, check_choice, check_int, check_number
from polymix.limits import LAYERS, check_memory
from polymix.mixers import MixerConfig
from polymix.ops.shared.tensors import autocast_dtype


class VisionTransformer(nn.Module):
    """A vision transformer (ViT, DeiT) with any mixer: patches, positions, `depth` blocks, a norm and a linear head.

    Maps images (B, channels, H, W) to logits (B, classes). With softmax, a class token and DeiT's sizes it has exactly
    DeiT's parameters. The learned positions start as 2-D sines, which trains much faster on small data than noise.

    Args:
        mixer: config of the mixer, or a config for each block. Grid and num_prefix_tokens are filled in.
        image_size: (H, W), or one number for both.
        patch_size: side of a patch, in pixels; divides H and W.
        dim: number of channels D.
        depth: number of blocks.
        classes: number of logits.
        channels: of the images.
        mlp_ratio: width of the hidden layers, divided by dim.
        class_token: classify from a class token. False: from the mean of the final tokens.

    Raises:
        OptionError: an option is out of range, or the mixer cannot take the grid or the class token.
    """

    def __init__(
        self,
        mixer: MixerConfig | Sequence[MixerConfig],
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        dim: int,
        depth: int,
        classes: int = 1000,
        channels: int = 3,
        mlp_ratio: float = 4.0,
        class_token: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"depth": depth, "classes": classes, "patch_size": patch_size, "dim": dim, "channels": channels}
        for name, value in sizes.items():
            check_int(name, value, 1)
        check_int("depth", depth, 1, LAYERS)
        mixers: tuple[Any, ...] = tuple(mixer) if isinstance(mixer, (tuple, list)) else (mixer,) * depth
        if len(mixers) != depth or not all(isinstance(each, MixerConfig) for each in mixers):
            allowed = f"a config, or {depth} of them"
            raise OptionError("mixer", repr(mixer), allowed, "Pass for example PomConfig().")
        size = tuple(image_size) if isinstance(image_size, (tuple, list)) else (image_size, image_size)
        if len(size) != 2 or any(type(side) is not int or side < 1 or side % patch_size for side in size):
            allowed = f"a multiple of patch_size={patch_size}, or two of them"
            raise OptionError("image_size", repr(image_size), allowed, "Change one of the two sizes.")
        kw: dict[str, Any] = {"device": device, "dtype": dtype}
        check_choice("class_token", class_token, (True, False))
        check_place(device, dtype)
        check_number("mlp_ratio", mlp_ratio, 1 / dim, math.inf, f"a number of at least 1/dim = 1/{dim}", 4)
        tokens = math.prod(size) // patch_size**2
        weights = tokens * dim + dim * (channels * patch_size**2 + classes) + 2 * depth * mlp_ratio * dim**2
        what = f"images of {size[0]:,} × {size[1]:,} pixels, dim={dim:,} and depth={depth:,}"
        check_memory("image_size, dim, depth", what, 4 * weights)
        self.options = {  # the arguments that build the same model again
            "mixer": mixer if isinstance(mixer, MixerConfig) else mixers, **sizes, "image_size": size,
            "mlp_ratio": mlp_ratio, "class_token": class_token,
        }  # fmt: skip
        self.image_size, self.channels = size, channels
        self.grid = (size[0] // patch_size, size[1] // patch_size)
        self.embed = nn.Conv2d(channels, dim, patch_size, patch_size, **kw)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim, **kw)) if class_token else None
        self.position = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1] + class_token, dim, **kw))
        with torch.no_grad():
            self.position[0, int(class_token) :] = sine_positions(self.grid, dim).to(self.position)
        configs = [each.for_grid(self.grid, int(class_token)) for each in mixers]
        self.blocks = nn.ModuleList(MixerBlock(dim, config, mlp_ratio=mlp_ratio, **kw) for config in configs)
        self.norm = nn.LayerNorm(dim, eps=1e-6, **kw)
        self.head = nn.Linear(dim, classes, **kw)
        self.calls = [config.call_options(self.grid) for config in configs]

    def forward(self, images: Tensor) -> Tensor:
        size = (self.channels, *self.image_size)
        if not isinstance(images, Tensor) or images.ndim != 4 or tuple(images.shape[1:]) != size:
            got = str(tuple(images.shape)) if isinstance(images, Tensor) else type(images).__name__
            raise ShapeError("images", got, f"(B, {', '.join(map(str, size))})", "Resize the images first.")
        weight = self.head.weight
        if images.device != weight.device or (images.dtype != weight.dtype and autocast_dtype(images.device) is None):
            got = f"{images.dtype} on {images.device}"
            raise ShapeError(
                "images", got, f"{weight.dtype} on {weight.device}", "Convert them with .to(device, dtype)."
            )
        x = self.embed(images).flatten(2).transpose(1, 2)  # (B, N, D)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1)
        x = x + self.position
        for block, call in zip(self.blocks, self.calls, strict=True):
            x = block(x, **call)
        x = self.norm(x)
        return self.head(x[:, 0] if self.class_token is not None else x.mean(1))


class PatchStem(nn.ModuleList):
    """Three convolutions of 2 × 2 with stride 2: a token for each square of 8 × 8 pixels, which sees nothing else.

    Args:
        channels: of the images.
        dim: channels of the tokens, a multiple of 4.
    """

    def __init__(self, channels: int, dim: int) -> None:
        widths = (channels, dim // 4, dim // 2, dim)
        super().__init__(nn.Conv2d(a, b, 2, 2) for a, b in pairwise(widths))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images (B, channels, H, W) to maps of a half, a quarter and an eighth of their sides; the last has `dim`."""
        maps = [images]
        for conv in self:
            maps.append(nn.functional.gelu(conv(maps[-1])))
        return maps[1:]


def sine_positions(
    grid: tuple[int, int], dim: int, base: float = 100.0, within: tuple[int, int] | None = None
) -> torch.Tensor:
    """(H · W, dim): sines and cosines of row and column, at dim // 4 wavelengths from 2π to 2π · base, then zeros.

    within: a grid (H', W') over which the H × W places are spread evenly, to interpolate; None: the grid itself.
    """
    axes = [torch.arange(size).float() for size in grid]
    if within is not None:
        axes = [(axis + 0.5) * (old / len(axis)) - 0.5 for axis, old in zip(axes, within, strict=True)]
    return sines(torch.cartesian_prod(*axes), dim, base)


def sines(places: Tensor, dim: int, base: float = 100.0) -> Tensor:
    """(N, dim): sines and cosines of places (N, axes) at wavelengths from 2π to 2π · base, then zeros."""
    each = dim // (2 * places.shape[1])
    frequency = base ** -(torch.arange(each, device=places.device) / max(each, 1))
    angle = (places.unsqueeze(-1) * frequency).flatten(1)
    return torch.nn.functional.pad(torch.cat((angle.sin(), angle.cos()), 1), (0, dim - 2 * angle.shape[1]))
