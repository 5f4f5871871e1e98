"""The mark of a module whose forward `polymix.optimize` replaced."""

from __future__ import annotations

from collections import Counter
from inspect import Signature, signature
from types import CodeType, MethodType
from typing import Any, ClassVar

from torch import nn


class OptimizedForward:
    """Another forward for a module, in its attribute `forward`. By default it runs the forward of the module's class.

    what: what the forward brings, in the plural.
    """

    what: ClassVar[str] = ""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __code__(self) -> CodeType:  # torch.export reads the names of the arguments here,
        return type(self.module).forward.__code__

    @property
    def __signature__(self) -> Signature:  # and here
        return signature(MethodType(type(self.module).forward, self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def forward_of(module: nn.Module | None) -> OptimizedForward | None:
    """The optimized forward of a module, if it has one."""
    own = None if module is None else vars(module).get("forward")
    return own if isinstance(own, OptimizedForward) else None


def optimized(model: nn.Module) -> dict[str, int]:
    """How many modules of the model have an optimized forward, by what it brings."""
    forwards = map(forward_of, model.modules())
    return dict(Counter(forward.what for forward in forwards if forward is not None))
