"""Registers the PyTorch operators that wrap the kernels, with their backward and fake implementations."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import CapabilityError, OptionError
from polymix.ops.shared.signature import Signature
from polymix.ops.shared.tensors import autocast_dtype


class Operator:
    """A registered operator, polymix::name, with its backward, polymix::name_backward.

    Each is one node in a traced, compiled or exported graph, with a schema and a fake implementation. Second
    derivatives are computed from the definition in plain PyTorch.

    Args:
        name: the operator's name in torch.ops.polymix.
        schema: such as "(Tensor x, Tensor? bias, int order) -> Tensor"; an argument `impl` is appended.
        define: the definition in plain PyTorch, with the same arguments in the same order.
        wrt: the positions of the arguments that have gradients; an argument that is None has none.
        sums: those of them that are sums over tokens, which keep their dtype under autocast.
        signature: what kernels need of the arguments; checked before each launch, because kernels take addresses.
        kernels: "module:function" for each implementation, imported when it first runs and called with the schema's
            argument names. The module also has function_backward, which takes the gradients of the outputs first and
            returns one gradient, or None, for each position in `wrt`. A C kernel's also takes `needs`, a boolean for
            each of them, and computes no gradient that is not needed.
    """

    def __init__(
        self, name: str, schema: str, define: Callable[..., Any], wrt: Sequence[int],
        signature: Signature, *, sums: Collection[int] = (), **kernels: str,
    ) -> None:  # fmt: skip
        self.name, self.define, self.wrt, self.kernels = name, define, tuple(wrt), kernels
        self.lowered = frozenset(wrt) - frozenset(sums)
        self.signature = signature
        arguments, returns = schema.removeprefix("(").split(") -> ")
        self.names = [argument.split()[-1] for argument in arguments.split(", ")]
        self.several = returns.startswith("(")
        forward, backward = f"polymix::{name}", f"polymix::{name}_backward"
        torch.library.define(forward, f"({arguments}, str impl) -> {returns}")
        torch.library.define(backward, f"(Tensor[] grads, {arguments}, str impl, *, bool[]? needs=None) -> Tensor[]")
        torch.library.impl(forward, ("cpu", "cuda"), self._forward)
        torch.library.impl(backward, ("cpu", "cuda"), self._backward)
        torch.library.register_fake(forward, lambda *args: _contiguous(define(*args[:-1])))
        torch.library.register_fake(backward, self._fake_backward)
        torch.library.register_autograd(forward, self._differentiate, setup_context=self._save)
        self._op = getattr(torch.ops.polymix, name)
        self._op_backward = getattr(torch.ops.polymix, f"{name}_backward")

    def __call__(self, *args: Any, impl: str) -> Any:
        """Run the implementation `impl`.

        "eager" calls the definition itself, so that every PyTorch transform can see through it. A C kernel that
        nothing observes bypasses PyTorch's dispatcher, which costs half a millisecond in a training step, as much as
        a small mixer.
        """
        if impl == "eager":
            return self.define(*args)
        args = self._as_autocast(args)
        if not _bypasses_dispatcher(impl):
            return self._op(*args, impl)
        return _Undispatched.apply(self, *args, impl) if torch.is_grad_enabled() else self._launch(impl, "", (), args)

    def _as_autocast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Under autocast, the tokens and weights in its dtype, as for PyTorch's products; kernels do not know of it."""
        if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
            return args
        dtype = autocast_dtype(args[0].device)
        if dtype is None:
            return args
        return tuple(
            value.to(dtype) if i in self.lowered and value is not None else value for i, value in enumerate(args)
        )

    def _needed(self, args: Sequence[Any], needs: Sequence[bool] | None) -> list[int]:
        """The positions of the arguments whose gradients are needed; by default of all that have one."""
        needs = [True] * len(self.wrt) if needs is None else needs
        if len(needs) != len(self.wrt):
            raise OptionError(f"{self.name}_backward: needs", f"{len(needs)} values", f"{len(self.wrt)}",
                              "Pass one for each argument that has a gradient.")  # fmt: skip
        return [i for i, needed in zip(self.wrt, needs, strict=True) if needed and args[i] is not None]

    def _launch(
        self, impl: str, suffix: str, grads: Sequence[Tensor], args: Sequence[Any], **more: Sequence[bool]
    ) -> Any:
        kernel, by_name = self._kernel(impl, suffix), dict(zip(self.names, args, strict=True))
        self.signature.check(self.name + suffix, impl, by_name, grads)
        if args[0].is_cpu:
            return kernel(*grads, **by_name, **more)
        with torch.cuda.device_of(args[0]):
            return kernel(*grads, **by_name, **more)

    @cache  # noqa: B019  operators live as long as the process
    def _kernel(self, impl: str, suffix: str) -> Callable[..., Any]:
        """Import and return the kernel, or its backward with suffix "_backward"."""
        if impl not in self.kernels:
            got, allowed = f"{impl!r} for {self.name}", " or ".join(map(repr, ("eager", *self.kernels)))
            raise CapabilityError("impl", got, allowed, "Choose one of these.")
        module, _, function = self.kernels[impl].partition(":")
        return getattr(importlib.import_module(module), function + suffix)

    def _forward(self, *inputs: Any) -> Any:
        *args, impl = inputs
        return _contiguous(self.define(*args)) if impl == "eager" else self._launch(impl, "", (), args)

    def _fake_backward(self, grads: list[Tensor], *inputs: Any, needs: Sequence[bool] | None = None) -> list[Tensor]:
        args = inputs[: len(self.names)]
        return [args[i].new_empty(args[i].shape) for i in self._needed(args, needs)]

    def _backward(self, grads: list[Tensor], *inputs: Any, needs: Sequence[bool] | None = None) -> list[Tensor]:
        args, impl = inputs[: len(self.names)], inputs[len(self.names)]
        wrt = self._needed(args, needs)
        if impl == "eager":
            return [grad.contiguous() for grad in self._by_definition(grads, args, wrt, create_graph=False)]
        more = {"needs": [i in wrt for i in self.wrt]} if impl == "native" else {}
        gradients = dict(zip(self.wrt, self._launch(impl, "_backward", grads, args, **more), strict=True))
        return [gradients[i].to(args[i].dtype) for i in wrt]

    def _by_definition(
        self, grads: Sequence[Tensor], args: Sequence[Any], wrt: Sequence[int], create_graph: bool
    ) -> list[Tensor]:
        """Compute the gradients of the arguments `wrt` by running the definition again and differentiating it."""
        autograd = torch._C.DispatchKey.AutogradFunctionality  # a dispatch mode switches autograd off; switch it on
        with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(autograd, False):
            # Views, so that no gradient flows from one argument to another.
            originals = [args[i] for i in wrt]
            leaves = [a.view_as(a) if create_graph else a.detach().requires_grad_() for a in originals]
            by_position = dict(zip(wrt, leaves, strict=True))
            outputs = self.define(*(by_position.get(i, a) for i, a in enumerate(args)))
            outputs = outputs if self.several else (outputs,)
            gradients = torch.autograd.grad(outputs, leaves, grads, create_graph=create_graph, allow_unused=True)
        return [torch.zeros_like(t) if grad is None else grad for grad, t in zip(gradients, leaves, strict=True)]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.positions = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.positions))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]

    def _differentiate(
        self, ctx: Any, *grads: Tensor, needs_input_grad: Sequence[bool] | None = None
    ) -> tuple[Tensor | None, ...]:
        inputs = list(ctx.others)
        for place, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            inputs[place] = tensor
        *args, impl = inputs
        input_needs = ctx.needs_input_grad if needs_input_grad is None else needs_input_grad
        needs = [bool(input_needs[i]) for i in self.wrt]
        wrt = self._needed(args, needs)
        if torch.is_grad_enabled() or any(map(_is_batched, grads)):
            gradients = self._by_definition(grads, args, wrt, create_graph=torch.is_grad_enabled())
        else:
            backward = self._backward if _bypasses_dispatcher(impl) else self._op_backward
            gradients = backward(list(grads), *args, impl, needs=needs)
        by_position: list[Tensor | None] = [None] * (len(args) + 1)
        for position, grad in zip(wrt, gradients, strict=True):
            by_position[position] = grad
        return tuple(by_position)


def registered() -> dict[str, Operator]:
    """All operators, by name."""
    folder = str(Path(__file__).parent)
    modules = [importlib.import_module(f"polymix.ops.{each.name}") for each in pkgutil.iter_modules([folder])]
    return {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Operator)}


class _Undispatched(torch.autograd.Function):
    """Calls an operator without PyTorch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, *inputs: Any) -> Any:
        ctx.operator = operator
        operator._save(ctx, inputs, None)
        return operator._forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.operator._differentiate(ctx, *grads, needs_input_grad=ctx.needs_input_grad[1:]))


def _bypasses_dispatcher(impl: str) -> bool:
    """Whether a C kernel runs while no graph is traced and no dispatch mode (such as FlopCounterMode) is active."""
    return impl == "native" and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def _is_batched(grad: Tensor) -> bool:
    """Whether a gradient stands for several, under vmap or `is_grads_batched`; it then has no address."""
    return torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)


def _contiguous(outputs: Any) -> Any:
    """Make the outputs contiguous, as kernels return them: a graph relies on the strides of the fake outputs."""
    return tuple(y.contiguous() for y in outputs) if isinstance(outputs, tuple) else outputs.contiguous()
