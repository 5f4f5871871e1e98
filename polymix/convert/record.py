"""What each attention layer of a model is called with in one run, and what it answers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, adapter_for
from polymix.convert.attention import Attention
from polymix.convert.find import CONTEXTS
from polymix.convert.masks import Seen, seen_through
from polymix.convert.replay import kept, mode, run, tensors


@dataclass(frozen=True)
class Record:
    """One call of a layer: copies of its arguments, its output, and the grid of the feature map that it came from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor  # of the part of the layer that a mixer stands for
    grid: tuple[int, ...] | None

    def again(self, adapter: Adapter) -> Tensor:
        """What an adapter, or its mixer where that stands for a part of the layer, answers to the same call."""
        found: dict[str, Any] = {}
        hook = (adapter.mixer if adapter.part else adapter).register_forward_hook(partial(_note, found, ""))
        adapter.now, before = self.grid, adapter.now
        try:
            adapter(*self.args, **self.kwargs)
        finally:
            hook.remove()
            adapter.now = before
        return tensors(found[""])[0]


def record(model: nn.Module, layers: Mapping[str, nn.Module], given: Any) -> dict[str, Record]:
    """The first call of each layer in a run of the model, without gradients and in evaluation, on `given`: a tensor,
    a tuple of arguments, or a dict of keyword arguments. Layers that the run does not call are missing."""
    found: dict[str, Record] = {}
    outputs: dict[str, Any] = {}
    grids: dict[str, tuple[int, ...]] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if name not in found:
            (output, *_), _ = kept(tuple(tensors(outputs[name])[:1]), {})
            found[name] = Record(*kept(args, kwargs), output, grids.get(name))

    def look(name: str, kind: type[Adapter], module: nn.Module, args: Any, output: Any) -> None:
        grids[name] = kind.grid_of(module, args, output)

    with ExitStack() as stack, mode(model, False), without_fast_path(), torch.no_grad():
        for name, module in layers.items():
            kind = adapter_for(module)
            assert kind is not None
            source, part = kind.feature_map(module, Host(model, name)), module.get_submodule(kind.part)
            if source is not None:
                stack.callback(source.register_forward_hook(partial(look, name, kind)).remove)
            stack.callback(part.register_forward_hook(partial(_note, outputs, name)).remove)
            stack.callback(module.register_forward_hook(partial(keep, name), with_kwargs=True).remove)
        run(model, given)
    return found


def _note(store: dict[str, Any], name: str, module: nn.Module, args: Any, output: Any) -> None:
    store[name] = output


@contextmanager
def without_fast_path() -> Iterator[None]:
    """torch.nn's transformer layers may compute attention without calling the module that holds it."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def asked(attention: Attention, module: nn.Module, call: Record) -> Attention:
    """The attention with what a call shows that its host asks beside: an order, a context, masks."""
    given = _given(module, call)
    x = _tokens(given)
    axis = _axis(module, x)
    context = next((given[name] for name in CONTEXTS if isinstance(given.get(name), Tensor)), x)
    cross = context.shape != x.shape or not torch.equal(context, x)
    kind = adapter_for(module)
    masked = kind is None or kind.masked
    seen = seen_through(module, given, x.shape[axis], context.shape[axis]) if masked else Seen(False, None)
    kinds = {seen.kind} if seen.kind else set()
    return replace(
        attention, causal=attention.causal or (seen.causal and not cross), cross=attention.cross or cross,
        masks=attention.masks | kinds, grid=attention.grid or call.grid,
    )  # fmt: skip


def length(module: nn.Module, call: Record) -> int | None:
    """How many tokens a call mixes; None where they are a feature map."""
    x = _tokens(_given(module, call))
    return x.shape[_axis(module, x)] if x.ndim < 4 else None


def _given(module: nn.Module, call: Record) -> dict[str, Any]:
    """The arguments by name."""
    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs).arguments
    return {**bound, **bound.get("kwargs", {})}


def _tokens(given: Mapping[str, Any]) -> Tensor:
    return next(t for t in given.values() if isinstance(t, Tensor) and t.is_floating_point())


def _axis(module: nn.Module, x: Tensor) -> int:
    return 0 if x.ndim == 2 else int(getattr(module, "batch_first", True))
