"""`polymix.convert`: mixers into a model's attention layers, all settled and checked before anything is changed."""

from __future__ import annotations

import copy as copies
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from polymix.convert.adapter import Adapter, Host, adapter_for
from polymix.convert.attention import Attention
from polymix.convert.find import attention_modules
from polymix.convert.inherit import inherit, match
from polymix.convert.plan import resolve
from polymix.convert.record import Record, asked, length, record
from polymix.convert.report import ConversionReport, LayerReport
from polymix.errors import CapabilityError, OptionError, PolymixError, check_choice
from polymix.mixers import MixerConfig, TokenMixer
from polymix.mixers.inheritance import Sources
from polymix.mixers.registry import lacks


def convert(
    model: nn.Module,
    plan: Any,
    *,
    mixer: str | MixerConfig = "padre",
    input: Any = None,
    init: str = "inherit",
    copy: bool = False,
    grid: tuple[int, ...] | None = None,
    causal: bool | None = None,
    windows: str = "keep",
) -> ConversionReport:
    """Put mixers where a model has attention; the report says what became of each layer, and undoes it.

    Args:
        model: any that holds attention of a known class: torch.nn, timm, transformers, torchvision, diffusers, or one
            with an adapter of yours (`register_adapter`).
        plan: what goes where. A mixer's name or config for every layer; a dict of layer names or globs to mixers or
            "keep", where a name says more than a glob; "1:1" (a mixer, an attention, …), "3:1", "all-but-last-2",
            "all-but-first-1"; or what `polymix.recommend` returned.
        mixer: what a pattern puts in.
        input: what the model is called with: a tensor, a tuple, or a dict of keyword arguments. With it masks and
            contexts that only a call shows are known, each mixer's output is scaled to the attention's, and the report
            has each layer's error.
        init: "inherit", start from the attention's own maps where the algebra has a place for them, or "fresh".
        copy: convert a copy (`report.model`) and leave the model as it is.
        grid: of the tokens, where the model does not say.
        causal: whether the attention is causal, where neither the model nor `input` says.
        windows: "keep" windowed attention's windows, or "merge" them: the mixer sees the whole feature map.
    Raises:
        OptionError, CapabilityError: before anything is changed, naming the layer and the cure.
    """
    check_choice("init", init, ("inherit", "fresh"))
    check_choice("copy", copy, (True, False))
    check_choice("windows", windows, ("keep", "merge"))
    model = copies.deepcopy(model) if copy else model
    layers = attention_layers(model)
    settled = resolve(plan, list(layers), mixer)
    chosen = {name: config for name, config in settled.items() if config is not None}
    calls = {} if input is None else record(model, {name: layers[name] for name in chosen}, input)
    swaps = {
        name: _Swap(Host(model, name, windows), layers[name], config, calls.get(name), grid, causal, init == "inherit")
        for name, config in chosen.items()
    }
    reports = [swaps[name].report() if name in swaps else LayerReport.kept(name, layers[name]) for name in layers]
    return ConversionReport(model, {name: swap.adapter for name, swap in swaps.items()}, tuple(reports), unknown(model))


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that an adapter can serve, by name, a shared one once; OptionError where there are none."""
    found = dict(_known(model, ""))
    if not found:
        others = ", ".join(unknown(model))
        what = f"attention of no known class: {others}" if others else "no attention"
        got = f"{type(model).__name__} with {what}"
        cure = "polymix.register_adapter teaches it a class of yours."
        raise OptionError("model", got, "a model that attends by a class of torch.nn, timm, transformers …", cure)
    return found


def _known(module: nn.Module, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, Adapter):
        return
    seen.add(id(module))
    if adapter_for(module) is not None:
        yield name, module
    if adapter_for(module) is not None or isinstance(module, TokenMixer):
        return
    for key, child in module.named_children():
        yield from _known(child, f"{name}.{key}" if name else key, seen)


def unknown(model: nn.Module) -> tuple[str, ...]:
    """Modules that look like attention but have no adapter, nor are part of one that has, "name (Class)"."""
    served = [name for name, _ in _known(model, "")]
    return tuple(
        f"{name} ({type(module).__name__})"
        for name, module in attention_modules(model)
        if not isinstance(module, (Adapter, TokenMixer))
        and not any(not place or f"{name}.".startswith(f"{place}.") for place in served)
    )


class _Swap:
    """One layer's mixer, built and checked, not yet in its place."""

    def __init__(
        self, host: Host, module: nn.Module, config: MixerConfig, call: Record | None, grid: tuple[int, ...] | None,
        causal: bool | None, inherits: bool,
    ) -> None:  # fmt: skip
        self.host, self.module, self.call = host, module, call
        kind = adapter_for(module)
        assert kind is not None
        try:
            attention = kind.describe(module, host)
            attention = attention if call is None else asked(attention, module, call)
            order = attention.causal if causal is None else causal
            attention = replace(attention, grid=grid or attention.grid, causal=order)
            if attention.grid is None and kind.feature_map(module, host) is not None and config.needs_grid:
                cure = "Pass grid=, or input=, which shows it."
                raise OptionError("grid", "None, and the model does not say", "(H, W) of its tokens", cure)
            weight = next(module.parameters())
            mixer = fitted(config, attention).build(attention.dim, device=weight.device, dtype=weight.dtype)
            _check(mixer, attention)
            self.attention, self.mixer = attention, mixer
            self.adapter = kind(mixer, attention, module).train(module.training)
            self.adapter.windows = host.windows
            self.sources: Sources = {**kind.kept(module), **(inherit(mixer, attention) if inherits else {})}
            self.scale, self.error = self._calibrate(inherits)
        except PolymixError as error:
            where = f"plan, for {host.name or 'the model'} ({type(module).__name__}): {error.argument}"
            raise type(error)(where, error.got, error.allowed, error.cure) from error

    @torch.no_grad()
    def _calibrate(self, inherits: bool) -> tuple[float | None, float | None]:
        """What the output was multiplied with so that it has the attention's statistics, and how far off it is then."""
        if self.call is None:
            return None, None
        self.adapter.eval()
        theirs, ours = self.call.output, self.call.again(self.adapter)
        if self.mixer.config.is_attention and inherits:
            factor = None  # is the attention itself, or that over fewer tokens
        else:
            last = partial(torch.movedim, source=self.adapter.channels, destination=-1)
            factor = match(self.mixer, last(ours), last(theirs))
            ours = self.call.again(self.adapter)
        self.adapter.train(self.module.training)
        return factor, ((ours - theirs).double().norm() / theirs.double().norm().clamp_min(1e-30)).item()

    def report(self) -> LayerReport:
        return LayerReport.swapped(
            self.host.name, self.module, self.adapter, self.attention, self.sources, self.scale, self.error,
            None if self.call is None else length(self.module, self.call),
        )  # fmt: skip


