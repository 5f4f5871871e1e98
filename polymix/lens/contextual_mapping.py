"""Is a module a contextual mapping: does every token in every context get an output row of its own?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import ShapeError
from polymix.lens.fits import SAFETY
from polymix.lens.probe import EPS, Probe, as_tokens, check_draws
from polymix.mixers import PomMixer
from polymix.numbers import significant

_CELLS = 6
_TWINS = 3  # inputs that differ from another one in a single token
# Pairs of numbers with equal sums of their powers up to 1, 2, 3, 4 and 5 (Prouhet, Tarry and Escott): contexts of
# tokens at these places on a line are alike to whatever reads the context by polynomials of such a degree.
EQUAL_SUMS = (
    ((0, 3), (1, 2)), ((0, 4, 5), (1, 2, 6)), ((0, 4, 7, 11), (1, 2, 9, 10)), ((0, 4, 8, 16, 17), (1, 2, 10, 14, 18)),
    ((0, 5, 6, 16, 17, 22), (1, 2, 10, 12, 20, 21)),
)  # fmt: skip
_MAX_DEGREE = 6  # of PoM, tried for `smallest`: the contexts above are told apart by degree 6
_LINES = 4  # lines for each pair
_STEPS = 60  # of the search
_MIN_DISTANCE = 1e-2  # contexts closer than this, as a share of their norm, are the same


@dataclass(frozen=True, eq=False)
class ContextualMapping:
    """Distances between output rows, relative to the mean norm of a row.

    Attributes:
        within: smallest distance between two rows of one input. The tokens of an input all differ.
        across: smallest distance between rows of two inputs.
        twins: smallest distance between the rows of the same token in two inputs that differ in one other token. Only
            a module that brings the whole context to every token can tell these apart.
        alike: the same for contexts with equal sums of powers, which a module that reads its context by a polynomial of
            low degree cannot tell apart; infinity where there are too few tokens for such contexts.
        collision: (2, N, C), two contexts of the same last token with the same last row, found by a search; None: it
            found none. A continuous map of more numbers than a row has always has some, PoM's and attention's too, at
            every degree: Lemma 3.3 of PoM can hold for finitely many inputs, not for all of R^(N × C).
        smallest: of PoM, (k, D): the smallest degree with its inner width, and the smallest inner width (of 1, 2, 4, …
            times what its heads and groups need) with its degree, whose rows do not coincide on these inputs, with new
            weights. k is None if no degree up to 6 is enough, D if not even its own width is. None for other modules.
        tolerance: rows closer than this coincide.
        inputs, pairs: how many random inputs and pairs of their rows were compared.
        size: mean norm of a row, by which the distances are divided.
        nearest: the distance from each row to its nearest neighbour.
    """

    within: float
    across: float
    twins: float
    alike: float
    collision: Tensor | None
    smallest: tuple[int | None, int | None] | None
    tolerance: float
    inputs: int
    pairs: int
    size: float
    nearest: Tensor

    @property
    def min_distance(self) -> float:
        return min(self.within, self.across, self.alike)  # the twins are among the second

    @property
    def holds(self) -> bool:
        """No two rows coincide on the inputs tried, up to rounding; `collision` says more. Evidence, not a proof."""
        return self.min_distance > self.tolerance

    def __str__(self) -> str:
        same = min(self.twins, self.alike)
        within, across, twins = (significant(value, 2) for value in (self.within, self.across, same))
        kinds = f"in one input {within}, in two {across}, same token in two contexts {twins}"
        verdict = "no two output rows coincide" if self.holds else "some output rows coincide"
        search = "none" if self.collision is None else "two contexts with the same row"
        tried = f"{self.pairs:,} pairs, {self.inputs} random inputs"
        sizes = ""
        if self.smallest is not None:
            k, width = ("none" if size is None else size for size in self.smallest)
            sizes = f"; smallest degree that is enough for these inputs: {k}, smallest inner width: {width}"
        return f"{verdict} ({tried}); smallest distance: {kinds}{sizes}; a search over all inputs found {search}"

    def plot(self, path: str | Path) -> Path:
        """Save a histogram of each output row's distance to its nearest neighbour."""
        from polymix.lens.plots import draw_contextual_mapping

        title = "no two rows coincide" if self.holds else "some rows coincide"
        return draw_contextual_mapping(Path(path), title, self.nearest, self.tolerance)


def contextual_mapping(
    module: Callable[..., Any], x: Tensor | None = None, *, shape: tuple[int, ...] | None = None, draws: int = 16,
    seed: int = 0, **call: Any,
) -> ContextualMapping:  # fmt: skip
    """Check whether output rows of different tokens, or of one token in different contexts, coincide on some inputs.

    A mixer for which they never do is a contextual mapping (PoM, Lemma 3.3), which can be asked of two sets of inputs.
    `holds` and `smallest` speak of a finite one: random inputs, inputs that differ in one token, and contexts that
    polynomials up to degree 5 cannot tell apart, as far as there are tokens for them. `collision` speaks of all of
    R^(N × C): Gauss and Newton's method searches two contexts of one token with the same row.

    Args:
        module: a mixer, any module, or a function of one tensor.
        x: an input to begin with, (1, N, C), (N, C) or (N,).
        shape: the shape of a random input, instead of x. Mixers of this package need neither.
        draws: number of random inputs. Each has three twins in which one token was replaced.
        seed: of the inputs.
        call: keyword arguments for every call of the module.
    """
    check_draws("draws", draws, 2)
    probe = Probe(module, x, shape, seed, _CELLS, call)
    found = _measure(probe, draws)
    n = probe.tokens[0]
    collision = None
    if as_tokens(probe.out_shape, "module")[0] == n > 1:
        collision = _search(probe, found.tolerance * found.size)
    return replace(found, collision=collision, smallest=_smallest(probe, found, draws, seed))


