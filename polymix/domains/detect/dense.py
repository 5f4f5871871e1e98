"""The default detector: a stem that makes tokens of 8 × 8 pixels, an encoder with any mixer, and a dense head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polymix.blocks import MixerBlock
from polymix.mixers import MixerConfig
from polymix.models.vit import PatchStem, sine_positions


class Residual(nn.Module):
    """Two convolutions with group norm, added to a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, out) for _ in range(2))
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + self.shortcut(x)).relu()


class ConvolutionalStem(nn.Sequential):
    """Three residual blocks of stride 2."""

    def __init__(self, dim: int) -> None:
        super().__init__(Residual(3, dim // 2, 2), Residual(dim // 2, dim, 2), Residual(dim, dim, 2))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images (B, 3, H, W) to the map of an eighth of their sides, in a list of one."""
        return [super().forward(images)]


class DenseDetector(nn.Module):
    """Every token of the encoder answers for the object whose centre is near: its class and its four sides.

    Args:
        mixers: of the encoder layers.
        image_size: sides of the square images, in pixels; a multiple of 8.
        classes: how many there are.
        dim: channels of the encoder, a multiple of 16.
        stem: "patches", a `PatchStem`: nothing but the mixers joins tokens, and no norm sees more than one. Or
            "convolutions", which see 43 × 43 pixels and place boxes better; their group norms see the whole picture.
    """

    stride = 8
    centres: Tensor

    def __init__(
        self, mixers: Sequence[MixerConfig], *, image_size: int, classes: int, dim: int, stem: str = "patches"
    ) -> None:
        super().__init__()
        self.options = {  # the arguments that build the same model again
            "mixers": tuple(mixers), "image_size": image_size, "classes": classes, "dim": dim, "stem": stem,
        }  # fmt: skip
        side = image_size // self.stride
        self.grid = (side, side)
        self.stem = PatchStem(3, dim) if stem == "patches" else ConvolutionalStem(dim)
        configs = [mixer.for_grid(self.grid, 0) for mixer in mixers]
        self.calls = [config.call_options(self.grid) for config in configs]
        self.position = nn.Parameter(sine_positions(self.grid, dim)[None].clone())
        self.blocks = nn.ModuleList(MixerBlock(dim, config, mlp_ratio=2.0) for config in configs)
        self.norm = nn.LayerNorm(dim)
        self.label = nn.Linear(dim, classes)
        self.sides = nn.Linear(dim, 4)
        nn.init.constant_(self.label.bias, -4.0)  # few tokens hold an object
        nn.init.constant_(self.sides.bias, 0.5)
        rows, columns = torch.meshgrid(*(torch.arange(side) + 0.5 for side in self.grid), indexing="ij")
        self.register_buffer("centres", torch.stack((columns, rows), -1).view(-1, 2) * self.stride, persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, S, S) from -1 to 1 to class logits (B, N, classes) and boxes (B, N, 4) as x1, y1, x2, y2."""
        x = self.stem(images)[-1].flatten(2).transpose(1, 2) + self.position
        for block, call in zip(self.blocks, self.calls, strict=True):
            x = block(x, **call)
        x = self.norm(x)
        sides = nn.functional.softplus(self.sides(x).float()) * self.stride
        return self.label(x), torch.cat((self.centres - sides[..., :2], self.centres + sides[..., 2:]), -1)
