"""Is a module a contextual mapping: does each output row tell its token and its context from all others?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import check_int
from polymix.lens.lines import SAFETY
from polymix.lens.probe import EPS, Probe, as_tokens

_CELLS = 6
_TWINS = 3  # inputs that differ from another in one token alone


@dataclass(frozen=True, eq=False)
class ContextualMapping:
    """Distances between output rows, relative to the rows' usual size.

    within: the smallest between rows of one input (whose tokens all differ). across: of different inputs. twins: the
    smallest between the rows of one and the same token in two inputs that differ in another token alone, which only a
    module that brings the whole context to each token tells apart. nearest: each row's distance to its nearest.
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
        return min(self.within, self.across)  # twins are among those across

    @property
    def holds(self) -> bool:
        """No two rows coincide: within rounding, on these inputs. It is no proof for all."""
        return self.min_distance > self.tolerance

    def __str__(self) -> str:
        kinds = f"one input {self.within:.1e}, two inputs {self.across:.1e}, one token in two contexts {self.twins:.1e}"
        verdict = "no two output rows coincide" if self.holds else "output rows coincide"
        return f"{verdict} in {self.pairs:,} pairs of {self.inputs} random inputs; the closest: {kinds}"

    def plot(self, path: str | Path) -> Path:
        """A picture: how far each output row is from its nearest."""
        from polymix.lens.plots import draw_contextual

        return draw_contextual(self, Path(path))


def contextual_mapping(
    module: Callable[..., Any], x: Tensor | None = None, *, shape: tuple[int, ...] | None = None, draws: int = 16,
    seed: int = 0, **call: Any,
) -> ContextualMapping:  # fmt: skip
    """Whether different inputs ever share an output row, and different tokens of one input (PoM, Lemma 3.3).

    `draws` random inputs, each with three twins in which one token was replaced. Args as `interactions`.
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
