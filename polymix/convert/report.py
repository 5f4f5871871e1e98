"""What a conversion did, layer by layer; and how to take it back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polymix.convert.adapter import Adapter, Host
from polymix.convert.attention import Attention
from polymix.errors import OptionError
from polymix.mixers.inheritance import Projection


@dataclass(frozen=True)
class LayerReport:
    """One attention layer: what was, what is.

    flops: 2 a multiply-add, of one sequence of `tokens`; None where the number of tokens is not known. error: of the
    layer's output on the calibration input, ‖new - old‖ / ‖old‖. inherited: a mixer's parameter to the attention's that
    it comes from; fresh: the others. dropped: the attention's parameters, and other parts of it, that live on nowhere,
    and why. scale: what the mixer's output was multiplied with.
    """

    name: str
    was: str
    now: str | None  # None: kept
    options: Mapping[str, Any]
    tokens: int | None
    parameters: tuple[int, int]
    flops: tuple[int, int] | None
    error: float | None
    inherited: Mapping[str, tuple[str, ...]]
    fresh: tuple[str, ...]
    dropped: Mapping[str, str]
    scale: float | None

    @classmethod
    def kept(cls, name: str, module: nn.Module) -> LayerReport:
        count = parameters(module)
        return cls(name, type(module).__name__, None, {}, None, (count, count), None, None, {}, (), {}, None)

    @classmethod
    def swapped(
        cls, name: str, module: nn.Module, adapter: Adapter, attention: Attention,
        sources: Mapping[str, tuple[str, ...]], scale: float | None, error: float | None, tokens: int | None,
    ) -> LayerReport:  # fmt: skip
        mixer = adapter.mixer
        tokens = attention.max_tokens if tokens is None else tokens
        if attention.grid is not None:
            tokens = attention.prefix + math.prod(attention.grid)
        used = {key for keys in sources.values() for key in keys}
        its = {key.partition("[")[0] for key in attention.keys}
        every = [*attention.keys, *(key for key, _ in module.named_parameters() if key not in its)]
        lost = {**dict.fromkeys(every, "no place in this mixer"), **attention.drops}
        if attention.rotary is not None and getattr(mixer.config, "rotary", None) is None:
            lost["rotary"] = "no place in this mixer"
        lost = {key: why for key, why in lost.items() if key not in used}
        fresh = tuple(key for key, _ in mixer.named_parameters() if key not in sources)
        flops = None if tokens is None else (attention_flops(attention, tokens), mixer.cost(tokens).flops)
        return cls(
            name, type(module).__name__, mixer.name, mixer.config.to_dict(), tokens,
            (parameters(module), parameters(adapter)), flops, error, dict(sources), fresh, lost, scale,
        )  # fmt: skip


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def attention_flops(attention: Attention, tokens: int) -> int:
    """Of its maps and of softmax(Q Kᵀ) V on one sequence that attends to itself, all of it or `span` tokens each: 2 a
    multiply-add. Of a layer that is one of the mixers, that mixer's."""
    if attention.twin is not None:
        return attention.twin.build().cost(tokens, grid=attention.grid).flops
    maps = (attention.query, attention.key, attention.value, attention.out)
    products = sum(part.weight.numel() for part in maps if isinstance(part, Projection))
    return 2 * tokens * products + 4 * tokens * (attention.span or tokens) * attention.dim


