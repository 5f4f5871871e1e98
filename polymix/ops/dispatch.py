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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from polymix.errors import CapabilityError
from polymix.extras import is_installed
from polymix.ops.native import library as native
from polymix.ops.shared import blocks
from polymix.ops.shared.tensors import autocast_dtype, keep_memory

KERNELS = ("triton", "native", "blocked")  # in the order in which "auto" prefers them
IMPLS = ("auto", "eager", *KERNELS)  # the values of `impl` for every mixer with kernels
# Tokens in a batch below which a kernel saves less than its extra calls cost (benchmarks/small_inputs.py).
MIN_TOKENS = {"native": 160, "blocked": 512}
# The same for a C kernel when gradients are recorded, by op: with up to WIDE_CHANNELS channels, and with more of them.
MIN_TOKENS_TO_TRAIN = {"pom": (512, 2048), "qt": (0, 160), "poly_sa": (512, 512), "poly_nl": (512, 2048)}
WIDE_CHANNELS = 256
# The same in bfloat16 with AVX512_BF16: the backward computes maps again, and PyTorch's passes take less than that as
# long as they stay in the cache (benchmarks/small_inputs.py --dtype bfloat16).
MIN_TOKENS_TO_TRAIN_IN_BF16 = {"poly_sa": 1 << 14, "poly_nl": 1 << 14}
# The same for a C kernel as a node of a compiled graph, by op (benchmarks/compiled.py): a compiler fuses small passes.
MIN_TOKENS_IN_A_GRAPH = {"pom": 160, "qt": 160, "poly_sa": 1024, "poly_nl": 1024}
_DEVICES = {"triton": "cuda", "native": "cpu", "blocked": "cpu"}
_NEEDS_GPU = "needs a GPU (or TRITON_INTERPRET=1 when requested by name)"
_EXPORTED = "stays out of exported programs, which then run without polymix (pass impl='native' to have it in them)"
log = logging.getLogger("polymix")
_Kind = tuple[torch.device, torch.dtype, type[Tensor]]  # the properties of a tensor that the choice depends on


