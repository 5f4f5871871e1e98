"""MixerConfig: a mixer's options, and what others need to know to place, measure or convert it."""

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
    """The options of a mixer, except its width, which the host decides.

    Args:
        bias: give linear maps and convolutions a bias.
        dropout: probability of zeroing an element of the output in training.
        impl: "auto" for the fastest implementation that supports a call, or one of the mixer's `impls`, which runs or
            raises. All compute the same.
    """

    name: ClassVar[str]
    mixer: ClassVar[type[TokenMixer]]  # set by `register`
    output: ClassVar[str]  # what it computes, as a formula or in words, on one line
    # Multiply-adds for N tokens of D channels, with d = D / heads, a grid (H, W), and options by name.
    cost_formula: ClassVar[str]
    sees: ClassVar[str] = "everything"  # what a token may see
    layer_of: ClassVar[str | None] = None  # the library whose layer it wraps
    is_attention: ClassVar[bool] = False  # softmax attention, full or over a window; can be the host's own layer
    cache_grows: ClassVar[bool] = False  # its state grows with the past
    bias: bool = True
    dropout: float = 0.0
    impl: str = "auto"

    def __post_init__(self) -> None:
        errors.check_choice("impl", self.impl, type(self).mixer.impls)
        errors.check_choice("bias", self.bias, (True, False))
        errors.check_number("dropout", self.dropout, 0.0, 1.0, "a probability in [0, 1)", 0.0)
        self.check()

    def check(self) -> None:
        """Raise OptionError for options that are out of range or contradict each other."""

    def build(
        self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **changes: Any
    ) -> TokenMixer:
        """Build the mixer for `dim` channels; `changes` replace options first."""
        return type(self).mixer(self.changed(**changes), dim, device=device, dtype=dtype)

    def changed(self: Self, **changes: Any) -> Self:
        """A copy with some options replaced. An unknown option is an error that lists the known ones."""
        check_options(type(self), changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Name and options, for JSON."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def annotations(cls) -> dict[str, str]:
        """The type of each option, as written in the source."""
        return {field.name: str(field.type) for field in fields(cls)}

    # -- what a host decides; a config without the option stays as it is

    @property
    def built_grid(self) -> tuple[int, ...] | None:
        """The grid of tokens that the mixer is built for."""
        return None

    @property
    def prefix(self) -> int:
        """Number of tokens before the grid."""
        return 0

    @property
    def causal_by_build(self) -> bool:
        """Whether the mixer was built causal, whatever the call says."""
        return False

    @property
    def rotary_base(self) -> float | None:
        """The base of its rotary positions; None where it has none."""
        return None

    @property
    def placed(self) -> bool:
        """Whether the positions of tokens on a grid matter."""
        return False

    @property
    def needs_grid(self) -> bool:
        """Whether rows and columns matter, but the config does not know them yet."""
        untold = self.placed and self.built_grid is None
        return not self.causal_by_build and (untold or bool(self.call_options((1, 1))))

    def for_heads(self: Self, heads: int) -> Self:
        """A copy with `heads`, if it has heads and their number is not set."""
        return self

    def for_grid(self: Self, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> Self:
        """A copy for tokens on `grid` after `num_prefix_tokens`, if positions matter.

        Raises OptionError if the config is for another grid, or cannot place the prefix tokens.
        """
        if self.causal_by_build and num_prefix_tokens:
            got = f"a causal {self.name} with a class token in front, which would see only itself"
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
        """A copy without the grid that a host set."""
        return self

    def for_order(self: Self) -> Self:
        """A copy for a causal host, if causality is a property of the weights."""
        return self

    def for_rotary(self: Self, base: float | None) -> Self:
        """A copy with rotary positions of this base, if it supports them and they are not set."""
        return self

    def for_relative(self: Self, relative: bool) -> Self:
        """A copy with a learned bias for each offset on the grid, if it supports one."""
        return self

    def call_options(self, grid: tuple[int, ...]) -> dict[str, Any]:
        """Keyword arguments that every call needs: the grid, if the mixer takes rows and columns from the call."""
        return {}


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(MixerConfig):
    """Options of a mixer with heads.

    Args:
        heads: number of heads; None for one per 64 channels.
    """

    heads: int | None = None

    def for_heads(self: Self, heads: int) -> Self:
        return self.changed(heads=heads) if self.heads is None else self  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class GridConfig(MixerConfig):
    """Options of a mixer for which the positions of tokens matter.

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
            got = f"a {self.name}, which cannot place a class token,"
            allowed = "a mixer with num_prefix_tokens, or without a grid"
            raise errors.OptionError("mixer", got, allowed, "Use class_token=False.")
        return self.changed(grid=grid)

    def without_grid(self: Self) -> Self:
        return self.changed(grid=None)


@dataclass(frozen=True, kw_only=True)
class PrefixedGridConfig(GridConfig):
    """Options of a mixer for which positions matter, except for some tokens before the grid.

    Args:
        num_prefix_tokens: number of tokens before the grid (class token, registers).
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

    Raises UnknownNameError for an unknown name, and OptionError for an unknown or invalid option.
    """
    config = config_class(name)
    check_options(config, options)
    return config(**options).build(dim, device=device, dtype=dtype)
