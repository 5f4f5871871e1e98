"""A converted model built again from what was written down of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from polymix.convert import model_recipes as hosts
from polymix.convert.adapter import Adapter, Host, adapter_for
from polymix.convert.attention import Attention
from polymix.convert.differences import plain_attributes
from polymix.convert.insert import Inserted, attach
from polymix.convert.plain import decode, encode
from polymix.convert.report import ConversionReport
from polymix.errors import OptionError, UnknownNameError
from polymix.mixers import TokenMixer
from polymix.mixers.spec import mixer_config

A = TypeVar("A", bound=Adapter)
_FILLS = {"normal_", "uniform_", "fill_", "zero_", "copy_", "mul_", "add_", "sub_", "div_", "clamp_", "erfinv_"}


class Unfilled(TorchFunctionMode):
    """Parameters stay as memory gives them: none is drawn, or even touched, that saved weights will replace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        fills = getattr(func, "__module__", None) == "torch.nn.init" or getattr(func, "__name__", None) in _FILLS
        return target if fills and isinstance(target, nn.Parameter) else func(*args, **kwargs)


def layers(model: nn.Module) -> dict[str, Any]:
    """The plan, read off the model: each adapter by name, with its mixer and what else it was told."""
    return {
        name: {
            "adapter": type(part).__qualname__, "dim": part.mixer.dim, "mixer": part.mixer.config.to_dict(),
            "attributes": {key: encode(value) for key, value in plain_attributes(part).items()},
        }
        for name, part in model.named_modules()
        if isinstance(part, Adapter)
    }  # fmt: skip


def rebuild(content: dict[str, Any], folder: Path, trust: bool) -> nn.Module:
    """The model of a config, converted as it was; what its parameters hold is anything."""
    with _anywhere():
        model = hosts.build(content["host"], folder, trust)
        inserted = {name: layer for name, layer in content["layers"].items() if layer["adapter"] == Inserted.__name__}
        swapped = {name: layer for name, layer in content["layers"].items() if name not in inserted}
        adapters = {name: _adapter(model, name, layer) for name, layer in swapped.items()}
        converted = ConversionReport(model, adapters, (), ()).model
        for name, layer in inserted.items():
            _insert(converted, name, layer)
        vars(converted)[hosts.REMEMBERED] = vars(model).get(hosts.REMEMBERED)
        return converted


@contextmanager
def _anywhere() -> Iterator[None]:
    """The same for whoever builds: on the CPU, in float32, and no random number is taken from the caller's."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), Unfilled():
            yield
    finally:
        torch.set_default_dtype(dtype)


def _adapter(model: nn.Module, name: str, said: dict[str, Any]) -> Adapter:
    module = model.get_submodule(name)
    kind = adapter_for(module)
    if kind is None or kind.__qualname__ != said["adapter"]:
        here = kind.__qualname__ if kind else "no adapter"
        got = f"{name}, which {said['adapter']} served, and is a {type(module).__name__} for {here} here"
        cure = "Import what registers the adapter (polymix.register_adapter) first."
        raise OptionError("host", got, "the same adapter", cure)
    attributes = decode(said["attributes"])
    attention = kind.describe(module, Host(model, name, attributes["windows"]))
    attention = replace(
        attention, grid=attributes["grid"], prefix=attributes["prefix"], causal=bool(attributes["causal"])
    )
    return _told(kind(_mixer(name, said), attention, module), attributes)


def _insert(model: nn.Module, name: str, said: dict[str, Any]) -> None:
    at, _, key = name.rpartition(".")
    attributes, mixer = decode(said["attributes"]), _mixer(name, said)
    place = Attention(dim=mixer.dim, heads=1, grid=attributes["grid"], prefix=attributes["prefix"])
    attach(model.get_submodule(at), key.removeprefix("inserted_"), _told(Inserted(mixer, place), attributes))


def _mixer(name: str, said: dict[str, Any]) -> TokenMixer:
    try:
        return mixer_config(said["mixer"]).build(said["dim"])
    except UnknownNameError as error:
        cure = "Import what registers the mixer (polymix.register) first."
        raise UnknownNameError(f"mixer of {name}", error.got, error.allowed, cure) from error


def _told(adapter: A, attributes: dict[str, Any]) -> A:
    vars(adapter).update(attributes)
    return adapter
