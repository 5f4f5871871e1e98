"""Which implementation of an op runs, and why; and the registered operators that kernels run behind.

    eager    plain PyTorch: differentiable to any order; can be traced, compiled and exported
    blocked  CPU, without gradients: blocks of tokens or channels that stay in the cache, results written in place
    native   CPU kernels in C, forward and backward, compiled at install
    triton   GPU kernels, forward and backward; on a CPU under Triton's interpreter when asked for by name

"auto" takes triton, else native, else blocked, else eager: the first that can run and is not slower. An implementation
that is asked for by name runs or raises; it never falls back.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import CapabilityError
from polymix.ops.native import library as native
from polymix.ops.shared.tensors import autocast_dtype, keep_memory

KERNELS = ("triton", "native", "blocked")  # in the order in which "auto" would have them
IMPLS = ("auto", "eager", *KERNELS)  # of every mixer with kernels
FEW = 512  # tokens in a batch below which blocks save less than their own calls cost
_TRACED = "a traced graph is made of plain PyTorch"
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


def choose(
    op: str,
    impl: str,
    tensors: Iterable[Tensor | None],
    unsupported: Mapping[str, str | None],
    *,
    slower: Mapping[str, str | None] = MappingProxyType({}),
    in_blocks: Collection[str] = (),
) -> str:
    """The implementation that runs for `op` on `tensors`, the first of which has the tokens (B, N, …).

    Args:
        impl: "auto", or the implementation that is asked for.
        unsupported: for each kernel that the op has, why it cannot run this call, or None.
        slower: for some of them, why "auto" should not take them although they could run, or None.
        in_blocks: those that need FEW tokens in a batch before they pay; "auto" leaves them out below that.
    Raises:
        CapabilityError: the implementation that is asked for cannot run; the message says why.
    """
    traced = torch.compiler.is_compiling()
    if not traced:
        keep_memory()
    if impl == "eager":
        return _settle(op, "eager", "asked for")
    present = [t for t in tensors if t is not None]
    kinds = {_Kind(t.device, t.dtype, type(t), t.requires_grad) for t in present}
    if impl != "auto":
        why = unsupported.get(impl, f"{op} has no such form") or _obstacle(impl, kinds, named=True)
        if why is not None:
            raise CapabilityError("impl", f"{impl!r} for {op}: {why}", "'auto', 'eager'",
                                  "These run everywhere.")  # fmt: skip
        return _settle(op, impl, "asked for")
    few = not traced and bool(in_blocks) and present[0].shape[:2].numel() < FEW
    reasons: list[str] = []
    for kernel in KERNELS:
        if kernel not in unsupported:
            continue
        why = unsupported[kernel] or slower.get(kernel)
        if why is None and few and kernel in in_blocks:
            why = f"fewer than {FEW} tokens are faster without blocks"
        why = why or _obstacle(kernel, kinds, named=False)
        if why is None:
            return _settle(op, kernel, *reasons, place=present[0])
        reasons.append(f"not {kernel}: {why}")
    return _settle(op, "eager", *(reasons or ("the only one",)))


def without_gradients(impl: str) -> bool:
    """Whether the form that records no gradients runs, and writes in place: native has it where none are recorded."""
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
    """Why a kernel cannot run here, whatever the op; `named`: asked for by name, when Triton's interpreter will do."""
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
        return "a dispatch mode (such as FlopCounterMode) is active: it should see plain PyTorch"
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
    """The transform that a hand-written kernel cannot see through, or None."""
    if any(autocast_dtype(k.device) for k in kinds):
        return "autocast decides the types"
    if torch.compiler.is_compiling():
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "torch.func and forward-mode derivatives need plain PyTorch"
    if any(k.type not in (Tensor, torch.nn.Parameter) for k in kinds):
        return "a tensor subclass needs plain PyTorch"
    return None


