"""Adapter: a mixer that is called as the attention layer it replaces; and the registry of adapters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from polymix import errors
from polymix.convert.adapters.libraries import any_adapter, load_adapters_of
from polymix.convert.find import grids, prefix_tokens
from polymix.convert.inherit import match
from polymix.convert.masks import split
from polymix.convert.positions import arrange
from polymix.convert.running import Grid, RunningGrid
from polymix.convert.spec import AttentionSpec
from polymix.mixers import MixerConfig, TokenMixer

A = TypeVar("A", bound="type[Adapter]")
E = TypeVar("E")
_ADAPTERS: dict[str, type[Adapter]] = {}  # by the attention's class, "package.module.Class"
_REFUSALS: dict[str, str] = {}  # why attention of a class is not converted, by "package.module.Class"


class Host(NamedTuple):
    """The place of a layer: the model, the layer's name in it, and the `windows` option of `convert`."""

    model: nn.Module
    name: str
    windows: str = "keep"

    def above(self, levels: int = 1) -> nn.Module | None:
        """The module that contains the layer, or the one `levels` above it."""
        parts = self.name.split(".")
        return self.model.get_submodule(".".join(parts[:-levels])) if self.name and levels <= len(parts) else None

    def chain(self) -> Iterator[nn.Module]:
        """The modules around the layer, from the nearest to the whole model."""
        parts = self.name.split(".") if self.name else []
        for last in range(len(parts) - 1, -1, -1):
            yield self.model.get_submodule(".".join(parts[:last]))

    def grid(self) -> tuple[int, ...] | None:
        """The token grid that the nearest module around the layer states, such as patch_embed.grid_size."""
        return next((grid for module in self.chain() for grid in grids(module)), None)

    def prefix(self) -> int:
        """The number of tokens in front of the grid: the class tokens of the nearest module that has any."""
        return next(filter(None, map(prefix_tokens, self.chain())), 0)


