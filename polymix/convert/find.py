"""Finding attention layers in any PyTorch model by their projections, and the token grid that a model states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError
from polymix.mixers import SoftmaxMixer, TokenMixer

FUSED = ("qkv", "qkv_proj", "Wqkv", "query_key_value", "c_attn")
SPLIT = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("to_q", "to_k", "to_v"),
    ("query_proj", "key_proj", "value_proj"), ("q", "k", "v"), ("wq", "wk", "wv"),
    ("q_content_proj", "k_content_proj", "v_proj"),
)  # fmt: skip
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
PREFIX = ("class_token", "cls_token", "dist_token", "distillation_token", "reg_token", "register_tokens")
CONTEXTS = ("key", "context", "key_value_states", "encoder_hidden_states")
ATTENTION_FORMS = (
    "a softmax mixer, nn.MultiheadAttention, or a module with a number of heads and projections named "
    f"({', '.join(FUSED)}, or {', '.join('/'.join(names) for names in SPLIT)})"
)


def attention_modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the outermost attention modules."""
    if attends(model):
        yield name or type(model).__name__, model
    elif not isinstance(model, TokenMixer):
        for key, child in model.named_children():
            yield from attention_modules(child, f"{name}.{key}" if name else key)


def attends(module: nn.Module) -> bool:
    """Whether a module is attention: a known class, or one with query, key and value projections and heads."""
    if isinstance(module, TokenMixer):
        return isinstance(module, SoftmaxMixer)
    return isinstance(module, nn.MultiheadAttention) or (
        (any(_projects(module, name) for name in FUSED) or any(_project(module, names) for names in SPLIT))
        and head_count(module) is not None  # last: diffusers' models warn when asked for their config's numbers
    )


def head_count(module: nn.Module) -> int | None:
    """The number of heads that a module or its config states."""
    places = (module, getattr(module, "config", None))
    counts = (getattr(place, name, None) for place in places for name in HEADS)
    return next((heads for heads in counts if type(heads) is int), None)


def _projects(module: nn.Module, name: str) -> bool:
    """Whether `module.name` is a linear map. Projections of feature maps are convolutions and do not count."""
    weight = getattr(getattr(module, name, None), "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def _project(module: nn.Module, names: Sequence[str]) -> bool:
    return all(_projects(module, name) for name in names)


def grids(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """The token grids that the modules of a model state."""
    for module in model.modules():
        for name in ("grid", "grid_size"):
            grid = getattr(module, name, None)
            if isinstance(grid, tuple) and 2 <= len(grid) <= 3 and all(type(size) is int for size in grid):
                yield grid
        image, patch = image_size(module), pair(getattr(module, "patch_size", None))
        if image and patch:
            yield image[0] // patch[0], image[1] // patch[1]


def prefix_tokens(module: nn.Module) -> int:
    """How many tokens, such as class tokens, a module puts in front of the others."""
    stated = getattr(module, "num_prefix_tokens", None)
    tokens = [getattr(module, name, None) for name in PREFIX]
    return stated if type(stated) is int else sum(t.shape[1] for t in tokens if isinstance(t, Tensor) and t.ndim == 3)


def pair(size: Any) -> tuple[int, int] | None:
    """A size as (H, W); None where it is no number and no pair of numbers."""
    size = (size, size) if type(size) is int else size
    valid = isinstance(size, (tuple, list)) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
    return (size[0], size[1]) if valid else None


def image_size(module: Any) -> tuple[int, int] | None:
    """The image size that a module or config states."""
    return pair(getattr(module, "image_size", None)) or pair(getattr(module, "img_size", None))


def pixels(model: Any) -> tuple[int, int] | None:
    """The image size (H, W) that a model states."""
    places = (model, getattr(model, "patch_embed", None), getattr(model, "config", None))
    known = next(filter(None, map(image_size, places)), None)
    return known or pair(((getattr(model, "pretrained_cfg", None) or {}).get("input_size") or ())[-2:])


def known_input(model: nn.Module, batch: int, generator: torch.Generator | None = None) -> Tensor:
    """Random images of the size that the model states. Raises OptionError where it states none.

    generator: on the CPU; None: PyTorch's own of the model's device.
    """
    size = pixels(model)
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if size is None or first is None:
        got = f"None for {type(model).__name__}, which does not state its input size"
        raise OptionError("input", got, "an input of the model: a tensor, a tuple or a dict", "Pass input=.")
    weight = first.weight
    if generator is not None:
        return torch.randn(batch, first.in_channels, *size, generator=generator).to(weight)
    return torch.randn(batch, first.in_channels, *size, device=weight.device, dtype=weight.dtype)
