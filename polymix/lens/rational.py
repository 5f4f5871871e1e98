"""Is a function along a line a quotient of two polynomials, and of which degrees?

A quotient p/q satisfies p(t) - f(t) q(t) = 0, which is linear in the coefficients of p and q: the null space of one
matrix, found by its singular values. Any smooth function comes close to some quotient, so closeness proves nothing.
What tells them apart is that a quotient has the same degrees however long the line is, where anything else needs more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polymix.lens.lines import SAFETY, Line, chebyshev

SCALES = (2.0, 4.0)  # the degrees are read off at these, where poles stand out best, and must be the same at both
CHECKS = (1.0, 8.0, 16.0)  # and must do at these
SLACK = 16.0  # times the tolerance there: far away a quotient's features crowd into a few nodes
GAP = 1e2  # times the tolerance: one degree less must be clearly off somewhere, not almost enough


def misfit(line: Line, outputs: Tensor, m: int, n: int) -> float:
    """The worst |p - f q| / √(1 + f²) on held-out points in units of the tolerance, each output with its own p, q."""
    weights = _null_vector(line.nodes, line.values[:, outputs].T, m, n)
    f = line.held_values[:, outputs].T
    basis = chebyshev(line.held, max(m, n))
    p, q = weights[:, : m + 1] @ basis[:, : m + 1].T, weights[:, m + 1 :] @ basis[:, : n + 1].T
    off = ((p - f * q).abs() / (1 + f * f).sqrt()).amax(1)
    return float((off / (SAFETY * line.noise[outputs])).max())


def _null_vector(t: Tensor, f: Tensor, m: int, n: int) -> Tensor:
    """(outputs, m + n + 2): coefficients of p, then of q, of norm 1, for which p - f q is smallest at the nodes."""
    basis = chebyshev(t, max(m, n))
    rows = torch.cat((basis[:, : m + 1].expand(len(f), -1, -1), -f.unsqueeze(-1) * basis[:, : n + 1]), dim=-1)
    rows = rows / (1 + f * f).sqrt().unsqueeze(-1)
    return torch.linalg.svd(rows, full_matrices=False).Vh[:, -1]


def degrees(lines: list[Line], outputs: Tensor, limit: int) -> tuple[int, int] | None:
    """The smallest (numerator, denominator) degrees up to `limit` that fit all of these lines; None if none do."""

    def fits(m: int, n: int) -> bool:
        return all(misfit(line, outputs, m, n) <= 1 for line in lines)

    if not fits(limit, limit):
        return None
    both = _smallest(lambda s: fits(s, s), limit)
    den = _smallest(lambda n: fits(both, n), both)
    return _smallest(lambda m: fits(m, den), both), den


def _smallest(fits: Callable[[int], bool], high: int) -> int:
    """The smallest number that fits, `high` known to, and all above it."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def quotient(
    draw: Callable[[float], list[Line] | None], limit: int, pick: Callable[[int], Tensor]
) -> tuple[tuple[int, int] | None, str]:
    """((numerator degree, denominator degree) or None, why). `draw` gives lines of a reach, `pick` which outputs."""
    found: list[tuple[int, int]] = []
    gap = 0.0
    for scale in SCALES:
        lines = draw(scale)
        if lines is None:
            return None, f"it is not finite at {scale:g} times the input"
        outputs = pick(lines[0].values.shape[1])
        here = degrees(lines, outputs, limit)
        if here is None:
            return None, f"no quotient of degrees up to [{limit}/{limit}] fits at {scale:g} times the input"
        found.append(here)
        lower = [(m, n) for m, n in ((here[0] - 1, here[1]), (here[0], here[1] - 1)) if min(m, n) >= 0]
        worst = [max(misfit(line, outputs, m, n) for line in lines) for m, n in lower]
        gap = max(gap, min(worst, default=GAP))
    if found[0] != found[1]:
        types = " and ".join(f"[{m}/{n}]" for m, n in found)
        reach = " and ".join(f"{scale:g}" for scale in SCALES)
        return None, f"the quotients that come close, {types} at {reach} times the input, grow with the reach"
    (m, n), name = found[0], f"[{found[0][0]}/{found[0][1]}]"
    if n == 0:
        return None, f"up to 4 times the input it is a polynomial of degree {m}, but not of {m} or less everywhere"
    if gap < GAP:
        return None, f"a quotient {name} comes close, but lower degrees almost as close, as for any smooth function"
    for scale in CHECKS:
        lines = draw(scale)
        if lines is None or any(misfit(line, pick(line.values.shape[1]), m, n) > SLACK for line in lines):
            return None, f"a quotient {name} comes close, but no longer at {scale:g} times the input"
    return found[0], f"{name} fits at {', '.join(f'{s:g}' for s in sorted((*SCALES, *CHECKS)))} times the input"
