"""The dense weights W^[d] of a polynomial module, read off its derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polymix.errors import OptionError, ShapeError, check_int, shown
from polymix.lens.degree import degree
from polymix.lens.interactions import Count
from polymix.lens.probe import Probe, as_tokens
from polymix.mixers import TokenMixer
from polymix.mixers.checks import check_dense

_CELLS = 4
_MAX_WEIGHTS = 1 << 22
_NOISE = 1e-11  # relative to the largest weight; smaller ones are rounding


@dataclass(frozen=True, eq=False)
class WeightTensor:
    """W^[d] of one order d: y_(a,b) = Σ w_(a,b,c,d,e,f,…) x_(c,d) x_(e,f) … is the part of that order (Poly-NL, Eq. 1).

    The order of the factors does not change a product, so many tensors W^[d] are the same function. This is the one
    that is symmetric in its factors: the mean of any other over all orders of its factors.

    Attributes:
        order: d, the number of factors.
        weights: (N', C', N, C, N, C, …) with 2 (d + 1) axes: the output's token and channel, then each factor's.
    """

    order: int
    weights: Tensor

    def __post_init__(self) -> None:
        check_int("order", self.order, 0)
        weights, axes = self.weights, 2 * (self.order + 1)
        allowed = f"finite real numbers (N', C', N, C, …) with {axes} axes, of equal factors, for order {self.order}"
        if not isinstance(weights, Tensor) or weights.is_meta or not weights.is_floating_point():
            got = f"a tensor of {weights.dtype} on {weights.device}" if isinstance(weights, Tensor) else shown(weights)
            raise ShapeError("weights", got, allowed, "")
        check_dense("weights", weights, ShapeError)
        factors = {tuple(weights.shape[axis : axis + 2]) for axis in range(2, weights.ndim, 2)}
        if weights.ndim != axes or weights.numel() == 0 or len(factors) > 1:
            raise ShapeError("weights", tuple(weights.shape), allowed, "")
        if not weights.isfinite().all():
            raise OptionError("weights", "numbers that are not finite", allowed, "")

    def __call__(self, x: Tensor) -> Tensor:
        """The sum Σ W^[d] ∏ x, (N', C'), for tokens x (N, C)."""
        check_factors(self.weights.shape, x, "(N, C)")
        return contract(self.weights, x[None])[0]

    @cached_property
    def mask(self) -> Tensor:
        """Which weights are not zero."""
        return self.weights.abs() > _NOISE * self.weights.abs().max()

    @cached_property
    def sparsity(self) -> Count:
        """How many weights are not zero, of all: (N C)^(d + 1) where output and input have the same shape."""
        return Count(int(self.mask.sum()), self.mask.numel())

    @cached_property
    def positions(self) -> tuple[frozenset[tuple[int, ...]], ...]:
        """For each output token, the sorted tuples of the tokens whose products reach it."""
        reach = self.mask.any(1)
        for axis in range(self.order):  # the channels of each factor, which the axis before has left one earlier
            reach = reach.any(axis + 2)
        return tuple(frozenset(tuple(sorted(row)) for row in token.nonzero().tolist()) for token in reach)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of W^[d] unfolded along each axis, which are the sizes of its smallest Tucker core."""
        unfolded = (self.weights.movedim(axis, 0).flatten(1) for axis in range(self.weights.ndim))
        return tuple(int(torch.linalg.matrix_rank(part, rtol=1e-9)) for part in unfolded)

    @cached_property
    def distinct(self) -> int:
        """How many different weights there are besides zero: fewer than there are weights where they are shared."""
        values = self.weights[self.mask].sort().values
        return 0 if not len(values) else 1 + int((values.diff() > 2 * _NOISE * values.abs().max()).sum())

    @cached_property
    def symmetries(self) -> dict[str, bool]:
        """Which renumberings leave W^[d] as it is: any of the "tokens" or "channels", or cyclic "shifts" of tokens."""
        n, c = self.weights.shape[-2:] if self.order else self.weights.shape
        swaps, turn = [_swapped(n, i) for i in range(n - 1)], [[*range(1, n), 0]]
        return {
            "tokens": all(self._keeps(0, order) for order in swaps),
            "shifts": all(self._keeps(0, order) for order in turn),
            "channels": all(self._keeps(1, _swapped(c, i)) for i in range(c - 1)),
        }

    def _keeps(self, first: int, order: list[int]) -> bool:
        moved, places = self.weights, torch.tensor(order)
        for axis in range(first, self.weights.ndim, 2):
            if self.weights.shape[axis] != len(order):
                return False
            moved = moved.index_select(axis, places)
        return bool(((moved - self.weights).abs() <= _NOISE * self.weights.abs().max()).all())

    def __str__(self) -> str:
        kept = [name for name, holds in self.symmetries.items() if holds]
        return "\n".join((
            f"W^[{self.order}], {' × '.join(map(str, self.weights.shape))}",
            f"  not zero: {self.sparsity}, {self.distinct:,} of them distinct",
            f"  rank of each axis: {', '.join(map(str, self.ranks))}",
            f"  unchanged when renumbered: {', '.join(kept) or 'nothing'}",
        ))  # fmt: skip


