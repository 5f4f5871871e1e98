"""Shapes, dtypes and devices of an operator's arguments, checked before a kernel takes their addresses."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import OptionError, ShapeError

DTYPES = {
    "native": (torch.float32, torch.bfloat16),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
}
_LETTERS = string.ascii_uppercase
MAX_CASES = 256  # combinations of arguments whose check is remembered


class _Argument(NamedTuple):
    """One tensor. sizes: a capital letter, or an expression, with its code; None: any shape."""

    name: str
    sizes: tuple[tuple[str, Any], ...] | None
    tokens: bool  # its dtype must be that of the first argument
    dtype: torch.dtype | None  # None: floating-point


class Signature:
    """What the arguments of an operator must look like.

    Args:
        inputs: such as "x: B, N, D; weight: E, D; mask: B, N". The first use of a capital letter binds it. Anything
            else is an expression of those letters and the operator's arguments, such as "B, prod(grid), D"; "..." is
            any shape. A name followed by "=" holds tokens: its dtype is that of the first argument; one followed by
            "#" holds integers, int64. A mask is boolean, everything else floating-point.
        outputs: the shapes of the outputs, which their gradients have too: "B, E", or "=: B, N, D" for tokens.
        rules: further expressions that must be true.
        empty: the letters that may be 0.
    """

    def __init__(self, inputs: str, outputs: str, *rules: str, empty: str = "B") -> None:
        self.empty = empty
        self.inputs = [_argument(part) for part in inputs.split(";")]
        self.gradients = [_argument(f"gradient{part}" if part.startswith("=") else f"gradient: {part}")
                          for part in map(str.strip, outputs.split(";"))]  # fmt: skip
        self.rules = [(rule, compile(rule, rule, "eval")) for rule in rules]
        self._right: set[Any] = set()

    def check(self, operator: str, impl: str, arguments: Mapping[str, Any], gradients: Sequence[Tensor] = ()) -> None:
        """Raise ShapeError or OptionError unless the arguments, and the outputs' gradients, fit."""
        case = impl, *[(part.shape, part.dtype, part.device) if isinstance(part, Tensor)
                       else tuple(part) if isinstance(part, list) else part
                       for part in (*arguments.values(), *gradients)]  # fmt: skip
        if case in self._right:
            return
        bindings: dict[str, Any] = {**arguments, "impl": impl, "prod": math.prod}
        first: Tensor = arguments[self.inputs[0].name]
        if first.dtype not in DTYPES[impl]:
            allowed = " or ".join(map(str, DTYPES[impl]))
            cure = f"The {impl} kernel supports nothing else; impl='eager' does."
            raise ShapeError(f"{operator}: {self.inputs[0].name}", str(first.dtype), allowed, cure)
        for argument, tensor in self._pairs(arguments, gradients):
            self._check(f"{operator}: {argument.name}", argument, tensor, first, bindings)
        for rule, code in self.rules:
            if not eval(code, bindings):
                values = {name: value for name, value in bindings.items() if isinstance(value, (int, list, str))}
                got = ", ".join(f"{name}={value}" for name, value in values.items() if name in rule)
                raise OptionError(operator, got, rule, f"The {impl} kernel supports nothing else.")
        if len(self._right) >= MAX_CASES:
            self._right.clear()
        self._right.add(case)

    def _pairs(self, arguments: Mapping[str, Any], gradients: Sequence[Tensor]) -> Iterator[tuple[_Argument, Tensor]]:
        for argument in self.inputs:
            tensor = arguments[argument.name]
            if tensor is not None:
                yield argument, tensor
        if gradients:
            yield from zip(self.gradients, gradients, strict=True)

    def _check(self, name: str, argument: _Argument, tensor: Tensor, first: Tensor, bindings: dict[str, Any]) -> None:
        """Check one tensor, and add the letters that it binds to `bindings`."""
        if tensor.device != first.device:
            raise ShapeError(name, f"a tensor on {tensor.device}", f"one on {first.device}", "Use .to(device).")
        dtype = first.dtype if argument.tokens else argument.dtype
        if (tensor.dtype != dtype) if dtype is not None else not tensor.is_floating_point():
            allowed = "a floating-point dtype" if dtype is None else str(dtype)
            raise ShapeError(name, str(tensor.dtype), allowed, "Convert it with .to(dtype).")
        if argument.sizes is None:
            return
        fits = tensor.ndim == len(argument.sizes)
        for (text, code), got in zip(argument.sizes, tensor.shape, strict=False):
            if text in _LETTERS and text not in bindings:
                bindings[text] = got
                fits = fits and (got > 0 or text in self.empty)
            else:
                fits = fits and eval(code, bindings) == got
        if not fits:
            bound = ", ".join(f"{letter} = {bindings[letter]}" for letter in _LETTERS if letter in bindings)
            allowed = f"({', '.join(text for text, _ in argument.sizes)})"
            cure = f"Here {bound}. Only {' and '.join(self.empty)} may be 0."
            raise ShapeError(name, str(tuple(tensor.shape)), allowed, cure)


def _argument(text: str) -> _Argument:
    name, _, sizes = (part.strip() for part in text.partition(":"))
    read = None if sizes == "..." else tuple((part.strip(), compile(part.strip(), sizes, "eval"))
                                             for part in sizes.split(","))  # fmt: skip
    dtype = torch.int64 if name.endswith("#") else torch.bool if name == "mask" else None
    return _Argument(name.rstrip("=#"), read, name.endswith("="), dtype)
