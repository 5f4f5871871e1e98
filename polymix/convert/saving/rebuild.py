"""Building a saved model again, and finding what of the original the rebuilt one lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polymix.convert import model_recipes as recipes
from polymix.convert.adapter import Adapter, Host, adapter_for, path
from polymix.convert.insert import Inserted, attach
from polymix.convert.model_recipes import decode, encode, is_plain
from polymix.convert.report import ConversionReport
from polymix.convert.spec import AttentionSpec
from polymix.errors import OptionError, UnknownNameError
from polymix.limits import Unfilled
from polymix.mixers import TokenMixer
from polymix.mixers.spec import mixer_config

A = TypeVar("A", bound=Adapter)
_RUN_ATTRIBUTES = {"training", "latest_grid"}  # they say nothing of the model


def layers(model: nn.Module) -> dict[str, Any]:
    """Every adapter in the model by name: its class, its mixer's config and its own attributes."""
    return {
        name: {
            "adapter": type(part).__qualname__, "dim": part.mixer.dim, "mixer": part.mixer.config.to_dict(),
            "attributes": {key: encode(value) for key, value in plain_attributes(part).items()},
        }
        for name, part in model.named_modules()
        if isinstance(part, Adapter)
    }  # fmt: skip


def rebuild(content: dict[str, Any], folder: Path, trust: bool) -> nn.Module:
    """Build the converted model of a config; its parameters are not initialised."""
    with _same_everywhere():
        model = recipes.build(content["host"], folder, trust)
        inserted = {name: layer for name, layer in content["layers"].items() if layer["adapter"] == Inserted.__name__}
        swapped = {name: layer for name, layer in content["layers"].items() if name not in inserted}
        adapters = {name: _adapter(model, name, layer) for name, layer in swapped.items()}
        converted = ConversionReport(model, adapters, (), ()).model
        for name, layer in inserted.items():
            _insert(converted, name, layer)
        vars(converted)[recipes.RECIPE_ATTRIBUTE] = vars(model).get(recipes.RECIPE_ATTRIBUTE)
        return converted


