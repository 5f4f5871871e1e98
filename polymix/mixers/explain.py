"""`explain`: which implementation of each mixer ran in a call, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError
from polymix.mixers.mixer import TokenMixer
from polymix.ops.dispatch import Choice, choosing_for_a_graph, recording
from polymix.ops.shared.optimized import optimized


@dataclass(frozen=True)
class Explanation:
    """Which implementation of one mixer ran, and why.

    Attributes:
        layer: name of the mixer in the model; "" if the model is the mixer itself.
        mixer: name of the kind of mixer, such as "pom".
        impl: name of the implementation.
        why: the reason for the choice.
        folded: names of the maps that `fold` merged.
    """

    layer: str
    mixer: str
    impl: str
    why: str
    folded: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.layer} ({self.mixer})" if self.layer else self.mixer
        folded = f"; folded: {', '.join(self.folded)}" if self.folded else ""
        return f"{where}: {self.impl}; {self.why}{folded}"


class Explanations(tuple[Explanation, ...]):
    """A tuple of explanations that prints as one line for each.

    Attributes:
        optimized: how many layers `polymix.optimize` made faster, by what it brought; empty without it.
    """

    optimized: Mapping[str, int]

    def __new__(
        cls, explanations: Iterable[Explanation] = (), optimized: Mapping[str, int] = MappingProxyType({})
    ) -> Explanations:
        self = super().__new__(cls, explanations)
        self.optimized = optimized
        return self

    def __str__(self) -> str:
        layers = ", ".join(f"{count} {what}" for what, count in sorted(self.optimized.items()))
        return "\n".join([*map(str, self), *([f"optimized: {layers}"] if layers else [])])


def explain(model: Any, *args: Any, **kwargs: Any) -> Explanations:
    """Run model(*args, **kwargs), and report which implementation each of its mixers used and why.

    `model` is a module, or the report of `polymix.convert`, which stands for the converted model. Without arguments, an
    image model of timm gets one image of the size that its `default_cfg` names.

    The choice depends on the context of the call: with gradients another implementation may run than under
    torch.inference_mode(). A compiled model, or a model with compiled parts, runs here without its compiled code, and
    the choices are those that torch.compile makes for it.

    Raises:
        OptionError: no mixer ran. Errors of the call itself pass through.

    Example: print(polymix.explain(mixer, x))
    """
    model = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    if not isinstance(model, nn.Module):
        raise OptionError("model", type(model).__name__, "a mixer or a model", "Pass the model, then its input.")
    if not args and not kwargs:
        args = (_declared_image(model),)
    names = {part: name for name, part in model.named_modules() if isinstance(part, TokenMixer)}
    compiled = tuple(name for name, part in model.named_modules() if _is_compiled(part))
    explanations: list[Explanation] = []
    started: list[int] = []  # for each mixer that is running: how many choices were made before it
    graphs: list[Any] = []  # for each mixer that is running: the token that restores `choosing_for_a_graph`

    with recording() as choices:

        def before(mixer: nn.Module, _: Any) -> None:
            assert isinstance(mixer, TokenMixer)
            started.append(len(choices))
            in_graph = any(name in ("", names[mixer]) or names[mixer].startswith(f"{name}.") for name in compiled)
            graphs.append(choosing_for_a_graph.set(in_graph))

        def after(mixer: nn.Module, _: Any, __: Any) -> None:
            assert isinstance(mixer, TokenMixer)
            choosing_for_a_graph.reset(graphs.pop())
            own = choices[started.pop() :] or [Choice(mixer.name, "eager", "the only implementation")]
            explanations.extend(Explanation(_plain(names[mixer]), *choice, mixer.folded) for choice in own)

        hooks = [hook for part in names for hook in (part.register_forward_pre_hook(before),
                                                     part.register_forward_hook(after))]  # fmt: skip
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                model(*args, **kwargs)
        finally:
            if graphs:  # a call that failed left them
                choosing_for_a_graph.reset(graphs[0])
            for hook in hooks:
                hook.remove()
    if not explanations:
        allowed = "a mixer, or a model whose forward runs mixers"
        raise OptionError("model", type(model).__name__, allowed, "Pass the converted model.")
    return Explanations(explanations, optimized(model))


def _declared_image(model: nn.Module) -> Tensor:
    """One image of the size that a model of timm declares."""
    declared = getattr(model, "default_cfg", None)
    size = declared.get("input_size") if isinstance(declared, Mapping) else None
    if size is None:
        raise OptionError("args", "no input", "what the model is called with", "Pass it: polymix.explain(model, x).")
    weight = next(model.parameters())
    return torch.zeros(1, *size, device=weight.device, dtype=weight.dtype)


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made the module, or module.compile() was called."""
    compiler = sys.modules.get("torch._dynamo")  # importing it takes seconds, and without it nothing is compiled
    return module._compiled_call_impl is not None or (
        compiler is not None and isinstance(module, compiler.OptimizedModule)
    )


def _plain(name: str) -> str:
    """A module's name without the parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


__all__ = ["Explanation", "explain"]
