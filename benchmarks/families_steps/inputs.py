"""Small inputs of models: what polymix tries by itself, and what only some models ask for beside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapters.libraries import examples_of

from . import diffusers_models

SIDE = 4  # patches of a side


def inputs_of(model: nn.Module) -> Iterator[Any]:
    """Inputs that a model may take, the fullest first; then the same with all else that its signature names."""
    if type(model).__module__.startswith("diffusers."):
        yield from diffusers_models.inputs(model)
        return
    if type(model).__module__.startswith("timm."):
        channels, *usual = model.pretrained_cfg["input_size"]
        stated = getattr(getattr(model, "patch_embed", None), "img_size", None)
        for size in dict.fromkeys((tuple(stated or (64, 64)), (96, 96), tuple(usual))):
            yield torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
        return
    examples = list(examples_of(model))
    yield from examples
    takes = inspect.signature(model.forward).parameters
    for example in examples or [{}]:
        known = _known(model.config, example)
        beside = {name: known[name] for name in takes if name in known}
        if beside:
            yield {**example, **beside}


def _known(config: Any, example: dict[str, Any]) -> dict[str, Tensor]:
    """Values for arguments that models of transformers have beside ids, pictures and sound, by their names."""
    drawn, vision = torch.Generator().manual_seed(0), getattr(config, "vision_config", None) or config

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    def whole(name: str, usual: int) -> int:
        value = getattr(config, name, None) or getattr(vision, name, None)
        return value if isinstance(value, int) and value else usual

    channels, patch = whole("num_channels", whole("in_channels", 3)), whole("patch_size", 8)
    patches = channels * patch**2 * whole("temporal_patch_size", 1)
    grid, lags = torch.tensor([[1, SIDE, SIDE]] * 2), getattr(config, "lags_sequence", None)
    past = numbers(2, config.context_length + max(lags)) if lags else numbers(2, 8)
    known = {
        "hidden_states": numbers(2 * SIDE**2, patches), "grid_thw": grid,
        "bbox": torch.zeros(2, 6, 4, dtype=torch.long), "qformer_input_ids": torch.ones(2, 6, dtype=torch.long),
        "spatial_shapes": grid[:, 1:], "pixel_attention_mask": torch.ones(2, SIDE**2, dtype=torch.long),
        "visual_feats": numbers(2, 3, whole("visual_feat_dim", 8)), "visual_pos": numbers(2, 3, 4),
        "inputs": numbers(2, 6, whole("d_model", 8)),
        "image_embeds": numbers(2, 3, whole("hidden_size", 8)), "states": numbers(2, 6, whole("state_dim", 8)),
        "actions": numbers(2, 6, whole("act_dim", 8)), "returns_to_go": numbers(2, 6, 1),
        "timesteps": torch.arange(6).repeat(2, 1), "query_embeds": numbers(2, 3, whole("hidden_size", 8)),
        "past_time_features": numbers(*past.shape, whole("num_time_features", 1)),
        "past_observed_mask": torch.ones(*past.shape), "conditioning_pixel_values": numbers(2, 3, 32, 32),
        "future_time_features": numbers(2, whole("prediction_length", 4), whole("num_time_features", 1)),
        "future_values": numbers(2, whole("prediction_length", 4)), "rewards": numbers(2, 6, 1),
    }  # fmt: skip
    if lags:
        known["past_values"] = past
    if hasattr(vision, "num_patches"):
        known["pixel_values"] = numbers(2, SIDE**2, patches)
    for name, ones in (("input_features", "input_features_mask"), ("input_features", "feature_attention_mask"),
                       ("input_values", "padding_mask"), ("input_ids", "attention_mask")):  # fmt: skip
        if name in example:
            known[ones] = torch.ones(2, example[name].shape[-1 if name != "input_features" else 1], dtype=torch.long)
    return known
