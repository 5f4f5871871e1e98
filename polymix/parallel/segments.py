"""Packed sequences, of which some lie on several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polymix.mixers.checks import MixerCall
from polymix.ops.shared.masks import zero_broken_padding
from polymix.ops.shared.sequences import apart
from polymix.parallel.layout import Part


def by_segments(whole: Any, x: Tensor) -> Tensor:
    """The outputs of packed sequences.

    Each part computes those that it has alone as usual. The others follow one by one, each as a sequence of its own: on
    every process of the tokens from its first one to its last one there, those of other sequences hidden.
    """
    ids, on_grid = whole.segments, len(whole.grid) > 1
    real = torch.ones_like(ids, dtype=torch.bool) if whole.mask is None else whole.mask
    y: Tensor = whole._in_order({part: _alone(whole, part, x) for part in whole.own})
    for names in _shared(whole, real).unbind(1):  # the same on every process
        member = (ids == names[:, None]) & real
        spans = [(p.first, p.last) if on_grid else _span(member, p) for p in whole.parts]
        parts, first = list[Part](), 0
        for p, (begin, end) in zip(whole.parts, spans, strict=True):
            before = sum(q.last - q.first for q in parts if q.rank == p.rank)  # this process's tokens
            parts.append(Part(p.rank, first, first + end - begin, before))
            first += end - begin
        mask = torch.cat([member[:, begin:end] for begin, end in spans], dim=1)
        one = type(whole)(whole.mixer, whole.processes, parts, None if bool(mask.all()) else mask, whole.causal,
                          whole.grid if on_grid else None)  # fmt: skip
        own = [(begin, end, p.offset - p.first) for p, (begin, end) in zip(whole.parts, spans, strict=True)
               if p.rank == whole.processes.rank]  # fmt: skip
        inside = torch.cat([member[:, begin:end] for begin, end, _ in own], dim=1)
        tokens = torch.cat([x[:, begin + shift : end + shift] for begin, end, shift in own], dim=1)
        outputs = one.outputs(zero_broken_padding(tokens, inside) if tokens.numel() else tokens)
        sizes = [end - begin for begin, end, _ in own]
        for (begin, end, shift), z, seen in zip(own, outputs.split(sizes, 1), inside.split(sizes, 1), strict=True):
            front, old, behind = y.split((begin + shift, end - begin, y.shape[1] - end - shift), 1)
            y = torch.cat((front, torch.where(seen[..., None], z, old), behind), dim=1)
    return y


def _span(member: Tensor, part: Part) -> tuple[int, int]:
    """From the first to the last of a sequence's tokens in a part, in any row; nothing where it has none."""
    places = member[:, part.first : part.last].any(0).nonzero()[:, 0].tolist() or [0, -1]
    return part.first + places[0], part.first + places[-1] + 1


def _shared(whole: Any, real: Tensor) -> Tensor:
    """(B, S) ids of the sequences that lie in several parts, after the smallest integer in shorter rows."""
    ids = whole.segments
    owner = torch.cat([torch.full((p.last - p.first,), i, device=ids.device) for i, p in enumerate(whole.parts)])
    rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    pairs, times = (torch.stack((rows, ids, owner.expand_as(ids)), dim=-1)[real].unique(dim=0)[:, :2]
                    .unique(dim=0, return_counts=True))  # fmt: skip
    shared = [pairs[(times > 1) & (pairs[:, 0] == row), 1] for row in range(len(ids))]
    table = ids.new_full((len(ids), max(map(len, shared))), torch.iinfo(ids.dtype).min)
    for row, names in enumerate(shared):
        table[row, : len(names)] = names
    return table


def _alone(whole: Any, part: Part, x: Tensor) -> Tensor:
    """The outputs of a part whose sequences all end with it."""
    if part.first == part.last:
        return x[:, :0]
    tokens, mask, _ = whole._tokens(x, part)
    ids, mixer = whole.segments[:, part.first : part.last], whole.mixer
    if mixer.capabilities.has("segments"):
        y: Tensor = mixer.mix(tokens, tokens, MixerCall(mask, whole.causal, None, ids))
        return y
    rows, real, where = apart(tokens, ids, mask)
    out: Tensor = mixer.mix(rows, rows, MixerCall(real, whole.causal))[where].view_as(tokens)
    return out
