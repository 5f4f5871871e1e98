"""What the groups share: a row with its target, the mixers, their input, a training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import polymix

DIM, HEADS, LENGTH = 192, 3, 4096
SHAPES = ((196, 16), (LENGTH, 1))  # tokens and batch of a training step
IMAGES = ((8, 64), (14, 16), (64, 1))  # side and batch of a depthwise convolution
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The target speedups over attention, by type: padre-2 at each number of tokens, pom at LENGTH.
PADRE_GOALS = {"float32": {4096: 15, 16384: 55, 65536: 220}, "bfloat16": {4096: 30, 16384: 115, 65536: 450}}
POM_GOALS = {"float32": 7.5, "bfloat16": 20}


class Row(NamedTuple):
    """A measured value with its target: at most (≤) or at least (≥)."""

    group: str
    what: str
    value: float
    sign: str
    target: float
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.sign == "≤" else self.value >= self.target


def side(n: int) -> tuple[int, int]:
    return (math.isqrt(n), math.isqrt(n))


def mixer(name: str, n: int, dtype: torch.dtype = torch.float32, **options: Any) -> polymix.TokenMixer:
    specs: dict[str, tuple[str, dict[str, Any]]] = {
        "padre-2": ("padre", {"degree": 2, "grid": side(n)}), "padre-3": ("padre", {"degree": 3, "grid": side(n)}),
        "pom": ("pom", {}), "qt": ("qt", {"heads": HEADS}), "poly_nl": ("poly_nl", {}),
        "poly_sa": ("poly_sa", {"heads": HEADS, "grid": side(n)}), "softmax": ("softmax", {"heads": HEADS}),
    }  # fmt: skip
    kind, own = specs[name]
    return polymix.create_mixer(kind, DIM, dtype=dtype, **{**own, **options}).eval()


MIXERS = ("padre-2", "padre-3", "pom", "qt", "poly_sa", "poly_nl")


def tokens(n: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, n, DIM, dtype=dtype)


def step(module: torch.nn.Module, x: torch.Tensor, **call: Any) -> Callable[[], Any]:
    grad = torch.randn_like(module(x, **call))

    def run() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x, **call).backward(grad)

    return run