def _measure(probe: Probe, draws: int) -> ContextualMapping:
    """All but the search."""
    n, c = probe.tokens
    rows_out = as_tokens(probe.out_shape, "module")[0]
    count = draws * (1 + _TWINS)
    probe.check_points("draws", count, 2 * (count * rows_out) ** 2)  # every row against every other
    inputs = []
    owner = torch.full((draws, _TWINS), -1)  # the token that was replaced
    for draw in range(draws):
        base = (probe.x if probe.x is not None and draw == 0 else probe.normal()).reshape(n, c)
        inputs.append(base)
        for twin in range(_TWINS):
            place = int(torch.randint(n, (), generator=probe.generator))
            other = base.clone()
            other[place] = probe.normal().reshape(n, c)[place]
            inputs.append(other)
            owner[draw, twin] = place
    stacked = torch.stack(inputs).reshape(-1, *probe.shape)
    rows = probe.check_finite(probe.values(stacked)).reshape(len(inputs) * rows_out, -1)
    size = float(rows.norm(dim=1).mean()) or 1.0
    noise = float(probe.noise(stacked[0], torch.ones_like(stacked[0])).max())
    distance = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") / size
    distance.fill_diagonal_(torch.inf)
    source = torch.arange(len(inputs)).repeat_interleave(rows_out)
    same = source[:, None] == source[None]
    twins, alike = [torch.inf], [torch.inf]
    if rows_out == n:
        family = rows.reshape(draws, 1 + _TWINS, n, -1)
        table = (family[:, 1:] - family[:, :1]).norm(dim=-1)  # (draws, twins, N)
        unchanged = torch.arange(n) != owner.unsqueeze(-1)
        twins += (table[unchanged] / size).tolist()
        alike += [_alike(probe, pair) / size for pair in EQUAL_SUMS if len(pair[0]) < n]
    tolerance = SAFETY * rows.shape[1] ** 0.5 * max(noise / size, EPS)
    return ContextualMapping(
        within=float(distance.masked_fill(~same, torch.inf).min()),
        across=float(distance.masked_fill(same, torch.inf).min()), twins=min(twins),
        alike=min(alike), collision=None, smallest=None, size=size, tolerance=tolerance, inputs=len(inputs),
        pairs=len(rows) * (len(rows) - 1) // 2, nearest=distance.amin(1),
    )  # fmt: skip


def _smallest(probe: Probe, found: ContextualMapping, draws: int, seed: int) -> tuple[int | None, int | None] | None:
    """The smallest degree and the smallest inner width of PoM that are enough for the inputs tried."""
    mixer = probe.function
    if not isinstance(mixer, PomMixer):
        return None

    def enough(degree: int, inner: int) -> bool:
        config = mixer.config.changed(degree=degree).with_width(inner, mixer.dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            twin = config.build(mixer.dim)
        return _measure(Probe(twin, probe.x, probe.shape, seed, _CELLS, dict(probe.call)), draws).holds

    step = mixer.config.width_unit
    degrees = (k for k in range(1, _MAX_DEGREE + 1) if enough(k, mixer.inner))
    doubled = (step << i for i in range((mixer.inner // step).bit_length()))
    widths = (width for width in doubled if enough(mixer.config.degree, width))
    return next(degrees, None), next(widths, None)


def _alike(probe: Probe, pair: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
    """Smallest distance between the rows of the tokens that stay, where the others lie at `pair` on a line."""
    (n, c), count = probe.tokens, len(pair[0])
    places = torch.tensor(pair, dtype=torch.float64)
    places = (places - places.mean()) / places.std()
    inputs = []
    for _ in range(_LINES):
        base, line = (probe.normal().reshape(n, c) for _ in range(2))
        both = base.repeat(2, 1, 1)
        both[:, :count] = base[0] + places[..., None] * line[0]
        inputs.append(both)
    rows = probe.values(torch.cat(inputs).reshape(-1, *probe.shape)).reshape(_LINES, 2, n, -1)[:, :, count:]
    return float((rows[:, 0] - rows[:, 1]).norm(dim=-1).min())


def _search(probe: Probe, tolerance: float) -> Tensor | None:
    """(2, N, C): two contexts of the last token whose last rows are closer than `tolerance`; None: none was found."""
    n, c = probe.tokens
    base, away = (probe.normal().reshape(n, c) for _ in range(2))
    last = base[-1:]

    def row(others: Tensor) -> Tensor:
        return probe(torch.cat((others.reshape(n - 1, c), last)).reshape(probe.shape)).reshape(n, -1)[-1]

    with torch.no_grad():
        goal = row(base[:-1])
    others = base[:-1] + away[:-1]
    for _ in range(_STEPS):
        try:
            slope = torch.autograd.functional.jacobian(row, others).reshape(len(goal), -1)
        except (RuntimeError, ShapeError):  # it has no derivative
            return None
        if not slope.isfinite().all():
            return None
        with torch.no_grad():
            step = torch.linalg.lstsq(slope, (goal - row(others))[:, None], driver="gelsd").solution
            others = others + step.reshape(others.shape)
            if not others.isfinite().all():
                return None
            apart = float((others - base[:-1]).norm()) > _MIN_DISTANCE * float(base.norm())
            if float((row(others) - goal).norm()) <= tolerance:
                return torch.stack((base, torch.cat((others, last)))) if apart else None
    return None
