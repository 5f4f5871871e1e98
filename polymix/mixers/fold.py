"""Cache of merged linear maps, for inference: `TokenMixer.fold`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polymix.ops.shared.tensors import Linear


class _Stamp(NamedTuple):
    """Identity and version of a parameter at the time of merging."""

    parameter: Tensor
    address: int
    dtype: torch.dtype
    version: int


class Folded:
    """Merged maps by name. They are merged again when a parameter has changed."""

    def __init__(self) -> None:
        self._stamps: tuple[_Stamp, ...] = ()
        self._maps: dict[str, Linear] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._maps)

    def maps(self, merge: Callable[[], dict[str, Linear]], parameters: Iterable[nn.Parameter]) -> dict[str, Linear]:
        """The result of `merge()`, from the cache if no parameter has changed."""
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return merge()  # under torch.compile and torch.func the product must be part of the graph
        stamps = tuple(_Stamp(p, p.data_ptr(), p.dtype, _version(p)) for p in parameters)
        if not _unchanged(stamps, self._stamps):
            with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be used in a graph later
                self._stamps, self._maps = stamps, merge()
        return self._maps


def _unchanged(now: tuple[_Stamp, ...], then: tuple[_Stamp, ...]) -> bool:
    """Whether all parameters are the same objects and were not written to; False if one has no version counter."""
    pairs = zip(now, then, strict=False)
    return len(now) == len(then) and all(
        a.parameter is b.parameter and a[1:] == b[1:] and a.version >= 0 for a, b in pairs
    )


def _version(parameter: Tensor) -> int:
    """The version counter, which every in-place write raises; -1 for inference tensors, which have none."""
    return -1 if parameter.is_inference() else parameter._version