class Choice(NamedTuple):
    """One decision: the implementation that ran for `op`, and the reasons."""

    op: str
    impl: str
    why: str


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
            MIN_TOKENS_TO_TRAIN and …_IN_BF16 decide when gradients are recorded, MIN_TOKENS_IN_A_GRAPH in a compiled
            graph.
    Raises:
        CapabilityError: the requested implementation cannot run this call. The message says why.
    """
    traced = torch.compiler.is_compiling()
    if not traced:
        keep_memory()
    if impl == "eager":
        return _record(op, "eager", ("requested by name",))
    present = [t for t in tensors if t is not None]
    x, kinds = present[0], {(t.device, t.dtype, type(t)) for t in present}
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in present)
    if impl != "auto":
        why = unsupported.get(impl, f"does not implement {op}") or _obstacle(impl, kinds, recorded, named=True)
        if why is not None:
            raise CapabilityError("impl", f"{impl!r} for {op}: {impl} {why}", "'auto' or 'eager'",
                                  "These two always run.")  # fmt: skip
        return _record(op, impl, ("requested by name",))
    counted = not (traced and _is_exporting())  # an exported program must not depend on the number of tokens
    reasons: list[str] = []
    for kernel in KERNELS:
        if kernel not in unsupported:
            continue
        why = unsupported[kernel] or slower.get(kernel)
        if why is None and counted and kernel != "triton":
            few = MIN_TOKENS[kernel] if kernel in in_blocks else 0
            if kernel == "native" and (traced or choosing_for_a_graph.get()):
                few = MIN_TOKENS_IN_A_GRAPH.get(op, 0)
            elif kernel == "native" and recorded:
                few = MIN_TOKENS_TO_TRAIN.get(op, (0, 0))[x.shape[-1] > WIDE_CHANNELS]
                if op in MIN_TOKENS_TO_TRAIN_IN_BF16 and blocks.multiplies_by_avx512(x):
                    few = MIN_TOKENS_TO_TRAIN_IN_BF16[op]
            if few and x.shape[0] * x.shape[1] < few:
                why = f"is slower with fewer than {few} tokens"
        why = why or _obstacle(kernel, kinds, recorded, named=False)
        if why is None:
            return _record(op, kernel, reasons, fastest_for=x)
        reasons.append(f"{kernel} {why}")
    return _record(op, "eager", reasons or ("the only implementation",))


def obstacle(impl: str, tensors: Sequence[Tensor]) -> str | None:
    """Why a kernel that is no `Operator`, and so ignores autocast, cannot run on such tensors, or None if it can."""
    if torch._C._is_any_autocast_enabled() and any(autocast_dtype(t.device) for t in tensors):
        return "does not support autocast"
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return _obstacle(impl, {(t.device, t.dtype, type(t)) for t in tensors}, recorded, named=False)


def without_gradients(impl: str) -> bool:
    """Whether to run the in-place form of `impl`, which records no gradients.

    That is always the case for "blocked", and for "native" when gradients and autocast are off and no graph is traced.
    """
    if impl != "native" or torch.is_grad_enabled():
        return impl == "blocked"
    return not (torch.compiler.is_compiling() or choosing_for_a_graph.get() or torch._C._is_any_autocast_enabled())


def in_one_call(impl: str) -> bool:
    """Whether one C function may run the whole mixer: without gradients, and no mode asks for its operators."""
    return impl == "native" and without_gradients(impl) and not torch._C._len_torch_dispatch_stack()


def _record(op: str, impl: str, reasons: Sequence[str], fastest_for: Tensor | None = None) -> str:
    """Record and log the choice of `impl` with its reasons, and return `impl`."""
    if torch.compiler.is_compiling():  # nothing is logged or recorded while a graph is traced
        return impl
    recorder = _recorder.get()
    case = (op, impl, tuple(reasons), None if fastest_for is None else (fastest_for.dtype, fastest_for.device.type))
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


def _obstacle(kernel: str, kinds: Collection[_Kind], recorded: bool, *, named: bool) -> str | None:
    """Why a kernel cannot run on such tensors, whatever the op, or None if it can. The device is looked at first.

    `recorded`: gradients of one of them are. `named`: the kernel was requested by name. Then Triton may use its
    interpreter, and native may enter a graph.
    """
    on_device = all(device.type == _DEVICES[kernel] for device, _, _ in kinds)
    if not on_device and kernel != "triton":
        return "runs on CPUs only"
    if not on_device and not named:
        return _NEEDS_GPU
    traced = torch.compiler.is_compiling()
    subclass = any(kind not in (Tensor, torch.nn.Parameter) for _, _, kind in kinds)
    if kernel == "triton":
        if not _HAS_TRITON:
            return "is not installed"
        if not on_device and os.environ.get("TRITON_INTERPRET") != "1":
            return _NEEDS_GPU
        if any(dtype == torch.float64 for _, dtype, _ in kinds):
            return "does not support float64: it accumulates in float32"
    elif kernel == "blocked":
        if traced or choosing_for_a_graph.get():
            return "does not run in a traced graph (torch.compile, torch.export)"
        if recorded:
            return "has no backward (call under torch.inference_mode() or torch.no_grad())"
    else:
        if traced and not named:
            if _is_exporting():
                return _EXPORTED
            if _inside_functorch():
                return "does not support torch.func"
            if subclass:
                return "does not support tensor subclasses"
        if not traced and not named and torch._C._len_torch_dispatch_stack():
            return "is skipped while a dispatch mode (such as FlopCounterMode) is active"
        if any(dtype not in (torch.float32, torch.bfloat16) for _, dtype, _ in kinds):
            return "supports float32 and bfloat16 only"

    # Active transforms that no kernel written by hand supports.
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "cannot be recorded by torch.jit.trace"
    if traced or torch._C._is_any_autocast_enabled():
        lowered = {autocast_dtype(device) for device, _, _ in kinds} - {None}
        if kernel == "blocked" and lowered:
            return "supports no autocast"
        if kernel == "native" and torch.float16 in lowered:
            return "supports no autocast to float16"
    if not traced:
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            return "does not support torch.func or forward-mode derivatives"
        if subclass:
            return "does not support tensor subclasses"

    # The last check, because it loads the library. A graph that names native may run elsewhere, and raises there.
    if kernel == "native" and not (traced and named):
        unavailable = _native_why_not() if traced else native.why_not()
        if unavailable is not None:
            return f"is unavailable: {unavailable}"
    return None


@native.run_by_the_compiler  # which guards the stack itself
def _inside_functorch() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


@native.run_by_the_compiler  # a graph does not outlive the process
def _native_why_not() -> str | None:
    return native.why_not()


# Before torch 2.7 an export cannot be told from a compilation; then no graph has kernels that were not asked for.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
_HAS_TRITON = is_installed("triton")
