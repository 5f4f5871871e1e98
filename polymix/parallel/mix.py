"""A mixer's forward on one part of a sequence, exact as if the whole were here."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from polymix.errors import CapabilityError, MaskError, PolymixError, ShapeError
from polymix.mixers.checks import MixerCall, check_tokens
from polymix.mixers.heads_mixer import Elsewhere
from polymix.mixers.mixer import TokenMixer
from polymix.mixers.registry import missing_capability
from polymix.mixers.states import Place, Summary, counts_tokens
from polymix.ops.shared.masks import zero_broken_padding
from polymix.parallel.collectives import Processes
from polymix.parallel.draws import with_own_draws
from polymix.parallel.layout import Part, joined, padded, parts_of
from polymix.parallel.segments import by_segments


@torch.compiler.disable
def forward(
    mixer: TokenMixer, processes: Processes, order: str, x: Tensor, context: Any = None, **options: Any
) -> Tensor:
    """`mixer.forward` for this process's tokens x (B, n, D); the lengths n may differ, and be 0.

    Raises:
        CapabilityError: what the mixer cannot do on several processes, before any communication. ShapeError,
            MaskError: an argument of this process is wrong; the others raise ParallelError, which names it.
    """
    causal = options.get("causal")
    causal = int(mixer.config.causal_by_build if causal is None else causal)
    refuse(mixer, context, causal, options)
    whole, x = _agreed(mixer, processes, order, x, causal, options)
    return finished(mixer, processes, x, whole.outputs(x))


@torch.compiler.disable
def prefill(
    mixer: TokenMixer, processes: Processes, order: str, x: Tensor, state: Any = None, *, mask: Tensor | None = None,
    causal: bool | int = True,
) -> tuple[Tensor, Any]:  # fmt: skip
    """`mixer.prefill` for this process's tokens of the next piece of a sequence.

    state: after the earlier pieces, the same on all processes; so is the state that it returns.
    Raises as `forward`.
    """
    refuse(mixer, None, int(causal), {"mask": mask})
    refuse_pieces(mixer)
    whole, x = _agreed(mixer, processes, order, x, 1, {"mask": mask}, state)
    y, state = whole.continue_halo(x) if mixer.capabilities.sequence == "halo" else whole.by_scan(x)
    return finished(mixer, processes, x, y), state


def finished(mixer: TokenMixer, processes: Processes, x: Tensor, y: Tensor) -> Tensor:
    """The outputs after dropout, with draws of this process's own."""
    if x.shape[1] == 0:  # gradients of zero, not none: engines wait for those of every weight
        y = y + sum(p.flatten()[:0].sum() for p in mixer.parameters()).to(y.dtype)  # type: ignore[union-attr]
    return with_own_draws(mixer.drop, processes, y) if mixer.drop.training and mixer.drop.p else y


def refuse(mixer: TokenMixer, context: Any, causal: int, options: dict[str, Any]) -> None:
    """Raise CapabilityError for what is not computed on several processes."""
    can = mixer.capabilities
    if can.sequence is None:
        raise missing_capability(mixer.name, "sequence", "mixer", "one sequence on several processes")
    if isinstance(getattr(mixer, "qkv", None), Elsewhere):
        got = f"a {mixer.name} whose projections belong to the layer around it"
        raise CapabilityError("mixer", got, "a mixer with its own", "Convert to mixers with projections of their own.")
    if causal and not can.causal:
        raise missing_capability(mixer.name, "causal", "causal", "causal=True")
    mask = options.get("mask")
    for name, used in (("context", context is not None), ("values", options.get("values") is not None),
                       ("causal", causal > 1 and can.sequence != "gather"),
                       ("mask", isinstance(mask, Tensor) and mask.ndim == 3)):  # fmt: skip
        if used:
            got = {"causal": f"blocks of {causal} tokens", "mask": "a mask for each query"}.get(name, f"{name}=")
            raise CapabilityError(name, f"{got} in a {mixer.name} on several processes", "padding and segments alone",
                                  "Run this mixer on one process, or leave it out.")  # fmt: skip
    for argument, capability in (("mask", "padding"), ("segments", "segments")):
        packs = causal and "padding" in can.masks  # each packed sequence by itself, others hidden
        if options.get(argument) is not None and capability not in can.masks and not packs:
            raise missing_capability(mixer.name, capability, argument, f"{argument}= ({capability})")