def check_factors(shape: Sequence[int], x: Any, axes: str) -> None:
    """Raise ShapeError unless x has the tokens and channels of the factors of weights of such a shape."""
    right = isinstance(x, Tensor) and x.ndim == axes.count(",") + 1
    if not right or (len(shape) > 2 and tuple(x.shape[-2:]) != tuple(shape[-2:])):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        where = f" with N={shape[-2]}, C={shape[-1]}" if len(shape) > 2 else ""
        raise ShapeError("x", got, f"tokens {axes}{where}", "Weights are for one number of tokens.")


def contract(weights: Tensor, x: Tensor) -> Tensor:
    """Σ W^[d] ∏ x, (B, N', C'), for dense weights and tokens x (B, N, C)."""
    y = weights.expand(len(x), *weights.shape)
    for _ in range(weights.ndim // 2 - 1):
        y = torch.einsum("z...nc,znc->z...", y, x)
    return y


def _swapped(size: int, i: int) -> list[int]:
    order = list(range(size))
    order[i], order[i + 1] = order[i + 1], order[i]
    return order


def tensor(
    module: Callable[..., Any], order: int, *, tokens: int | None = None, shape: tuple[int, ...] | None = None,
    seed: int = 0, **call: Any,
) -> WeightTensor:  # fmt: skip
    """Read the weights W^[order] of a polynomial module off its derivatives at zero: W^[d] = ∂^d f(0) / d!.

    Args:
        module: a mixer, any module, or a function of one tensor. It must be a polynomial: `degree` is asked first.
        order: number of factors of a product, 0 to 8; 0 is the constant term.
        tokens: N, for a mixer. None: 4, or the mixer's grid.
        shape: the shape of the input, (1, N, C), (N, C) or (N,), instead of `tokens`. Other modules need it.
        seed: of the inputs on which the degree is measured.
        call: keyword arguments for every call of the module.

    Raises:
        OptionError: the module is not a polynomial, or has no derivatives. ShapeError: W^[order] is too large.
    """
    check_int("order", order, 0, 8)
    if tokens is not None:
        check_int("tokens", tokens, 1)
        if shape is not None or not isinstance(module, TokenMixer):
            got = f"{tokens} with {'shape=' if shape is not None else f'a {type(module).__name__}, which is no mixer'}"
            raise OptionError("tokens", got, "the number of tokens of a mixer", "Pass shape=(1, N, C) alone.")
        shape = (1, tokens, module.dim)
    probe = Probe(module, None, shape, seed, _CELLS, call)
    out, size = as_tokens(probe.out_shape, "module"), math.prod(as_tokens(probe.shape, "shape"))
    count = math.prod(out) * size**order
    if count > _MAX_WEIGHTS:
        got = f"{probe.shape}, whose W^[{order}] has {count:.2g} weights"
        raise ShapeError("shape", got, f"an input with at most {_MAX_WEIGHTS:,}", "Use fewer tokens or channels.")
    found = degree(module, shape=probe.shape, max_rational=0, seed=seed, **call)
    if found.degree is None:
        raise OptionError("module", str(found), "a polynomial of its input", "Use lens.interactions for others.")

    def run(x: Tensor) -> Tensor:
        return probe(x.view(probe.shape))

    function: Callable[[Tensor], Tensor] = run
    for _ in range(order):
        function = torch.func.jacrev(function)
    try:
        derivative = function(torch.zeros(size, dtype=torch.float64))
    except RuntimeError as error:
        raise OptionError("module", f"one without derivatives of order {order} ({error})", "a differentiable one", "") \
            from error  # fmt: skip
    probe.check_finite(derivative)
    weights = derivative.detach().reshape(*out, *as_tokens(probe.shape, "shape") * order) / math.factorial(order)
    return WeightTensor(order, weights)
