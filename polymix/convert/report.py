"""ConversionReport: what a conversion did to each layer, and how to undo it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from polymix.convert.adapter import Adapter, Host
from polymix.convert.context import Extension
from polymix.convert.drops import DROPS
from polymix.convert.positions import MEANING
from polymix.convert.replacement import Replacement
from polymix.convert.spec import AttentionSpec
from polymix.errors import OptionError
from polymix.mixers.inheritance import Projection
from polymix.numbers import DASH, aligned, arrow, between, plural, spanned


@dataclass(frozen=True)
class LayerReport:
    """One attention layer before and after the conversion.

    name: in the model. was: class of the attention. now: the mixer's name; None: the attention was kept. options: the
    mixer's config. tokens: of one sequence; None where that is not known. parameters: before and after. flops: before
    and after, for one sequence of `tokens`, 2 per multiply-add. error: ‖new − old‖ / ‖old‖ of the layer's output on the
    input of `convert`. inherited: each mixer parameter that comes from the attention, with the parameters it comes
    from. fresh: the mixer's other parameters. dropped: which attention weights and other parts were discarded, and why.
    scale: factor applied to the mixer's output. way: how a layer of a class without an adapter was read. positions:
    "all", "drop" or "values" where the host adds positions to queries and keys only (see `convert`); else None.
    """

    name: str
    was: str
    now: str | None
    options: Mapping[str, Any]
    tokens: int | None
    parameters: tuple[int, int]
    flops: tuple[int, int] | None
    error: float | None
    inherited: Mapping[str, tuple[str, ...]]
    fresh: tuple[str, ...]
    dropped: Mapping[str, str]
    scale: float | None
    positions: str | None = None
    way: str = ""

    @classmethod
    def unconverted(cls, name: str, module: nn.Module) -> LayerReport:
        count = parameters(module)
        return cls(name, type(module).__name__, None, {}, None, (count, count), None, None, {}, (), {}, None)

    @classmethod
    def swapped(
        cls, name: str, module: nn.Module, adapter: Adapter, attention: AttentionSpec,
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
        lost |= {key: why for key, why in adapter.discards.items() if key in lost or "." not in key}
        if attention.rotary is not None and mixer.config.rotary_base is None:
            lost["rotary"] = "no place in this mixer"
        positions = adapter.positions if attention.own_values else None
        if positions in ("all", "drop"):
            lost["position_embeddings"] = MEANING[positions]
        if mixer.config.causal_by_build and not attention.causal:
            lost["later_tokens"] = "this mixer is causal: no token sees those after it"
        lost = {key: why for key, why in lost.items() if key not in used or key in DROPS}
        fresh = tuple(key for key, _ in mixer.named_parameters() if key not in sources)
        flops = None if tokens is None else (attention_flops(attention, tokens), mixer.cost(tokens).flops)
        return cls(
            name, type(module).__name__, mixer.name, mixer.config.to_dict(), tokens,
            (parameters(module), parameters(adapter)), flops, error, dict(sources), fresh, lost, scale, positions,
            adapter.way,
        )  # fmt: skip


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def attention_flops(attention: AttentionSpec, tokens: int) -> int:
    """FLOPs of the linear maps and of softmax(Q Kᵀ) V for one sequence of self-attention, 2 per multiply-add.

    With a `span`, each token attends to that many tokens. A layer with an equivalent mixer costs what that mixer does.
    """
    if attention.equivalent is not None:
        mixer = attention.equivalent.build()
        return mixer.cost(tokens, grid=attention.grid if mixer.capabilities.grids else None).flops
    if attention.cost is not None:
        return attention.cost(tokens)
    maps = (attention.query, attention.key, attention.value, attention.out)
    products = sum(part.weight.numel() for part in maps if isinstance(part, Projection))
    return 2 * tokens * products + 4 * tokens * (attention.span or tokens) * attention.dim


class ConversionReport(Replacement):
    """What `polymix.convert` did. Printing it shows a table.

    model: the converted model. layers: a LayerReport for each layer. parameters: of the whole model, before and after.
    left_out: attention that was not converted: no adapter, or refused. refusals: why, by class. accuracy, metric, kept,
    schedule: what `polymix.distill` did, as in `Replacement`. context: what let the model take more tokens.
    """

    def __init__(
        self, model: nn.Module, adapters: Mapping[str, Adapter], layers: tuple[LayerReport, ...],
        left_out: tuple[str, ...], refusals: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model)
        self.layers, self.left_out, self.refusals = layers, left_out, dict(refusals or {})
        self.context: Extension | None = None
        self._after = dict(adapters)
        self._before = {name: model.get_submodule(name) for name in adapters}
        layers_of_both = (*self._before.values(), *self._after.values())
        self._modes = {part: part.training for layer in layers_of_both for part in layer.modules()}
        self.model = adapters.get("", model)
        self._settings: list[tuple[Any, str, Any]] = []  # of the host, as they were
        self._hooks: list[RemovableHandle] = []
        self.undone = True
        before = parameters(model)
        self.redo()
        self.parameters = before, parameters(self.model)

    @property
    def attentions(self) -> dict[str, nn.Module]:
        """The attention layers that were replaced, by name."""
        return self.originals

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters that replace them, by name."""
        return dict(self._after)

    def undo(self) -> nn.Module:
        """Put the attention layers back, unchanged, and return the original model.

        Weights that `polymix.distill` changed elsewhere in the model are restored too, and so is its context.
        """
        if self.undone:
            raise OptionError(
                "report", "a conversion that was undone already", "one that is in place", "Convert the model again."
            )
        host = self._withdraw()
        if self.context is not None:
            self.context.revert()
        return host

    def _withdraw(self) -> nn.Module:
        """Put the attention layers back, in a model that still takes as many tokens."""
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
        """Put the mixers back after `undo`, with the weights they had then, and return the converted model."""
        if not self.undone:
            raise OptionError("report", "a conversion that is in place", "one that was undone", "")
        if self.context is not None:
            self.context.apply()
        return self._install()

    def _install(self) -> nn.Module:
        self._exchange()
        self._hooks += self.follow_grids()
        for name, adapter in self._after.items():
            for module, attribute, value in adapter.host_settings(Host(self._host, name)):
                self._settings.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, value)
        self._replace(self._before, self._after)
        self.undone = False
        return self.model

    @property
    def taken_out(self) -> tuple[str, ...]:
        """The parts of the host, by their attributes, that it runs without while the mixers are in it."""
        return tuple(dict.fromkeys(name for _, name, value in self._settings if isinstance(value, nn.Module)))

    def follow_grids(self) -> list[RemovableHandle]:
        """Register the hooks that tell the adapters the grid of each run."""
        hooks: list[RemovableHandle] = []
        for name, part in self._after.items():
            source = part.feature_map(self._before[name], Host(self._host, name))
            if source is not None and part.needs_current_grid:
                hooks += [
                    self._host.register_forward_pre_hook(part.running.enter),
                    source.register_forward_hook(part.note_grid),
                    self._host.register_forward_hook(part.running.leave, always_call=True),
                ]
        return hooks

    def _replace(self, old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
        for name, module in new.items():
            if (training := old[name].training) != module.training:
                module.train(training)
                for part in module.modules() if training == self._modes[module] else ():
                    part.training = self._modes.get(part, training)
            _place(self._host, name, module)

    @property
    def worse(self) -> str | None:
        """A sentence where the model is worse than the original by more than a hundredth; None where it is not."""
        before, after, kind = self.accuracy.get("before"), self.result, self.metric
        if before is None or after is None or kind not in ("accuracy", "perplexity"):
            return None
        worse = after < before - 0.01 if kind == "accuracy" else not after <= 1.01 * before
        text = f"The converted model is worse than the original: its {kind} is {self.written(after)}, not "
        return f"{text}{self.written(before)}." if worse else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": [asdict(layer) for layer in self.layers], "left_out": list(self.left_out),
            "refusals": dict(self.refusals), "accuracy": dict(self.accuracy), "metric": self.metric, "kept": self.kept,
            "schedule": dict(self.schedule), "parameters": list(self.parameters),
            "context": None if self.context is None else self.context.to_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [*table(self.layers, self.parameters), *fates(self.layers)]
        lines += [f"Not converted (no adapter): {', '.join(self.left_out)}."] if self.left_out else []
        lines += [f"{kind} is kept: {why}." for kind, why in self.refusals.items()]
        turns = ", ".join(f"{name} after {plural(step, 'step')}" for name, step in self.schedule.items())
        lines += [f"The layers got their mixers one by one: {turns}."] if turns else []
        lines += [] if self.context is None else [str(self.context)]
        measured = self.metric.capitalize().replace("_", " ")
        stage = self.kept if self.kept != next(reversed(self.accuracy), None) else None
        lines += [f"{measured}, {name}{' (kept)' if name == stage else ''}: {self.written(value)}."
                  for name, value in self.accuracy.items()]  # fmt: skip
        lines += [self.unimproved] if self.unimproved else []
        return "\n".join(lines)


def table(layers: Sequence[LayerReport], counts: tuple[int, int]) -> list[str]:
    """The report as text: a line for equal layers in a row, and one with the parameters of the whole model."""
    rows: list[tuple[str, ...]] = [("layer", "was", "is", "parameters", "MFLOPs", "error")]
    for cells, group in groupby(layers, _cells):
        its = list(group)
        error = between([layer.error for layer in its if layer.error is not None])
        rows.append((spanned([layer.name or "(the model)" for layer in its]), *cells, error))
    note = "MFLOPs: millions of floating-point operations of one sequence, by formula, 2 for each multiply-add."
    return [*aligned(rows), f"Parameters of the model: {counts[0]:,} → {counts[1]:,}. {note}"]


def _cells(layer: LayerReport) -> tuple[str, ...]:
    """What a line of the table says of a layer besides its name and its error."""
    parameters = f"{layer.parameters[0]:,} → {layer.parameters[1]:,}" if layer.now else f"{layer.parameters[0]:,}"
    flops = DASH if layer.flops is None else arrow([count / 1e6 for count in layer.flops])
    return layer.was, layer.now or "kept", parameters, flops


def fates(layers: Sequence[LayerReport]) -> list[str]:
    """Which weights the mixers start from and which were discarded: a line for each kind of layer."""
    lines: dict[str, None] = {}
    for layer in layers:
        if layer.now is not None:
            inherited = _modules(key for keys in layer.inherited.values() for key in keys)
            lost = [name for name in _modules(layer.dropped) if name not in inherited]
            origin = f"starts from {', '.join(inherited)}" if inherited else "starts from random weights"
            parts = [origin, *(["discards " + ", ".join(lost)] if lost else []), *([layer.way] if layer.way else [])]
            lines[f"{layer.was} → {layer.now}: {'; '.join(parts)}."] = None
    choices = [layer.positions for layer in layers]
    for choice in filter(None, dict.fromkeys(choices)):
        lines[f"Positions in {choices.count(choice)} layers ({choice}): {MEANING[choice]}."] = None
    for name in dict.fromkeys(layer.now for layer in layers if "later_tokens" in layer.dropped):
        lines[f"{name} is causal: no token sees those after it, as it did in attention."] = None
    return list(lines)


def _modules(keys: Iterable[str]) -> list[str]:
    """The modules of parameters such as "qkv.weight[query]", each once: "qkv[query]"."""
    modules: dict[str, None] = {}
    for key in keys:
        name, bracket, part = key.partition("[")
        above, _, last = name.rpartition(".")
        modules[(above if last in ("weight", "bias") and above else name) + bracket + part] = None
    return list(modules)


def _place(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module `name` by `module`, everywhere in the model that it occurs."""
    if not name:
        return
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = module