@contextmanager
def _same_everywhere() -> Iterator[None]:
    """Build on the CPU and in float32, without drawing from the caller's random numbers."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), Unfilled():
            yield
    finally:
        torch.set_default_dtype(dtype)


def _adapter(model: nn.Module, name: str, saved: dict[str, Any]) -> Adapter:
    """The adapter of layer `name`, as it was saved."""
    module = model.get_submodule(name)
    registered = adapter_for(module)
    forms = {} if registered is None else {kind.__qualname__: kind for kind in registered.forms()}
    kind = forms.get(saved["adapter"])
    if kind is None:
        here = " or ".join(forms) or "no adapter"
        got = f"{name}, a {type(module).__name__} with {here}; it was saved with {saved['adapter']}"
        cure = "First import the code that registers the adapter (polymix.register_adapter)."
        raise OptionError("host", got, "the same adapter", cure)
    attributes = decode(saved["attributes"])
    attention = kind.describe(module, Host(model, name, attributes["windows"]))
    attention = replace(
        attention, grid=attributes["grid"], prefix=attributes["prefix"], causal=bool(attributes["causal"])
    )
    return _with_attributes(kind(_mixer(name, saved), attention, module), attributes)


def _insert(model: nn.Module, name: str, saved: dict[str, Any]) -> None:
    """Put an inserted block into the model again."""
    at, _, key = name.rpartition(".")
    attributes, mixer = decode(saved["attributes"]), _mixer(name, saved)
    place = AttentionSpec(dim=mixer.dim, heads=1, grid=attributes["grid"], prefix=attributes["prefix"])
    block = Inserted(mixer, place, attributes.get("residual", True))
    attach(model.get_submodule(at), key.removeprefix("inserted_"), _with_attributes(block, attributes))


def _mixer(name: str, saved: dict[str, Any]) -> TokenMixer:
    try:
        return mixer_config(saved["mixer"]).build(saved["dim"])
    except UnknownNameError as error:
        cure = "First import the code that registers the mixer (polymix.register)."
        raise UnknownNameError(f"mixer of {name}", error.got, error.allowed, cure) from error


def _with_attributes(adapter: A, attributes: dict[str, Any]) -> A:
    vars(adapter).update(attributes)
    adapter.settle()
    return adapter


# Comparing the model with the rebuilt one


def differences(model: nn.Module, rebuilt: nn.Module) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """What `model` has and `rebuilt` lacks: plain attributes by module, and buffers outside the state dict.

    Raises OptionError where the two consist of different modules, or have weights of different shapes.
    """
    parts, others = (dict(each.named_modules(remove_duplicate=False)) for each in (model, rebuilt))
    _same({name: path(type(part)) for name, part in parts.items()},
          {name: path(type(part)) for name, part in others.items()})  # fmt: skip
    _same(_first_names(parts), _first_names(others))
    state, other = model.state_dict(keep_vars=True), rebuilt.state_dict(keep_vars=True)
    _same({key: shape(value) for key, value in state.items()}, {key: shape(value) for key, value in other.items()})
    attributes = {}
    for name, part in parts.items():
        theirs, called = plain_attributes(others[name]), _callables(part)
        _same(called, {key: value for key, value in _callables(others[name]).items() if key in called}, name)
        changed = {
            key: value for key, value in plain_attributes(part).items() if repr(theirs.get(key, ...)) != repr(value)
        }
        if changed:
            attributes[name] = changed
    others_buffers = dict(rebuilt.named_buffers(remove_duplicate=False))
    buffers = {
        name: buffer.detach()
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name not in state and not _equal(buffer, others_buffers.get(name))
    }
    return attributes, buffers


def plain_attributes(part: nn.Module) -> dict[str, Any]:
    """A module's attributes that JSON can hold. Gradient checkpointing is left out: it needs more than a flag."""
    return {
        key: value
        for key, value in vars(part).items()
        if _settable(part, key) and key not in _RUN_ATTRIBUTES and "checkpointing" not in key and is_plain(value)
    }


def shape(value: Any) -> str:
    """A tensor's shape, or the type of anything else."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first key with different values, in words; None if there is none."""
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key):
            return f"{key} is {theirs.get(key, 'missing')} instead of {ours.get(key, 'missing')}"
    return None


def restore(model: nn.Module, attributes: dict[str, dict[str, Any]], buffers: dict[str, Tensor]) -> None:
    """Give a rebuilt model the attributes and buffers that `differences` found."""
    for name, values in attributes.items():
        part = model.get_submodule(name)
        if not all(_settable(part, key) for key in values):
            raise OptionError("attributes", f"{sorted(values)} of {name}", "plain attributes", "")
        vars(part).update(values)
    for name, buffer in buffers.items():
        above, _, key = name.rpartition(".")
        model.get_submodule(above).register_buffer(key, buffer, persistent=False)


def _first_names(parts: dict[str, nn.Module]) -> dict[str, str]:
    """Each module's first name, by which a module in several places is recognised."""
    first: dict[int, str] = {}
    return {name: f"one with {first.setdefault(id(part), name)!r}" for name, part in parts.items()}


def _settable(part: nn.Module, key: str) -> bool:
    return not key.startswith("_") and not callable(getattr(type(part), key, None))


def _callables(part: nn.Module) -> dict[str, str]:
    """The names of attributes that are functions or classes, such as activations."""
    kinds = (FunctionType, BuiltinFunctionType, type)
    named = {key: value for key, value in vars(part).items() if isinstance(value, kinds) and not key.startswith("_")}
    return {key: f"{value.__module__}.{value.__qualname__}" for key, value in named.items()}


def _same(ours: dict[str, str], theirs: dict[str, str], where: str = "") -> None:
    mismatch = difference(ours, theirs)
    if mismatch:
        cure = f"Say how the host is built: host={recipes.FORMS}."
        raise OptionError(
            "host", f"a recipe by which {where and where + '.'}{mismatch}", "one that builds this model", cure
        )


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype and torch.equal(a.cpu(), b)