def refuse_pieces(mixer: TokenMixer) -> None:
    """Raise CapabilityError for a mixer that hands no state from one piece of a shared sequence to the next."""
    if not mixer.capabilities.recurrent or mixer.capabilities.sequence == "channels":
        got = f"prefill of a {mixer.name} on several processes, which hands on no state"
        raise CapabilityError("mixer", got, "a mixer with a state of fixed size", "Run it on one process.")


def _check(mixer: TokenMixer, x: Tensor, mask: Any, segments: Any, state: Any) -> None:
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] > 0:
        check_tokens(mixer, "x", x)
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == x.shape[:2]):
        raise MaskError("mask", str(getattr(mask, "shape", mask)), f"boolean {tuple(x.shape[:2])}", "Split it as x.")
    if segments is not None and not (isinstance(segments, Tensor) and segments.shape == x.shape[:2]
                                     and not segments.is_floating_point()):  # fmt: skip
        got = str(getattr(segments, "shape", segments))
        raise MaskError("segments", got, f"integer ids {tuple(x.shape[:2])}", "Split them as x.")
    if state is not None:
        mixer.state_spec(x.shape[0]).check(state, x)


def _agreed(
    mixer: TokenMixer, processes: Processes, order: str, x: Tensor, causal: int, options: dict[str, Any],
    state: Any = None,
) -> tuple[Whole, Tensor]:  # fmt: skip
    """What each process knows of the whole after one exchange of lengths, or two; and x without broken padding."""
    mask, segments, error = options.get("mask"), options.get("segments"), None
    try:
        _check(mixer, x, mask, segments, state)
    except PolymixError as wrong:
        error = wrong
    n, batch = (x.shape[1], x.shape[0]) if error is None else (0, 0)
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    numbers = n, mask is not None, batch, causal, segments is not None, state is not None
    rows = processes.agree(numbers, error, device)
    if len({tuple(row[2:]) for row in rows}) > 1:
        got = f"(batch, causal, segments, state) of {[tuple(row[2:]) for row in rows]}"
        raise ShapeError("x", got, "the same on all processes", "Split tokens, not samples, and pass the same to all.")
    lengths = [row[0] for row in rows]
    if sum(lengths) == 0:
        raise ShapeError("x", "no tokens on any process", "at least one", "")
    parts = parts_of(lengths, order)
    whole_mask = None
    if any(row[1] for row in rows):
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=device) if mask is None else mask
        x = zero_broken_padding(x, mask) if n else x
        whole_mask = joined(processes.all_gather(padded(mask, max(lengths))), parts)
    ids = None if segments is None else joined(processes.all_gather(padded(segments.long(), max(lengths))), parts)
    grid = options.get("grid") or mixer.config.built_grid
    return Whole(mixer, processes, parts, whole_mask, causal, grid, ids, state), x


