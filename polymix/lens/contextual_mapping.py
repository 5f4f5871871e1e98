"""Is a module a contextual mapping: does every token in every context get an output row of its own?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import check_int
from polymix.lens.fits import SAFETY
from polymix.lens.probe import EPS, Probe, as_tokens
from polymix.numbers import significant

_CELLS = 6
_TWINS = 3  # inputs that differ from another one in a single token


@dataclass(frozen=True, eq=False)
class ContextualMapping:
    """Distances between output rows, relative to the mean norm of a row.

    Attributes:
        within: smallest distance between two rows of one input. The tokens of an input all differ.
        across: smallest distance between rows of two inputs.
        twins: smallest distance between the rows of the same token in two inputs that differ in one other token. Only
            a module that brings the whole context to every token can tell these apart.
        tolerance: rows closer than this coincide.
        inputs, pairs: how many inputs and pairs of rows were compared.
        nearest: the distance from each row to its nearest neighbour.
    """

    within: float
    across: float
    twins: float
    tolerance: float
    inputs: int
    pairs: int
    nearest: Tensor

    @property
    def min_distance(self) -> float:
        return min(self.within, self.across)  # the twins are among the latter

    @property
    def holds(self) -> bool:
        """No two rows coincide on these inputs, up to rounding. This is evidence, not a proof."""
        return self.min_distance > self.tolerance

    def __str__(self) -> str:
        within, across, twins = (significant(value, 2) for value in (self.within, self.across, self.twins))
        kinds = f"in one input {within}, in two {across}, same token in two contexts {twins}"
        verdict = "no two output rows coincide" if self.holds else "some output rows coincide"
        return f"{verdict} ({self.pairs:,} pairs, {self.inputs} random inputs); smallest distance: {kinds}"

    def plot(self, path: str | Path) -> Path:
        """Save a histogram of each output row's distance to its nearest neighbour."""
        from polymix.lens.plots import draw_contextual_mapping

        title = "no two rows coincide" if self.holds else "some rows coincide"
        return draw_contextual_mapping(Path(path), title, self.nearest, self.tolerance)


def contextual_mapping(
    module: Callable[..., Any], x: Tensor | None = None, *, shape: tuple[int, ...] | None = None, draws: int = 16,
    seed: int = 0, **call: Any,
) -> ContextualMapping:  # fmt: skip
    """Check whether output rows of different tokens, or of one token in different contexts, ever coincide.

    A mixer for which they never do is a contextual mapping (PoM, Lemma 3.3).

    Args:
        module: a mixer, any module, or a function of one tensor.
        x: an input to begin with, (1, N, C), (N, C) or (N,).
        shape: the shape of a random input, instead of x. Mixers of this package need neither.
        draws: number of random inputs. Each has three twins in which one token was replaced.
        seed: of the inputs.
        call: keyword arguments for every call of the module.
    """
    check_int("draws", draws, 2)
    probe = Probe(module, x, shape, seed, _CELLS, call)
    n, c = probe.tokens
    rows_out = as_tokens(probe.out_shape, "module")[0]
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
    rows = probe.values(stacked).reshape(len(inputs) * rows_out, -1)
    size = float(rows.norm(dim=1).mean()) or 1.0
    noise = float(probe.noise(stacked[0], torch.ones_like(stacked[0])).max())
    distance = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") / size
    distance.fill_diagonal_(torch.inf)
    source = torch.arange(len(inputs)).repeat_interleave(rows_out)
    same = source[:, None] == source[None]
    twins = [torch.inf]
    if rows_out == n:
        family = rows.reshape(draws, 1 + _TWINS, n, -1)
        table = (family[:, 1:] - family[:, :1]).norm(dim=-1)  # (draws, twins, N)
        kept = torch.arange(n) != owner.unsqueeze(-1)
        twins += (table[kept] / size).tolist()
    return ContextualMapping(
        within=float(distance.masked_fill(~same, torch.inf).min()),
        across=float(distance.masked_fill(same, torch.inf).min()), twins=min(twins),
        tolerance=SAFETY * rows.shape[1] ** 0.5 * max(noise / size, EPS), inputs=len(inputs),
        pairs=len(rows) * (len(rows) - 1) // 2, nearest=distance.amin(1),
    )  # fmt: skip
