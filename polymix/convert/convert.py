"""`polymix.convert`: replace attention layers by mixers. Everything is checked before anything is changed."""

from __future__ import annotations

import copy as copies
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, adapter_for, refusal_of
from polymix.convert.find import attention_modules
from polymix.convert.inherit import inherit
from polymix.convert.inherit import match as match_output
from polymix.convert.matching import matched
from polymix.convert.plan import resolve
from polymix.convert.positions import POSITIONS, check_used, settle
from polymix.convert.report import ConversionReport, LayerReport, parameters
from polymix.convert.spec import AttentionSpec
from polymix.convert.tracing import LayerCall, record_layers, token_count, with_call
from polymix.convert.tracing import tensors as input_tensors
from polymix.errors import CapabilityError, OptionError, PolymixError, check_choice, check_grid_option
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
    positions: str | None = None,
    match: str | None = None,
    multi_scale: bool = True,
) -> ConversionReport:
    """Replace attention layers of a model by mixers. The report shows what became of each layer, and can undo it.

    Args:
        model: a model with attention of torch.nn, timm, transformers, torchvision or diffusers, or of a class for which
            you registered an adapter (`register_adapter`).
        plan: which layers get which mixer. A mixer's name or config, for every layer; a dict from layer names or globs
            to mixers or "keep", in which a full name overrides a glob; a pattern such as "1:1" (mixer, attention,
            mixer, …), "3:1", "all-but-last-2" or "all-but-first-1"; or the result of `polymix.recommend`.
        mixer: the mixer that a pattern inserts.
        input: an input of the model: a tensor, a tuple, or a dict of keyword arguments. The model is run on it once.
            This shows masks and contexts that only calls have, scales each mixer's output to the attention's, and
            measures each layer's error.
        init: "inherit" starts mixers from the attention's weights where they have a use for them; "fresh" does not.
        copy: convert a copy (`report.model`) and leave the model unchanged.
        grid: the grid of the tokens, where the model does not state it.
        causal: whether the attention is causal, where neither the model nor `input` shows it.
        windows: "keep" the windows of windowed attention, or "merge" them: the mixer then sees the whole feature map.
        positions: in a host that adds positions to queries and keys, but not to values (DETR), "values" does the same,
            by the mixer's map that starts from W_v; "all" adds them to everything that the mixer reads; "drop" reads
            the values' input alone (in cross-attention, queries stay as they are). None: "values" for mixers with
            separate maps. padre, poly_nl and mixers with one input: "all" in transformers' models, else an error.
        match: "parameters" sets the mixer's width (`expand` of pom and mamba) so that it has as many parameters as the
            attention. None: as the mixer's options say.
        multi_scale: whether mixers that can have them keep the multi-scale branches of EfficientViT. False drops them.
    Raises:
        OptionError, CapabilityError: a layer cannot be converted. The model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise OptionError("model", type(model).__name__, "a torch.nn.Module", "Pass the model itself.")
    given = dict(input) if isinstance(input, Mapping) else input  # such as a BatchEncoding of transformers
    if given is not None and not (isinstance(given, (Tensor, tuple, list, dict)) and input_tensors(given)):
        allowed = "a tensor, a tuple of arguments, or a dict of keyword arguments"
        raise OptionError("input", type(input).__name__, allowed, "Pass what you call the model with.")
    if grid is not None:
        check_grid_option(grid, (1, 2, 3))
    check_choice("causal", causal, (None, True, False))
    check_choice("init", init, ("inherit", "fresh"))
    check_choice("copy", copy, (True, False))
    check_choice("windows", windows, ("keep", "merge"))
    check_choice("positions", positions, (None, *POSITIONS))
    check_choice("match", match, (None, "parameters"))
    check_choice("multi_scale", multi_scale, (True, False))
    model = copies.deepcopy(model) if copy else model
    layers = attention_layers(model)
    why_not = refused(model)
    _check_named(plan, layers, why_not)
    settled = resolve(plan, list(layers), mixer, _included(model, layers))
    chosen = {name: config for name, config in settled.items() if config is not None}
    calls = {} if input is None else record_layers(model, {name: layers[name] for name in chosen}, input)
    swaps = {
        name: _Swap(
            Host(model, name, windows), layers[name], config, calls.get(name), grid, causal, init == "inherit",
            positions, match is not None, multi_scale,
        )
        for name, config in chosen.items()
    }  # fmt: skip
    check_used(positions, (swap.attention for swap in swaps.values()))
    if not multi_scale and not any(swap.attention.smoothing for swap in swaps.values()):
        got = f"False for {type(model).__name__}, whose converted layers have no multi-scale branches"
        raise OptionError("multi_scale", got, "True", "Leave it out. EfficientViT has such branches.")
    reports = [swaps[name].report() if name in swaps else LayerReport.kept(name, layers[name]) for name in layers]
    adapters = {name: swap.adapter for name, swap in swaps.items()}
    left_out = unknown(model)
    refusals = {type(model.get_submodule(name)).__name__: why for name, why in why_not.items()}
    return ConversionReport(model, adapters, tuple(reports), left_out, refusals)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers that have an adapter, by name; a shared layer once. OptionError if there are none."""
    found = dict(_known(model, ""))
    if not found:
        others, reasons = ", ".join(unknown(model)), "; ".join(dict.fromkeys(refused(model).values()))
        what = f"attention of no known class: {others}" if others else "no attention"
        what = f"attention that is not converted: {others}: {reasons}" if reasons else what
        got = f"{type(model).__name__} with {what}"
        cure = "For a class of your own, write an adapter (polymix.register_adapter)."
        raise OptionError("model", got, "a model with attention of torch.nn, timm, transformers …", cure)
    return found