class Whole:
    """One call: a mixer, and what each process knows of the whole sequence.

    mask, segments: (B, N) of the whole, or None. start: the state in front of it.
    """

    def __init__(
        self, mixer: Any, processes: Processes, parts: list[Part], mask: Tensor | None, causal: int,
        grid: tuple[int, ...] | None, segments: Tensor | None = None, start: Any = None,
    ) -> None:  # fmt: skip
        self.mixer, self.processes, self.parts, self.mask, self.causal = mixer, processes, parts, mask, causal
        self.segments, self.start = segments, start
        self.total = parts[-1].last
        self.own = [p for p in parts if p.rank == processes.rank]
        one_axis = (self.total - mixer.config.prefix,)
        self.grid = one_axis if grid is None or len(grid) == 1 else tuple(grid)

    def outputs(self, x: Tensor) -> Tensor:
        mode = self.mixer.capabilities.sequence
        if self.segments is not None and mode != "gather":
            return by_segments(self, x)
        if mode in ("sum", "scan"):
            return self.by_scan(x)[0] if self.causal or mode == "scan" else self.by_sum(x)
        return {"halo": self.by_halo, "gather": self.by_gather, "channels": self.by_channels}[mode](x)

    def _real(self, first: int, last: int) -> Tensor | None:
        return None if self.mask is None else self.mask[:, first:last]

    def _count(self, first: int, last: int, x: Tensor) -> Tensor:
        real = self._real(first, last)
        return torch.full(x.shape[:1], last - first, device=x.device) if real is None else real.sum(1)

    def _in_order(self, outputs: dict[Part, Tensor]) -> Tensor:
        """The outputs of own parts, as this process holds its tokens."""
        return torch.cat([outputs[p] for p in sorted(self.own, key=lambda p: p.offset)], dim=1)

    def _before_part(self, place: int, x: Tensor) -> Tensor:
        """(B) the real tokens in front of a place, those of earlier pieces too."""
        count = self._count(0, place, x)
        return count + self.start.count if counts_tokens(self.start) else count

    def _tokens(self, x: Tensor, part: Part) -> tuple[Tensor, Tensor | None, Place]:
        """A part's tokens, mask and place; one hidden token where it has none, so that it takes part all the same."""
        place = Place(part.first, self.total, self._before_part(part.first, x), self.grid, self.causal > 0)
        own = x[:, part.offset : part.offset + part.last - part.first]
        if part.first == part.last:  # the sum of none: zero, and in the graph of x
            return own.sum(1, keepdim=True), x.new_zeros(x.shape[0], 1, dtype=torch.bool), place
        return own, self._real(part.first, part.last), place

    # -- states

    def by_sum(self, x: Tensor) -> Tensor:
        tokens = {part: self._tokens(x, part) for part in self.own}
        summaries = [self.mixer.summary(*tokens[part]) for part in self.own]
        kind = type(summaries[0].state)
        if hasattr(kind, "blank"):
            state = self._merged(self._gathered(summaries), len(self.parts))
        else:  # states that add up are reduced, whatever the number of processes
            added = summaries[0] if len(summaries) == 1 else summaries[0].merge(summaries[1])
            fields = [self.processes.total(f) if f.is_floating_point() else f for f in added.state]
            state = kind(*(f if f.is_floating_point() else self._count(0, self.total, x) for f in fields))
        return self._in_order(
            {p: self.mixer.read_state(t[0], state, t[1], t[2])[:, : p.last - p.first] for p, t in tokens.items()}
        )

    def by_scan(self, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs in causal order, and the state after all tokens, on every process."""
        starts = self._windows(x)
        tokens = {part: self._tokens(x, part) for part in self.own}
        gathered = self._gathered([self.mixer.summary(*tokens[p], starts[p]) for p in self.own])
        outputs = {}
        for part in self.own:
            state = self._merged(gathered, self.parts.index(part))
            start = starts[part]
            state = state if start is None else state._replace(window=start.window)
            outputs[part] = self.mixer.scan(tokens[part][0], state, tokens[part][1])[0][:, : part.last - part.first]
        return self._in_order(outputs), self._merged(gathered, len(self.parts))

    def _gathered(self, summaries: list[Summary]) -> list[Summary]:
        """The summary of each part of the sequence, in its order, by one collective."""
        fields = [[*s.state, *([] if s.carry is None else [s.carry])] for s in summaries]
        floats = [i for i, f in enumerate(fields[0]) if f.is_floating_point()]
        own = torch.stack([torch.cat([row[i].flatten() for i in floats]) for row in fields])
        all_rows, kind, forgets = self.processes.gather(own), type(summaries[0].state), summaries[0].carry is not None
        result = []
        for part in self.parts:
            row = all_rows[part.rank, [p for p in self.parts if p.rank == part.rank].index(part)]
            pieces = iter(row.split([fields[0][i].numel() for i in floats]))
            values = [next(pieces).view(f.shape) if f.is_floating_point() else self._count(part.first, part.last, f)
                      for f in fields[0]]  # fmt: skip
            carry = values.pop() if forgets else None
            result.append(Summary(kind(*values), carry))
        return result

    def _merged(self, summaries: list[Summary], count: int) -> Any:
        """The state after the first `count` summaries. The others enter as of no tokens: a process that left them out
        would miss the backward pass of the collective, and the others would wait for it."""
        merged = None if self.start is None else Summary(self.start)
        for place, (state, carry) in enumerate(summaries):
            if place >= count:
                blank = state.blank() if hasattr(state, "blank") else (0,) * len(state)
                state = type(state)(*(_blanked(f, value) for f, value in zip(state, blank, strict=True)))
                carry = None if carry is None else _blanked(carry, 1.0)
            summary = Summary(state, carry)
            merged = summary if merged is None else merged.merge(summary)
        assert merged is not None
        return merged.state.recurrent if hasattr(merged.state, "recurrent") else merged.state

    def _windows(self, x: Tensor) -> dict[Part, Any]:
        """For mixers with a memory: the state that each own part's windows continue from."""
        memory = self.mixer.memory
        if not memory:
            return dict.fromkeys(self.own)
        starts = {}
        for part, (first, _, edges) in self._with_edges(x, memory, 0).items():
            front = edges[:, : part.first - first]
            mask = self._real(first, part.first)
            if front.shape[1] == 0:  # the beginning: one hidden token
                front, mask = edges.new_zeros(len(x), 1, x.shape[2]), edges.new_zeros(len(x), 1, dtype=torch.bool)
                front = front + edges.sum() * 0
            starts[part] = self.mixer.scan(front, self.start if first == 0 else None, mask)[1]
        return starts

    # -- edges

    def by_halo(self, x: Tensor) -> Tensor:
        front, behind = self.mixer.halo()
        width = self.total // self.grid[0] if len(self.grid) > 1 else 1
        outputs = {}
        for part, (first, last, tokens) in self._with_edges(x, front * width, behind * width).items():
            n = part.last - part.first
            if n == 0:
                outputs[part] = tokens[:, :0]
                continue
            grid = (last - first) // width, *self.grid[1:]
            call = MixerCall(self._real(first, last), self.causal, grid if self.mixer.capabilities.grids else None)
            y = self.mixer.mix(tokens, tokens, call)
            outputs[part] = y[:, part.first - first : part.first - first + n]
        return self._in_order(outputs)

    def continue_halo(self, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs of a piece, and the state after it. Windows see tokens of the piece, or those in `start`."""
        outputs, states, front = {}, {}, self.mixer.halo()[0]
        for field in (
            [] if self.start is None else tree_flatten(self.start)[0]
        ):  # in the graph of every process: its backward pass is a collective
            x = x + field.flatten()[:0].sum().to(x.dtype)
        nothing = x.new_zeros(len(x), 1, dtype=torch.bool)
        blank = self.mixer.scan(x.new_zeros(len(x), 1, x.shape[2]), None, nothing)[1]
        for part, (first, _, tokens) in self._with_edges(x, front, 0).items():
            n, mask = part.last - part.first, self._real(first, part.last)
            start = blank if first or self.start is None else self.start
            if first and counts_tokens(blank):  # the window is full, so that nobody looks in front of it
                start = blank._replace(count=self._before_part(first, x))
            if first == part.last:  # no tokens at all: one hidden one, in the graph of x
                tokens, mask = tokens.sum(1, keepdim=True), nothing
            y, states[part] = self.mixer.scan(tokens, start, mask)
            outputs[part] = y[:, part.first - first : part.first - first + n]
        ending = max((p for p in self.parts if p.first < p.last), key=lambda p: p.last)
        fields, kind = tree_flatten(states[ending if ending in states else self.own[0]])
        sums = [i for i, f in enumerate(fields) if f.is_floating_point()]
        if sums:  # a state may be a count alone
            rows = self.processes.gather(torch.cat([fields[i].flatten() for i in sums]))[ending.rank]
            for i, row in zip(sums, rows.split([fields[i].numel() for i in sums]), strict=True):
                fields[i] = row.view_as(fields[i])
        state = tree_unflatten(fields, kind)
        return self._in_order(outputs), (
            state._replace(count=self._before_part(self.total, x)) if counts_tokens(state) else state
        )

    # -- keys and values

    def by_gather(self, x: Tensor) -> Tensor:
        """Softmax attention: own queries see the keys and values of all processes."""
        counts = [sum(p.last - p.first for p in self.parts if p.rank == r) for r in range(self.processes.size)]
        own = sorted(self.own, key=lambda p: p.offset)
        places = torch.cat([torch.arange(p.first, p.last, device=x.device) for p in own])
        y: Tensor = self.mixer.mix_part(
            x, places, lambda part: joined(self.processes.collect(part, counts), self.parts),
            MixerCall(self.mask, self.causal, self.grid, self.segments),
        )  # fmt: skip
        return y

    def _with_edges(self, x: Tensor, front: int, behind: int) -> dict[Part, tuple[int, int, Tensor]]:
        """Own parts with so many real tokens more on either side: the first and the last index, and the tokens."""
        reach = [(self._before(p.first, front), self._after(p.last, behind)) for p in self.parts]
        # every process knows all transfers: (from, to, of which part, first, last)
        moves = [
            (source, target, max(source.first, low), min(source.last, high))
            for target, (begin, end) in zip(self.parts, reach, strict=True)
            for low, high in ((begin, target.first), (target.last, end)) for source in self.parts
            if max(source.first, low) < min(source.last, high)
        ]  # fmt: skip
        rank, ranks = self.processes.rank, range(self.processes.size)
        out = [m for r in ranks for m in moves if m[0].rank == rank and m[1].rank == r]
        into = [m for r in ranks for m in moves if m[1].rank == rank and m[0].rank == r]
        sizes = [[sum(b - a for s, t, a, b in group if (t, s)[side].rank == r) for r in ranks]
                 for side, group in enumerate((out, into))]  # fmt: skip
        rows = x.transpose(0, 1)
        sent = [rows[s.offset + a - s.first : s.offset + b - s.first] for s, _, a, b in out]
        received = self.processes.exchange(torch.cat([rows[:0], *sent]), *sizes)
        chunks = dict(zip(into, received.split([b - a for _, _, a, b in into]), strict=True)) if into else {}
        result = {}
        for part, (begin, end) in zip(self.parts, reach, strict=True):
            if part.rank == rank:
                own = rows[part.offset : part.offset + part.last - part.first]
                mine = sorted((m for m in into if m[1] is part), key=lambda m: m[2])
                before = [chunks[m] for m in mine if m[3] <= part.first]
                after = [chunks[m] for m in mine if m[2] >= part.last and m[3] > part.first]
                tokens = torch.cat([*before, own, *after, received[:0]])
                result[part] = begin, end, tokens.transpose(0, 1)
        return result

    def _before(self, place: int, count: int) -> int:
        """The last index that has `count` real tokens between it and a place, in every row."""
        if self.mask is None or len(self.grid) > 1 or not count:
            return max(0, place - count)
        behind = self.mask[:, :place].flip(1).cumsum(1).amin(0)
        return place - int((behind < count).sum()) - 1 if bool((behind >= count).any()) else 0

    def _after(self, place: int, count: int) -> int:
        if self.mask is None or len(self.grid) > 1 or not count:
            return min(self.total, place + count)
        ahead = self.mask[:, place:].cumsum(1).amin(0)
        return place + int((ahead < count).sum()) + 1 if bool((ahead >= count).any()) else self.total

    # -- channels

    def by_channels(self, x: Tensor) -> Tensor:
        mixer, size, rank = self.mixer, self.processes.size, self.processes.rank
        mixer.check_length(self.total)
        bounds = [mixer.dim * r // size for r in range(size + 1)]
        counts = [sum(p.last - p.first for p in self.parts if p.rank == r) for r in range(size)]
        batch, n, d = x.shape[0], x.shape[1], bounds[rank + 1] - bounds[rank]
        u = mixer.in_proj(x).unflatten(-1, (-1, mixer.dim))
        several = u.shape[2]
        widths = [b - a for a, b in pairwise(bounds)]
        sent = torch.cat([part.flatten() for part in u.split(widths, dim=-1)])
        received = self.processes.exchange(
            sent, [batch * n * several * w for w in widths], [batch * c * several * d for c in counts]
        )
        shares = [r.view(batch, c, several, d) for r, c in
                  zip(received.split([batch * c * several * d for c in counts]), counts, strict=True)]  # fmt: skip
        whole = torch.cat([shares[p.rank][:, p.offset : p.offset + p.last - p.first] for p in self.parts], dim=1)
        y = mixer.of_channels(whole.flatten(2), self.mask, slice(bounds[rank], bounds[rank + 1]))
        by_offset = sorted(self.parts, key=lambda p: p.offset)
        back = [torch.cat([y[:, p.first : p.last] for p in by_offset if p.rank == r], 1) for r in range(size)]
        home = self.processes.exchange(
            torch.cat([part.flatten() for part in back]), [batch * c * d for c in counts],
            [batch * n * w for w in widths],
        )  # fmt: skip
        parts = [h.view(batch, n, w) for h, w in zip(home.split([batch * n * w for w in widths]), widths, strict=True)]
        out: Tensor = mixer.out_proj(torch.cat(parts, dim=-1).to(x.dtype))
        return out


def _blanked(x: Tensor, value: float) -> Tensor:
    """The value everywhere, with x in the graph."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), value)