class ConversionReport:
    """What `polymix.convert` did. `model` is the converted one; printing gives a table.

    layers: a LayerReport each. parameters: of the whole model, before and after. left_out: what looks like attention
    but has no adapter. accuracy: figures of yours by name, "before", "converted", "distilled", as `polymix.distill`
    fills them in; metric: what they are.
    """

    def __init__(
        self, model: nn.Module, adapters: Mapping[str, Adapter], layers: tuple[LayerReport, ...],
        left_out: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.layers, self.left_out = layers, left_out
        self.accuracy: dict[str, float] = {}
        self.metric = "accuracy"
        self._host, self._after = model, dict(adapters)
        self._before = {name: model.get_submodule(name) for name in adapters}
        self.model = adapters.get("", model)
        self._settings: list[tuple[Any, str, Any]] = []  # of the host, as they were
        self._hooks: list[RemovableHandle] = []
        self._weights: dict[str, Tensor] | None = None
        self.undone = True
        before = parameters(model)
        self.redo()
        self.parameters = before, parameters(self.model)

    @property
    def attentions(self) -> dict[str, nn.Module]:
        """The attention layers that were replaced, by name."""
        return dict(self._before)

    @property
    def adapters(self) -> dict[str, Adapter]:
        """What stands in their place."""
        return dict(self._after)

    def undo(self) -> nn.Module:
        """Put the attention back, the same modules with the same bits; returns the model as it was.

        Weights that `polymix.distill` changed in the rest of the model are restored too.
        """
        if self.undone:
            raise OptionError("report", "a conversion that was undone already", "one that stands", "Convert again.")
        for module, attribute, value in reversed(self._settings):
            setattr(module, attribute, value)
        for hook in self._hooks:
            hook.remove()
        self._settings.clear()
        self._hooks.clear()
        self._replace(self._after, self._before)
        self._exchange()
        self.undone = True
        return self._host

    def redo(self) -> nn.Module:
        """Put the mixers in again, as they were when they were taken out; returns the converted model."""
        if not self.undone:
            raise OptionError("report", "a conversion that stands", "one that was undone", "")
        self._exchange()
        self._hooks += self.follow()
        for name, adapter in self._after.items():
            for module, attribute, value in adapter.settings(Host(self._host, name)):
                self._settings.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, value)
        self._replace(self._before, self._after)
        self.undone = False
        return self.model

    @contextmanager
    def former(self) -> Iterator[nn.Module]:
        """The model with its attention back, for a while; the mixers stand in it again afterwards."""
        host = self.undo()
        try:
            yield host
        finally:
            self.redo()

    def follow(self) -> list[RemovableHandle]:
        """Hooks by which the adapters learn the grid of each run, while they or the attention stand in the model."""
        sources = (
            (part.feature_map(self._before[name], Host(self._host, name)), part) for name, part in self._after.items()
        )
        return [
            source.register_forward_hook(part.follow) for source, part in sources if source is not None and part.follows
        ]

    def _replace(self, old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
        for name, module in new.items():
            if module.training != old[name].training:
                module.train(not module.training)
            _place(self._host, name, module)

    def remember(self) -> None:
        """Keep the weights of the whole model with its attention, for `undo`, before they are trained."""
        if self._weights is None and not self.undone:
            self.undo()
            self._weights = {name: value.detach().to("cpu", copy=True) for name, value in self._tensors()}
            self.redo()

    @torch.no_grad()
    def _exchange(self) -> None:
        """While the attention stands: the weights that are kept for those in the model. Buffers that have another form
        by now are a run's, and stay."""
        if self._weights is not None:
            kept, self._weights = self._weights, {}
            for name, value in self._tensors():
                self._weights[name] = value.detach().to("cpu", copy=True)
                if name in kept and kept[name].shape == value.shape:
                    value.copy_(kept[name])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._host.named_parameters()
        yield from self._host.named_buffers()

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": [asdict(layer) for layer in self.layers], "left_out": list(self.left_out),
            "accuracy": dict(self.accuracy), "metric": self.metric, "parameters": list(self.parameters),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = table(self.layers, self.parameters)
        lines += [f"Not converted, no adapter: {', '.join(self.left_out)}."] if self.left_out else []
        lines += [f"{self.metric.capitalize()}, {name}: {value:.4g}." for name, value in self.accuracy.items()]
        return "\n".join(lines)


def table(layers: Sequence[LayerReport], counts: tuple[int, int]) -> list[str]:
    """A line each layer, and one for the parameters of the whole model."""
    rows = [("layer", "was", "is", "parameters", "FLOPs", "error")]
    for layer in layers:
        now = layer.now or "kept"
        count = f"{layer.parameters[0]:,} → {layer.parameters[1]:,}" if layer.now else f"{layer.parameters[0]:,}"
        flops = "–" if layer.flops is None else f"{layer.flops[0] / 1e6:,.1f} → {layer.flops[1] / 1e6:,.1f} M"
        error = "–" if layer.error is None else f"{layer.error:.3g}"
        rows.append((layer.name or "(the model)", layer.was, now, count, flops, error))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"Parameters of the model: {counts[0]:,} → {counts[1]:,}."]


def _place(model: nn.Module, name: str, module: nn.Module) -> None:
    """Module `name` of the model, and wherever else the same one stands, becomes `module`."""
    if not name:
        return
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = module
