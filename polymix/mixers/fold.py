"""Linear maps that follow each other with nothing between them, merged into one for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polymix.ops.shared.tensors import Linear


class _Stamp(NamedTuple):
    """A parameter as it was when it was merged."""

    parameter: Tensor
    address: int
    dtype: torch.dtype
    version: int


class Folded:
    """Merged maps by name, merged again whenever a parameter has changed."""

    def __init__(self) -> None:
        self._stamps: tuple[_Stamp, ...] = ()
        self._maps: dict[str, Linear] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._maps)

    def maps(self, merge: Callable[[], dict[str, Linear]], parameters: Iterable[nn.Parameter]) -> dict[str, Linear]:
        """What `merge` returns for the parameters as they are now."""
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return merge()  # part of the graph
        stamps = tuple(_Stamp(p, p.data_ptr(), p.dtype, _version(p)) for p in parameters)
        if not _unchanged(stamps, self._stamps):
            with torch.inference_mode(False), torch.no_grad():  # what is merged may meet a graph later
                self._stamps, self._maps = stamps, merge()
        return self._maps


def _unchanged(now: tuple[_Stamp, ...], then: tuple[_Stamp, ...]) -> bool:
    """Whether no parameter was replaced or written to; False for one that does not count its writes."""
    pairs = zip(now, then, strict=False)
    return len(now) == len(then) and all(
        a.parameter is b.parameter and a[1:] == b[1:] and a.version >= 0 for a, b in pairs
    )


def _version(parameter: Tensor) -> int:
    """How often it was written to in place; inference tensors do not count."""
    return -1 if parameter.is_inference() else parameter._version
