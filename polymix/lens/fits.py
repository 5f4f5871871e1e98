"""Fits of a function along straight lines: by polynomials, and by quotients of two polynomials.

The function is sampled at Chebyshev nodes. Each fit is judged at held-out points against the measured rounding noise.

A quotient p/q satisfies p(t) - f(t) q(t) = 0, which is linear in the coefficients of p and q: they are the null
vector of one matrix. Every smooth function is close to some quotient, so closeness proves nothing. But a true
quotient has the same degrees however long the line is; anything else needs higher degrees as the line gets longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polymix.lens.probe import EPS, Probe

# How far the lines reach, in units of the input's spread. A polynomial needs the same degree on every length. Other
# functions look like a polynomial on short lines but not on long ones, and a faint term of high degree shows far away.
SCALES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
SAFETY = 64.0  # a deviation counts if it exceeds the measured noise this many times
NOISE_LIMIT = 1e-4  # relative to the output; noisier functions cannot be judged

QUOTIENT_SCALES = (2.0, 4.0)  # lines from which a quotient's degrees are read, which must agree; poles show best here
QUOTIENT_CHECKS = (1.0, 8.0, 16.0)  # lines on which those degrees must fit too
SLACK = 16.0  # times the tolerance on these: on long lines a quotient's features fall between the nodes
GAP = 1e2  # times the tolerance: with one degree less, the fit must be clearly worse


class Line(NamedTuple):
    """Samples of f(x + t · scale · v) for t in [-1, 1]. Outputs are columns, each divided by its maximum `size`."""

    scale: float
    nodes: Tensor  # (M,)
    values: Tensor  # (M, outputs)
    held: Tensor  # (H,)
    held_values: Tensor  # (H, outputs)
    size: Tensor  # (outputs,)
    noise: Tensor  # (outputs,) relative to size, at least one rounding of the result

    def tolerance(self, max_degree: int) -> Tensor:
        """(max_degree + 1, outputs): the allowed error of a fit by degree, including the basis' own rounding."""
        basis = EPS / 8 * torch.arange(max_degree + 1, dtype=torch.float64)
        return SAFETY * (self.noise + basis.unsqueeze(-1))


def chebyshev(t: Tensor, degree: int) -> Tensor:
    """(points, degree + 1): T_0 … T_degree at t in [-1, 1], by recursion; cos(n arccos t) would lose digits."""
    columns = [torch.ones_like(t), t]
    while len(columns) <= degree:
        columns.append(2 * t * columns[-1] - columns[-2])
    return torch.stack(columns[: degree + 1], dim=-1)


def sample(probe: Probe, x: Tensor, v: Tensor, scale: float, nodes: int, held: int) -> Line | None:
    """Sample f along one line; None if a value is not finite."""
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


def polynomial_misfits(line: Line, max_degree: int) -> Tensor:
    """(max_degree + 1, outputs): the largest error at the held-out points for the fit of each degree.

    Least squares at Chebyshev nodes truncates a discrete cosine transform, so one transform gives all degrees.
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


def quotient_misfit(line: Line, outputs: Tensor, m: int, n: int) -> float:
    """The largest |p - f q| / √(1 + f²) at held-out points, over the tolerance. Each output has its own p and q."""
    weights = _null_vector(line.nodes, line.values[:, outputs].T, m, n)
    f = line.held_values[:, outputs].T
    basis = chebyshev(line.held, max(m, n))
    p, q = weights[:, : m + 1] @ basis[:, : m + 1].T, weights[:, m + 1 :] @ basis[:, : n + 1].T
    off = ((p - f * q).abs() / (1 + f * f).sqrt()).amax(1)
    return float((off / (SAFETY * line.noise[outputs])).max())


def _null_vector(t: Tensor, f: Tensor, m: int, n: int) -> Tensor:
    """(outputs, m + n + 2): unit-norm coefficients of p, then of q, that minimise p - f q at the nodes."""
    basis = chebyshev(t, max(m, n))
    rows = torch.cat((basis[:, : m + 1].expand(len(f), -1, -1), -f.unsqueeze(-1) * basis[:, : n + 1]), dim=-1)
    rows = rows / (1 + f * f).sqrt().unsqueeze(-1)
    return torch.linalg.svd(rows, full_matrices=False).Vh[:, -1]


def quotient_degrees(lines: list[Line], outputs: Tensor, limit: int) -> tuple[int, int] | None:
    """The smallest (numerator, denominator) degrees up to `limit` that fit all lines, or None."""

    def fits(m: int, n: int) -> bool:
        return all(quotient_misfit(line, outputs, m, n) <= 1 for line in lines)

    if not fits(limit, limit):
        return None
    both = _smallest(lambda s: fits(s, s), limit)
    den = _smallest(lambda n: fits(both, n), both)
    return _smallest(lambda m: fits(m, den), both), den


def _smallest(fits: Callable[[int], bool], high: int) -> int:
    """The smallest number that fits, by bisection. `high` is known to fit."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def quotient(
    draw: Callable[[float], list[Line] | None], limit: int, pick: Callable[[int], Tensor]
) -> tuple[tuple[int, int] | None, str]:
    """((numerator degree, denominator degree) or None, the reason).

    `draw` samples lines of a scale, `pick` chooses outputs.
    """
    degrees: list[tuple[int, int]] = []
    gap = 0.0
    for scale in QUOTIENT_SCALES:
        lines = draw(scale)
        if lines is None:
            return None, f"it is not finite at {scale:g} times the input"
        outputs = pick(lines[0].values.shape[1])
        here = quotient_degrees(lines, outputs, limit)
        if here is None:
            return None, f"no quotient of degrees up to [{limit}/{limit}] fits at {scale:g} times the input"
        degrees.append(here)
        lower = [(m, n) for m, n in ((here[0] - 1, here[1]), (here[0], here[1] - 1)) if min(m, n) >= 0]
        worst = [max(quotient_misfit(line, outputs, m, n) for line in lines) for m, n in lower]
        gap = max(gap, min(worst, default=GAP))
    if degrees[0] != degrees[1]:
        types = " and ".join(f"[{m}/{n}]" for m, n in degrees)
        reach = " and ".join(f"{scale:g}" for scale in QUOTIENT_SCALES)
        return None, f"the best quotients, {types} at {reach} times the input, grow with the length of the line"
    (m, n), name = degrees[0], f"[{degrees[0][0]}/{degrees[0][1]}]"
    if n == 0:
        return None, f"up to 4 times the input it is a polynomial of degree {m}, but not farther out"
    if gap < GAP:
        return None, f"a quotient {name} is close, but lower degrees are almost as close, as for any smooth function"
    for scale in QUOTIENT_CHECKS:
        lines = draw(scale)
        if lines is None or any(quotient_misfit(line, pick(line.values.shape[1]), m, n) > SLACK for line in lines):
            return None, f"a quotient {name} is close, but not at {scale:g} times the input"
    scales = ", ".join(f"{scale:g}" for scale in sorted((*QUOTIENT_SCALES, *QUOTIENT_CHECKS)))
    return degrees[0], f"{name} fits at {scales} times the input"
