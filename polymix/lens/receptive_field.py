"""Which input tokens reach each output token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.lens.fits import SAFETY
from polymix.lens.probe import EPS, Probe, as_tokens, check_draws

_CELLS = 16  # tokens of the input, unless the mixer has a grid
KEEP = 64  # a mixer's own grid is used whole up to this many tokens
_DIRECTIONS = 16  # an output token with more channels is represented by this many random mixtures of them


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """Which input tokens reach each output token.

    Attributes:
        reach: (output tokens, input tokens), True where changing the input token changes the output token. This can
            be True although the derivative is zero almost everywhere, as with nearest neighbours.
        magnitude: the same shape, the mean of ‖∂y_i/∂x_j‖.
        grid: of the tokens after the prefix. prefix: number of tokens before it.
    """

    reach: Tensor
    magnitude: Tensor
    grid: tuple[int, ...]
    prefix: int

    @property
    def causal(self) -> bool:
        """No token is reached by a later token."""
        return not bool(self.reach.triu(1).any())

    @property
    def span(self) -> tuple[int, int]:
        """The smallest and the largest number of tokens that reach one token."""
        seen = self.reach.sum(1)
        return int(seen.min()), int(seen.max())

    def __str__(self) -> str:
        (low, high), n = self.span, self.reach.shape[1]
        many = f"all {n}" if low == n else f"{low} of {n}" if low == high else f"{low} to {high} of {n}"
        kind = ", itself only" if high == 1 and self.reach.diagonal().all() else ""
        return f"a token is reached by {many} tokens{kind}" + (", none of them later" if self.causal else "")

    def plot(self, path: str | Path) -> Path:
        """Save a plot of ‖∂y_i/∂x_j‖, blank where a token is not reached, with a map for the middle of a 2-D grid."""
        from polymix.lens.plots import draw_receptive_field

        return draw_receptive_field(Path(path), str(self), self.magnitude, self.reach, self.grid, self.prefix)


def reach_of(probe: Probe, draws: int) -> Tensor:
    """(output tokens, input tokens): whether replacing the input token by a random one changes the output token."""
    n, c = probe.tokens
    out = as_tokens(probe.out_shape, "module")
    probe.check_points("shape", 2 * (n + 1))
    reach = torch.zeros(out[0], n, dtype=torch.bool)
    for draw in range(draws):
        base = probe.x if probe.x is not None and draw == 0 else probe.normal()
        fresh = probe.normal().reshape(n, c)
        points = base.reshape(1, n, c).repeat(n + 1, 1, 1)
        places = torch.arange(n)
        points[places, places] = fresh
        values = probe.values(points.reshape(n + 1, *probe.shape))
        moved = (values[:n] - values[n:]).abs()
        noise = torch.maximum(probe.noise(base, torch.ones_like(base)), EPS * values.abs().amax(0))
        noise = torch.maximum(noise, EPS * noise.new_tensor(float(values.abs().max())))  # an FFT spreads it
        reach |= ~(moved <= SAFETY * noise).unflatten(1, out).all(2).T
    return reach


def receptive_field(
    module: Callable[..., Any], x: Tensor | None = None, *, shape: tuple[int, ...] | None = None, draws: int = 3,
    seed: int = 0, **call: Any,
) -> ReceptiveField:  # fmt: skip
    """Find which input tokens reach each output token, and how strongly.

    Reach is found by replacing one token at a time, strength from the Jacobian: N · C backward passes per input. More
    than 16 output channels are replaced by 16 random mixtures, which gives the same magnitudes to about 20 %.

    Args:
        module: a mixer, any module, or a function of one tensor.
        x: an input to begin with, (1, N, C), (N, C) or (N,).
        shape: the shape of a random input, instead of x. Mixers of this package need neither.
        draws: number of random inputs.
        seed: of the inputs.
        call: keyword arguments for every call of the module, such as causal=True.
    """
    check_draws("draws", draws, 1)
    probe = Probe(module, x, shape, seed, _CELLS, call, keep=KEEP)
    (n, c), out = probe.tokens, as_tokens(probe.out_shape, "module")
    probe.check_points("shape", 0, 2 * out[0] * min(out[1], _DIRECTIONS) * n * c)  # of the Jacobian
    reach = reach_of(probe, draws)
    magnitude = torch.zeros(out[0], n, dtype=torch.float64)
    for draw in range(draws):
        base = probe.x if probe.x is not None and draw == 0 else probe.normal()
        mix = torch.eye(out[1], dtype=torch.float64)
        if out[1] > _DIRECTIONS:
            mix = torch.randn(out[1], _DIRECTIONS, generator=probe.generator, dtype=torch.float64) / _DIRECTIONS**0.5
        slope = torch.autograd.functional.jacobian(_mixed(probe, out, mix), base).reshape(out[0], -1, n, c)
        magnitude += slope.square().sum((1, 3)).sqrt() / draws
    return ReceptiveField(reach, magnitude, grid_of(probe), probe.prefix)


def _mixed(probe: Probe, out: tuple[int, int], mix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: probe(x).reshape(out) @ mix


def grid_of(probe: Probe) -> tuple[int, ...]:
    """The grid of the tokens after the prefix; a single axis if no known grid fits."""
    rest = probe.tokens[0] - probe.prefix
    grid = probe.grid
    return grid if grid is not None and math.prod(grid) == rest else (rest,)
