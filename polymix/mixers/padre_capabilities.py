"""What a PADRe mixer can do as built, and how far its tokens see along the sequence, or along the rows of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polymix.mixers.registry import Capabilities
from polymix.structured.base import StructuredMap
from polymix.structured.compose import Identity
from polymix.structured.conv import DepthwiseConv


def capabilities_of(mixer: Any, one_grid: bool, full: bool) -> Capabilities:
    """The capabilities of a mixer; one_grid: its weights fix the grid; full: W or L does."""
    config, maps = mixer.config, (*mixer.A, *mixer.C)
    memory = all(isinstance(part, StructuredMap) and part.recurrent for part in maps)
    local = all(isinstance(part, (Identity, DepthwiseConv)) for part in maps)
    placed = mixer.needs_context or one_grid or config.num_prefix_tokens > 0 or mixer.U is not None
    return Capabilities(
        causal=config.causal, cross=mixer.needs_context, values=not mixer.needs_context,
        isolates_future=config.causal and "toeplitz" not in mixer.plan.token,  # which is an FFT
        # a circulant map wraps around N positions and cannot leave padding out
        masks=frozenset() if "circulant" in mixer.plan.token else frozenset({"padding"}),
        recurrent=config.causal and memory and not full, any_length=not one_grid, grids=(mixer.axes,),
        sequence="halo" if local and not placed else None,
    )  # fmt: skip


def halo(A: Sequence[Any], C: Sequence[Any], degree: int) -> tuple[int, int]:
    """The widest of the paths A_i, C_i … C_{d-1} of each chain, in front of and behind a row: their edges add up."""
    front, behind = 0, 0
    for first, later in ((A[:degree], C[: degree - 1]), (A[degree:], C[degree - 1 :])):
        for i, part in enumerate(first):
            edges = [_edges(p) for p in (part, *later[max(i - 1, 0) :])]
            front = max(front, sum(edge[0] for edge in edges))
            behind = max(behind, sum(edge[1] for edge in edges))
    return front, behind


def _edges(part: Any) -> tuple[int, int]:
    if not isinstance(part, DepthwiseConv):
        return 0, 0
    if part.site.causal:
        return part.reach, 0
    side = part.kernel[0] // 2 * part.dilation
    return side, side
