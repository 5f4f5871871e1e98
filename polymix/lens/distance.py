"""The distance d_p between two maps of sequences, sampled (PoM, Eq. 10)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from polymix.errors import OptionError, ShapeError, check_number
from polymix.lens.probe import Probe, check_draws
from polymix.numbers import significant

_CELLS = 4


@dataclass(frozen=True)
class Distance:
    """d_p of two maps, from random inputs.

    Attributes:
        value: the distance. At p = ∞ it is the largest difference seen, which can only be too small.
        error: the standard error of `value` from the sampling; nan at p = ∞.
        p: of the norm.
        draws: how many inputs were tried.
    """

    value: float
    error: float
    p: float
    draws: int

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        about = "at least " if math.isinf(self.p) else ""
        spread = "" if math.isnan(self.error) else f" ± {significant(self.error, 1)}"
        return f"d_{self.p:g} = {about}{significant(self.value, 3)}{spread} ({self.draws:,} random inputs)"


def distance(
    f: Callable[..., Any], g: Callable[..., Any], *, p: float = 2.0, shape: tuple[int, ...] | None = None,
    low: float = 0.0, high: float = 1.0, draws: int = 4096, seed: int = 0, **call: Any,
) -> Distance:  # fmt: skip
    """How far apart two maps of sequences are: d_p(f, g) = (∫ ‖f(X) − g(X)‖_p^p dX)^(1/p) over a cube (PoM, Eq. 10).

    The integral is the cube's volume times the mean over uniform random inputs. The volume of [0, 1]^(N × C) is 1.

    Args:
        f, g: mixers, modules, or functions of one tensor, with outputs of one shape.
        p: at least 1; math.inf is the largest difference of two numbers.
        shape: the shape of an input. Mixers of this package do not need it.
        low, high: the sides of the cube.
        draws: number of inputs.
        seed: of the inputs.
        call: keyword arguments for every call of both.

    Raises:
        ShapeError: the outputs differ in shape. OptionError: an option is out of range, or an output is not finite.
    """
    check_draws("draws", draws, 2)
    if not (isinstance(p, float) and p == math.inf):
        check_number("p", p, 1.0, 1e9, "a number from 1 to 1e9, or math.inf", 2.0)
    for name, value in (("low", low), ("high", high)):
        check_number(name, value, -1e6, 1e6, "a number up to 1e6 in size", 0.5)
    if not low < high:
        raise OptionError("high", high, f"more than low={low:g}", "")
    one = Probe(f, None, shape, seed, _CELLS, dict(call), argument="f")
    other = Probe(g, None, one.shape, seed, _CELLS, dict(one.call), argument="g")
    if one.out_shape != other.out_shape:
        raise ShapeError("g", f"outputs {other.out_shape}", f"{one.out_shape}, as f's", "Compare maps of one shape.")
    one.check_points("draws", 3 * draws)
    x = low + (high - low) * torch.rand(draws, *one.shape, generator=one.generator, dtype=torch.float64)
    apart = (one.check_finite(one.values(x)) - other.check_finite(other.values(x))).abs()
    most = float(apart.max())
    if math.isinf(p) or most == 0:
        return Distance(most, math.nan if math.isinf(p) else 0.0, p, draws)
    sums = (apart / most).pow(p).sum(1)  # of at most 1, so that no power of a large p is infinite, nor all are zero
    scale = most * (high - low) ** (math.prod(one.shape) / p)
    mean = float(sums.mean())
    value = mean ** (1 / p)
    error = value / p / mean * float(sums.std()) / draws**0.5
    return Distance(scale * value, scale * error, p, draws)
