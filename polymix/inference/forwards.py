"""The forwards that `polymix.optimize` gives to layers: products with packed weights, and whole feed-forward networks.

Each is an attribute `forward` of the module, which the class's own forward is behind: the module keeps its class, its
parameters and its hooks. A call that the fast way does not support runs the class's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from polymix.mixers.fold import Folded
from polymix.ops.shared.blocks import fast_types
from polymix.ops.shared.optimized import OptimizedForward, forward_of
from polymix.ops.shared.tensors import autocast_dtype, forward_mode


class Activation(NamedTuple):
    """An activation function that oneDNN applies to the outputs of a product before it writes them."""

    name: str
    algorithm: str
    function: Callable[[Tensor], Tensor]


ACTIVATIONS = (
    Activation("gelu", "none", nn.functional.gelu),
    Activation("gelu", "tanh", lambda x: nn.functional.gelu(x, approximate="tanh")),
    Activation("relu", "", nn.functional.relu),
    Activation("swish", "", nn.functional.silu),
)


def available() -> str | None:
    """Why the products cannot run on this machine, or None if they can."""
    if not torch.backends.mkldnn.is_available():
        return "a PyTorch built without oneDNN"
    return None if hasattr(torch.ops.mkldnn, "_linear_pointwise") else "a PyTorch without oneDNN's packed products"


def supports(x: Any) -> bool:
    """Whether the fast forwards can take this input: a dense tensor on the CPU in a plain call without transforms."""
    return (  # sizes come last: torch.jit.trace would record them
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and x.device.type == "cpu"
        and x.dtype in fast_types()
        and x.dtype != torch.float64
        and x.layout is torch.strided
        and x.ndim > 1
        and x.numel() > 0
        and torch._C._get_mkldnn_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not forward_mode()
        and autocast_dtype(x.device) is None
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook runs when the module is called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or modules._global_forward_hooks or modules._global_forward_pre_hooks
        or modules._global_backward_hooks or modules._global_backward_pre_hooks
    )  # fmt: skip


class PackedLinear(OptimizedForward):
    """x Wᵀ + b by oneDNN, with the weight in the layout that its products read.

    The packed weight is made in the first call, and again if the weight has changed.

    Args:
        module: a linear layer with the parameters `weight` and `bias`.
        transposed: the layer's weight is (in, out), as in GPT-2's Conv1D.
    """

    what = "products with packed weights"

    def __init__(self, module: nn.Module, transposed: bool = False) -> None:
        super().__init__(module)
        self.transposed, self.cache = transposed, Folded()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": Folded()}  # a packed weight can be neither copied nor pickled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and supports(args[0]) and (parts := self.parts(args[0])):
            return torch.ops.mkldnn._linear_pointwise.default(args[0], *parts, "none", [], "")
        return super().__call__(*args, **kwargs)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The packed weight and the bias; None if the layer's parameters do not allow the fast product of x."""
        weight, bias = self.module._parameters.get("weight"), self.module._parameters.get("bias")
        if weight is None or (bias is None and "bias" not in self.module._parameters):
            return None  # the parameters are computed, as under torch.nn.utils.parametrize
        width = weight.shape[0 if self.transposed else 1]
        plain = all(p is None or (type(p) is nn.Parameter and p.dtype == x.dtype and p.is_cpu) for p in (weight, bias))
        if not plain or weight.ndim != 2 or x.shape[-1] != width or self.module.training or weight.is_inference():
            self.cache = Folded()
            return None
        if torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return None

        def pack() -> dict[str, Any]:
            matrix = weight.detach().t().contiguous() if self.transposed else weight.detach().contiguous()
            return {"weight": (torch.ops.mkldnn._reorder_linear_weight(matrix), None)}

        return self.cache.maps(pack, (weight,))["weight"][0], bias


class _Parent(OptimizedForward):
    """The forward of a module that combines some linear layers, which have packed weights, with an activation.

    It runs as long as the module has the children that it had, and nobody observes them.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], activation: int) -> None:
        super().__init__(module)
        self.names, self.activation = names, activation
        self.children = self._children()

    def _children(self) -> list[Any]:
        parts = list(self.module._modules.items())
        return [(name, part, "" if part is None else part.extra_repr()) for name, part in parts]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and supports(args[0]) and not self.module.training:
            y = self._fast(args[0])
            if y is not None:
                return y
        return super().__call__(*args, **kwargs)

    def _fast(self, x: Tensor) -> Tensor | None:
        if self._children() != self.children:
            return None
        if any(part is not None and (part.training or has_hooks(part)) for _, part, _ in self.children):
            return None
        layers = [forward_of(self.module._modules[name]) for name in self.names]
        packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
        return self.combine(x, packed) if len(packed) == len(self.names) else None

    def combine(self, x: Tensor, layers: list[PackedLinear]) -> Tensor | None:
        raise NotImplementedError

    def activated(self, x: Tensor, layer: PackedLinear) -> Tensor | None:
        """act(x Wᵀ + b) in one pass."""
        parts, kind = layer.parts(x), ACTIVATIONS[self.activation]
        if parts is None:
            return None
        return torch.ops.mkldnn._linear_pointwise.default(x, *parts, kind.name, [], kind.algorithm)


class ActivatedLinear(_Parent):
    """act(x Wᵀ + b), with the activation in the product."""

    what = "activations in the product"

    def combine(self, x: Tensor, layers: list[PackedLinear]) -> Tensor | None:
        return self.activated(x, layers[0])


class FeedForward(_Parent):
    """act(x W₁ᵀ + b₁) W₂ᵀ + b₂, with the activation in the first product."""

    what = "activations in the product"

    def combine(self, x: Tensor, layers: list[PackedLinear]) -> Tensor | None:
        hidden = self.activated(x, layers[0])
        last = None if hidden is None else layers[1].parts(hidden)
        if hidden is None or last is None:
            return None
        return torch.ops.mkldnn._linear_pointwise.default(hidden, *last, "none", [], "")


class GatedFeedForward(_Parent):
    """(act(x W_gᵀ + b_g) ⊙ (x W_uᵀ + b_u)) W_dᵀ + b_d, with activation and gate in the products."""

    what = "activations in the product"

    def combine(self, x: Tensor, layers: list[PackedLinear]) -> Tensor | None:
        gate = self.activated(x, layers[0])
        up = None if gate is None else layers[1].parts(x)
        if gate is None or up is None:
            return None
        hidden = torch.ops.mkldnn._linear_pointwise.binary(x, gate, *up, "mul")
        last = layers[2].parts(hidden)
        return None if last is None else torch.ops.mkldnn._linear_pointwise.default(hidden, *last, "none", [], "")
