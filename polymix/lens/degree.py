"""Is a module a polynomial of its input, of which degree, and homogeneous? Or a quotient of two polynomials?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import check_int
from polymix.lens.fits import NOISE_LIMIT, SAFETY, SCALES, Line, polynomial_misfits, quotient, sample
from polymix.lens.probe import EPS, Probe, check_draws
from polymix.numbers import significant

_CELLS = 6  # tokens of the input, unless the mixer has a grid
_RAYS = (0.0625, -0.0625, 0.5, -0.5, -1.0, 2.0)
_OUTPUTS = 8  # outputs in which a quotient is searched; each needs a singular value decomposition


@dataclass(frozen=True)
class Evidence:
    """The measurements behind a verdict.

    Attributes:
        reason: the verdict's reason, in a sentence.
        residual: by degree, the largest error of the fit at held-out points, over all lines, scales and outputs,
            relative to the output's largest value on the line.
        excess: the same in units of the tolerance; at most 1 where the degree fits.
        tolerance: 64 times the measured rounding noise, the largest of all outputs, at the degree found, or at
            max_degree if none was found.
        noise: measured rounding noise, relative to the output.
        lines, scales, points: how many lines, their lengths, and the points on each.
        needed: the degree needed at each scale; None if above max_degree.
        outputs, shape: number of outputs, and shape of the input.
    """

    reason: str
    residual: dict[int, float]
    excess: dict[int, float]
    tolerance: float
    noise: float
    lines: int
    scales: tuple[float, ...]
    needed: tuple[int | None, ...]
    points: int
    outputs: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DegreeResult:
    """What a module is as a function of its input.

    Attributes:
        degree: total degree; None if it is not a polynomial of degree up to max_degree.
        homogeneous: f(tX) = t^degree f(X).
        rational: (numerator degree, denominator degree), the largest of any output, as each output has its own
            denominator. None if it is a polynomial, or not a quotient of two.
        evidence: the measurements.
    """

    degree: int | None
    homogeneous: bool
    rational: tuple[int, int] | None
    evidence: Evidence

    def __str__(self) -> str:
        if self.degree is not None:
            return f"polynomial of degree {self.degree}, {'' if self.homogeneous else 'not '}homogeneous"
        if self.rational is not None:
            return f"not a polynomial: rational, degree {self.rational[0]} over degree {self.rational[1]}"
        return "neither a polynomial nor a quotient of two"

    def explain(self) -> str:
        """The verdict and its evidence, in a few lines."""
        e = self.evidence
        lines = [str(self), e.reason]
        if e.residual:
            lines.append(f"{e.lines} lines with {e.points} points each, input {e.shape}, {e.outputs} outputs")
            reach = ", ".join(f"{s:g}: {'–' if d is None else d}" for s, d in zip(e.scales, e.needed, strict=True))
            lines.append(f"degree needed, by scale of the line: {reach}")
            noise, tolerance = significant(e.noise, 2), significant(e.tolerance, 2)
            lines.append(f"relative to the output: rounding noise {noise}, tolerance {tolerance}")
            last = max(e.residual) if self.degree is None else min(self.degree + 1, max(e.residual))
            shown = range(0, last + 1, 1 if self.degree is not None else max(1, last // 4))
            rows = [f"{d}: {significant(e.residual[d], 2)}{'' if e.excess[d] > 1 else ' fits'}" for d in shown]
            lines.append("error of the best fit, by degree: " + ", ".join(rows))
        return "\n".join(lines)

    def plot(self, path: str | Path) -> Path:
        """Save a plot of the error of the best fit by degree."""
        from polymix.lens.plots import draw_degree

        evidence = self.evidence
        return draw_degree(Path(path), str(self), evidence.residual, evidence.excess, evidence.tolerance)


def degree(
    module: Callable[..., Any], x: Tensor | None = None, *, shape: tuple[int, ...] | None = None, max_degree: int = 16,
    max_rational: int = 20, lines: int = 3, seed: int = 0, **call: Any,
) -> DegreeResult:  # fmt: skip
    """Find out whether `module` is a polynomial of its input, a quotient of two polynomials, or neither.

    Along a line x + t v, a polynomial of degree d is a polynomial of degree d in t. The function is sampled on random
    lines in float64, fitted in every degree, and judged at held-out points against the measured rounding noise. The
    lines are 1 to 1024 times as long as the input. Functions that are not polynomials may look like one on short
    lines, but the degree that they need changes with the length.

    Args:
        module: a mixer, any module, or a function of one tensor. It is copied, not changed. Of several outputs only
            the first is used.
        x: the input that the lines pass through.
        shape: the shape of a random input, instead of x. Mixers of this package need neither.
        max_degree: highest degree of a polynomial.
        max_rational: highest degree of a quotient's numerator and denominator; 0 skips quotients.
        lines: number of directions.
        seed: of the inputs and directions.
        call: keyword arguments for every call of the module, such as causal=True or grid=(4, 4).
    """
    check_int("max_degree", max_degree, 0, 64)
    check_int("max_rational", max_rational, 0, 32)
    check_draws("lines", lines, 1)
    probe = Probe(module, x, shape, seed, _CELLS, call, strict=False)
    nodes, held = 2 * max_degree + 8, max_degree + 13
    probe.check_points("lines", max(2 * lines, nodes + held))
    starts = [(probe.normal() if probe.x is None else probe.x, probe.normal()) for _ in range(lines)]
    outputs = math.prod(probe.out_shape)
    empty = Evidence("", {}, {}, math.nan, math.nan, lines, SCALES, (), nodes + held, outputs, probe.shape)
    reason = _hopeless(probe, starts[0][0])
    if reason:
        return DegreeResult(None, False, None, _with(empty, reason=reason))
    table: list[list[Line]] = []
    for scale in SCALES:
        row = [line for v in starts if (line := sample(probe, *v, scale, nodes, held)) is not None]
        if len(row) < lines:
            before = max((float(line.size.max()) for line in table[-1]), default=1.0) if table else 1.0
            if before > 1e300 / 4.0 ** max(max_degree, 1):
                break  # any polynomial of this degree overflows here
            reason = f"It is not finite everywhere at {scale:g} times the input."
            return DegreeResult(None, False, None, _with(empty, reason=reason))
        table.append(row)
    lowest, evidence = _judge(table, max_degree, empty)
    if lowest is not None:
        return DegreeResult(lowest, _homogeneous(probe, [x for x, _ in starts], lowest), None, evidence)
    if not max_rational or evidence.noise > NOISE_LIMIT:
        return DegreeResult(None, False, None, evidence)

    def draw(scale: float) -> list[Line] | None:
        row = [sample(probe, *v, scale, 4 * max_rational + 20, 37) for v in starts[:2]]
        return None if any(line is None for line in row) else [line for line in row if line is not None]

    def pick(outputs: int) -> Tensor:
        return torch.linspace(0, outputs - 1, min(outputs, _OUTPUTS)).round().long()

    rational, why = quotient(draw, max_rational, pick)
    says = "It is a quotient: " if rational else "It is no quotient either: "
    return DegreeResult(None, False, rational, _with(evidence, reason=f"{evidence.reason} {says}{why}."))


def _with(evidence: Evidence, **changes: Any) -> Evidence:
    return Evidence(**{**vars(evidence), **changes})


def _hopeless(probe: Probe, x: Tensor) -> str:
    """Why nothing can be measured, or an empty string."""
    once, again = (probe.values(x.unsqueeze(0)) for _ in range(2))
    if once.numel() == 0:
        return "It has no output."
    if not once.isfinite().all():
        return f"Its output has {int((~once.isfinite()).sum())} entries that are not finite."
    return "" if torch.equal(once, again) else "Two calls with the same input give different outputs."


def _judge(table: list[list[Line]], max_degree: int, empty: Evidence) -> tuple[int | None, Evidence]:
    residual = torch.zeros(max_degree + 1, dtype=torch.float64)
    excess, noise, needed = residual.clone(), 0.0, []
    clearly = torch.zeros(len(table[0]), table[0][0].size.numel())  # degree that shorter lines needed, by output
    falls = False
    for row in table:
        asked = []
        for i, line in enumerate(row):
            off = polynomial_misfits(line, max_degree)  # (degree + 1, outputs)
            ratio = off / line.tolerance(max_degree)
            counts = line.size > 0
            residual = torch.maximum(residual, (off * counts).amax(1))
            excess = torch.maximum(excess, ratio.amax(1))
            noise = max(noise, float((line.noise * line.size).max() / line.size.max().clamp_min(1e-300)))
            need, sure = ((ratio > bound).sum(0).float() for bound in (1, 10))
            falls |= bool((clearly[i] > need).any())
            clearly[i] = torch.maximum(clearly[i], sure)
            asked.append(int(need.max()))
        needed.append(max(asked) if max(asked) <= max_degree else None)
    fits = (excess <= 1).nonzero()
    lowest = None if falls or noise > NOISE_LIMIT or len(fits) == 0 else int(fits[0])
    last = max_degree if lowest is None else lowest
    evidence = _with(
        empty, residual=dict(enumerate(residual.tolist())), excess=dict(enumerate(excess.tolist())), noise=noise,
        tolerance=max(
            float(line.tolerance(last)[last].masked_fill(line.size == 0, 0).max()) for row in table for line in row
        ),
        scales=SCALES[: len(table)], needed=tuple(needed),
    )  # fmt: skip
    least = float(excess.min())
    best = f"{significant(least, 1) if least < 1e6 else 'over a million'} times the tolerance"
    if noise > NOISE_LIMIT:
        reason = f"Its outputs are too noisy to judge: {significant(noise, 1)} of their size."
    elif lowest is not None:
        lower = f", degree {lowest - 1} does not." if lowest else "."
        reason = f"Degree {lowest} fits every line up to rounding{lower}"
    elif falls and len(fits):
        reason = "The degree that it needs falls as the lines get longer. A polynomial's does not."
    else:
        reason = f"No polynomial of degree {max_degree} or less fits: the best error is {best}."
    return lowest, _with(evidence, reason=reason)


def _homogeneous(probe: Probe, starts: list[Tensor], degree: int) -> bool:
    """Whether f(tX) = t^degree f(X) on rays from zero, up to the rounding noise there."""
    for x in starts:
        whole = probe.values(x.unsqueeze(0))[0]
        for t in _RAYS:
            here = probe.values(t * x.unsqueeze(0))[0]
            noise = torch.maximum(probe.noise(t * x, t * x), abs(t) ** degree * probe.noise(x, x))
            noise = torch.maximum(noise, EPS * torch.maximum(here.abs(), (t**degree * whole).abs()))
            noise = torch.maximum(noise, 1e-3 * noise.max())  # an output of zero shows no noise
            if ((here - t**degree * whole).abs() > SAFETY * noise).any():
                return False
    return True
