"""Fit pictures and their boxes into squares, and boxes back into pictures."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad


def fit(pixels: Tensor, target: Mapping[str, Tensor], size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture (3, H, W) scaled to fit a square, padded at the right and below; its boxes, areas and masks follow.

    `scale` and `size` tell by how much each side grew, and height and width without padding.
    """
    height, width = pixels.shape[1:]
    scale = size / max(height, width)
    new = (max(1, round(height * scale)), max(1, round(width * scale)))
    scales = torch.tensor([new[1] / width, new[0] / height] * 2)
    if new != (height, width):
        grown = interpolate(pixels[None].float(), size=new, mode="bilinear", antialias=True)[0]
        pixels = grown.round().clamp(0, 255).to(torch.uint8)
    edges = (0, size - new[1], 0, size - new[0])
    found = {**target, "boxes": target["boxes"] * scales, "area": target["area"] * scales[0] * scales[1]}
    found["scale"], found["size"] = scales, torch.tensor(new)
    if "masks" in target:
        masks = target["masks"]
        if new != (height, width) and len(masks):
            masks = interpolate(masks[None].float(), size=new, mode="bilinear", antialias=True)[0] > 0.5
        found["masks"] = pad(masks, edges)
    return pad(pixels, edges), found
