"""Who sees whom: what the masks and positions that a model passes to its layers mean."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from polymix.convert.masks import for_all_heads, split, visible
from polymix.errors import MaskError
from polymix.mixers.checks import holds

T = TypeVar("T")


class Seen(NamedTuple):
    """What the N tokens of a call see, apart from causal order.

    padding: (B, N), True for real tokens. segments: (B, N), ids of packed sequences. pairs: (B, N, N), any other mask.
    before: (B,), how many earlier tokens, in the cache, they see; None: all.
    """

    padding: Tensor | None = None
    segments: Tensor | None = None
    pairs: Tensor | None = None
    before: Tensor | None = None

    @property
    def in_order(self) -> bool:
        """Whether there is at most padding, which is all that works with a state."""
        return self.segments is None and self.pairs is None


def look(
    mask: Any, positions: Tensor | None, x: Tensor, past: int, *, causal: bool, unmasked: bool, by: object
) -> Seen:  # fmt: skip
    """What the tokens x (B, N, D) see, after `past` tokens in a cache.

    Args:
        mask: (B, past + N), (B, 1, N, past + N), or None for causal order alone.
        positions: (B or 1, N); they start again at each packed sequence.
        unmasked: whether the positions alone mark packed sequences, as for flash attention.
        by: the layer that asks.
    """
    batch, n = x.shape[:2]
    if mask is None:
        if positions is None:
            return Seen()
        ids = positions
        if not unmasked:
            once(ids, "one", lambda: _one_each(ids, None), by)
            return Seen()
        packed = once(ids, "packed", lambda: _packed(ids), by)
        return Seen(segments=None if packed is None else packed.expand(batch, -1))
    seen = grid(mask, batch, by)
    if seen.shape[-1] != past + n or (seen.ndim == 3 and seen.shape[1] != n):
        raise MaskError("attention_mask", tuple(mask.shape), f"({batch}, {past + n}), or ({batch}, 1, {n}, {past + n})")
    return once(mask, f"{batch} read after {past}, {causal}", lambda: _read(seen, positions, past, causal), by)


def grid(mask: Any, batch: int, by: object) -> Tensor:
    """A model's mask (B, 1, N, M) or (B, M) as (B, N, M) or (B, M), True where seen. by: the layer that asks."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        cure = 'Load the model with attn_implementation="sdpa".'
        raise MaskError("attention_mask", got, "a tensor (B, M) or (B, 1, N, M)", cure)
    return once(mask, "grid", lambda: _grid(mask), by).expand(batch, *(-1,) * (mask.ndim // 2))


def once(of: Tensor, name: str, make: Callable[[], T], by: object) -> T:
    """The result of `make`, computed once for a tensor that a model passes to all its layers, until it is written to.

    Reading a mask of N² entries in every layer would take longer than a mixer that is linear in N, and on a GPU every
    look at values waits for all that runs. What was made under inference_mode does not count how often it is written
    to: there, the layer `by` that asks for a second time begins the model's next call, for which all is read again.
    """
    if torch.compiler.is_compiling():
        return make()
    results: dict[Hashable, Any] = vars(of).setdefault("_polymix", {})
    key, asked = (name, None if of.is_inference() else of._version), id(by)
    if key not in results or (of.is_inference() and asked in results[key][1]):
        results[key] = make(), set()
    result, askers = results[key]
    askers.add(asked)
    return cast(T, result)


def _grid(mask: Tensor) -> Tensor:
    seen = mask if mask.dtype == torch.bool else visible(mask, inverted=False, shares=True)
    if seen.ndim == 2:
        return seen
    return for_all_heads(seen, 1, "attention_mask")


def _read(seen: Tensor, positions: Tensor | None, past: int, causal: bool) -> Seen:
    """The parts of a visibility mask (B, past + N) or (B, N, past + N)."""
    now, before = seen[..., past:], seen[..., :past]
    if seen.ndim == 2:
        _one_each(positions, now)
        return Seen(now, before=before.sum(1) if past else None)
    parts = split(now, causal)
    if parts.arbitrary is not None:
        packed = None if positions is None else _packed(positions)
        if packed is not None and bool((now == within(packed, causal)).all()):
            return Seen(segments=packed.expand(now.shape[0], -1))
        return Seen(pairs=now)
    _one_each(positions, parts.padding)
    if not past:
        return Seen(parts.padding)
    earlier, real = before.any(1), now.any(1)
    same = ((before == earlier[:, None]) | ~real[:, :, None]).all()
    if not holds(same, "takes no mask under which the tokens of a call see different ones before it"):
        return Seen(pairs=now)
    return Seen(parts.padding, before=earlier.sum(1))


def _one_each(positions: Tensor | None, padding: Tensor | None) -> None:
    """Raise MaskError where positions start again in a row, but the mask does not separate the sequences."""
    if positions is None or positions.shape[1] == 1:
        return
    forward = positions.diff(dim=1) > 0
    if padding is not None:
        forward = forward | ~(padding[:, 1:] & padding[:, :-1])
    if not holds(forward.all(), "takes no packed sequences that its mask does not keep apart"):
        cure = "Leave attention_mask out and pass use_cache=False: the model then makes a mask that separates them."
        raise MaskError(
            "position_ids", "packed sequences that the mask does not separate", "one sequence per row", cure
        )


def _packed(positions: Tensor) -> Tensor | None:
    """(B or 1, N): each token's sequence, which ends where positions do not increase by 1. None: one sequence."""
    ids = (positions.diff(dim=1) != 1).cumsum(1)
    if holds((ids == 0).all(), "takes no packed sequences"):
        return None
    return torch.nn.functional.pad(ids, (1, 0))


def within(segments: Tensor, causal: bool) -> Tensor:
    """(B, N, N): True where both tokens are in one sequence, and with `causal` the second is not later."""
    same = segments[:, :, None] == segments[:, None]
    return same.tril() if causal else same


def in_step(seen: Seen, positions: Tensor | None) -> bool:
    """Whether tokens that see each other are as far apart as their positions say: RoPE needs only distances."""
    if positions is None:
        return True
    drift = positions - torch.arange(positions.shape[1], device=positions.device)
    same = drift[:, :, None] == drift[:, None]
    if seen.segments is not None:
        same = same | ~within(seen.segments, False)
    if seen.pairs is not None:
        same = same | ~seen.pairs
    if seen.padding is not None:
        same = same | ~(seen.padding[:, :, None] & seen.padding[:, None])
    return holds(same.all(), "takes no positions but those of the tokens in the row")
