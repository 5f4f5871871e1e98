"""What a model has that building it does not give again; an error where it is another model altogether."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import path
from polymix.convert.model_recipes import FORMS
from polymix.convert.plain import is_plain
from polymix.errors import OptionError

_PASSING = {"training", "now"}  # of a run, not of the model


def differences(model: nn.Module, twin: nn.Module) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """What `model` has and its rebuilt `twin` has not: plain attributes by module, and buffers outside the state dict.

    Raises OptionError where the two are made of different modules, or have weights of different shapes.
    """
    parts, others = (dict(each.named_modules(remove_duplicate=False)) for each in (model, twin))
    _same({name: path(type(part)) for name, part in parts.items()},
          {name: path(type(part)) for name, part in others.items()})  # fmt: skip
    _same(_first_names(parts), _first_names(others))
    state, other = model.state_dict(keep_vars=True), twin.state_dict(keep_vars=True)
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
    rebuilt = dict(twin.named_buffers(remove_duplicate=False))
    buffers = {
        name: buffer.detach()
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name not in state and not _equal(buffer, rebuilt.get(name))
    }
    return attributes, buffers


def plain_attributes(part: nn.Module) -> dict[str, Any]:
    """Attributes that are plain values. Checkpointing hangs on more than a flag: who wants it turns it on."""
    return {
        key: value
        for key, value in vars(part).items()
        if _settable(part, key) and key not in _PASSING and "checkpointing" not in key and is_plain(value)
    }


def shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first key that differs, in words."""
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key):
            return f"{key} is {theirs.get(key, 'missing')} instead of {ours.get(key, 'missing')}"
    return None


def restore(model: nn.Module, attributes: dict[str, dict[str, Any]], buffers: dict[str, Tensor]) -> None:
    """Give a rebuilt model what `differences` found."""
    for name, values in attributes.items():
        part = model.get_submodule(name)
        if not all(_settable(part, key) for key in values):
            raise OptionError("attributes", f"{sorted(values)} of {name}", "plain attributes", "")
        vars(part).update(values)
    for name, buffer in buffers.items():
        above, _, key = name.rpartition(".")
        model.get_submodule(above).register_buffer(key, buffer, persistent=False)


def _first_names(parts: dict[str, nn.Module]) -> dict[str, str]:
    """Of each module: one that stands in several places has the first of its names in all."""
    first: dict[int, str] = {}
    return {name: f"one with {first.setdefault(id(part), name)!r}" for name, part in parts.items()}


def _settable(part: nn.Module, key: str) -> bool:
    return not key.startswith("_") and not callable(getattr(type(part), key, None))


def _callables(part: nn.Module) -> dict[str, str]:
    """Attributes that are functions or classes, such as activations, by name."""
    kinds = (FunctionType, BuiltinFunctionType, type)
    named = {key: value for key, value in vars(part).items() if isinstance(value, kinds) and not key.startswith("_")}
    return {key: f"{value.__module__}.{value.__qualname__}" for key, value in named.items()}


def _same(ours: dict[str, str], theirs: dict[str, str], where: str = "") -> None:
    found = difference(ours, theirs)
    if found:
        cure = f"Say how the host is built: host={FORMS}."
        raise OptionError(
            "host", f"a recipe by which {where and where + '.'}{found}", "one that builds this model", cure
        )


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype and torch.equal(a.cpu(), b)
