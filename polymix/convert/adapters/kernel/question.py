"""Attention by PyTorch's `scaled_dot_product_attention`: who asks for it, what is asked, and the answer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polymix.convert.adapters.kernel.logits import PRODUCTS, Logits, Turned
from polymix.convert.heads import Heads, Talking, scaled, softmax
from polymix.convert.masks import HIDDEN, for_all_heads, split, visible
from polymix.errors import CapabilityError

_ATTENTION = re.compile("Att(entio)?n|([A-Z]{2}|M)SA(V2)?$")  # such as MHSA, and mmpretrain's WindowMSA
NAMES = ("scaled_dot_product_attention", "dispatch_attention_fn")  # PyTorch's kernel, and diffusers' way to it


class Question(NamedTuple):
    """The arguments of `scaled_dot_product_attention`: q (…, N, d), k (…, M, d), v (…, M, e); and talking heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    talking: Talking | None = None

    def answer(self) -> Tensor:
        """What PyTorch answers, or softmax by its definition where heads exchange their logits."""
        if self.talking is None:
            return F.scaled_dot_product_attention(*self[:6], scale=self.scale, enable_gqa=self.enable_gqa)
        return softmax(scaled(*self[:3], self.scale)._replace(position_bias=self.attn_mask, talking=self.talking))


class Answering(TorchFunctionMode):
    """Context manager in which `answer` stands in the place of softmax attention.

    That is `scaled_dot_product_attention` or, with `products`, what begins with these matrix products, counted from 0.
    What `answer` calls is not changed. It costs about a microsecond for each operation of PyTorch inside.
    """

    def __init__(self, answer: Callable[[Question], Tensor], products: Collection[int] = ()) -> None:
        super().__init__()
        self.answer, self.products = answer, products
        self.count, self.answering = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.answering:
            return func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and not self.products:
            return self.answer(Question(*args, **(kwargs or {})))
        if func in PRODUCTS and len(args) == 2 and not any(isinstance(part, (Logits, Turned)) for part in args):
            self.count += 1
            if self.count - 1 in self.products:
                return Logits(args[0], args[1].transpose(-2, -1), self._defined)
        return func(*args, **(kwargs or {}))

    def _defined(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, factor: Any, dropout: float,
        talking: Talking | None,
    ) -> Tensor:  # fmt: skip
        if bias is not None:
            bias = bias.expand(*q.shape[:-1], k.shape[-2]) if bias.ndim > q.ndim else bias
        question = Question(q * (factor * q.shape[-1] ** 0.5), k, v, bias, dropout, talking=talking)
        self.count += 1  # of weights and values
        self.answering = True
        try:
            return self.answer(question)
        finally:
            self.answering = False


def asks_pytorch(module: nn.Module) -> bool:
    """Whether the code of a module, or of its processor, asks PyTorch for attention, or computes it by definition."""
    kinds: tuple[Any, ...] = (type(module), type(getattr(module, "processor", None)))
    return any(map(_names_kernel, kinds)) or _defines(kinds[0])


@cache
def _names_kernel(kind: type) -> bool:
    if kind.__module__.startswith(("torch.", "polymix.", "builtins")):
        return False
    sources = (_source(base) for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins")))
    return any(f"{name}(" in source for source in sources for name in NAMES)


@cache
def _defines(kind: type) -> bool:
    """Whether a class of attention, by its name, has a softmax between products of matrices."""
    if kind.__module__.startswith(("torch.", "polymix.", "builtins")) or not _ATTENTION.search(kind.__name__):
        return False
    source = _source(kind)
    return "softmax" in source and ("@" in source or "matmul(" in source or "bmm(" in source)


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined where there is no file
        return ""


def in_heads(question: Question, axis: int | None, biased: bool | None) -> Heads:
    """A question in one form. biased: whether its mask is a bias; None: it is, where it does more than hide."""
    q, k, v, mask, _, causal, scale, _, talking = question
    lead = [size for place, size in enumerate(q.shape[:-2]) if place != axis]
    heads = scaled(folded(q, axis), folded(k, axis), folded(v, axis), scale)._replace(causal=causal, talking=talking)
    if mask is None:
        return heads
    if talking is not None:
        if not torch.compiler.is_compiling() and bool((mask <= HIDDEN).any()):
            got = "a layer whose heads exchange logits of hidden tokens"
            raise CapabilityError("attention", got, "a call without a mask", "Keep this layer.")
        return heads._replace(position_bias=folded(mask.expand(q.shape[:-1] + mask.shape[-1:]), axis))
    if mask.dtype != torch.bool:
        if biased or (biased is None and not bool(((mask == 0) | (mask <= HIDDEN)).all())):
            heads = heads._replace(position_bias=folded(mask.expand(q.shape[:-1] + mask.shape[-1:]), axis))
        mask = mask > HIDDEN if biased or heads.position_bias is not None else visible(mask, inverted=False)
    mask = mask[(None,) * (q.ndim - mask.ndim)]
    seen = mask if axis is None else for_all_heads(mask, axis, "attn_mask")
    seen = seen.expand(*lead, *seen.shape[-2:]).reshape(-1, *seen.shape[-2:])
    if seen.shape[1] == 1 < heads.q.shape[2] or seen.shape[1:] == (1, heads.k.shape[2]):
        real = seen[:, 0] if torch.compiler.is_compiling() or not bool(seen.all()) else None
        return heads._replace(padding=real)
    parts = split(seen)
    return heads._replace(padding=parts.padding, pairs=parts.arbitrary, causal=parts.causal or causal)


def folded(part: Tensor, axis: int | None) -> Tensor:
    """(…, h, …, N, d) as (B, h, N, d)."""
    part = part.unsqueeze(-3) if axis is None else part.movedim(axis, -3)
    return part.reshape(-1, *part.shape[-3:])


def in_shape(y: Tensor, question: Question, axis: int | None) -> Tensor:
    """An answer (B, h, N, e) in the shape of the question, in memory as PyTorch's: some hosts call `view`."""
    shape = [size for place, size in enumerate(question.query.shape[:-2]) if place != axis]
    y = y.to(question.query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    y = y.reshape(*shape, *y.shape[1:]) if len(shape) != 1 else y
    return y.squeeze(-3) if axis is None else y.movedim(-3, axis)


def rows(y: Tensor, axis: int | None) -> Tensor:
    """An answer in its host's shape as (B, N, h e)."""
    return folded(y, axis).transpose(1, 2).flatten(2)


def without_padding(y: Tensor, heads: Heads) -> Tensor:
    """An answer (B, h, N, e) with zeros for queries that are padding: nobody reads what they get."""
    if heads.padding is None or heads.padding.shape[1] != y.shape[2]:
        return y
    return y.masked_fill(~heads.padding[:, None, :, None], 0.0)
