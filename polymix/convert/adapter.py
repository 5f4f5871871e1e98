"""An adapter: a mixer behind the calling convention of one attention class; and which adapter is whose."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from polymix import errors
from polymix.convert.attention import Attention
from polymix.convert.find import grids, prefix_tokens
from polymix.convert.masks import split
from polymix.mixers import TokenMixer

A = TypeVar("A", bound="type[Adapter]")
_ADAPTERS: dict[str, type[Adapter]] = {}  # by the attention's class, "package.module.Class"
_FILES = {"torch": "torch_nn", "timm": "timm", "transformers": "transformers", "torchvision": "torchvision",
          "diffusers": "diffusers", "polymix": "own"}  # fmt: skip


class Host(NamedTuple):
    """Where a layer stands: the model, the layer's name in it; and what `convert` was told to do with windows."""

    model: nn.Module
    name: str
    windows: str = "keep"

    def above(self, levels: int = 1) -> nn.Module | None:
        """The module that holds the layer, or the one `levels` above it."""
        parts = self.name.split(".")
        return self.model.get_submodule(".".join(parts[:-levels])) if self.name and levels <= len(parts) else None

    def chain(self) -> Iterator[nn.Module]:
        """The modules around the layer, from the nearest to the whole model."""
        parts = self.name.split(".") if self.name else []
        for last in range(len(parts) - 1, -1, -1):
            yield self.model.get_submodule(".".join(parts[:last]))

    def grid(self) -> tuple[int, ...] | None:
        """The grid that the nearest module around the layer names, such as patch_embed.grid_size."""
        return next((grid for module in self.chain() for grid in grids(module)), None)

    def prefix(self) -> int:
        """How many tokens stand in front of the grid, by the class tokens of the nearest module that has any."""
        return next(filter(None, map(prefix_tokens, self.chain())), 0)


class Adapter(nn.Module):
    """A mixer in the place of an attention layer, called as its host calls that layer.

    A subclass says with `describe` what the attention is, and in `forward` takes the host's arguments and gives what
    the host expects, by `self.mix`. Attributes of the attention that the host reads are named in `carries`; parts of it
    that the adapter computes with beside the mixer in `keeps`: it has copies of its own, by the last of their names.
    `part` is the one whose output the mixer's stands for, where the attention does more after it, such as a norm.
    """

    carries: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[tuple[str, ...]] = ()
    part: ClassVar[str] = ""
    channels: ClassVar[int] = -1  # the axis that they have in its output
    masked: ClassVar[bool] = True  # whether the masks of a call say what its mixer must be able to do

    def __init__(self, mixer: TokenMixer, attention: Attention, module: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.grid, self.prefix = attention.grid, attention.prefix
        self.windows = "keep"  # as `convert` was told
        self.now: tuple[int, ...] | None = None  # the grid of the feature map that the host made last
        self.causal: bool | None = True if attention.causal else None
        for name in self.carries:
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))
        for name in self.keeps:
            setattr(self, name.rpartition(".")[2], copy.deepcopy(module.get_submodule(name)))

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> Attention:
        """What the attention is and what its host asks of it."""
        raise NotImplementedError

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        """The host's module whose output (B, C, H, W) has a place for each token after the prefix, if there is one:
        the grid is what it was in this run."""
        return None

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> tuple[int, ...]:
        """The grid in a call of that module, for one whose output is of another form."""
        return tuple(output.shape[2:])

    def follow(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the feature map."""
        self.now = self.grid_of(module, args, output)

    @property
    def follows(self) -> bool:
        """Whether it must know the grid of this run."""
        return bool(self.mixer.capabilities.grids)

    @classmethod
    def kept(cls, module: nn.Module) -> dict[str, tuple[str, ...]]:
        """Parameters of the copies, each with the attention's that it comes from."""
        parts = ((name, key) for name in cls.keeps for key, _ in module.get_submodule(name).named_parameters())
        return {f"{name.rpartition('.')[2]}.{key}": (f"{name}.{key}",) for name, key in parts}

    def settings(self, host: Host) -> list[tuple[Any, str, Any]]:
        """(module or config, attribute, value): what must be set in the host while the adapter stands in it."""
        return []

    def seen(self, visible: Tensor | None, padding: Tensor | None = None, causal: bool | None = None) -> dict[str, Any]:
        """`mask` and `causal` for `mix`, from who sees whom (B, N, M), padding (B, M), and what is said of order."""
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
        grid: tuple[int, ...] | None = None, segments: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The mixer on x (B, N, D), with the grid that N tokens stand on where that matters."""
        order = self.causal if causal is None else causal
        if x.shape[1] == 1 and context is None and not order:
            order = None  # one token sees itself, whatever the order that the mixer was built for
        return self.mixer(x, context, mask=mask, causal=order, segments=segments, **self.place(x, grid))

    def place(self, x: Tensor, grid: tuple[int, ...] | None = None) -> dict[str, Any]:
        """The `grid` of a call: as given, else the layer's own, or one of its shape at another size."""
        if not self.mixer.capabilities.grids:
            return {}
        tokens = x.shape[1] - self.prefix
        if self.grid is None:
            return {"grid": (tokens,)} if self.mixer.config.built_grid is not None else {}
        grid = grid or self.now or self.grid
        if tokens != math.prod(grid):
            grid = resized(grid, tokens)
        return {"grid": grid} if grid != self.grid else self.mixer.config.call_options(grid)


def resized(grid: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """A grid of `tokens` places with the proportions of `grid`."""
    factor = (tokens / math.prod(grid)) ** (1 / len(grid))
    found = tuple(round(size * factor) for size in grid)
    if math.prod(found) != tokens:
        cure = "Give the adapter's `grid` the new one before the call."
        raise errors.ShapeError("x", f"{tokens} tokens", f"a grid with the proportions of {grid}", cure)
    return found


def register_adapter(*classes: str | type[nn.Module]) -> Callable[[A], A]:
    """Class decorator for an Adapter: it serves these attention classes, given themselves or as "package.module.Class".

    A name needs no import of its library. Subclasses that keep the class's forward are served too. A class can be
    registered once; to replace an adapter of ours, subclass the attention or the adapter.
    """

    def add(adapter: A) -> A:
        for name in (kind if isinstance(kind, str) else path(kind) for kind in classes):
            if name in _ADAPTERS:
                raise errors.OptionError("classes", name, "a class without an adapter", "It has one already.")
            _ADAPTERS[name] = adapter
        return adapter

    return add


def path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def adapter_for(module: nn.Module) -> type[Adapter] | None:
    """The adapter of a module's class, or of the class whose forward it runs; None where there is none."""
    for kind in type(module).__mro__:
        if file := _FILES.get(kind.__module__.partition(".")[0]):
            importlib.import_module(f"polymix.convert.adapters.{file}")
        adapter = _ADAPTERS.get(path(kind))
        if adapter is not None and getattr(kind, "forward", None) is type(module).forward:
            return adapter
    return None
