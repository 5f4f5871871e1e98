"""Registered operators, `torch.ops.polymix.*`: a schema, a fake, a backward that is an operator too.

Each has a definition in plain PyTorch, Triton kernels for it, and some have kernels in C. Inside a graph that is
traced, compiled or exported it is one node; `opcheck` holds it to that. Second derivatives are those of the definition.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polymix.errors import CapabilityError


class Operator:
    """polymix::name and polymix::name_backward.

    Args:
        name, schema: of the operator, such as "(Tensor x, Tensor? bias, int order) -> Tensor"; `impl` is added last.
        define: the definition, on the same arguments in the same order.
        kernel: "file.function" in polymix.ops.triton, and in polymix.ops.native where it has one, called by the names
            of the schema; function_backward takes the outputs' gradients in front and gives a gradient for each of
            `wrt`, or None.
        wrt: the arguments that have gradients, by place; a tensor that is None has none.
    """

    def __init__(self, name: str, schema: str, define: Callable[..., Any], kernel: str, wrt: Sequence[int]) -> None:
        self.name, self.define, self.wrt = name, define, tuple(wrt)
        self.module, self.function = kernel.split(".")
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
        """The definition itself for "eager", so that every transform sees through it; else the operator.

        A kernel in C that nothing looks at from outside is called at once: the dispatcher takes half a millisecond in
        a training step, which is what a small mixer takes.
        """
        if impl == "eager":
            return self.define(*args)
        if not _unseen(impl):
            return self._op(*args, impl)
        return _AtOnce.apply(self, *args, impl) if torch.is_grad_enabled() else self._forward(*args, impl)

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
        module = f"polymix.ops.{impl}.{self.module}"
        try:
            return getattr(importlib.import_module(module), self.function + suffix)
        except ModuleNotFoundError as error:
            if error.name and module.startswith(error.name):
                why = f"{impl!r} for {self.name}"
                raise CapabilityError("impl", why, "'eager', or a kernel that there is", "") from None
            raise

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
            # Views: what one argument owes to another is not for here.
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


class _AtOnce(torch.autograd.Function):
    """An operator without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, *inputs: Any) -> Any:
        ctx.operator = operator
        operator._save(ctx, inputs, None)
        return operator._forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.operator._differentiate(ctx, *grads))


def _unseen(impl: str) -> bool:
    """Whether a kernel runs that no graph, and no dispatch mode such as a counter of FLOPs, is to see."""
    return impl == "native" and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def _contiguous(outputs: Any) -> Any:
    """As kernels give them: a graph relies on the strides that its fake had."""
    return tuple(y.contiguous() for y in outputs) if isinstance(outputs, tuple) else outputs.contiguous()
