"""Which implementation of an op runs, and why.

    eager    plain PyTorch: differentiable to any order, traced, compiled and exported as it stands
    blocked  CPU, without gradients: blocks of tokens or channels that stay in the cache, results written in place
    native   CPU kernels in C, forward and backward, compiled for the machine on their first use
    triton   GPU kernels, forward and backward; on a CPU under Triton's interpreter when asked for by name

"auto" takes triton, else native, else blocked, else eager: the first that has no reason against it. A name that is
asked for either runs or raises; it never falls back.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from polymix.errors import CapabilityError
from polymix.ops.common import autocast_dtype
from polymix.ops.native import build as native

KERNELS = ("triton", "native", "blocked")  # in the order in which "auto" would have them
IMPLS = ("auto", "eager", *KERNELS)  # of every mixer with kernels
_TRACED = "the graph that is traced has plain PyTorch in it"
log = logging.getLogger("polymix")


class Choice(NamedTuple):
    """One decision: what ran for `op`, and why that."""

    op: str
    impl: str
    why: str


class _Kind(NamedTuple):
    """What a choice depends on of a tensor."""

    device: torch.device
    dtype: torch.dtype
    type: type[Tensor]
    requires_grad: bool


_recorder: ContextVar[list[Choice] | None] = ContextVar("polymix_choices", default=None)
_said: set[object] = set()


@contextmanager
def recording() -> Iterator[list[Choice]]:
    """The choices made inside, in order."""
    choices: list[Choice] = []
    token = _recorder.set(choices)
    try:
        yield choices
    finally:
        _recorder.reset(token)


def choose(op: str, impl: str, tensors: Sequence[Tensor], against: Mapping[str, str | None]) -> str:
    """The implementation that runs for `op` on `tensors`.

    Args:
        impl: "auto" or the one that is asked for.
        against: what the op itself has against each kernel that it has: a reason, or None.
    Raises:
        CapabilityError: the one that is asked for cannot run here; the message says why.
    """
    if impl == "eager":
        return _settle(op, "eager", "asked for")
    kinds = {_Kind(t.device, t.dtype, type(t), t.requires_grad) for t in tensors}
    if impl != "auto":
        why = against.get(impl, f"{op} has no such form") or _obstacle(impl, kinds, named=True)
        if why is not None:
            raise CapabilityError("impl", f"{impl!r} for {op}: {why}", "'auto', 'eager'", "Those run everywhere.")
        return _settle(op, impl, "asked for")
    reasons: list[str] = []
    for kernel in KERNELS:
        if kernel in against:
            why = against[kernel] or _obstacle(kernel, kinds, named=False)
            if why is None:
                return _settle(op, kernel, *reasons, place=tensors[0])
            reasons.append(f"not {kernel}: {why}")
    return _settle(op, "eager", *(reasons or ("the only one",)))


def at_once(impl: str) -> bool:
    """Whether the form without gradients runs, that writes in place: native has it where nothing is recorded."""
    return impl == "blocked" or (impl == "native" and not torch.is_grad_enabled() and not torch.compiler.is_compiling())


def _settle(op: str, impl: str, *reasons: str, place: Tensor | None = None) -> str:
    """`impl`, recorded and logged with the reasons; at its `place` it is the fastest."""
    if torch.compiler.is_compiling():  # tracing neither logs nor records
        return impl
    recorder = _recorder.get()
    case = (op, impl, reasons, None if place is None else (place.dtype, place.device.type))
    if recorder is None and case in _said:  # the text takes longer than the choice
        return impl
    where = [] if place is None else [f"the fastest for {place.dtype} on {place.device.type}".replace("torch.", "")]
    choice = Choice(op, impl, "; ".join([*where, *reasons]))
    if recorder is not None:
        recorder.append(choice)
    if case not in _said:
        _said.add(case)
        log.info("%s runs %s: %s", *choice)
    return impl


def _obstacle(kernel: str, kinds: set[_Kind], named: bool) -> str | None:
    """What speaks against a kernel here, whatever the op. Only where it is `named` Triton's interpreter will do."""
    return {"triton": _triton, "native": _native, "blocked": _blocked}[kernel](kinds, named)


def _triton(kinds: set[_Kind], named: bool) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    interpreted = named and os.environ.get("TRITON_INTERPRET") == "1"
    if any(k.device.type != "cuda" for k in kinds) and not interpreted:
        return "it needs a GPU (or, asked for by name, TRITON_INTERPRET=1)"
    if any(k.dtype == torch.float64 for k in kinds):
        return "its accumulators are float32"
    return _transformed(kinds)


def _native(kinds: set[_Kind], named: bool) -> str | None:
    traced = torch.compiler.is_compiling()
    if traced and not named:
        return _TRACED
    if not named and torch._C._len_torch_dispatch_stack():  # in this order: nothing of the kind can be traced
        return "what looks at every operator, as a counter of FLOPs does, is to see plain PyTorch"
    if any(k.device.type != "cpu" for k in kinds):
        return "it is for the CPU"
    if any(k.dtype not in (torch.float32, torch.bfloat16) for k in kinds):
        return "it is for float32 and bfloat16, with sums in float32"
    if reason := _transformed(kinds):
        return reason
    return None if traced else native.why_not()  # last, for it may compile; in a graph the operator says it as it runs


def _blocked(kinds: set[_Kind], named: bool) -> str | None:
    if torch.compiler.is_compiling():
        return _TRACED
    if any(k.device.type != "cpu" for k in kinds):
        return "it is for the CPU"
    if torch.is_grad_enabled() and any(k.requires_grad for k in kinds):
        return "it has no backward (call under torch.inference_mode() or torch.no_grad())"
    return _transformed(kinds)


def _findable(package: str) -> bool:
    """Whether there is such a package, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


_HAS_TRITON = _findable("triton")


def _transformed(kinds: set[_Kind]) -> str | None:
    """What a hand-written kernel cannot see through."""
    if any(autocast_dtype(k.device) for k in kinds):
        return "autocast decides the types"
    if torch.compiler.is_compiling():
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "torch.func and forward-mode derivatives need plain PyTorch"
    if any(k.type not in (Tensor, torch.nn.Parameter) for k in kinds):
        return "a tensor subclass needs plain PyTorch"
    return None
