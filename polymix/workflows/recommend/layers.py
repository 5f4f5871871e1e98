"""The attention layers of any PyTorch model, recognised by what they hold, and what each is called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert import attention_layers, convert
from polymix.convert.adapter import Host, adapter_for
from polymix.convert.drops import naming_drops
from polymix.convert.find import ATTENTION_FORMS, CONTEXTS, attention_modules, grids, head_count
from polymix.convert.masks import seen_through
from polymix.convert.tracing import arguments_of, call_of, copied_arguments, on_calls, same_tokens, tensors
from polymix.errors import CapabilityError, OptionError, PolymixError
from polymix.measure.shapes import Shape
from polymix.measure.timing import Call
from polymix.mixers import MixerConfig

_PREFIX = 8  # with more tokens than that before it, a grid is not the layer's


@dataclass(frozen=True)
class Layer:
    """The calls of one kind of attention layer at one shape. The first call stands for all."""

    names: tuple[str, ...]  # one a call
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: Shape
    host: nn.Module
    example: Any = None  # the host's input

    @property
    def places(self) -> tuple[str, ...]:
        """The layers as `polymix.convert` names them (it may replace a parent); empty if it knows none."""
        try:
            known = attention_layers(self.host)
        except OptionError:
            return ()
        held = (place for name in self.names for place in known if not place or f"{name}.".startswith(f"{place}."))
        return tuple(dict.fromkeys(held))

    def refused(self, mixers: Mapping[str, MixerConfig]) -> dict[str, str]:
        """For each label of a mixer that `polymix.convert` would not insert here: the reason."""
        reasons: dict[str, str] = {}
        for place in self.places[:1]:
            module = self.host.get_submodule(place)
            kind = adapter_for(module)
            example = self.example if kind is not None and kind.needs_call else None
            shown = kind is not None and kind.feature_map(module, Host(self.host, place)) is not None
            for label, config in mixers.items():
                try:
                    grid = self.shape.grid if shown else None
                    plan = {place: config}
                    naming_drops(partial(convert, self.host, plan, init="fresh", grid=grid, input=example)).undo()
                except CapabilityError as error:
                    reasons[label] = " ".join(str(error.got).split())
                except PolymixError as error:
                    reasons[label] = f"{error.argument.rpartition(': ')[2]} is {error.got}, not {error.allowed}"
        return reasons

    def call(self, training: bool) -> Call:
        """The same call of the layer alone."""
        for t in tensors((self.args, self.kwargs)) if training else ():
            if t.is_floating_point() and t.shape[-1] == self.shape.dim:  # tokens, not masks or angles
                t.requires_grad_()
        return call_of(self.module, self.args, self.kwargs, training)


def record(model: nn.Module, run: Call, ids: bool, example: Any = None) -> tuple[list[Layer], list[str]]:
    """The distinct attention layers of one `run` of the model, and notes on those that are left out.

    ids: the model reads token ids, so its tokens are a sequence.

    Raises:
        OptionError: the model has no attention. The message says what was looked for.
    """
    modules = dict(attention_modules(model))
    if not modules:
        got = f"{type(model).__name__}, which has no attention"
        raise OptionError("model", got, ATTENTION_FORMS, "Or pass shapes.")
    layers: dict[tuple[type, Shape], Layer] = {}
    left_out: dict[str, str] = {}
    its_grids = list(grids(model))

    def seen(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        try:
            shape = _located(shape_of_call(module, args, kwargs), its_grids, ids)
        except PolymixError as error:
            left_out[name] = f"{name} ({type(module).__name__}) is left out: {error.got}"
            return
        key = type(module), shape
        if key in layers:
            layers[key] = replace(layers[key], names=(*layers[key].names, name))
        else:
            layers[key] = Layer((name,), module, *copied_arguments(args, kwargs), shape, model, example)

    with on_calls(modules, seen):
        run()
    if not layers:
        got = "; ".join(left_out.values()) or f"no call of {', '.join(modules)}"
        raise OptionError("input", got, "an input with which the model runs its attention", "Or pass shapes.")
    return list(layers.values()), list(left_out.values())


def shape_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape:
    """What the layer is called with, apart from its grid."""
    arguments = arguments_of(module, args, kwargs)
    x = next((value for value in arguments.values() if isinstance(value, Tensor) and value.is_floating_point()), None)
    if x is None or x.ndim not in (2, 3) or (x.ndim == 2 and not isinstance(module, nn.MultiheadAttention)):
        got = "no tensor" if x is None else f"an input of shape {tuple(x.shape)}"
        raise OptionError("model", got, "layers that are given (batch, tokens, channels)", "")
    axis = 0 if x.ndim == 2 else int(getattr(module, "batch_first", True))
    tokens, batch = x.shape[axis], 1 if x.ndim == 2 else x.shape[1 - axis]
    context = next((arguments[name] for name in CONTEXTS if isinstance(arguments.get(name), Tensor)), x)
    cross = not same_tokens(context, x)
    if context.shape[-1] != x.shape[-1]:
        got = f"a context of {context.shape[-1]} channels for {x.shape[-1]}"
        raise OptionError("model", got, "one width for both", "")
    mask = seen_through(module, arguments, tokens, context.shape[axis])
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
    """With the model's grid, if one fits; text has one axis."""
    if ids or shape.causal:
        return replace(shape, grid=(shape.tokens,))
    prefixes = {grid: shape.tokens - torch.Size(grid).numel() for grid in grids}
    fits = [grid for grid, prefix in prefixes.items() if 0 <= prefix <= _PREFIX]
    return replace(shape, grid=min(fits, key=prefixes.__getitem__)) if fits else shape.placed()
