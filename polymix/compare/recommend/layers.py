"""The attention layers of any PyTorch model, found by what they hold, and what each is called with in one run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polymix.bench.measure import Call
from polymix.compare.recommend.masks import seen_through
from polymix.compare.recommend.replay import call_of, kept, tensors
from polymix.compare.recommend.shapes import Shape
from polymix.errors import OptionError, PolymixError
from polymix.mixers import TokenMixer

FUSED = ("qkv", "qkv_proj", "Wqkv", "query_key_value", "c_attn")
SPLIT = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("to_q", "to_k", "to_v"),
    ("q", "k", "v"), ("wq", "wk", "wv"),
)  # fmt: skip
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
CONTEXTS = ("key", "context", "key_value_states", "encoder_hidden_states")
SOUGHT = (
    "a softmax mixer, nn.MultiheadAttention, or a module with a number of heads and projections "
    f"({', '.join(FUSED)}, or {', '.join('/'.join(names) for names in SPLIT)})"
)
_PREFIX = 8  # more tokens than these in front of a grid: it is another grid


@dataclass(frozen=True)
class Layer:
    """Calls of one kind of attention layer at one shape: the first of them stands for all."""

    names: tuple[str, ...]  # one a call
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: Shape

    def call(self, training: bool) -> Call:
        """The layer alone, called so again."""
        for t in tensors((self.args, self.kwargs)) if training else ():
            if t.is_floating_point() and t.shape[-1] == self.shape.dim:  # tokens: no mask, no angles
                t.requires_grad_()
        return call_of(self.module, self.args, self.kwargs, training)


def attention_modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the outermost modules that attend."""
    if attends(model):
        yield name or type(model).__name__, model
    elif not isinstance(model, TokenMixer):
        for key, child in model.named_children():
            yield from attention_modules(child, f"{name}.{key}" if name else key)


def attends(module: nn.Module) -> bool:
    if isinstance(module, TokenMixer):
        return module.name == "softmax"
    return isinstance(module, nn.MultiheadAttention) or (
        head_count(module) is not None
        and (any(_projects(module, name) for name in FUSED) or any(_project(module, names) for names in SPLIT))
    )


def head_count(module: nn.Module) -> int | None:
    places = (module, getattr(module, "config", None))
    found = (getattr(place, name, None) for place in places for name in HEADS)
    return next((heads for heads in found if type(heads) is int), None)


def _projects(module: nn.Module, name: str) -> bool:
    """Whether it is a linear map of tokens; those of feature maps are convolutions."""
    weight = getattr(getattr(module, name, None), "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def _project(module: nn.Module, names: Sequence[str]) -> bool:
    return all(_projects(module, name) for name in names)


def record(model: nn.Module, run: Call, ids: bool) -> tuple[list[Layer], list[str]]:
    """The distinct layers of one `run` of the model, and which were found but cannot be judged, and why.

    ids: the model reads ids of a text, so that its tokens stand in a line.

    Raises:
        OptionError: there is nothing that attends; the message says what was looked for.
    """
    found = dict(attention_modules(model))
    if not found:
        raise OptionError("model", f"{type(model).__name__}, in which nothing attends,", SOUGHT, "Or pass shapes.")
    layers: dict[tuple[type, Shape], Layer] = {}
    left_out: dict[str, str] = {}
    grids = list(_grids(model))

    def seen(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            shape = _located(shape_of_call(module, args, kwargs), grids, ids)
        except PolymixError as error:
            left_out[name] = f"{name} ({type(module).__name__}) is left out: {error.got}"
            return
        key = type(module), shape
        if key in layers:
            layers[key] = replace(layers[key], names=(*layers[key].names, name))
        else:
            layers[key] = Layer((name,), module, *kept(args, kwargs), shape)

    with ExitStack() as stack:
        for name, module in found.items():
            hook = module.register_forward_pre_hook(partial(seen, name), with_kwargs=True)
            stack.callback(hook.remove)
        fast = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)  # it would pass the hooks by
        run()
    if not layers:
        got = "; ".join(left_out.values()) or f"no call of {', '.join(found)}"
        raise OptionError("input", got, "one with which the model attends", "Pass shapes instead.")
    return list(layers.values()), list(left_out.values())


def shape_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape:
    """What the layer is called with, without its grid."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    given = {**bound, **bound.get("kwargs", {})}
    x = next((value for value in given.values() if isinstance(value, Tensor) and value.is_floating_point()), None)
    if x is None or x.ndim not in (2, 3) or (x.ndim == 2 and not isinstance(module, nn.MultiheadAttention)):
        got = "no tensor" if x is None else f"an input of shape {tuple(x.shape)}"
        raise OptionError("model", got, "layers that are given (batch, tokens, channels)", "")
    axis = 0 if x.ndim == 2 else int(getattr(module, "batch_first", True))
    tokens, batch = x.shape[axis], 1 if x.ndim == 2 else x.shape[1 - axis]
    context = next((given[name] for name in CONTEXTS if isinstance(given.get(name), Tensor)), x)
    cross = context.data_ptr() != x.data_ptr() or context.shape != x.shape
    if context.shape[-1] != x.shape[-1]:
        got = f"a context of {context.shape[-1]} channels for {x.shape[-1]}"
        raise OptionError("model", got, "one width for both", "")
    mask = seen_through(module, given, tokens, context.shape[axis])
    return Shape(
        tokens=tokens,
        dim=x.shape[-1],
        heads=head_count(module),
        batch=batch,
        causal=mask.causal and not cross,
        cross=context.shape[axis] if cross else None,
        mask=mask.kind,
    )


def _located(shape: Shape, grids: Sequence[tuple[int, ...]], ids: bool) -> Shape:
    """With the model's grid where it has one that fits; a text has a line."""
    if ids or shape.causal:
        return replace(shape, grid=(shape.tokens,))
    prefixes = {grid: shape.tokens - torch.Size(grid).numel() for grid in grids}
    fits = [grid for grid, prefix in prefixes.items() if 0 <= prefix <= _PREFIX]
    return replace(shape, grid=min(fits, key=prefixes.__getitem__)) if fits else shape.placed()


def _grids(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """What the modules of a host say of the grid of their tokens."""
    for module in model.modules():
        for name in ("grid", "grid_size"):
            grid = getattr(module, name, None)
            if isinstance(grid, tuple) and 2 <= len(grid) <= 3 and all(type(size) is int for size in grid):
                yield grid
        image, patch = image_size(module), pair(getattr(module, "patch_size", None))
        if image and patch:
            yield image[0] // patch[0], image[1] // patch[1]


def pair(size: Any) -> tuple[int, int] | None:
    size = (size, size) if type(size) is int else size
    valid = isinstance(size, (tuple, list)) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
    return (size[0], size[1]) if valid else None


def image_size(module: Any) -> tuple[int, int] | None:
    return pair(getattr(module, "image_size", None)) or pair(getattr(module, "img_size", None))


def known_input(model: nn.Module, batch: int) -> Tensor:
    """Random images of the size that the model says it is for."""
    places = (model, getattr(model, "patch_embed", None), getattr(model, "config", None))
    size = next(filter(None, map(image_size, places)), None)
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if size is None or first is None:
        got = f"None for {type(model).__name__}, whose input's size is not known"
        raise OptionError("input", got, "a tensor, a dict or a tuple that the model takes", "Pass input=.")
    weight = first.weight
    return torch.randn(batch, first.in_channels, *size, device=weight.device, dtype=weight.dtype)
