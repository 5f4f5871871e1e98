"""`polymix.optimize`: make a model's calls without gradients faster on a CPU, reversibly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polymix.errors import CapabilityError, OptionError, check_choice
from polymix.inference import forwards
from polymix.inference.forwards import ACTIVATIONS, ActivatedLinear, FeedForward, GatedFeedForward, PackedLinear
from polymix.mixers import TokenMixer
from polymix.mixers.fold import Folded
from polymix.mixers.modules import check_module
from polymix.ops.shared.optimized import OptimizedForward, forward_of
from polymix.structured.dense import Dense

M = TypeVar("M", bound=nn.Module)
_LINEAR = {nn.Linear.forward, Dense.forward}
_TRANSPOSED = "transformers.pytorch_utils.Conv1D"  # its weight is (in, out)
_PARENTS = {1: ActivatedLinear, 2: FeedForward, 3: GatedFeedForward}  # by the number of linear layers
_TOLERANCE = 1e-5  # of a recognised activation, relative to its largest value


class _FoldedHere(Folded):
    """The merged maps of a mixer that `optimize` folded, not the user."""


def optimize(model: M, *, enabled: bool = True) -> M:
    """Make a model's calls without gradients faster on a CPU; return the model. `enabled=False` restores it exactly.

    Outputs stay the same up to rounding; modules, parameters and state dict stay the same. What changes is how the
    model's layers compute:

    - Linear layers multiply by oneDNN with packed weights, without a copy of the bias.
    - Feed-forward networks of two linear layers, or of three with a gate, apply their activation (GELU, its tanh
      approximation, ReLU, SiLU) inside the product. They are recognised by what they compute, in any library.
    - Mixers merge consecutive linear maps (`TokenMixer.fold`).

    All of this runs in plain calls without gradients, in eval mode, on the CPU, in float32, and in bfloat16 where the
    processor multiplies it. All other calls compute as before: in training, with gradients, under autocast,
    torch.compile, torch.export, torch.func or a dispatch mode, on other devices and dtypes, and in feed-forward
    networks whose layers have hooks or were replaced. After a change of a weight, by an optimizer, `load_state_dict`,
    `.to` or any operation in place, the next call packs and merges again. Changes through `.data` in place are not
    noticed: call `optimize` again after them.

    Layers that are added later, such as those of `convert`, need another call. Copies and pickles of an optimized
    model are optimized too. Packed weights take as much memory again as the weights; the first call makes them.

    Args:
        model: any model, with mixers or attention, on the CPU.
        enabled: False undoes an earlier call.

    Returns:
        The model itself.

    Raises:
        OptionError: the model is not a module, is not on the CPU, or has no layer that becomes faster.
        CapabilityError: this PyTorch has no oneDNN.

    Example: polymix.optimize(polymix.convert(vit, "padre").model.eval())
    """
    check_module(model)
    check_choice("enabled", enabled, (True, False))
    if enabled:
        _check(model)
    _restore(model)
    if not enabled:
        return model
    layers = {module: PackedLinear(module, _is_transposed(module)) for module in model.modules() if _is_plain(module)}
    parents = [parent for module in model.modules() if (parent := _parent(module, layers)) is not None]
    for forward in (*layers.values(), *parents):
        forward.module.forward = forward
    for mixer in _mixers(model):
        if mixer._folded is None and mixer.merge():
            mixer._folded = _FoldedHere()
    return model


def _check(model: nn.Module) -> None:
    """Raise unless the model has something to optimize."""
    if (why := forwards.available()) is not None:
        raise CapabilityError("model", why, "a PyTorch with oneDNN", "Use the model as it is.")
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} - {"cpu"}
    if devices:
        raise OptionError("model", f"a model on {', '.join(sorted(devices))}", "a model on the CPU",
                          "Move it first, or use it as it is.")  # fmt: skip
    layers = any(_is_plain(module) or forward_of(module) is not None for module in model.modules())
    if not layers and not any(mixer.merge() for mixer in _mixers(model)):
        raise OptionError("model", f"a {type(model).__name__} without linear layers", "a model with linear layers",
                          "Use the model as it is.")  # fmt: skip


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        if forward_of(module) is not None:
            del module.forward
    for mixer in _mixers(model):
        if isinstance(mixer._folded, _FoldedHere):
            mixer.unfold()


def _mixers(model: nn.Module) -> Iterator[TokenMixer]:
    return (module for module in model.modules() if isinstance(module, TokenMixer))


def _is_transposed(module: nn.Module) -> bool:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" == _TRANSPOSED


def _is_plain(module: nn.Module) -> bool:
    """Whether the module is a linear layer that runs its class's forward, on parameters of its own."""
    linear = type(module).forward in _LINEAR or _is_transposed(module)
    weight = module._parameters.get("weight")
    return linear and "forward" not in vars(module) and "bias" in module._parameters and weight is not None


