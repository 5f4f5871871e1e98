"""`polymix.convert`: replace attention layers by mixers. Everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, adapter_for, refusal_of
from polymix.convert.context import EXTENSIONS, extended
from polymix.convert.drops import check_named, check_names, needed, with_losses
from polymix.convert.drops import check_used as check_drops_used
from polymix.convert.find import attention_modules
from polymix.convert.inherit import inherit
from polymix.convert.matching import matched
from polymix.convert.plan import resolve
from polymix.convert.positions import POSITIONS, check_used, resolve_positions
from polymix.convert.readable import check_readable
from polymix.convert.report import ConversionReport, LayerReport, parameters
from polymix.convert.spec import AttentionSpec
from polymix.convert.tracing import (
    LayerCall,
    difference,
    mode,
    record_layers,
    record_on_an_example,
    run,
    same,
    token_count,
    with_call,
)
from polymix.convert.tracing import tensors as input_tensors
from polymix.convert.trained import trained_plan
from polymix.errors import (
    CapabilityError,
    OptionError,
    PolymixError,
    ShapeError,
    check_choice,
    check_grid_option,
    check_int,
    one_line,
)
from polymix.mixers import MixerConfig, TokenMixer
from polymix.mixers.inheritance import Sources
from polymix.mixers.modules import check_module, copied, still
from polymix.mixers.registry import missing_capability, mixer_class


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
    drop: Collection[str] = (),
    context: int | None = None,
) -> ConversionReport:
    """Replace attention layers of a model by mixers. The report shows what became of each layer, and can undo it.

    Args:
        model: a model with attention of torch.nn, timm, transformers, torchvision or diffusers, or of a class for which
            you registered an adapter (`register_adapter`).
        plan: which layers get which mixer. A mixer's name or config, for every layer; a dict from layer names or globs
            to mixers or "keep", in which a full name overrides a glob; a pattern such as "1:1" (mixer, attention,
            mixer, …), "3:1", "all-but-last-2" or "all-but-first-1"; the result of `polymix.recommend`; or that of
            `polymix.search`, or the path of its plan.json, whose mixers are trained.
        mixer: the mixer that a pattern inserts.
        input: an input of the model: a tensor, a tuple, or a dict of keyword arguments. The model is run on it.
            This shows masks and contexts that only calls have, scales each mixer's output to the attention's, and
            measures each layer's error. None: where a layer is read from a call, a small example of the model's
            library, or random images of the size that the model states; else the model is not run.
        init: "inherit" starts mixers from the attention's weights where they have a use for them; "fresh" does not.
        copy: convert a copy (`report.model`) and leave the model unchanged.
        grid: the grid of the tokens, where the model does not state it.
        causal: whether the attention is causal, where neither the model nor `input` shows it.
        windows: "keep" the windows of windowed attention, or "merge" them: the mixer then sees the whole feature map.
        positions: in a host that adds positions to queries and keys, but not to values (DETR), "values" does the same,
            by the mixer's map that starts from W_v; "all" adds them to everything that the mixer reads; "drop" reads
            the values' input alone (in cross-attention, queries stay as they are). None: "values" for mixers with
            separate maps. padre, poly_nl and mixers with one input: "all" in transformers' models, else an error.
            With `context`: "interpolate" (learned positions, and rotary angles scaled likewise), "repeat" or "none"
            (learned positions alone), "continue" (rotary angles as they are). None: learned ones are interpolated,
            rotary ones continue. Learned positions that are "none" are zero: order is left to the mixers.
        match: "parameters" sets the mixer's width (`expand` of pom and mamba) so that it has as many parameters as the
            attention. None: as the mixer's options say.
        multi_scale: whether mixers that can have them keep the multi-scale branches of EfficientViT. False drops them.
        drop: parts of attention that may be lost: "position_bias" (ALiBi, relative tables), "soft_cap" (Gemma 2),
            "talking_heads" (CaiT), "sinks" (gpt-oss), "rotary" (angles that attention lacks, such as scaled ones),
            "qk_norm" and "gate" (for mixers that read tokens). A part that is not named refuses the conversion.
        context: tokens that a text model of transformers takes from now on, more than before. Distil it at that length:
            see `polymix.distill(piece=)`.
    Raises:
        OptionError, CapabilityError: a layer cannot be converted. The model is unchanged.
    """
    check_module(model)
    example = dict(input) if isinstance(input, Mapping) else input  # such as a BatchEncoding of transformers
    if example is not None and not (isinstance(example, (Tensor, tuple, list, dict)) and input_tensors(example)):
        allowed = "a tensor, a tuple of arguments, or a dict of keyword arguments"
        raise OptionError("input", type(input).__name__, allowed, "Pass what you call the model with.")
    if grid is not None:
        check_grid_option(grid, (1, 2, 3))
    check_choice("causal", causal, (None, True, False))
    check_choice("init", init, ("inherit", "fresh"))
    check_choice("copy", copy, (True, False))
    check_choice("windows", windows, ("keep", "merge"))
    check_choice("positions", positions, (None, *(POSITIONS if context is None else EXTENSIONS)))
    if context is not None:
        check_int("context", context, 1)
    check_choice("match", match, (None, "parameters"))
    check_choice("multi_scale", multi_scale, (True, False))
    drop = check_names(drop)
    trained = trained_plan(plan)
    if trained is not None:
        trained.check(model)
        plan = trained.plan()
    model = copied(model, "copy") if copy else model
    with still(model):
        extension = None if context is None else extended(model, context, positions)
        try:
            report = _converted(
                model, plan, mixer, example, init, grid, causal, windows, positions if extension is None else None,
                match, multi_scale, drop,
            )  # fmt: skip
            if trained is not None:
                trained.fill(report)
        except BaseException:
            if extension is not None:
                extension.revert()
            raise
        report.context = extension
        return report


def _converted(
    model: nn.Module, plan: Any, mixer: str | MixerConfig, example: Any, init: str, grid: tuple[int, ...] | None,
    causal: bool | None, windows: str, positions: str | None, match: str | None, multi_scale: bool,
    drop: tuple[str, ...],
) -> ConversionReport:  # fmt: skip
    """`convert` with arguments that are checked."""
    layers, named = attention_layers(model), isinstance(plan, Mapping)
    if example is None and not named:  # those that only a call shows are left where others are sure
        layers = {name: part for name, part in layers.items() if not _kind(part).optional} or layers
    why_not = refused(model)
    _check_named(plan, layers, why_not)
    settled = resolve(plan, list(layers), mixer, included(model, layers))
    configs = {name: config for name, config in settled.items() if config is not None}
    parts = {name: layers[name] for name in configs}
    check_readable(model, parts)
    if example is None and any(kind is not None and kind.needs_call for kind in map(adapter_for, parts.values())):
        calls = record_on_an_example(model, parts)
    else:
        calls = {} if example is None else record_layers(model, parts, example)
    configs = {name: config for name, config in configs.items() if name in calls or not _uncalled(plan, parts[name])}
    swaps: dict[str, _Swap] = {}
    errors: list[PolymixError] = []
    for name, config in configs.items():
        try:
            swaps[name] = _Swap(
                Host(model, name, windows), layers[name], config, calls.get(name), grid, causal, init == "inherit",
                positions, match is not None, multi_scale, drop,
            )  # fmt: skip
        except PolymixError as error:
            if named or not _kind(layers[name]).may_stay(Host(model, name)):
                raise
            errors.append(error)
            why_not[name] = error.got
            layers.pop(name)
    if errors and not swaps:
        raise errors[0]
    check_used(positions, (swap.attention for swap in swaps.values()))
    check_drops_used(drop, [swap.attention for swap in swaps.values()])
    if not multi_scale and not any(swap.attention.smoothing for swap in swaps.values()):
        got = f"False for {type(model).__name__}, whose converted layers have no multi-scale branches"
        raise OptionError("multi_scale", got, "True", "Leave it out. EfficientViT has such branches.")
    reports = [
        swaps[name].report() if name in swaps else LayerReport.unconverted(name, part) for name, part in layers.items()
    ]
    adapters = {name: swap.adapter for name, swap in swaps.items()}
    left_out = _left_out(model, layers, why_not)
    refusals = {type(model.get_submodule(name)).__name__: why for name, why in why_not.items()}
    report = ConversionReport(model, adapters, tuple(reports), left_out, refusals)
    if example is not None and any(call.several for call in calls.values()):
        _check_still_runs(report, example, [name for name, call in calls.items() if call.several])
    return report


def _check_still_runs(report: ConversionReport, example: Any, names: Sequence[str]) -> None:
    """Undo the conversion and raise CapabilityError if the model reads more of a layer than mixers have.

    names: the layers that returned more than their output, such as attention weights, of which a mixer has none.
    """
    try:
        with mode(report.model, False), torch.no_grad():
            run(report.model, example)
    except Exception as error:  # whatever a model raises where it finds None in place of attention weights
        report.undo()
        got = f"{type(report.model).__name__}, which then fails with {one_line(error.__cause__ or error)[:200]}"
        allowed = f"a model that reads the output alone of {', '.join(names[:3])}: a mixer has no attention weights"
        raise CapabilityError("model", got, allowed, "Change that part of the model, or keep these layers.") from error


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers that have an adapter, by name; a shared layer once. OptionError if there are none."""
    layers = dict(_layers(model, ""))
    if not layers:
        why_not = refused(model)
        others, reasons = ", ".join(_left_out(model, layers, why_not)), "; ".join(dict.fromkeys(why_not.values()))
        what = f"attention of no known class: {others}" if others else "no attention"
        what = f"attention that is not converted: {others}: {reasons}" if reasons else what
        got = f"{type(model).__name__} with {what}"
        cure = "For a class of your own, write an adapter (polymix.register_adapter)."
        raise OptionError("model", got, "a model with attention of torch.nn, timm, transformers …", cure)
    return layers


