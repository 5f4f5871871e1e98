"""The floor of a whole model: its matrix products and convolutions, each alone and in its fastest way."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from polymix.measure import in_turn, once, repeated
from polymix.measure.clock import Clock
from polymix.measure.floor import floor
from polymix.mixers import TokenMixer
from polymix.structured.cost import Cost, Op

MAX_ROUNDS = 20


def least_seconds(calls: Mapping[Any, Callable[[], Any]], seconds: float, clock: Clock) -> dict[Any, float]:
    """The seconds of each call, the fastest of several rounds in turn: other work on the machine only adds to them.

    The rounds take so many seconds altogether, but there are two at least: the first packs weights and finds memory.
    """
    first = {name: once(call, clock=clock) for name, call in calls.items()}
    whole = sum(first.values())
    rounds = max(1, min(MAX_ROUNDS, int((seconds - whole) / whole)))
    return {name: min(first[name], timing.least) for name, timing in in_turn(calls, rounds, clock=clock).items()}


def products_of(model: nn.Module, inputs: dict[str, Any]) -> Counter[Op]:
    """The products and convolutions of a call, those of mixers by their cost, each with how often it occurs."""
    found: Counter[Op] = Counter()
    inside: list[nn.Module] = []

    def before(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mixer, TokenMixer)
        batch = len(args[0])
        for op in mixer.cost_ops(args[0].shape[1], kwargs.get("grid")):
            if op.kind == "depthwise":
                found[op] += batch
            else:  # the first number of a shape counts rows, heads or products, which a batch has more of
                found[replace(op, shape=(batch * op.shape[0], *op.shape[1:]))] += 1
        inside.append(mixer)

    def product(layer: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if inside:
            return
        if isinstance(layer, nn.Conv2d):  # patches: a product of each with all filters
            found[Op("linear", (output[:, 0].numel(), math.prod(layer.weight.shape[1:]), output.shape[1], 1))] += 1
        else:
            x = args[0]
            found[Op("linear", (x.numel() // x.shape[-1], x.shape[-1], output.shape[-1], 1))] += 1

    hooks = []
    for module in model.modules():
        if isinstance(module, TokenMixer):
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(lambda *_: inside.pop() and None))
        elif isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D":
            hooks.append(module.register_forward_hook(product))
    with torch.inference_mode():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return found


_known: dict[Op, float] = {}  # models share most of their products


def floor_of(ops: Counter[Op], clock: Clock) -> float:
    """Seconds of all products: each is run by PyTorch, in blocks, by our kernel or with packed weights."""
    for op in ops:
        if op not in _known:
            _known[op] = min(_least(way, clock) for way in (floor(Cost(0, (op,))), *_packed(op)))
    return sum(count * _known[op] for op, count in ops.items())


def _least(call: Callable[[], Any], clock: Clock) -> float:
    return repeated(call, seconds=0.15, most=15, warm_up=1, clock=clock).least


def _packed(op: Op) -> list[Callable[[], Any]]:
    if op.kind != "linear" or op.shape[3] > 1:
        return []
    rows, inside, outside, _ = op.shape
    x, weight = torch.randn(rows, inside), torch.ops.mkldnn._reorder_linear_weight(torch.randn(outside, inside))

    @torch.inference_mode()
    def run() -> Any:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")

    return [run]