def _parent(module: nn.Module, packed: dict[nn.Module, PackedLinear]) -> OptimizedForward | None:
    """The forward of a feed-forward network of packed layers, or None if the module is something else.

    The module has one to three packed layers, and other children without parameters. A call on random tokens tells
    the order of the layers and the activation.
    """
    linear = [name for name, part in module.named_children() if part in packed]
    others = [part for name, part in module.named_children() if name not in linear]
    direct = [*module._parameters.values(), *(p for part in others for p in (*part.parameters(), *part.buffers()))]
    if len(linear) not in _PARENTS or direct or "forward" in vars(module) or isinstance(module, TokenMixer):
        return None
    if any(map(forwards.has_hooks, (module, *module.children()))) or (len(linear) == 1 and not others):
        return None
    layers = {name: module._modules[name] for name in linear}
    if any(layer is None or layer.weight.dtype != torch.float32 for layer in layers.values()):
        return None
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()
        names, activation = _recognise(module, layers)
    finally:
        for part, training in modes.items():
            part.training = training
    return None if activation is None else _PARENTS[len(linear)](module, names, activation)


@torch.no_grad()
def _recognise(module: nn.Module, layers: dict[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """The layers in the order of `_PARENTS`, and the index of the activation between them; None if there is no such."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Any:
        return lambda layer, args, output: calls.__setitem__(name, (args[0], output))

    first = next(iter(layers.values()))
    width = first.weight.shape[0 if _is_transposed(first) else 1]
    x = torch.randn(1, 8, width, generator=torch.Generator().manual_seed(0))
    hooks = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    try:
        spread = float(first(x).std())
        x = x * (1.5 / spread if 0 < spread < float("inf") else 1.0)  # so that the activations differ
        calls.clear()
        y = type(module).forward(module, x)
    except Exception:  # whatever a foreign module raises on such an input: it is no feed-forward network
        return (), None
    finally:
        for hook in hooks:
            hook.remove()
    if set(calls) != set(layers) or not isinstance(y, Tensor):
        return (), None
    for names in permutations(layers):
        inner, last = (names[:-1], names[-1]) if len(names) > 1 else (names, None)
        if any(calls[name][0] is not x and not torch.equal(calls[name][0], x) for name in inner):
            continue
        if last is not None and not torch.equal(calls[last][1], y):
            continue
        hidden = y if last is None else calls[last][0]
        gated = calls[inner[1]][1] if len(inner) > 1 else None
        errors = []
        for kind in ACTIVATIONS:
            value = kind.function(calls[inner[0]][1])
            value = value if gated is None else value * gated
            same = value.shape == hidden.shape
            errors.append(float((value - hidden).abs().max() / value.abs().max()) if same else float("inf"))
        best, second, *_ = sorted(errors)
        if best < _TOLERANCE and second > 3 * _TOLERANCE:
            return names, errors.index(best)
    return (), None
