"""bfloat16: forward and training over bare products, and against float32, by length."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from polymix.measure import interleaved
from polymix.measure.floor import floor
from target_steps.common import Row, mixer, step, tokens

NAMES = ("pom", "qt", "poly_sa", "poly_nl", "padre-2")
LENGTHS = (196, 1024, 4096, 16384)


def bf16(given: argparse.Namespace) -> Iterator[Row]:
    """The forward over its floor, a training step over three floors, and how much faster both are than in float32."""
    for name in NAMES:
        for n in LENGTHS:
            calls: dict[Any, Callable[[], Any]] = {}
            for kind in (torch.bfloat16, torch.float32):
                module, x = mixer(name, n, kind), tokens(n, kind)
                calls["forward", kind] = torch.inference_mode()(partial(module, x))
                calls["step", kind] = step(mixer(name, n, kind).train(), tokens(n, kind).requires_grad_())
            calls["floor"] = floor(mixer(name, n).cost(n), dtype=torch.bfloat16)
            times = interleaved(calls, seconds=0.5, clock=given.clock)
            bare, detail = times["floor"].median, f"{given.threads} threads, "
            for what, floors, limit in (("forward", 1, 1.25), ("step", 3, 1.3)):
                ours, wide = (times[what, kind].median for kind in (torch.bfloat16, torch.float32))
                title = f"{name}, {what}, bfloat16, N = {n:,}"
                over = f"{1e3 * ours:.3f} ms over {floors} × {1e3 * bare:.3f}"
                yield Row("bf16", f"{title} / {floors} floors", ours / bare / floors, "≤", limit, detail + over)
                over = f"{1e3 * wide:.3f} ms over {1e3 * ours:.3f}"
                yield Row("bf16", f"float32 / {title}", wide / ours, "≥", 5, detail + over)
