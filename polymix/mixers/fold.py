"""Cache of merged linear maps, for inference: `TokenMixer.fold`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polymix.ops.shared.tensors import Linear


class _Stamp(NamedTuple):
    """Identity and version of a parameter at the time of merging.

    `memory` is a view of its memory then, which keeps the address from being used again while the stamp is compared.
    """

    parameter: Tensor
    memory: Tensor
    dtype: torch.dtype
    version: int

    def fits(self, parameter: Tensor) -> bool:
        """Whether this is the same parameter, with the same memory, and nothing was written to it."""
        return (
            parameter is self.parameter
            and self.version >= 0
            and parameter._version == self.version
            and parameter.dtype == self.dtype
            and parameter.data_ptr() == self.memory.data_ptr()
        )


class Folded:
    """Merged maps by name. They are merged again when a parameter has changed."""

    def __init__(self) -> None:
        # One attribute: a thread must not see the stamps of new maps beside the old maps.
        self._merged: tuple[tuple[_Stamp, ...], dict[str, Linear]] = ((), {})

    def __getstate__(self) -> dict[str, object]:
        return {"_merged": ((), self._merged[1])}  # a copy has other parameters: it merges in its first call

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._merged[1])

    def maps(self, merge: Callable[[], dict[str, Linear]], parameters: Iterable[nn.Parameter]) -> dict[str, Linear]:
        """The result of `merge()`, from the cache if no parameter has changed."""
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return merge()  # under torch.compile and torch.func the product must be part of the graph
        current = tuple(parameters)
        stamps, maps = self._merged
        if len(current) != len(stamps) or not all(map(_Stamp.fits, stamps, current)):
            with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be used in a graph later
                stamps = tuple(_Stamp(p, p.detach(), p.dtype, _version(p)) for p in current)
                maps = merge()
            self._merged = stamps, maps
        return maps


def _version(parameter: Tensor) -> int:
    """The version counter, which every in-place write raises; -1 for inference tensors, which have none."""
    return -1 if parameter.is_inference() else parameter._version
