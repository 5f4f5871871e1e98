"""What sharing a sequence costs: the bytes that a process sends for one layer, by the way that its mixer splits.

    sum        2 (P - 1) / P · S                    an all-reduce of the state of S bytes
    scan       (P - 1) · S + m · D                  a gather of the states; m: tokens that windows remember
    halo       (front + behind) · D                 the edges, in tokens: on a grid, rows
    gather     2 (P - 1) · n · D                    attention, whose keys and values all processes get, n = N / P
    channels   (parts + 1) (P - 1) / P · n · D      projections by all-to-all, and the outputs back
    ring       2 (P - 1) · n · D                    attention, whose keys and values go round
    all-to-all 4 (P - 1) / P · n · D                attention, by heads: queries, keys, values, and the outputs back

times the batch and the bytes of a number. The backward pass sends as much again; a ring that keeps no keys and values
of others sends them once more with their gradients, twice as much. Lengths and errors, on which each call agrees first,
are left out: they do not depend on the model. So are masks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from polymix.errors import check_choice, check_int
from polymix.mixers.mixer import TokenMixer
from polymix.mixers.registry import missing_capability
from polymix.mixers.states import Place

ATTENTION = ("ring", "all-to-all")


class Sent(NamedTuple):
    """Bytes that the busiest process sends for one layer in each pass."""

    forward: float
    backward: float


def mixer_bytes(
    mixer: TokenMixer, processes: int, tokens: int, *, batch: int = 1, causal: bool = False,
    grid: tuple[int, ...] | None = None,
) -> Sent:  # fmt: skip
    """What one call of a mixer sends when so many processes share its tokens evenly, in their order.

    Raises CapabilityError: the mixer cannot be split.
    """
    check_int("processes", processes, 1)
    check_int("tokens", tokens, 1)
    mode = mixer.capabilities.sequence
    own, like = -(-tokens // processes), next(mixer.parameters())
    token = batch * mixer.dim * like.element_size()
    if mode == "halo":
        front, behind = mixer.halo()
        grid = grid or mixer.config.built_grid or (tokens,)
        width = math.prod(grid[1:])
        edges = front * width, behind * width
        return Sent(*(float(token * _busiest(*way, own, processes)) for way in (edges, edges[::-1])))
    if mode == "channels":
        several: int = mixer.in_proj.out_features // mixer.dim  # type: ignore[union-attr, operator, assignment]
        return Sent(*2 * ((several + 1) * token * own * (processes - 1) / processes,))
    if mode == "gather":  # keys and values, of every process to every other one
        return Sent(*2 * (2.0 * (processes - 1) * token * own,))
    if mode not in ("sum", "scan"):
        raise missing_capability(mixer.name, "sequence", "mixer", "one sequence on several processes")
    added, gathered = _state(mixer, batch, tokens, grid, like, causal)
    if causal or mode == "scan" or gathered:
        states = (processes - 1) * (added + gathered)
        return Sent(*2 * (states + token * _busiest(mixer.memory, 0, own, processes),))
    return Sent(*2 * (2 * (processes - 1) / processes * added,))


def _state(
    mixer: TokenMixer, batch: int, tokens: int, grid: tuple[int, ...] | None, like: torch.Tensor, causal: bool
) -> tuple[int, int]:
    """The bytes of a state that adds up, or of one that does not; the other is 0. Of a real one, of one token."""
    x = torch.zeros(batch, 1, mixer.dim, dtype=like.dtype, device=like.device)
    place = Place(0, tokens, torch.zeros(batch, dtype=torch.int64, device=like.device), grid or (tokens,), causal)
    start = mixer.scan(x, None, x[..., 0].bool())[1] if mixer.memory else None
    with torch.no_grad():
        state, carry = mixer.summary(x, None, place, start)
    parts = [part for part in (*state, *(() if carry is None else (carry,))) if part.is_floating_point()]
    size = sum(part.nbytes for part in parts)
    return (0, size) if hasattr(state, "blank") else (size, 0)


def _busiest(front: int, behind: int, own: int, processes: int) -> int:
    """The most tokens that one process sends, where each needs so many in front of its own and behind them."""

    def sent(reach: int, others: int) -> int:  # to the next process, the one after it …
        return sum(min(max(reach - far * own, 0), own) for far in range(min(others, -(-reach // own))))

    ranks = (0, (processes - 1) // 2, processes // 2, processes - 1)  # in the middle there are most on both sides
    return max(sent(front, processes - 1 - rank) + sent(behind, rank) for rank in ranks)


def attention_bytes(
    kind: str, dim: int, processes: int, tokens: int, *, batch: int = 1, number: int = 4, keeps: bool = True
) -> Sent:
    """What a layer of softmax attention sends. kind: of `ATTENTION`. number: bytes of one.

    keeps: whether a ring keeps the keys and values of others for its backward pass.
    """
    check_choice("kind", kind, ATTENTION)
    share = batch * -(-tokens // processes) * dim * number
    if kind == "ring":
        return Sent(2 * (processes - 1) * share, 2 * (processes - 1) * share * (1 if keeps else 2))
    return Sent(*2 * (4 * share * (processes - 1) / processes,))
