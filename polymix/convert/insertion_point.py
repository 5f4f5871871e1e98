"""Where `polymix.insert` adds a mixer: the module, the tensor that passes there, and what the mixer must support."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Host
from polymix.convert.spec import AttentionSpec
from polymix.convert.tracing import mode, on_calls, run, tensors
from polymix.errors import OptionError, ShapeError, nearest_first
from polymix.mixers import MixerConfig
from polymix.mixers.heads import head_count

KEY = "inserted_{}"  # the block's name in its module: "inserted_before" or "inserted_after"
_CHANNELS = ("in_channels", "in_features", "num_features", "embed_dim")


def resolve(model: nn.Module, at: str, where: str) -> str:
    """The name of the module to hook: `at` itself, or the first or last module of a container."""
    names = dict(model.named_modules(remove_duplicate=False))
    if at not in names:
        nearest = ", ".join(nearest_first(at, filter(None, names))[:8])
        raise OptionError("at", f"{at!r}, which is no module's name", f"{nearest} …", "The closest names come first.")
    module = names[at]
    while isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):  # a container may not run itself
        inside = list(module._modules)
        if type(module).forward is not nn.Sequential.forward or not inside:
            allowed = ", ".join(f"{at}.{key}" for key in inside) or "a module with a forward"
            raise OptionError("at", f"{at!r}, a {type(module).__name__}", allowed, "Name a module inside it.")
        key = inside[0 if where == "before" else -1]
        at, module = f"{at}.{key}" if at else key, module.get_submodule(key)
    if type(module).__name__ == "OptimizedModule":  # of torch.compile: its hooks are those of the module inside
        raise OptionError("at", f"{at!r}, which is compiled", "a module before torch.compile", "Insert, then compile.")
    if hasattr(module, KEY.format(where)):
        raise OptionError(
            "at", f"{at!r}, which has a mixer {where} it already", "another module", "Undo that insertion first."
        )
    return at


def tensor_at(model: nn.Module, module: nn.Module, where: str, inputs: Any) -> Tensor:
    """The tensor that passes before or after the module when the model runs on `inputs`."""
    inputs_seen: list[Tensor] = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs_seen.extend(tensors((args, kwargs) if where == "before" else output)[:1])

    with mode(model, False), on_calls({"": module}, note), torch.no_grad():
        run(model, inputs)
    if not inputs_seen:
        raise OptionError(
            "input", "an input with which the module is not called", "one with which it is called with a tensor", ""
        )
    return inputs_seen[0]


def describe(config: MixerConfig, host: Host, module: nn.Module, where: str, x: Tensor | None) -> AttentionSpec:
    """The channels, grid and prefix tokens at the insertion point."""
    channels = _channels(module) if where == "before" else None
    if x is None:
        if channels is None or config.needs_grid:
            got = "None, and the model does not state " + ("the channels" if channels is None else "the grid")
            raise OptionError("input", got, "an input of the model: a tensor, a tuple or a dict", "Pass input=.")
        return AttentionSpec(dim=channels, heads=head_count(None, channels))
    width = x.shape[1] if x.ndim == 4 else x.shape[-1]
    if x.ndim not in (3, 4) or width != (channels or width):
        got = f"{tuple(x.shape)}" + (f" for {channels} channels" if channels else "")
        raise ShapeError("x", got, "a feature map (B, C, H, W) or tokens (B, N, C)", "Choose another module.")
    grid, prefix = (tuple(x.shape[2:]), 0) if x.ndim == 4 else (host.grid(), host.prefix())
    if x.ndim == 3 and (grid is None or math.prod(grid) + prefix != x.shape[1]):
        grid, prefix = (x.shape[1],), 0
    return AttentionSpec(dim=width, heads=head_count(None, width), grid=grid, prefix=prefix)


def _channels(module: nn.Module) -> int | None:
    """The number of input channels, from the first part of the module that states it; None if no part does."""
    for part in module.modules():
        stated = vars(part)
        sizes = [stated.get(name) for name in _CHANNELS] + list(stated.get("normalized_shape", ()))
        counts = [channels for channels in sizes if type(channels) is int]
        if counts:
            return counts[-1]
    return None