def _kind(module: nn.Module) -> type[Adapter]:
    """The adapter of a layer that has one."""
    kind = adapter_for(module)
    assert kind is not None
    return kind


def _uncalled(plan: Any, module: nn.Module) -> bool:
    """Whether a layer that the input does not reach is kept: it must be called to be read, and no plan names it."""
    kind = adapter_for(module)
    return kind is not None and kind.needs_call and not isinstance(plan, Mapping)


def included(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """The layers that a plan without names is for: all but those that their adapters leave alone by default."""
    kinds = {name: adapter_for(part) for name, part in layers.items()}
    names = [name for name, kind in kinds.items() if kind and kind.by_default(layers[name], Host(model, name))]
    return names or list(layers)


def _layers(module: nn.Module, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, Adapter):
        return
    seen.add(id(module))
    if adapter_for(module) is not None:
        yield name, module
    elif not isinstance(module, TokenMixer):
        for key, child in module.named_children():
            yield from _layers(child, f"{name}.{key}" if name else key, seen)


def _left_out(model: nn.Module, layers: Collection[str], why_not: Collection[str]) -> tuple[str, ...]:
    """Modules that look like attention, or are refused, and are in none of the layers, as "name (Class)"."""
    attention = {**dict(attention_modules(model)), **{name: model.get_submodule(name) for name in why_not}}
    return tuple(
        f"{name} ({type(module).__name__})"
        for name, module in attention.items()
        if not isinstance(module, (Adapter, TokenMixer))
        and not any(not layer or f"{name}.".startswith(f"{layer}.") for layer in layers)
    )


def refused(model: nn.Module) -> dict[str, str]:
    """Why layers whose class is refused by name are not converted, by the name of the layer."""
    reasons = ((name, refusal_of(module)) for name, module in model.named_modules())
    return {name: why for name, why in reasons if why is not None}


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
        drop: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.host, self.module, self.call = host, module, call
        kind = adapter_for(module)
        assert kind is not None
        try:
            attention = kind.describe(module, host)
            if call is not None:
                attention = kind.proven(with_call(attention, module, call), module, call)
            elif kind.needs_call:
                cure = "Pass input= with everything that the model takes, or keep this layer."
                raise OptionError("input", "one on which this layer is not called", "an input that reaches it", cure)
            order = attention.causal if causal is None else causal
            attention = replace(attention, grid=grid or attention.grid, causal=order)
            if inherits:
                kind, attention = kind.serving(config, attention)
            if attention.grid is None and kind.feature_map(module, host) is not None and config.needs_grid:
                cure = "Pass grid=, or input=, from which it is read."
                raise OptionError("grid", "None, and the model does not state it", "(H, W) of its tokens", cure)
            if config.causal_by_build and kind.masks_alone and not attention.causal:
                got = f"{config.name}, which is causal, where calls without a causal mask see all tokens"
                cure = f"Pass causal=True, or an input with a causal mask; or use {config.sees_all}."
                raise CapabilityError("mixer", got, "a mixer that is not causal", cure)
            weight = next(iter([*module.parameters(), *host.model.parameters()]), torch.empty(()))
            if attention.smoothing and not multi_scale:
                config, attention = config.for_scales(()), replace(attention, equivalent=None)
            config = fitted(config, attention)
            attention = with_losses(attention, config)
            check_named(drop, attention, config)
            if equal:
                narrow = config.with_width(config.width_unit, attention.dim).build(attention.dim, device="meta")
                copied = (module.get_submodule(name) for name in kind.present_copies(self.module, narrow))
                config = matched(config, attention.dim, parameters(module) - sum(map(parameters, copied)))
            mixer = _built(config, kind.width(attention), attention, weight)
            _check(mixer, attention)
            if attention.grid is None and kind.masks_alone and mixer.capabilities.grids:
                _check_without_grid(mixer, weight)
            self.attention, self.mixer = attention, mixer
            self.adapter = kind(mixer, attention, module)
            self.adapter.windows = host.windows
            self.adapter.positions = resolve_positions(positions, mixer, attention, kind.positions)
            self.sources: Sources = {
                **kind.copied_parameters(module, mixer),
                **(inherit(mixer, attention) if inherits else {}),
            }
            check_named(drop, attention, config, self.sources)
            self.scale, self.error = self._calibrate(inherits)
            self.adapter.follow_modes(module)
            own = {key.removeprefix("mixer.") for key, _ in self.adapter.named_parameters()}
            self.sources = {key: origin for key, origin in self.sources.items() if key in own}
        except PolymixError as error:
            where = f"plan, for {host.name or 'the model'} ({type(module).__name__}): {error.argument}"
            raise type(error)(where, error.got, error.allowed, error.cure) from error

    @torch.no_grad()
    def _calibrate(self, inherits: bool) -> tuple[float | None, float | None]:
        """Scale the mixer's output to the attention's; return the factor and the relative error that remains.

        Raises CapabilityError where softmax is not the layer itself.
        """
        if self.call is None:
            return None, None
        self.adapter.eval()
        theirs, ours = self.call.output, self.call.repeat(self.adapter)
        if self.mixer.config.is_attention and inherits:
            factor = None  # attention with the same weights needs no scaling
            self._check_reproduces(self.call, ours)
        else:
            factor = self.adapter.calibrate(self.call)
            ours = self.call.repeat(self.adapter)
        return factor, difference(ours, theirs)

    def _check_reproduces(self, call: LayerCall, ours: Tensor) -> None:
        """Raise CapabilityError where softmax attention, with the layer's weights, does not give the layer's output.

        Adapters that must see a call, and do not prove it themselves, are held to it here.
        """
        proven = self.adapter.proves_softmax or not self.adapter.needs_call
        reach = self.mixer.config.reach  # local attention sees less than the layer
        whole = reach is None or (token_count(self.module, call) or 0) <= reach
        exact = whole and not proven and not needed(self.attention, self.mixer.config, self.sources)
        if exact and not same(ours, call.output):
            got = f"{self.mixer.name}, whose output differs by {difference(ours, call.output):.2g} of the layer's own"
            cure = "Keep the layer, or choose another mixer."
            raise CapabilityError("attention", got, "softmax to be the layer itself", cure)

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
        if 1 not in mixer_class(config.name).capabilities.grids:
            raise _no_grid(config)
        return config.for_grid((attention.max_tokens,))
    return config


def _built(config: MixerConfig, width: int, attention: AttentionSpec, like: Tensor) -> TokenMixer:
    """The mixer. Raises OptionError where it needs a grid of more axes than the host's tokens have."""
    try:
        return config.build(width, device=like.device, dtype=like.dtype)
    except OptionError as error:
        if error.argument != "grid" or len(attention.grid or (1,)) > 1:
            raise
        raise _no_grid(config) from error


def _no_grid(config: MixerConfig) -> OptionError:
    cure = "Pass grid=, or choose a mixer for tokens in a row, such as qt."
    return OptionError("grid", f"None for {config.name}, and the model has none", "(H, W) of its tokens", cure)


@torch.no_grad()
def _check_without_grid(mixer: TokenMixer, like: Tensor) -> None:
    """Raise OptionError where a mixer cannot take its tokens for a row, as it must where no call has a grid."""
    try:
        with mode(mixer, False):
            mixer(like.new_zeros(1, 4, mixer.dim))
    except ShapeError as error:
        if error.argument == "grid":
            raise _no_grid(mixer.config) from error


def _check(mixer: TokenMixer, attention: AttentionSpec) -> None:
    """Raise CapabilityError where the mixer, as built, cannot do what the layer's host asks."""
    needs = [name for name in ("causal", "cross") if getattr(attention, name)] + sorted(attention.masks)
    words = {"causal": "causal order", "cross": "a separate context"}
    for need in needs:
        if not mixer.capabilities.has(need):
            raise missing_capability(mixer.name, need, "mixer", words.get(need, f"{need} masks"))
    if attention.any_length and not mixer.capabilities.any_length:
        got = f"this {mixer.name}, which is built for one number of tokens"
        allowed = "a mixer for any number of tokens, since the host's inputs vary"
        raise CapabilityError("mixer", got, allowed, "Choose other options or another mixer.")
