"""Checks of a model that is to be converted, described or changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from polymix.errors import OptionError, one_line

M = TypeVar("M", bound=nn.Module)


def check_module(model: Any, argument: str = "model") -> None:
    """Raise OptionError unless `model` is a module whose layers can be read and replaced.

    Layers of a scripted module are not Python's, those of lazy layers do not exist yet, and FSDP keeps parts of the
    weights in this process alone.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(argument, type(model).__name__, "a torch.nn.Module", "Pass the model itself.")
    for name, module in model.named_modules():
        kind, where = type(module).__name__, f" at {name}" if name else ""
        if isinstance(module, torch.jit.ScriptModule):
            raise OptionError(argument, f"a {kind}{where}", "a model in Python", "Pass the model before scripting.")
        if kind == "FullyShardedDataParallel":
            cure = "Convert the model first, and wrap it then; or unwrap it: model.module."
            raise OptionError(argument, f"a {kind}{where}", "a model with whole weights", cure)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            got, cure = f"a model whose {name} is not initialised", "Run the model on an input first."
            raise OptionError(argument, got, "a model with weights", cure)
        if type(tensor).__name__ == "DTensor":
            got, cure = f"a model whose {name} is a DTensor", "Convert the model first, and shard it then."
            raise OptionError(argument, got, "a model with whole weights", cure)


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Keep parametrizations of weights from changing when they are read, as spectral_norm does in training."""
    lists = [part for part in model.modules() if isinstance(part, ParametrizationList)]
    before = {part: part.training for whole in lists for part in whole.modules()}
    for part in before:
        part.training = False
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training


def copied(model: M, argument: str) -> M:
    """A copy of a model. Raises OptionError where one of its parts cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever a tensor subclass, a wrapper, or a tensor inside a graph raises
        got = f"a {type(model).__name__} that cannot be copied ({one_line(error)[:200]})"
        raise OptionError(argument, got, "a module that copy.deepcopy can copy", "Change it in place.") from error
