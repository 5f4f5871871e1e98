"""Where `polymix.insert` puts a mixer: the module, what passes there, and what a mixer must be to take it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Host
from polymix.convert.attention import Attention
from polymix.convert.record import without_fast_path
from polymix.convert.replay import mode, run, tensors
from polymix.errors import OptionError, ShapeError, nearest_first
from polymix.mixers import MixerConfig
from polymix.mixers.heads import head_count

KEY = "inserted_{}"  # of the block, among the children of the module that it stands before or after
_CHANNELS = ("in_channels", "in_features", "num_features", "embed_dim")


def settle(model: nn.Module, at: str, where: str) -> str:
    """The name of the module itself, which containers hand down to what they hold."""
    names = dict(model.named_modules(remove_duplicate=False))
    if at not in names:
        known = ", ".join(nearest_first(at, filter(None, names))[:8])
        raise OptionError("at", f"{at!r}, which names no module", f"{known} …", "The nearest stand first.")
    module = names[at]
    while isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):  # what they hold, they may run
        inside = list(module._modules)
        if type(module).forward is not nn.Sequential.forward or not inside:
            allowed = ", ".join(f"{at}.{key}" for key in inside) or "a module that runs"
            raise OptionError("at", f"{at!r}, a {type(module).__name__}", allowed, "Name a module inside it.")
        key = inside[0 if where == "before" else -1]
        at, module = f"{at}.{key}" if at else key, module.get_submodule(key)
    if hasattr(module, KEY.format(where)):
        raise OptionError("at", f"{at!r}, which has a mixer {where} it already", "another place", "Undo that first.")
    return at


def given(model: nn.Module, module: nn.Module, where: str, inputs: Any) -> Tensor:
    """What a mixer would be called with in one run of the model."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.extend(tensors((args, kwargs) if where == "before" else output)[:1])

    hook = module.register_forward_hook(note, with_kwargs=True)
    try:
        with mode(model, False), without_fast_path(), torch.no_grad():
            run(model, inputs)
    finally:
        hook.remove()
    if not found:
        raise OptionError("input", "a run without a call of it", "one that calls it with a tensor", "Pass another.")
    return found[0]


def asked(config: MixerConfig, host: Host, module: nn.Module, where: str, x: Tensor | None) -> Attention:
    """The place that the mixer is to fill."""
    channels = _channels(module) if where == "before" else None
    if x is None:
        if channels is None or config.needs_grid:
            got = "None, and the model does not say " + ("the channels" if channels is None else "the grid")
            raise OptionError("input", got, "a tensor, a tuple or a dict that the model takes", "Pass input=.")
        return Attention(dim=channels, heads=head_count(None, channels))
    found = x.shape[1] if x.ndim == 4 else x.shape[-1]
    if x.ndim not in (3, 4) or found != (channels or found):
        got = f"{tuple(x.shape)}" + (f" for {channels} channels" if channels else "")
        raise ShapeError("x", got, "a feature map (B, C, H, W) or tokens (B, N, C)", "Choose another module.")
    grid, prefix = (tuple(x.shape[2:]), 0) if x.ndim == 4 else (host.grid(), host.prefix())
    if x.ndim == 3 and (grid is None or math.prod(grid) + prefix != x.shape[1]):
        grid, prefix = (x.shape[1],), 0
    return Attention(dim=found, heads=head_count(None, found), grid=grid, prefix=prefix)


def _channels(module: nn.Module) -> int | None:
    """What the first part of a module that says how many channels it takes."""
    for part in module.modules():
        said = vars(part)
        sizes = [said.get(name) for name in _CHANNELS] + list(said.get("normalized_shape", ()))
        found = [channels for channels in sizes if type(channels) is int]
        if found:
            return found[-1]
    return None
