"""Packed sequences of which some lie on several processes: their states are exchanged, one for each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.mixers.checks import MixerCall
from polymix.mixers.states import Place


class Slot(NamedTuple):
    """For each row, one packed sequence that a part shares with others."""

    mask: Tensor  # (B, n) the part's real tokens of it
    column: Tensor  # (B, S) one-hot, which of the shared sequences it is; zeros for none
    before: Tensor  # (B) its real tokens in earlier parts
    seen: Tensor  # (B) its real tokens that the part's tokens see in other parts, and with causal=0 in this one


def by_segments(whole: Any, x: Tensor) -> Tensor:
    """The outputs of packed sequences. Each part computes those that it has alone as usual, and the state of each
    that it shares; from the sums of these states it computes the others."""
    table = shared_segments(whole)
    tokens = {part: whole._tokens(x, part) for part in whole.own}
    slots = {part: _slots(whole, part, table, tokens[part][0].shape[1]) for part in whole.own}
    outputs = {part: _alone(whole, part, *tokens[part][:2]) for part in whole.own}
    if table.shape[1]:  # the same on every process
        own = torch.stack([_states(whole, tokens[part][0], part, slots[part]) for part in whole.own])
        everywhere = whole.processes.gather(own)
        ordered = torch.stack([everywhere[p.rank, [q for q in whole.parts if q.rank == p.rank].index(p)]
                               for p in whole.parts])  # fmt: skip
        for part in whole.own:
            for slot in slots[part]:
                read = _read(whole, tokens[part][0], part, slot, ordered)
                outputs[part] = torch.where(slot.mask.unsqueeze(-1), read, outputs[part])
    y: Tensor = whole._in_order({part: y[:, : part.last - part.first] for part, y in outputs.items()})
    return y


def shared_segments(whole: Any) -> Tensor:
    """(B, S) ids of the sequences that lie in several parts, after the smallest integer in shorter rows."""
    ids, real = whole.segments, whole.mask
    assert ids is not None
    batch, n = ids.shape
    owner = torch.cat([torch.full((p.last - p.first,), i, device=ids.device) for i, p in enumerate(whole.parts)])
    rows = torch.arange(batch, device=ids.device)[:, None].expand(batch, n)
    triples = torch.stack((rows, ids, owner.expand(batch, n)), dim=-1)
    triples = triples.flatten(0, 1) if real is None else triples[real]
    pairs, times = triples.unique(dim=0)[:, :2].unique(dim=0, return_counts=True)
    shared = [pairs[(times > 1) & (pairs[:, 0] == row), 1] for row in range(batch)]
    table = ids.new_full((batch, max(map(len, shared))), torch.iinfo(ids.dtype).min)
    for row, names in enumerate(shared):
        table[row, : len(names)] = names
    return table


def _slots(whole: Any, part: Any, table: Tensor, n: int) -> list[Slot]:
    """Slots that hold every sequence that a part shares; one of none, for the collectives, where it shares none."""
    ids = whole.segments
    assert ids is not None
    real = torch.ones_like(ids, dtype=torch.bool) if whole.mask is None else whole.mask
    inside = slice(part.first, part.last)
    member = (ids[:, None] == table[:, :, None]) & real[:, None]  # (B, S, N)
    there = member[:, :, inside].any(-1)
    order = (~there).to(torch.uint8).argsort(dim=1, stable=True)  # those of this part first
    slots = []
    for k in range(max(1, int(there.sum(1).max())) if table.shape[1] else 0):
        column = torch.zeros_like(there).scatter_(1, order[:, k : k + 1], there.gather(1, order[:, k : k + 1]))
        tokens = (member & column[:, :, None]).any(1)
        mask = tokens[:, inside] if part.first < part.last else tokens.new_zeros(len(tokens), n)
        before = tokens[:, : part.first].sum(1)
        slots.append(Slot(mask, column, before, before if whole.causal else tokens.sum(1)))
    return slots


def _alone(whole: Any, part: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    assert whole.segments is not None
    ids = whole.segments[:, part.first : part.last] if part.first < part.last else x.new_zeros(x.shape[:2]).long()
    y: Tensor = whole.mixer.mix(x, x, MixerCall(mask, whole.causal, None, ids))
    return y


def _states(whole: Any, x: Tensor, part: Any, slots: list[Slot]) -> Tensor:
    """(B, S, E): the sums of each shared sequence's tokens in this part."""
    total: Any = 0
    for slot in slots:
        place = Place(part.first, whole.total, slot.before, whole.grid)
        sums = whole.mixer.summary(x, slot.mask, place).state.total
        total = total + slot.column[:, :, None].to(sums.dtype) * sums[:, None]
    return total


def _read(whole: Any, x: Tensor, part: Any, slot: Slot, states: Tensor) -> Tensor:
    """The outputs of a slot's tokens; states: (parts, B, S, E). Parts that they do not see enter with weight zero."""
    index = whole.parts.index(part)
    weights = states.new_tensor([float(not whole.causal or i < index) for i in range(len(whole.parts))])
    total = torch.einsum("p,bs,pbse->be", weights, slot.column.to(states.dtype), states)
    state = whole.mixer.state_spec(len(x)).kind(total, slot.seen)
    if whole.causal:
        y: Tensor = whole.mixer.scan(x, state, slot.mask)[0]
        return y
    place = Place(part.first, whole.total, slot.before, whole.grid)
    read: Tensor = whole.mixer.read_state(x, state, slot.mask, place)
    return read


def first_seen(ids: Tensor, real: Tensor, first: int, last: int, count: int) -> int:
    """The first of the `count` last real tokens in front of a part of each sequence that it continues, in one row."""
    inside = ids[first:last].unique()
    index = (real[:first] & torch.isin(ids[:first], inside)).nonzero()[:, 0]
    starts = [int(index[ids[index] == name][-count:][0]) for name in ids[index].unique()]
    return min(starts, default=first)