def _included(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """The layers that a plan without names is for: all but those that their adapters leave alone by default."""
    kinds = {name: adapter_for(part) for name, part in layers.items()}
    included = [
        name for name, kind in kinds.items() if kind is not None and kind.by_default(layers[name], Host(model, name))
    ]
    return included or list(layers)


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
    """Modules that look like attention but have no adapter and are in no layer that has one, as "name (Class)"."""
    served = [name for name, _ in _known(model, "")]
    found = {**dict(attention_modules(model)), **{name: model.get_submodule(name) for name in refused(model)}}
    return tuple(
        f"{name} ({type(module).__name__})"
        for name, module in found.items()
        if not isinstance(module, (Adapter, TokenMixer))
        and not any(not place or f"{name}.".startswith(f"{place}.") for place in served)
    )


def refused(model: nn.Module) -> dict[str, str]:
    """Why layers whose class is refused by name are not converted, by the name of the layer."""
    found = ((name, refusal_of(module)) for name, module in model.named_modules())
    return {name: why for name, why in found if why is not None}


def _check_named(plan: Any, layers: Mapping[str, nn.Module], why_not: Mapping[str, str]) -> None:
    """Raise CapabilityError where a plan names only layers that are refused."""
    for key in plan if isinstance(plan, Mapping) else ():
        names = [name for name in why_not if fnmatchcase(name, str(key))]
        if names and not any(fnmatchcase(name, str(key)) for name in layers):
            raise CapabilityError("plan", f"{key!r}, for {names[0]}", f"another layer: {why_not[names[0]]}", "Keep it.")


class _Swap:
    """The replacement of one layer: the mixer in its adapter, built and checked, but not yet in the model."""

    def __init__(
        self, host: Host, module: nn.Module, config: MixerConfig, call: LayerCall | None, grid: tuple[int, ...] | None,
        causal: bool | None, inherits: bool, positions: str | None, equal: bool, multi_scale: bool,
    ) -> None:  # fmt: skip
        self.host, self.module, self.call = host, module, call
        kind = adapter_for(module)
        assert kind is not None
        try:
            attention = kind.describe(module, host)
            attention = attention if call is None else with_call(attention, module, call)
            order = attention.causal if causal is None else causal
            attention = replace(attention, grid=grid or attention.grid, causal=order)
            if attention.grid is None and kind.feature_map(module, host) is not None and config.needs_grid:
                cure = "Pass grid=, or input=, from which it is read."
                raise OptionError("grid", "None, and the model does not state it", "(H, W) of its tokens", cure)
            weight = next(module.parameters())
            if attention.smoothing and not multi_scale:
                config, attention = config.for_scales(()), replace(attention, equivalent=None)
            config = fitted(config, attention)
            if equal:
                narrow = config.with_width(config.width_unit, attention.dim).build(attention.dim, device="meta")
                copied = (module.get_submodule(name) for name in kind.present_copies(self.module, narrow))
                config = matched(config, attention.dim, parameters(module) - sum(map(parameters, copied)))
            mixer = config.build(attention.dim, device=weight.device, dtype=weight.dtype)
            _check(mixer, attention)
            self.attention, self.mixer = attention, mixer
            self.adapter = kind(mixer, attention, module).train(module.training)
            self.adapter.windows = host.windows
            self.adapter.positions = settle(positions, mixer, attention, kind.positions)
            self.sources: Sources = {
                **kind.copied_parameters(module, mixer),
                **(inherit(mixer, attention) if inherits else {}),
            }
            self.scale, self.error = self._calibrate(inherits)
        except PolymixError as error:
            where = f"plan, for {host.name or 'the model'} ({type(module).__name__}): {error.argument}"
            raise type(error)(where, error.got, error.allowed, error.cure) from error

    @torch.no_grad()
    def _calibrate(self, inherits: bool) -> tuple[float | None, float | None]:
        """Scale the mixer's output to the attention's; return the factor and the relative error that remains."""
        if self.call is None:
            return None, None
        self.adapter.eval()
        theirs, ours = self.call.output, self.call.repeat(self.adapter)
        if self.mixer.config.is_attention and inherits:
            factor = None  # attention with the same weights needs no scaling
        else:
            last = partial(torch.movedim, source=self.adapter.channel_axis, destination=-1)
            factor = match_output(self.mixer, last(ours), last(theirs))
            ours = self.call.repeat(self.adapter)
        self.adapter.train(self.module.training)
        return factor, ((ours - theirs).double().norm() / theirs.double().norm().clamp_min(1e-30)).item()

    def report(self) -> LayerReport:
        return LayerReport.swapped(
            self.host.name, self.module, self.adapter, self.attention, self.sources, self.scale, self.error,
            None if self.call is None else token_count(self.module, self.call),
        )  # fmt: skip


def fitted(config: MixerConfig, attention: AttentionSpec) -> MixerConfig:
    """The config with what the layer determines: heads, grid, prefix tokens, causal order, dropout."""
    config = config.for_heads(attention.heads)
    if config.is_attention:
        config = config.for_relative(attention.relative is not None).for_rotary(attention.rotary)
    if attention.equivalent is not None and attention.equivalent.name == config.name:
        config = attention.equivalent.complete(config)
    if attention.smoothing:
        config = config.for_scales(tuple(part.size for part in attention.smoothing))
    if attention.dropout and not config.dropout:
        config = config.changed(dropout=attention.dropout)
    if attention.causal:
        config = config.for_order()
    if config.causal_by_build:
        if attention.prefix and not attention.causal:
            config.for_grid(attention.grid or (1,), attention.prefix)  # raises: a class token in front would see itself
        return config
    if attention.grid is not None:
        return config.for_grid(attention.grid, attention.prefix)
    if config.placed and config.built_grid is None and attention.max_tokens:
        return config.for_grid((attention.max_tokens,))
    return config


def _check(mixer: TokenMixer, attention: AttentionSpec) -> None:
    """Raise CapabilityError where the mixer, as built, cannot do what the layer's host asks."""
    needs = [name for name in ("causal", "cross") if getattr(attention, name)] + sorted(attention.masks)
    words = {"causal": "causal order", "cross": "a separate context"}
    for need in needs:
        if not mixer.capabilities.has(need):
            raise lacks(mixer.name, need, "mixer", words.get(need, f"{need} masks"))
    if attention.any_length and not mixer.capabilities.any_length:
        got = f"this {mixer.name}, which is built for one number of tokens"
        allowed = "a mixer for any number of tokens, since the host's inputs vary"
        raise CapabilityError("mixer", got, allowed, "Choose other options or another mixer.")
