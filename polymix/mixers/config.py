"""MixerConfig: a mixer's options, and what others must know of it to place, measure or convert it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch

from polymix import errors
from polymix.mixers.mixer import TokenMixer
from polymix.mixers.registry import check_options, config_class

Self = TypeVar("Self", bound="MixerConfig")


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """The options of a mixer, apart from the width that its host decides.

    Args:
        bias: whether its linear maps and convolutions have biases.
        dropout: probability with which an element of the output is zeroed in training.
        impl: "auto", the fastest implementation that can serve a call, or one of the mixer's `impls` by name, which
            runs or raises. No part of what the mixer computes.
    """

    name: ClassVar[str]
    mixer: ClassVar[type[TokenMixer]]  # set by `register`
    output: ClassVar[str]  # what it computes, in one line of formula or words
    cost_formula: ClassVar[str]  # multiply-adds of a forward: N tokens, D channels, d = D / heads
    sees: ClassVar[str] = "everything"  # what a token may see
    layer_of: ClassVar[str | None] = None  # the library whose layer it wraps
    is_attention: ClassVar[bool] = False  # softmax attention, whole or over a window: can be its host's own layer
    cache_grows: ClassVar[bool] = False  # what it must keep of the past grows with the past
    bias: bool = True
    dropout: float = 0.0
    impl: str = "auto"

    def __post_init__(self) -> None:
        errors.check_choice("impl", self.impl, type(self).mixer.impls)
        errors.check_choice("bias", self.bias, (True, False))
        errors.check_number("dropout", self.dropout, 0.0, 1.0, "a probability in [0, 1)", 0.0)
        self.check()

    def check(self) -> None:
        """Raise OptionError where options are out of range or make each other meaningless."""

    def build(
        self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **changes: Any
    ) -> TokenMixer:
        """A mixer of these options for `dim` channels; `changes` replace options first."""
        return type(self).mixer(self.changed(**changes), dim, device=device, dtype=dtype)

    def changed(self: Self, **changes: Any) -> Self:
        """A copy with some options replaced; an unknown option is an error that lists the known ones."""
        check_options(type(self), changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Name and options, as JSON can hold them."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def annotations(cls) -> dict[str, str]:
        """Each option's type, as it is written."""
        return {field.name: str(field.type) for field in fields(cls)}

    # -- what a host settles; a config without the option stays as it is

    @property
    def built_grid(self) -> tuple[int, ...] | None:
        """The grid of tokens that the mixer is built for."""
        return None

    @property
    def prefix(self) -> int:
        """How many tokens stand in front of the grid."""
        return 0

    @property
    def causal_by_build(self) -> bool:
        """Whether causality is a property of the weights, not of the call."""
        return False

    @property
    def rotary_base(self) -> float | None:
        """The base of its rotary positions; None where it has none."""
        return None

    @property
    def placed(self) -> bool:
        """Whether the places of the tokens on a grid play a part."""
        return False

    @property
    def needs_grid(self) -> bool:
        """Whether rows and columns play a part, and the config has not been told of them."""
        untold = self.placed and self.built_grid is None
        return not self.causal_by_build and (untold or bool(self.call_options((1, 1))))

    def for_heads(self: Self, heads: int) -> Self:
        """With `heads`, where it has heads and leaves their number open."""
        return self

    def for_grid(self: Self, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> Self:
        """For tokens on `grid` behind `num_prefix_tokens`, where their places play a part.

        Raises OptionError where the config was made for another grid, or the tokens in front have no place in it.
        """
        if self.causal_by_build and num_prefix_tokens:
            got = f"a causal {self.name} with a class token in front, which would see itself alone"
            raise errors.OptionError(
                "mixer", got, "a mixer that is not causal", "Use causal=False or class_token=False."
            )
        if self.causal_by_build or not self.placed:
            return self
        if self.built_grid not in (None, grid):
            raise errors.OptionError("grid", self.built_grid, f"None or the host's {grid}", "Leave it to the host.")
        return self._on_grid(grid, num_prefix_tokens)

    def _on_grid(self: Self, grid: tuple[int, ...], num_prefix_tokens: int) -> Self:
        return self

    def without_grid(self: Self) -> Self:
        """As before a host placed it."""
        return self

    def for_order(self: Self) -> Self:
        """For a host in which every token sees its past alone, where that is a property of the weights."""
        return self

    def for_rotary(self: Self, base: float | None) -> Self:
        """With rotary positions of this base, where it can have them and nothing was said of them."""
        return self

    def for_relative(self: Self, relative: bool) -> Self:
        """With a learned bias for each offset on the grid, where it can have one."""
        return self

    def call_options(self, grid: tuple[int, ...]) -> dict[str, Any]:
        """What the mixer must be told in every call: the grid, where it counts rows and columns by the call's."""
        return {}


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(MixerConfig):
    """Options of a mixer with heads.

    Args:
        heads: None takes one for every 64 channels.
    """

    heads: int | None = None

    def for_heads(self: Self, heads: int) -> Self:
        return self.changed(heads=heads) if self.heads is None else self  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class GridConfig(MixerConfig):
    """Options of a mixer whose tokens have places.

    Args:
        grid: (N,), (H, W) or (T, H, W) of the tokens.
    """

    grid: tuple[int, ...] | None = None

    @property
    def built_grid(self) -> tuple[int, ...] | None:
        return self.grid

    @property
    def rotary_base(self) -> float | None:
        """The base of its rotary positions; None where it has none."""
        return None

    @property
    def placed(self) -> bool:
        return True

    def _on_grid(self: Self, grid: tuple[int, ...], num_prefix_tokens: int) -> Self:
        if num_prefix_tokens:
            got = f"a {self.name}, which has no place for a class token,"
            allowed = "a mixer with num_prefix_tokens, or without a grid"
            raise errors.OptionError("mixer", got, allowed, "Use class_token=False.")
        return self.changed(grid=grid)

    def without_grid(self: Self) -> Self:
        return self.changed(grid=None)


@dataclass(frozen=True, kw_only=True)
class PrefixedGridConfig(GridConfig):
    """Options of a mixer whose tokens have places, but for some in front.

    Args:
        num_prefix_tokens: tokens in front of the grid (class token, registers).
    """

    num_prefix_tokens: int = 0

    @property
    def prefix(self) -> int:
        return self.num_prefix_tokens

    def _on_grid(self: Self, grid: tuple[int, ...], num_prefix_tokens: int) -> Self:
        return self.changed(grid=grid, num_prefix_tokens=num_prefix_tokens)

    def without_grid(self: Self) -> Self:
        return self.changed(grid=None, num_prefix_tokens=0)


def create_mixer(
    name: str, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any
) -> TokenMixer:
    """Build a mixer by name: create_mixer("padre", dim=192, degree=3, grid=(14, 14)).

    Raises UnknownNameError for a name, and OptionError for an option, that is not known or makes no sense.
    """
    config = config_class(name)
    check_options(config, options)
    return config(**options).build(dim, device=device, dtype=dtype)
