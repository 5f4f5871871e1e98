"""Training steps over three forward floors, and the backward of a depthwise convolution."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from polymix.measure import interleaved
from polymix.measure.floor import floor
from polymix.ops.dispatch import choose
from polymix.ops.padre import padre_step
from target_steps.common import DIM, IMAGES, MIXERS, SHAPES, Row, mixer, step, tokens


def training(_: argparse.Namespace) -> Iterator[Row]:
    """Forward and backward over three forward floors."""
    for n, batch in SHAPES:
        calls: dict[Any, Callable[[], Any]] = {}
        for name in MIXERS:
            module = mixer(name, n).train()
            calls[name, "step"] = step(module, tokens(n, batch=batch).requires_grad_())
            calls[name, "floor"] = floor(module.cost(n), batch=batch)
        times = interleaved(calls, seconds=1.5)
        for name in MIXERS:
            ours, bare = times[name, "step"].median, times[name, "floor"].median
            detail = f"{1e3 * ours:.2f} ms over 3 × {1e3 * bare:.2f}"
            yield Row("training", f"{name}, step / 3 floors, N = {n:,} × {batch}", ours / bare / 3, "≤", 1.5, detail)


def depthwise(_: argparse.Namespace) -> Iterator[Row]:
    """An 11×11 convolution with its backward over the forward alone, as PADRe's step makes it on this machine."""
    impl = choose("depthwise", "auto", (torch.zeros(1),), {"native": None})
    for size, batch in IMAGES:
        x = torch.randn(batch, size * size, DIM, requires_grad=True)
        weight = torch.randn(DIM, 1, 11, 11, requires_grad=True)
        grad = torch.randn_like(x)

        def both(x: Any = x, weight: Any = weight, grad: Any = grad, size: int = size) -> None:
            x.grad = weight.grad = None
            padre_step(x, weight, None, None, [size, size], False, 1, impl=impl).backward(grad)

        def alone(x: Any = x, weight: Any = weight, size: int = size) -> None:
            with torch.no_grad():
                padre_step(x, weight, None, None, [size, size], False, 1, impl=impl)

        times = interleaved({"both": both, "alone": alone}, seconds=1.5)
        ratio = times["both"].median / times["alone"].median
        detail = f"{1e3 * times['both'].median:.2f} ms over {1e3 * times['alone'].median:.2f}"
        what = f"depthwise 11×11, {impl}, forward + backward / forward, {size}² × {batch}"
        yield Row("depthwise", what, ratio, "≤", 3.5, detail)
