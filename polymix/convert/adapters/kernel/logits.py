"""Softmax attention that a layer computes by its definition, softmax(Q Kᵀ) V: logits that nobody computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.convert.heads import HeadsMap, Talking
from polymix.errors import CapabilityError

PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
_DROPOUT = (F.dropout, torch.dropout)
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_ADD = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


class Logits:
    """Q Kᵀ, to which a layer adds biases and factors before softmax, as it adds them to a tensor.

    Its product with V after softmax is what `answer(q, k, v, bias, factor, dropout, talking)` says. Anything else is an
    error, by which a layer that does more with its logits is recognised.
    """

    def __init__(
        self, q: Tensor, k: Tensor, answer: Callable[..., Tensor], factor: Any = 1.0, bias: Tensor | None = None,
        normal: bool = False, talking: Talking | None = None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.answer, self.factor, self.bias, self.normal = q, k, answer, factor, bias, normal
        self.talking = talking
        self.dropout = 0.0  # the rate at which its weights are dropped
        self.shape, self.dtype, self.device = torch.Size((*q.shape[:-1], k.shape[-2])), q.dtype, q.device
        self.ndim = len(self.shape)

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return self.ndim

    def _with(self, **changes: Any) -> Logits:
        if self.normal and changes.keys() - {"talking"}:
            raise _more("changes weights after softmax")
        if self.talking and changes.keys() - {"talking", "normal"}:
            raise _more("changes its logits after its heads have exchanged them")
        parts = {"factor": self.factor, "bias": self.bias, "normal": self.normal, "talking": self.talking, **changes}
        other = Logits(self.q, self.k, self.answer, **parts)
        other.dropout = self.dropout
        return other

    def __mul__(self, factor: Any) -> Logits:
        if isinstance(factor, Tensor) and factor.numel() != 1 and factor.shape[-2:] != (1, 1):
            raise _more("scales its logits by more than a number for each head")
        bias = None if self.bias is None else self.bias * factor
        return self._with(factor=self.factor * factor, bias=bias)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Logits:
        return self * (1 / divisor)

    def __add__(self, bias: Any) -> Logits:
        if not isinstance(bias, Tensor):
            raise _more("adds something else than a tensor to its logits")
        return self._with(bias=bias if self.bias is None else self.bias + bias)

    __radd__ = __add__

    def masked_fill(self, mask: Tensor, value: Any) -> Logits:
        return self + torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill(mask, value)

    def view(self, *shape: Any) -> Logits:
        """Other axes before those of queries and keys, as windows have them."""
        shape = tuple(shape[0]) if len(shape) == 1 else shape
        if self.normal or self.talking or shape[-2:] != tuple(self.shape[-2:]):
            raise _more("gives its logits another shape")
        q, k = (part.reshape(*shape[:-2], *part.shape[-2:]) for part in (self.q, self.k))
        bias = None if self.bias is None else self.bias.expand(self.shape).reshape(shape)
        return Logits(q, k, self.answer, self.factor, bias)

    reshape = view

    def __getitem__(self, places: Any) -> Tensor:
        """Zeros in the place of a part, so that what a layer adds to it shows when it is put back."""
        if self.normal:
            raise _more("takes parts of its weights")
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)[places]

    def __setitem__(self, places: Any, added: Tensor) -> None:
        if self.normal:
            raise _more("changes parts of its weights")
        bias = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        bias = bias if self.bias is None else bias + self.bias
        bias[places] += added
        self.bias = bias

    def float(self) -> Logits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Logits:
        return self

    def type_as(self, other: Any) -> Logits:
        return self

    def softmax(self, dim: int, dtype: Any = None) -> Logits:
        if dim not in (-1, self.ndim - 1):
            raise _more("normalises its logits over another axis than the keys")
        return self._with(normal=True)

    def __matmul__(self, values: Tensor) -> Tensor:
        if not self.normal:
            raise _more("has no softmax")
        return self.answer(self.q, self.k, values, self.bias, self.factor, self.dropout, self.talking)

    def transpose(self, first: int, second: int) -> Turned:
        return self.permute(*_swapped(self.ndim, first, second))

    def permute(self, *axes: int) -> Turned:
        return Turned(self, tuple(axis % self.ndim for axis in axes))

    def exchanged(self, heads_map: HeadsMap) -> Logits:
        """The same after a map across heads, which are the second of four axes."""
        talking = self.talking or Talking()
        name = "after" if self.normal else "before"
        if self.ndim != 4 or getattr(talking, name) is not None:
            raise _more("mixes its logits by more than a map across heads")
        return self._with(talking=talking._replace(**{name: heads_map}))

    def dropped(self, p: Any = 0.5, training: bool = True, **inplace: Any) -> Logits:
        """The same, with the rate at which weights are dropped: whoever answers does that, or does not."""
        weights = self._with()
        weights.dropout = p if training else 0.0
        return weights

    def __getattr__(self, name: str) -> Any:
        raise _more(f"asks its logits for {name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else kwargs.pop("input", None)
        rest = args[1:]
        if isinstance(first, Logits):
            if func is torch.conv2d or func is F.conv2d:
                weight, bias = rest[0], rest[1] if len(rest) > 1 else kwargs.get("bias")
                if weight.shape != (first.shape[1], first.shape[1], 1, 1):
                    raise _more("convolves its logits")
                return first.exchanged((weight[:, :, 0, 0], bias))
            if func in _SOFTMAX:
                return first.softmax(rest[0] if rest else kwargs["dim"])
            if func in _DROPOUT:
                return first.dropped(*rest, **kwargs)
            if func in PRODUCTS:
                return first @ rest[0]
        if func in _ADD and len(args) == 2:
            return args[1] + first if isinstance(args[1], Logits) else first + args[1]
        raise _more(f"passes its logits to {getattr(func, '__name__', func)}")


def _swapped(ndim: int, first: int, second: int) -> list[int]:
    axes = list(range(ndim))
    axes[first], axes[second] = axes[second], axes[first]
    return axes


class Turned:
    """Logits, or weights, with other axes: heads last, for a linear map across them, or keys before queries."""

    def __init__(self, logits: Logits, axes: tuple[int, ...]) -> None:
        self.logits, self.axes = logits, axes
        self.shape, self.dtype = torch.Size(logits.shape[axis] for axis in axes), logits.dtype

    def transpose(self, first: int, second: int) -> Any:
        return self.permute(*_swapped(len(self.axes), first, second))

    def permute(self, *axes: int) -> Any:
        turned = tuple(self.axes[axis] for axis in axes)
        return self.logits if turned == tuple(range(len(axes))) else Turned(self.logits, turned)

    def __getattr__(self, name: str) -> Any:
        raise _more(f"asks its logits for {name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, *rest = args
        kwargs = dict(kwargs or {})
        if func is F.linear and isinstance(first, Turned) and first.axes == (0, 2, 3, 1):
            heads_map = (rest[0], rest[1] if len(rest) > 1 else kwargs.get("bias"))
            if heads_map[0].shape[0] == first.shape[-1]:
                return Turned(first.logits.exchanged(heads_map), first.axes)
        if func in PRODUCTS and rest and isinstance(rest[0], Turned):  # V with its tokens last, times turned weights
            weights, places = rest[0].logits, rest[0].axes
            if places == tuple(_swapped(len(places), -2, -1)):
                return (weights @ first.transpose(-2, -1)).transpose(-2, -1)
        raise _more(f"passes its logits to {getattr(func, '__name__', func)}")


def _more(what: str) -> CapabilityError:
    return CapabilityError("attention", f"a layer that {what}", "softmax of Q Kᵀ with factors and biases", "")