class Adapter(nn.Module):
    """A mixer in the place of an attention layer, with that layer's signature.

    A subclass describes the attention in `describe`. Its `forward` takes the host's arguments, calls `self.mix`, and
    returns what the host expects.

    Class attributes:
        forward_attributes: names of attributes of the attention that the host reads.
        copied_modules: names of parts of the attention that the adapter runs itself, beside the mixer. It has copies of
            them, under the last part of their names.
        replaced_part: the part of the attention whose output the mixer's output stands for, where the attention does
            more after it, such as a norm.
        channel_axis: axis of the channels in the adapter's output, or in that of `replaced_part`.
        checks_masks: whether the masks of a call tell what the mixer must support.
        masks_alone: whether calls say nothing of their tokens but by masks: no grid, and causal order in no other way.
        needs_call: whether a layer is read from a call too (`proven`); `convert` then runs the model.
        optional: whether a plan without names leaves a layer that cannot be converted as it is, and says why.
        proves_softmax: whether `proven` has shown that softmax attention gives the layer's own output.
        way: how the mixer came to its place, where a report should say so.
        positions: what becomes of positions that the host adds to queries and keys only, unless `convert` is told: see
            `polymix.convert.positions`. None: mixers with one input need to be told.
    """

    forward_attributes: ClassVar[tuple[str, ...]] = ()
    copied_modules: ClassVar[tuple[str, ...]] = ()
    replaced_part: ClassVar[str] = ""
    channel_axis: ClassVar[int] = -1
    checks_masks: ClassVar[bool] = True
    masks_alone: ClassVar[bool] = False
    needs_call: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    proves_softmax: ClassVar[bool] = False
    way: ClassVar[str] = ""
    positions: str | None = None

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.grid, self.prefix = attention.grid, attention.prefix
        self.windows = "keep"  # the option of `convert`
        self.running = RunningGrid()
        self.latest_grid: Grid = None  # that any thread has noted
        self.causal: bool | None = True if attention.causal else None
        for name in self.forward_attributes:
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))
        for name in self.present_copies(module, mixer):
            setattr(self, name.rpartition(".")[2], copy.deepcopy(module.get_submodule(name)))

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        """Describe the attention and what its host asks of it."""
        raise NotImplementedError

    @classmethod
    def proven(cls, spec: AttentionSpec, module: nn.Module, call: Any) -> AttentionSpec:
        """The spec with what a recorded call (a `LayerCall`) shows beyond, or against, `describe`."""
        return spec

    @classmethod
    def forms(cls) -> tuple[type[Adapter], ...]:
        """The adapters that `serving` chooses from."""
        return (cls,)

    @classmethod
    def serving(cls, config: MixerConfig, spec: AttentionSpec) -> tuple[type[Adapter], AttentionSpec]:
        """The adapter for this mixer, where there are several, and the spec that then holds."""
        return cls, spec

    @classmethod
    def width(cls, spec: AttentionSpec) -> int:
        """The number of channels that the mixer is built for."""
        return spec.dim

    def output_map(self) -> nn.Linear | None:
        """The linear map whose output is the layer's output, if there is one."""
        return self.mixer.output_map()

    @classmethod
    def may_stay(cls, host: Host) -> bool:
        """Whether a plan without names leaves this layer as it is, with the reason, where it cannot be converted."""
        return cls.optional

    @classmethod
    def by_default(cls, module: nn.Module, host: Host) -> bool:
        """Whether a plan for all layers includes this one. Otherwise only a plan by names replaces it."""
        return True

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        """The host's module whose output (B, C, H, W) has one place per token after the prefix, if there is one.

        The grid of the tokens is the size of that output.
        """
        return None

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> tuple[int, ...]:
        """The grid in a call of `feature_map`. Override it where the output has another shape."""
        return tuple(output.shape[2:])

    def note_grid(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook on the feature map: keep the grid of this run, where it is one: torch.fx knows no sizes."""
        if not isinstance(output[0] if isinstance(output, tuple) else output, Proxy):
            self.current_grid = self.grid_of(module, args, output)

    @property
    def current_grid(self) -> Grid:
        """The grid of the feature map in this thread's running call.

        A thread that has noted none gets the latest of any: autograd's threads run checkpointed blocks again. A
        compiled graph notes the latest alone, because it cannot write to what belongs to a thread.
        """
        return self.latest_grid if torch.compiler.is_compiling() else self.running.grid or self.latest_grid

    @current_grid.setter
    def current_grid(self, grid: Grid) -> None:
        self.latest_grid = grid
        if not torch.compiler.is_compiling():
            self.running.grid = grid

    @property
    def needs_current_grid(self) -> bool:
        """Whether the adapter needs the grid of each run."""
        return bool(self.mixer.capabilities.grids)

    @classmethod
    def copies(cls, mixer: TokenMixer) -> tuple[str, ...]:
        """Names of the attention's parts that the adapter copies for this mixer. Default: `copied_modules`."""
        return cls.copied_modules

    @classmethod
    def present_copies(cls, module: nn.Module, mixer: TokenMixer) -> tuple[str, ...]:
        """Those of `copies` that this attention has."""
        parts = {name for name, _ in module.named_modules()}
        return tuple(name for name in cls.copies(mixer) if name in parts)

    @classmethod
    def copied_parts(cls, module: nn.Module, mixer: TokenMixer) -> dict[str, str]:
        """The adapter's parts that are copies, each with the name of the attention's part ("": the attention)."""
        return {name.rpartition(".")[2]: name for name in cls.present_copies(module, mixer)}

    @classmethod
    def copied_parameters(cls, module: nn.Module, mixer: TokenMixer) -> dict[str, tuple[str, ...]]:
        """The parameters of the parts copied for a mixer, each with the attention's parameter that it is a copy of."""
        parts = cls.copied_parts(module, mixer).items()
        return {
            f"{ours}.{key}": (f"{theirs}.{key}".lstrip("."),)
            for ours, theirs in parts
            for key, _ in module.get_submodule(theirs).named_parameters()
        }

    def follow_modes(self, module: nn.Module) -> None:
        """Put what is new into the attention's mode, and each part that is a copy into the mode of what it copies."""
        self.train(module.training)
        for ours, theirs in self.copied_parts(module, self.mixer).items():
            modes = {name: part.training for name, part in module.get_submodule(theirs).named_modules()}
            for name, part in self.get_submodule(ours).named_modules():
                part.training = modes.get(name, part.training)

    @property
    def discards(self) -> Mapping[str, str]:
        """What of the layer this mixer leaves out, beside the `drops` of its spec, and why."""
        return {}

    def calibrate(self, call: Any) -> float | None:
        """Scale the mixer's output to the attention's in a recorded call (a `LayerCall`). Returns the factor."""
        ours, theirs = (part.movedim(self.channel_axis, -1) for part in (call.repeat(self), call.output))
        return match(self.mixer, self.output_map(), ours, theirs)

    def settle(self) -> None:
        """Called once the adapter has its attributes, as a conversion or a saved model gives them."""

    def host_settings(self, host: Host) -> list[tuple[Any, str, Any]]:
        """(module or config, attribute, value): what to set in the host while the adapter is in it."""
        return []

    def mask_options(
        self, visible: Tensor | None, padding: Tensor | None = None, causal: bool | None = None
    ) -> dict[str, Any]:
        """The `mask` and `causal` arguments for `mix`.

        visible: (B, N, M), True where query n sees token m; it is split into padding and causal order where it is
            nothing else. padding: (B, M), True for real tokens. causal: the order, where the host states it.
        """
        if visible is None:
            return {"mask": padding, "causal": causal}
        parts = split(visible, causal)
        if parts.arbitrary is not None:
            mask = parts.arbitrary if padding is None else parts.arbitrary & padding[:, None]
            return {"mask": mask, "causal": False}
        both = [part for part in (parts.padding, padding) if part is not None]
        return {"mask": both[0] & both[1] if len(both) == 2 else both[0] if both else None, "causal": parts.causal}

    def mix(
        self, x: Tensor, context: Tensor | None = None, *, mask: Tensor | None = None, causal: bool | None = None,
        grid: tuple[int, ...] | None = None, segments: Tensor | None = None, values: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply the mixer to x (B, N, D). `grid` is the grid of the N tokens, where it differs from the layer's own.

        values: what the host computes values from, where that is not `context` (or x, without one).
        """
        order = self.causal if causal is None else causal
        if x.shape[1] == 1 and context is None and not order:
            order = None  # a single token sees itself in any order
        x, contexts, values = arrange(self.mixer, self.positions, x, context, values)
        options: dict[str, Any] = {"segments": segments, **self.grid_options(x, grid)}
        options |= {} if values is None else {"values": values}
        options["mask"] = (mask, mask) if mask is not None and isinstance(contexts, tuple) else mask
        return self.mixer(x, contexts, causal=order, **options)

    def mix_map(self, x: Tensor) -> Tensor:
        """Apply the mixer to a feature map (B, C, H, W), whose places are its tokens."""
        grid = tuple(x.shape[2:])
        return self.mix(x.flatten(2).transpose(1, 2), grid=grid).transpose(1, 2).unflatten(2, grid)

    def grid_options(self, x: Tensor, grid: tuple[int, ...] | None = None) -> dict[str, Any]:
        """The `grid` argument of a call: as given, else the layer's own, scaled to the number of tokens."""
        axes = self.mixer.capabilities.grids
        if not axes or (axes == (1,) and len(grid or self.current_grid or self.grid or (1,)) > 1):
            return {}  # without positions, or with those in a row alone, which the mixer counts itself
        tokens = x.shape[1] - self.prefix
        if self.grid is None:
            if grid is not None and self.mixer.config.built_grid is None:
                return {"grid": grid}
            return {"grid": (tokens,)} if self.mixer.config.built_grid is not None else {}
        grid = grid or self.current_grid or self.grid
        if tokens != math.prod(grid):
            grid = resized(grid, tokens)
        return {"grid": grid} if grid != self.grid else self.mixer.config.call_options(grid)


def resized(grid: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """A grid of `tokens` tokens with the proportions of `grid`."""
    factor = (tokens / math.prod(grid)) ** (1 / len(grid))
    scaled = tuple(round(size * factor) for size in grid)
    if math.prod(scaled) != tokens:
        cure = "Give the adapter's `grid` the new one before the call."
        raise errors.ShapeError("x", f"{tokens} tokens", f"a grid with the proportions of {grid}", cure)
    return scaled


def register_adapter(*classes: str | type[nn.Module]) -> Callable[[A], A]:
    """Class decorator: register an Adapter for attention classes, given as classes or as "package.module.Class".

    A name does not import its library. The adapter also serves subclasses that keep the class's `forward`. A class has
    one adapter; to replace one of polymix's, subclass the attention class.

    Raises OptionError where a class has an adapter already.
    """

    def add(adapter: A) -> A:
        for name in (kind if isinstance(kind, str) else path(kind) for kind in classes):
            if name in _ADAPTERS:
                raise errors.OptionError(
                    "classes", name, "a class without an adapter", "To replace its adapter, subclass the class."
                )
            _ADAPTERS[name] = adapter
        return adapter

    return add


def register_refusal(why: str, *classes: str) -> None:
    """Say of attention classes, given as "package.module.Class", why they are not converted.

    `ConversionReport.refusals` has the reason; naming such a layer in a plan is an error with the same reason.
    """
    _REFUSALS.update(dict.fromkeys(classes, why))


def refusal_of(module: nn.Module) -> str | None:
    """Why a module is not converted, if its class, or one that it inherits its `forward` from, is refused by name."""
    return _entry(module, _REFUSALS)


def path(kind: type) -> str:
    """The "package.module.Class" of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def adapter_for(module: nn.Module) -> type[Adapter] | None:
    """The adapter of a module's class, or of a base class whose `forward` it runs, or of its library; None if none."""
    return _entry(module, _ADAPTERS) or any_adapter(module)


def _entry(module: nn.Module, table: Mapping[str, E]) -> E | None:
    """The entry of a module's class, or of a base class whose `forward` it runs.

    It is looked up in each call, because adapters may be registered at any time.
    """
    kind = type(module)
    for base in kind.__mro__:
        load_adapters_of(base.__module__.partition(".")[0])
        name = path(base)
        if name in table and getattr(base, "forward", None) is kind.forward:
            return table[name]
    return None
