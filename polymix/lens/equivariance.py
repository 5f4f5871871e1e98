"""Is a module equivariant to permutations of its tokens, and to shifts of their grid?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import ShapeError
from polymix.lens.fits import SAFETY
from polymix.lens.probe import EPS, Probe, as_tokens, check_draws
from polymix.lens.receptive_field import KEEP, grid_of, reach_of
from polymix.numbers import significant

_CELLS = 36
_NOISE_FACTOR = 16  # reordered tokens are summed in another order, which rounds more than repeating one input


@dataclass(frozen=True)
class Verdict:
    """Whether one symmetry holds.

    Attributes:
        error: largest difference relative to the largest output; None if there was nothing to compare.
        tolerance: rounding error that is allowed.
        compared: number of output tokens compared, over all draws.
    """

    error: float | None
    tolerance: float
    compared: int

    @property
    def holds(self) -> bool | None:
        return None if self.error is None else self.error <= self.tolerance

    def __str__(self) -> str:
        if self.error is None:
            return "nothing to compare, as every token sees the border; try a larger input"
        error, tolerance = significant(self.error, 2), significant(self.tolerance, 1)
        return f"{'yes' if self.holds else 'no'} (error {error}, tolerance {tolerance})"


@dataclass(frozen=True)
class Equivariance:
    """Which symmetries a module has. Prefix tokens stay in place.

    Attributes:
        permutation: f(PX) = P f(X) for permutations P of the tokens.
        circular: the same for shifts that wrap around the grid.
        interior: for shifts, compared only at tokens whose inputs stay inside the grid.
        grid: the grid that was shifted.
    """

    permutation: Verdict
    circular: Verdict
    interior: Verdict
    grid: tuple[int, ...]

    def __str__(self) -> str:
        rows = {"permutation": self.permutation, "translation, circular": self.circular,
                "translation, interior": self.interior}  # fmt: skip
        return "\n".join(f"{name}: {verdict}" for name, verdict in rows.items())

    def plot(self, path: str | Path) -> Path:
        """Save a plot of the three errors with their tolerance."""
        from polymix.lens.plots import draw_equivariance

        errors = {"permutation": self.permutation.error, "shift, circular": self.circular.error,
                  "shift, interior": self.interior.error}  # fmt: skip
        return draw_equivariance(Path(path), errors, self.permutation.tolerance)


def equivariance(
    module: Callable[..., Any], x: Tensor | None = None, *, shape: tuple[int, ...] | None = None, draws: int = 3,
    seed: int = 0, **call: Any,
) -> Equivariance:  # fmt: skip
    """Check whether `module` is equivariant to permutations of its tokens and to shifts of their grid.

    Shifts are by one token along each axis, and along all axes at once. The grid is that of the call (grid=), else
    the mixer's, else a row.

    Args:
        module: a mixer, any module, or a function of one tensor.
        x: an input to begin with, (1, N, C), (N, C) or (N,).
        shape: the shape of a random input, instead of x. Mixers of this package need neither.
        draws: number of random inputs.
        seed: of the inputs.
        call: keyword arguments for every call of the module.
    """
    check_draws("draws", draws, 1)
    probe = Probe(module, x, shape, seed, _CELLS, call, keep=KEEP)
    n, c = probe.tokens
    if as_tokens(probe.out_shape, "module")[0] != n:
        raise ShapeError("module", f"{probe.out_shape} from {probe.shape}", "the same number of tokens in and out", "")
    grid, p = grid_of(probe), probe.prefix
    reach = reach_of(probe, draws)
    worst: dict[str, float | None] = {"permutation": None, "circular": None, "interior": None}
    count = dict.fromkeys(worst, 0)
    tolerance = 0.0
    place = torch.arange(n - p).reshape(grid)
    moves = [m for m in itertools.product((0, 1), repeat=len(grid)) if sum(m) in (1, len(grid))]
    moves = [m for m in moves if all(step == 0 or size > 1 for step, size in zip(m, grid, strict=True))]
    for draw in range(draws):
        base = probe.x if probe.x is not None and draw == 0 else probe.normal()
        tokens = base.reshape(n, c)
        shuffle = torch.randperm(n - p, generator=probe.generator)
        orders: list[tuple[str, Tensor, tuple[int, ...] | None]] = [("permutation", shuffle, None)]
        orders += [("circular", place.roll(m, tuple(range(len(grid)))).flatten(), m) for m in moves]
        orders = [(kind, torch.cat((torch.arange(p), order + p)), m) for kind, order, m in orders]
        moved = torch.stack([tokens[order] for _, order, _ in orders])  # the new token i is the old token order[i]
        values = probe.values(torch.cat((tokens[None], moved)).reshape(-1, *probe.shape))
        values = probe.check_finite(values).reshape(len(orders) + 1, n, -1)
        size = float(values.abs().max()) or 1.0
        noise = max(float(probe.noise(base, torch.ones_like(base)).max()) / size, EPS)
        tolerance = max(tolerance, SAFETY * _NOISE_FACTOR * noise)
        for (kind, order, m), after in zip(orders, values[1:], strict=True):
            error = (after - values[0][order]).abs().amax(1) / size  # of each token, at its new place
            kinds = [(kind, torch.ones(n, dtype=torch.bool))]
            if m is not None:
                kinds.append(("interior", _inside(reach, order, grid, p, m)))
            for name, here in kinds:
                count[name] += int(here.sum())
                if here.any():
                    worst[name] = max(worst[name] or 0.0, float(error[here].max()))
    verdicts = {name: Verdict(worst[name], tolerance, count[name]) for name in worst}
    return Equivariance(verdicts["permutation"], verdicts["circular"], verdicts["interior"], grid)


def _inside(reach: Tensor, order: Tensor, grid: tuple[int, ...], prefix: int, move: tuple[int, ...]) -> Tensor:
    """(N,) shifted tokens whose inputs did not wrap around and are the shifted inputs of the original token."""
    wrapped = torch.zeros(grid, dtype=torch.bool)
    for axis, step in enumerate(move):
        if step:
            wrapped.select(axis, 0)[...] = True
    wrapped = torch.cat((torch.zeros(prefix, dtype=torch.bool), wrapped.flatten()))
    same = (reach == reach[order][:, order]).all(1)
    inside = same & ~(reach & wrapped).any(1) & ~wrapped
    inside[:prefix] = False
    return inside
