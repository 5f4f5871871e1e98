"""Which input tokens reach each output token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import check_int
from polymix.lens.lines import SAFETY
from polymix.lens.probe import EPS, Probe, as_tokens

_CELLS, KEEP = 16, 64  # tokens where the mixer does not say, and up to which its own grid is taken whole
_DIRECTIONS = 16  # channels of an output token beyond which so many random mixtures of them stand for all


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """reach (output tokens, input tokens): whether a token's change shows. magnitude: the mean of ‖∂y_i/∂x_j‖.

    A token can reach another where the derivative is zero almost everywhere (which tokens are nearest, say).
    """

    reach: Tensor
    magnitude: Tensor
    grid: tuple[int, ...]
    prefix: int

    @property
    def causal(self) -> bool:
        """No token is reached by a later one."""
        return not bool(self.reach.triu(1).any())

    @property
    def span(self) -> tuple[int, int]:
        """The fewest and the most tokens that reach one."""
        seen = self.reach.sum(1)
        return int(seen.min()), int(seen.max())

    def __str__(self) -> str:
        (low, high), n = self.span, self.reach.shape[1]
        many = f"{low}" if low == high else f"{low} to {high}"
        kind = ", all" if low == n else ", itself alone" if high == 1 and self.reach.diagonal().all() else ""
        return f"a token is reached by {many} of {n} tokens{kind}" + (", none of them later" if self.causal else "")

    def plot(self, path: str | Path) -> Path:
        """A picture: the size of ∂y_i/∂x_j, blank where nothing arrives; on a grid the middle token's as a map."""
        from polymix.lens.plots import draw_field

        return draw_field(self, Path(path))


def reach_of(probe: Probe, draws: int) -> Tensor:
    """(output tokens, input tokens): whether another random token in one place changes the output in the other."""
    n, c = probe.tokens
    out = as_tokens(probe.out_shape, "module")
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
        noise = torch.maximum(noise, EPS * noise.new_tensor(float(values.abs().max())))  # what an FFT smears
        reach |= ~(moved <= SAFETY * noise).unflatten(1, out).all(2).T
    return reach


def receptive_field(
    module: Callable[..., Any], x: Tensor | None = None, *, shape: tuple[int, ...] | None = None, draws: int = 3,
    seed: int = 0, **call: Any,
) -> ReceptiveField:  # fmt: skip
    """Which input tokens reach each output token, by changing one token at a time, and how strongly, by the Jacobian.

    Args as `interactions`; `draws` random inputs. Cost: N · C backward passes an
    input, with C at most 16 (random mixtures of more channels give the same sizes, to about a fifth).
    """
    check_int("draws", draws, 1)
    probe = Probe(module, x, shape, seed, _CELLS, call, keep=KEEP)
    (n, c), out = probe.tokens, as_tokens(probe.out_shape, "module")
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
    """The grid of the tokens after the prefix; one axis where nothing says otherwise, or what is said does not fit."""
    rest = probe.tokens[0] - probe.prefix
    grid = probe.grid
    return grid if grid is not None and math.prod(grid) == rest else (rest,)
