"""What the recurrent state of a mixer must be, and the check of it before a step reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import StateError
from polymix.ops.shared.tensors import Counts, Shape, accumulator, autocast_dtype

__all__ = ["Counts", "Place", "PooledState", "Shape", "StateSpec", "Summary", "count_tokens"]


class Place(NamedTuple):
    """Where a part of a sequence lies in the whole: what positions depend on."""

    first: int  # the index of its first token
    total: int  # the number of tokens of the whole
    before: Tensor  # (B,) real tokens in front of it, int64
    grid: tuple[int, ...] | None = None  # of the whole
    causal: bool = True  # whether tokens see earlier ones alone


class Summary(NamedTuple):
    """What a part of a sequence does to the state: state -> carry ⊙ state + its own.

    carry: None where nothing is forgotten. Summaries merge associatively, so that parts can be summarised apart.
    """

    state: Any
    carry: Tensor | None = None

    def merge(self, later: Summary) -> Summary:
        """The summary of this part and the one behind it."""
        carry = None if self.carry is None or later.carry is None else self.carry * later.carry
        return Summary(self.state.merge(later.state, later.carry), carry)


def count_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The real tokens of each row of x (B, N, D), (B) int64; without a mask all."""
    return torch.full(x.shape[:1], x.shape[1], device=x.device) if mask is None else mask.sum(1)


def counts_tokens(state: Any) -> bool:
    """Whether a state counts tokens, in a field of that name (every tuple has a method `count`)."""
    return "count" in getattr(state, "_fields", ()) and not state.count.is_floating_point()


class PooledState(NamedTuple):
    """The state of a mixer that pools all tokens once and has no causal form."""

    total: Tensor  # (B, E), the sum over the tokens, in float32 or wider
    count: Tensor  # type: ignore[assignment]  # (B,) the number of real tokens, int64

    def merge(self, later: PooledState, carry: Tensor | None = None) -> PooledState:
        """The state of both parts of a sequence; nothing is forgotten, so that `carry` is None."""
        return PooledState(self.total + later.total, self.count + later.count)


_CURE = "Pass what prefill or step of this mixer returned for this batch."


class StateSpec:
    """A state: its class, and the shape of each field in order; a list for a field that is a tuple of tensors."""

    def __init__(self, kind: type[Any], *fields: Shape | list[Shape]) -> None:
        self.kind, self.fields = kind, fields

    def check(self, state: Any, x: Tensor) -> None:
        """Raise StateError unless `state` is such a state, for tokens x (B, N, D): dtypes, shapes and device."""
        sums = accumulator(x.dtype)
        # Autocast may have changed between the calls.
        allowed = (sums,) if autocast_dtype(x.device) is None else (sums, torch.float32, torch.float64)
        if not isinstance(state, self.kind):
            raise StateError("state", _described(state), self._text(sums), _CURE)
        for spec, value in zip(self.fields, state, strict=True):
            parts = spec if isinstance(spec, list) else [spec]
            values = value if isinstance(spec, list) else [value]
            if not isinstance(values, (tuple, list)) or len(values) != len(parts):
                raise StateError("state", _described(state), self._text(sums), _CURE)
            for shape, part in zip(parts, values, strict=True):
                if not _fits(part, shape, allowed):
                    raise StateError("state", _described(state), self._text(sums), _CURE)
                if part.device != x.device:
                    raise StateError("state", f"a tensor on {part.device}", f"one on {x.device}, where x is",
                                     "Move it with .to(device).")  # fmt: skip

    def _text(self, sums: torch.dtype) -> str:
        texts = []
        for name, spec in zip(self.kind._fields, self.fields, strict=True):
            parts = ", ".join(_typed(part, sums) for part in (spec if isinstance(spec, list) else [spec]))
            texts.append(f"{name} [{parts}]" if isinstance(spec, list) else f"{name} {parts}")
        return f"a {self.kind.__name__} of {', '.join(texts)}"


def _fits(part: Any, spec: Shape, dtypes: tuple[torch.dtype, ...]) -> bool:
    if not isinstance(part, Tensor) or part.is_nested or part.layout is not torch.strided:
        return False
    if isinstance(spec, Counts):
        spec, dtypes = spec.shape, (torch.int64,)
    return part.shape == spec and part.dtype in dtypes


def _typed(spec: Shape, sums: torch.dtype) -> str:
    shape, dtype = (spec.shape, torch.int64) if isinstance(spec, Counts) else (spec, sums)
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def _described(state: Any) -> str:
    """A state's class, and the shapes and dtypes of its tensors."""
    fields = state if isinstance(state, tuple) else ()
    parts = [part for field in fields for part in (field if isinstance(field, (tuple, list)) else (field,))]
    texts = [_tensor(part) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    return f"{type(state).__name__} of {', '.join(texts)}" if texts else type(state).__name__


def _tensor(x: Tensor) -> str:
    if x.is_nested or x.layout is not torch.strided:
        return "a nested tensor" if x.is_nested else f"a tensor with layout {x.layout}"
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
