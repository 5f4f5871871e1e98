"""Layers that were made without storage, for a checkpoint to fill, and what the checkpoint did not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polymix.models.language.layer import CausalLayer


def on_meta(model: nn.Module) -> None:
    """Note which layers were made without storage, so that their own init did nothing."""
    for module in model.modules():
        if isinstance(module, CausalLayer):
            module.unfilled = any(parameter.is_meta for parameter in module.parameters())


@torch.no_grad()
def fill(layer: CausalLayer) -> None:
    """Give what no checkpoint filled, buffers that are never saved among it, the values of a fresh layer."""
    if not layer.unfilled:
        return
    like = next(layer.parameters())
    fresh = layer.again(device=like.device, dtype=like.dtype)
    made: dict[str, Tensor] = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
    for name, tensor in missing(layer):
        tensor.copy_(made[name])
    layer.unfilled = False


def missing(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that no checkpoint has filled."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [(name, tensor) for name, tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]