def fitted(config: MixerConfig, attention: Attention) -> MixerConfig:
    """The config with what the layer settles: heads, grid, tokens in front, order, dropout."""
    config = config.for_heads(attention.heads)
    if config.is_attention:
        config = config.for_relative(attention.relative is not None).for_rotary(attention.rotary)
    if attention.twin is not None and attention.twin.name == config.name:
        config = attention.twin.fit(config)
    if attention.dropout and not config.dropout:
        config = config.changed(dropout=attention.dropout)
    if attention.causal:
        config = config.for_order()
    if config.causal_by_build:
        return config
    if attention.grid is not None:
        return config.for_grid(attention.grid, attention.prefix)
    if config.placed and config.built_grid is None and attention.max_tokens:
        return config.for_grid((attention.max_tokens,))
    return config


def _check(mixer: TokenMixer, attention: Attention) -> None:
    """Raise where the mixer, as built, cannot do what the layer's host asks."""
    needs = [name for name in ("causal", "cross") if getattr(attention, name)] + sorted(attention.masks)
    words = {"causal": "causal order", "cross": "a context of its own"}
    for need in needs:
        if not mixer.capabilities.has(need):
            raise lacks(mixer.name, need, "mixer", words.get(need, f"{need} masks"))
    if attention.any_length and not mixer.capabilities.any_length:
        got = f"this {mixer.name}, which serves one number of tokens,"
        raise CapabilityError("mixer", got, "one that serves any, since the host's inputs vary", "Build it otherwise.")
