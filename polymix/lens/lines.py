"""A function along straight lines: samples at Chebyshev nodes, fits judged where they were not made, rounding noise."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from polymix.lens.probe import EPS, Probe

# How far the lines reach, in units of the input's spread. A polynomial has one degree however far one looks. What is
# none looks like one from near, and no longer from afar; and a term too faint to see near is seen far away.
SCALES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
SAFETY = 64.0  # a deviation counts from so many times the measured noise on
NOISE_LIMIT = 1e-4  # of the output's size; with more noise than that there is nothing to be told


class Line(NamedTuple):
    """Samples of f(x + t · scale · v): t in [-1, 1], outputs in columns; divided by `size`, the largest of each."""

    scale: float
    nodes: Tensor  # (M,)
    values: Tensor  # (M, outputs)
    held: Tensor  # (H,)
    held_values: Tensor  # (H, outputs)
    size: Tensor  # (outputs,)
    noise: Tensor  # (outputs,) relative to size; one rounding of the result at least

    def tolerance(self, max_degree: int) -> Tensor:
        """(max_degree + 1, outputs): what a fit of each degree may be off by, its basis' own rounding included."""
        basis = EPS / 8 * torch.arange(max_degree + 1, dtype=torch.float64)
        return SAFETY * (self.noise + basis.unsqueeze(-1))


def chebyshev(t: Tensor, degree: int) -> Tensor:
    """(points, degree + 1): T_0 … T_degree at t in [-1, 1], by recursion: through the angle would lose digits."""
    columns = [torch.ones_like(t), t]
    while len(columns) <= degree:
        columns.append(2 * t * columns[-1] - columns[-2])
    return torch.stack(columns[: degree + 1], dim=-1)


def sample(probe: Probe, x: Tensor, v: Tensor, scale: float, nodes: int, held: int) -> Line | None:
    """f along one line; None where it is not finite everywhere on it."""
    t = torch.cos(math.pi * (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes)
    s = torch.cos(math.pi * torch.rand(held, generator=probe.generator, dtype=torch.float64))
    ways = (-1,) + (1,) * len(probe.shape)
    both = probe.values(x + scale * torch.cat((t, s)).view(ways) * v)
    if not both.isfinite().all():
        return None
    size = both.abs().amax(0)
    places = torch.tensor([-0.993, -0.71, 0.0137, 0.67, 0.987], dtype=torch.float64)
    noise = torch.stack([probe.noise(x + scale * place * v, scale * v) for place in places]).amax(0)
    unit = size.clamp_min(torch.finfo(torch.float64).tiny)
    relative = torch.maximum(noise / unit, torch.full_like(size, EPS))
    return Line(scale, t, both[:nodes] / unit, s, both[nodes:] / unit, size, relative)


def misfits(line: Line, max_degree: int) -> Tensor:
    """(max_degree + 1, outputs): the largest error, on the held-out points, of the fit of each degree.

    Least squares at Chebyshev nodes is a cut of the discrete cosine transform, so that all degrees come at once.
    """
    count = len(line.nodes)
    coefficients = 2 / count * chebyshev(line.nodes, max_degree).T @ line.values  # (degree + 1, outputs)
    coefficients[0] /= 2
    basis = chebyshev(line.held, max_degree)
    rest, errors = line.held_values.clone(), []
    for degree in range(max_degree + 1):
        rest -= basis[:, degree, None] * coefficients[degree]
        errors.append(rest.abs().amax(0))
    return torch.stack(errors)
