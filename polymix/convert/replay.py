"""A call of a module that can be made again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

Call = Callable[[], Any]


def kept(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the arguments, one a tensor however often it comes, without a cache that would grow with each call."""
    copies: dict[int, Tensor] = {}
    fresh = {key: None if key.startswith("past_key") else value for key, value in kwargs.items()}
    with torch.inference_mode(False):  # else they could not take part in a training step
        return tree_map_only(Tensor, lambda t: copies.setdefault(id(t), t.detach().clone()), (args, fresh))


def call_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Call:
    """A call of `module` without gradients; `training`: forward and backward, and no gradient is kept."""
    if not training:

        def forward() -> Any:
            with torch.inference_mode():
                return module(*args, **kwargs)

        return forward
    inputs = [t for t in (*module.parameters(), *tensors((args, kwargs))) if t.requires_grad]

    def both() -> list[Tensor]:
        outputs = [t for t in tensors(module(*args, **kwargs)) if t.requires_grad]
        ones = [torch.ones_like(t) for t in outputs]
        return [*outputs, *(g for g in torch.autograd.grad(outputs, inputs, ones, allow_unused=True) if g is not None)]

    return both


def run(model: nn.Module, given: Any) -> Any:
    """The model on `given`: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(given, Mapping):
        return model(**given)
    return model(*(given if isinstance(given, (tuple, list)) else (given,)))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """The module in training or evaluation, each part as it was afterwards."""
    before = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for part, was in before.items():
            part.training = was
