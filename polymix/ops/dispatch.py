"""Chooses the implementation of an op, and records why.

    eager    plain PyTorch: differentiable to any order; can be traced, compiled and exported
    blocked  CPU, no gradients: works on blocks of tokens or channels that stay in cache, and in place
    native   C kernels for the CPU, forward and backward, compiled at install
    triton   GPU kernels, forward and backward; on a CPU only when requested by name under Triton's interpreter

"auto" tries triton, native, blocked and eager in this order and takes the first that can run and is not slower. An
implementation requested by name runs or raises CapabilityError; it never falls back.

A reason is a predicate such as "needs a GPU"; messages put the implementation in front: "triton needs a GPU".
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from polymix.errors import CapabilityError
from polymix.extras import is_installed
from polymix.ops.native import library as native
from polymix.ops.shared.tensors import autocast_dtype, forward_mode, keep_memory

KERNELS = ("triton", "native", "blocked")  # in the order in which "auto" prefers them
IMPLS = ("auto", "eager", *KERNELS)  # the values of `impl` for every mixer with kernels
# Tokens in a batch below which a kernel saves less than its extra calls cost (benchmarks/small_inputs.py).
MIN_TOKENS = {"native": 160, "blocked": 512}
# The same for a C kernel when gradients are recorded, by op: with up to WIDE_CHANNELS channels, and with more of them.
MIN_TOKENS_TO_TRAIN = {"pom": (512, 2048), "qt": (0, 160), "poly_sa": (512, 512), "poly_nl": (512, 2048)}
WIDE_CHANNELS = 256
# The same for a C kernel as a node of a compiled graph, by op (benchmarks/compiled.py): a compiler fuses small passes.
MIN_TOKENS_IN_A_GRAPH = {"pom": 160, "qt": 160, "poly_sa": 1024, "poly_nl": 1024}
_DEVICES = {"triton": "cuda", "native": "cpu", "blocked": "cpu"}
_NEEDS_GPU = "needs a GPU (or TRITON_INTERPRET=1 when requested by name)"
_TRACED = "does not run in a traced graph (torch.compile, torch.export)"
_EXPORTED = "stays out of exported programs, which then run without polymix (pass impl='native' to have it in them)"
log = logging.getLogger("polymix")
_T = TypeVar("_T")


class Choice(NamedTuple):
    """One decision: the implementation that ran for `op`, and the reasons."""

    op: str
    impl: str
    why: str


class _TensorKind(NamedTuple):
    """The properties of a tensor that the choice depends on. requires_grad: and gradients are recorded."""

    device: torch.device
    dtype: torch.dtype
    type: type[Tensor]
    requires_grad: bool


# Chooses as torch.compile does, in a call that is not compiled; for `explain`.
choosing_for_a_graph: ContextVar[bool] = ContextVar("polymix_choosing_for_a_graph", default=False)
_recorder: ContextVar[list[Choice] | None] = ContextVar("polymix_choices", default=None)
_logged: set[object] = set()  # the decisions logged so far: each is logged once in a process


@contextmanager
def recording() -> Iterator[list[Choice]]:
    """Collect the choices made inside the context, in order."""
    choices: list[Choice] = []
    token = _recorder.set(choices)
    try:
        yield choices
    finally:
        _recorder.reset(token)


def choose(
    op: str,
    impl: str,
    tensors: Iterable[Tensor | None],
    unsupported: Mapping[str, str | None],
    *,
    slower: Mapping[str, str | None] = MappingProxyType({}),
    in_blocks: Collection[str] = (),
) -> str:
    """Return the implementation that runs `op` on `tensors`.

    Args:
        op: the op's name, for records and messages.
        impl: "auto", or the implementation requested by name.
        tensors: the inputs of the call; the first holds the tokens (B, N, …).
        unsupported: for each kernel that the op has, why it cannot run this call, or None if it can.
        slower: for some of these kernels, why "auto" should skip them although they can run, or None.
        in_blocks: the kernels that "auto" skips when the batch has fewer tokens than MIN_TOKENS says. For C kernels
            MIN_TOKENS_TO_TRAIN decides when gradients are recorded, and MIN_TOKENS_IN_A_GRAPH in a compiled graph.
    Raises:
        CapabilityError: the requested implementation cannot run this call. The message says why.
    """
    traced = torch.compiler.is_compiling()
    if not traced:
        keep_memory()
    if impl == "eager":
        return _record(op, "eager", "requested by name")
    present = [t for t in tensors if t is not None]
    records = torch.is_grad_enabled()
    kinds = set(map(_TensorKind._make, {(t.device, t.dtype, type(t), records and t.requires_grad) for t in present}))
    if impl != "auto":
        why = unsupported.get(impl, f"does not implement {op}") or _obstacle(impl, kinds, named=True)
        if why is not None:
            raise CapabilityError("impl", f"{impl!r} for {op}: {impl} {why}", "'auto' or 'eager'",
                                  "These two always run.")  # fmt: skip
        return _record(op, impl, "requested by name")
    counted = not (traced and _is_exporting())  # an exported program must not depend on the number of tokens
    recorded = any(k.requires_grad for k in kinds)
    reasons: list[str] = []
    for kernel in KERNELS:
        if kernel not in unsupported:
            continue
        why = unsupported[kernel] or slower.get(kernel)
        if why is None and counted and (few := _few(op, kernel, kernel in in_blocks, recorded, present[0])):
            tokens = present[0].shape[0] * present[0].shape[1]
            why = f"is slower with fewer than {few} tokens" if tokens < few else None
        why = why or _obstacle(kernel, kinds, named=False)
        if why is None:
            return _record(op, kernel, *reasons, fastest_for=present[0])
        reasons.append(f"{kernel} {why}")
    return _record(op, "eager", *(reasons or ("the only implementation",)))


def _few(op: str, kernel: str, in_blocks: bool, recorded: bool, x: Tensor) -> int:
    """The number of tokens in a batch of tokens x (B, N, …) below which "auto" skips the kernel."""
    if kernel == "native" and _in_graph():
        return MIN_TOKENS_IN_A_GRAPH.get(op, 0)
    if kernel == "native" and recorded:
        return MIN_TOKENS_TO_TRAIN.get(op, (0, 0))[x.shape[-1] > WIDE_CHANNELS]
    return MIN_TOKENS[kernel] if in_blocks else 0


def obstacle(impl: str, tensors: Iterable[Tensor]) -> str | None:
    """Why "auto" cannot run the implementation `impl` on such tensors, or None if it can. Nothing is recorded."""
    records = torch.is_grad_enabled()
    kinds = {_TensorKind(t.device, t.dtype, type(t), records and t.requires_grad) for t in tensors}
    return _obstacle(impl, kinds, named=False)


def without_gradients(impl: str) -> bool:
    """Whether to run the in-place form of `impl`, which records no gradients.

    That is always the case for "blocked", and for "native" when gradients are off and no graph is traced.
    """
    return impl == "blocked" or (impl == "native" and not torch.is_grad_enabled() and not _in_graph())


def _record(op: str, impl: str, *reasons: str, fastest_for: Tensor | None = None) -> str:
    """Record and log the choice of `impl` with its reasons, and return `impl`."""
    if torch.compiler.is_compiling():  # nothing is logged or recorded while a graph is traced
        return impl
    recorder = _recorder.get()
    case = (op, impl, reasons, None if fastest_for is None else (fastest_for.dtype, fastest_for.device.type))
    if recorder is None and case in _logged:  # skip formatting the message, which takes longer than the choice
        return impl
    praise = []
    if fastest_for is not None:
        praise = [f"the fastest for {fastest_for.dtype} on {fastest_for.device.type}".replace("torch.", "")]
    choice = Choice(op, impl, "; ".join([*praise, *reasons]))
    if recorder is not None:
        recorder.append(choice)
    if case not in _logged:
        _logged.add(case)
        log.info("%s runs %s: %s", *choice)
    return impl


def _obstacle(kernel: str, kinds: set[_TensorKind], named: bool) -> str | None:
    """Why a kernel cannot run on such tensors, whatever the op, or None if it can. The device is looked at first.

    `named`: the kernel was requested by name. Then Triton may use its interpreter, and native may enter a graph.
    """
    on_device = all(k.device.type == _DEVICES[kernel] for k in kinds)
    if kernel == "triton":
        return _triton(kinds, on_device) if on_device or named else _NEEDS_GPU
    if not on_device:
        return "runs on CPUs only"
    return _native(kinds, named) if kernel == "native" else _blocked(kinds)


def _triton(kinds: set[_TensorKind], on_device: bool) -> str | None:
    if not _HAS_TRITON:
        return "is not installed"
    if not on_device and os.environ.get("TRITON_INTERPRET") != "1":
        return _NEEDS_GPU
    if any(k.dtype == torch.float64 for k in kinds):
        return "does not support float64: it accumulates in float32"
    return _transform(kinds)


def _native(kinds: set[_TensorKind], named: bool) -> str | None:
    traced = torch.compiler.is_compiling()
    if traced and not named and (why := _graph_obstacle(kinds)):
        return why
    if not traced and not named and torch._C._len_torch_dispatch_stack():
        return "is skipped while a dispatch mode (such as FlopCounterMode) is active"
    if any(k.dtype not in (torch.float32, torch.bfloat16) for k in kinds):
        return "supports float32 and bfloat16 only"
    if reason := _transform(kinds):
        return reason
    if traced and named:  # the operator raises when the graph runs on a machine without the kernels
        return None
    unavailable = _native_why_not() if traced else native.why_not()  # the last check: it loads the library
    return None if unavailable is None else f"is unavailable: {unavailable}"


def _blocked(kinds: set[_TensorKind]) -> str | None:
    if _in_graph():
        return _TRACED
    if any(k.requires_grad for k in kinds):
        return "has no backward (call under torch.inference_mode() or torch.no_grad())"
    return _transform(kinds)


def _graph_obstacle(kinds: set[_TensorKind]) -> str | None:
    """Why "auto" takes no C kernel as a node of the graph that is being traced, or None if it may."""
    if _is_exporting():
        return _EXPORTED
    if _inside_functorch():
        return "does not support torch.func"
    if any(k.type not in (Tensor, torch.nn.Parameter) for k in kinds):
        return "does not support tensor subclasses"
    return None


def _run_by_the_compiler(function: Callable[[], _T]) -> Callable[[], _T]:
    """Mark a function that torch.compile runs instead of tracing it.

    It does what torch.compiler.assume_constant_result does, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_run_by_the_compiler  # which guards the stack itself
def _inside_functorch() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


@_run_by_the_compiler  # a graph does not outlive the process
def _native_why_not() -> str | None:
    return native.why_not()


# Before torch 2.7 an export cannot be told from a compilation; then no graph has kernels that were not asked for.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def _in_graph() -> bool:
    """Whether the choice is made for a graph: while it is traced, or for `explain`."""
    return torch.compiler.is_compiling() or choosing_for_a_graph.get()


_HAS_TRITON = is_installed("triton")


def _transform(kinds: set[_TensorKind]) -> str | None:
    """The active transform that hand-written kernels do not support, as a reason, or None."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "cannot be recorded by torch.jit.trace"
    traced = torch.compiler.is_compiling()
    if (traced or torch._C._is_any_autocast_enabled()) and any(autocast_dtype(k.device) for k in kinds):
        return "does not support autocast"
    if traced:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_mode():
        return "does not support torch.func or forward-mode derivatives"
    if any(k.type not in (Tensor, torch.nn.Parameter) for k in kinds):
        return "does not support tensor subclasses"
    return None