class Operator:
    """polymix::name and polymix::name_backward: one node in a graph that is traced, compiled or exported.

    It has a schema, a fake, and a backward that is an operator too. Second derivatives are those of the definition.

    Args:
        name, schema: of the operator, such as "(Tensor x, Tensor? bias, int order) -> Tensor"; `impl` is added last.
        define: the definition in plain PyTorch, on the same arguments in the same order.
        wrt: the places of the arguments that have gradients; a tensor that is None has none.
        kernels: for each implementation its "module:function", called by the names of the schema and imported when it
            first runs. function_backward takes the outputs' gradients in front and returns a gradient for each of
            `wrt`, or None.
    """

    def __init__(self, name: str, schema: str, define: Callable[..., Any], wrt: Sequence[int], **kernels: str) -> None:
        self.name, self.define, self.wrt, self.kernels = name, define, tuple(wrt), kernels
        arguments, returns = schema.removeprefix("(").split(") -> ")
        self.names = [argument.split()[-1] for argument in arguments.split(", ")]
        self.several = returns.startswith("(")
        forward, backward = f"polymix::{name}", f"polymix::{name}_backward"
        torch.library.define(forward, f"({arguments}, str impl) -> {returns}")
        torch.library.define(backward, f"(Tensor[] grads, {arguments}, str impl) -> Tensor[]")
        torch.library.impl(forward, ("cpu", "cuda"), self._forward)
        torch.library.impl(backward, ("cpu", "cuda"), self._backward)
        torch.library.register_fake(forward, lambda *args: _contiguous(define(*args[:-1])))
        torch.library.register_fake(backward, lambda grads, *args: [t.new_empty(t.shape) for t in self._wanted(args)])
        torch.library.register_autograd(forward, self._differentiate, setup_context=self._save)
        self._op = getattr(torch.ops.polymix, name)
        self._op_backward = getattr(torch.ops.polymix, f"{name}_backward")

    def __call__(self, *args: Any, impl: str) -> Any:
        """Run the definition itself for "eager", so that every transform sees through it; else the operator.

        A kernel in C that nothing observes is called without the dispatcher, which takes half a millisecond of a
        training step: as much as a small mixer.
        """
        if impl == "eager":
            return self.define(*args)
        if not _unseen(impl):
            return self._op(*args, impl)
        return _Undispatched.apply(self, *args, impl) if torch.is_grad_enabled() else self._forward(*args, impl)

    def _wanted(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[i] for i in self.wrt if args[i] is not None]

    def _launch(self, impl: str, suffix: str, grads: Sequence[Tensor], args: Sequence[Any]) -> Any:
        kernel, named = self._kernel(impl, suffix), dict(zip(self.names, args, strict=True))
        if args[0].is_cpu:
            return kernel(*grads, **named)
        with torch.cuda.device_of(args[0]):
            return kernel(*grads, **named)

    @cache  # noqa: B019  operators live as long as the process
    def _kernel(self, impl: str, suffix: str) -> Callable[..., Any]:
        """The function, imported when it is first called."""
        if impl not in self.kernels:
            got, allowed = f"{impl!r} for {self.name}", ", ".join(map(repr, ("eager", *self.kernels)))
            raise CapabilityError("impl", got, allowed, "Choose one of these.")
        module, _, function = self.kernels[impl].partition(":")
        return getattr(importlib.import_module(module), function + suffix)

    def _forward(self, *inputs: Any) -> Any:
        *args, impl = inputs
        return _contiguous(self.define(*args)) if impl == "eager" else self._launch(impl, "", (), args)

    def _backward(self, grads: list[Tensor], *inputs: Any) -> list[Tensor]:
        *args, impl = inputs
        if impl == "eager":
            return [grad.contiguous() for grad in self._by_definition(grads, args, create_graph=False)]
        found, wanted = self._launch(impl, "_backward", grads, args), self._wanted(args)
        return [grad.to(t.dtype) for grad, t in zip((g for g in found if g is not None), wanted, strict=True)]

    def _by_definition(self, grads: Sequence[Tensor], args: Sequence[Any], create_graph: bool) -> list[Tensor]:
        """Gradients through the definition, run once more."""
        autograd = torch._C.DispatchKey.AutogradFunctionality  # below a dispatch mode it is switched off
        with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(autograd, False):
            # Views, so that no gradient flows from one argument to another.
            fresh = [a.view_as(a) if create_graph else a.detach().requires_grad_() for a in self._wanted(args)]
            given = iter(fresh)
            outputs = self.define(*(next(given) if i in self.wrt and a is not None else a for i, a in enumerate(args)))
            outputs = outputs if self.several else (outputs,)
            found = torch.autograd.grad(outputs, fresh, grads, create_graph=create_graph, allow_unused=True)
        return [torch.zeros_like(t) if grad is None else grad for grad, t in zip(found, fresh, strict=True)]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]

    def _differentiate(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = list(ctx.others)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[place] = tensor
        *args, impl = inputs
        if torch.is_grad_enabled():
            found = self._by_definition(grads, args, create_graph=True)
        else:
            found = (self._backward if _unseen(impl) else self._op_backward)(list(grads), *args, impl)
        by_place: list[Tensor | None] = [None] * (len(args) + 1)
        for place, grad in zip((i for i in self.wrt if args[i] is not None), found, strict=True):
            by_place[place] = grad
        return tuple(by_place)


class _Undispatched(torch.autograd.Function):
    """An operator, called without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, *inputs: Any) -> Any:
        ctx.operator = operator
        operator._save(ctx, inputs, None)
        return operator._forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.operator._differentiate(ctx, *grads))


def _unseen(impl: str) -> bool:
    """Whether a kernel runs that neither a graph nor a dispatch mode, such as FlopCounterMode, observes."""
    return impl == "native" and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def _contiguous(outputs: Any) -> Any:
    """Contiguous, as kernels return them: a graph relies on the strides that its fake had."""
    return tuple(y.contiguous() for y in outputs) if isinstance(outputs, tuple) else outputs.contiguous()
