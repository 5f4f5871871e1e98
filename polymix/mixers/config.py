"""MixerConfig: a mixer's options, and what hosts, benchmarks and `convert` need to know about it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch

from polymix import errors
from polymix.devices import check_place
from polymix.limits import bounded, check_model
from polymix.mixers.mixer import TokenMixer
from polymix.mixers.registry import check_options, config_class

Self = TypeVar("Self", bound="MixerConfig")
Scan = TypeVar("Scan", bound="ScanConfig")
_ALWAYS_FITTING_WEIGHTS = 2**24  # weights that any machine has room for


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """Base class of all configs: the options of a mixer, except its width, which the host decides.

    Args:
        bias: linear maps and convolutions have biases.
        dropout: probability of zeroing an element of the output in training.
        impl: "auto" chooses the fastest implementation for each call. A name from the mixer's `impls` always runs
            that one, or raises. The result is the same up to rounding.
        preset: "paper" sets the options of the paper's experiments; "equations" those of its equations as printed, such
            as bias=False. Options that are given as well win. None: the defaults. Not every mixer has them.
    """

    name: ClassVar[str]
    mixer: ClassVar[type[TokenMixer]]  # set by `register`
    output: ClassVar[str]  # what it computes, as a one-line formula or in words
    # Multiply-adds for N tokens of D channels, with d = D / heads, a grid (H, W), and options by name.
    cost_formula: ClassVar[str]
    sees: ClassVar[str] = "everything"  # which tokens a token can see
    layer_of: ClassVar[str | None] = None  # library whose layer the mixer wraps
    is_attention: ClassVar[bool] = False  # softmax attention, global or windowed; `convert` may keep the host's layer
    keeps_bias: ClassVar[bool] = False  # biases on attention's logits can stay where it takes attention's place
    attends_apart: ClassVar[bool] = False  # its `attend` takes packed segments
    reads_keys: ClassVar[bool] = True  # given a context and values of their own, the context still plays a part
    cache_grows: ClassVar[bool] = False  # generation needs a cache that grows with the sequence
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # the options of each preset; see `with_preset`
    presets: ClassVar[tuple[str, ...]] = ("paper", "equations")
    own_values: ClassVar[bool] = True  # `convert` lets it read values apart from keys, if it can, without being told
    equal_widths: ClassVar[bool] = False  # keys and values need as many channels each, whoever projects
    width_option: ClassVar[str | None] = None  # the option that sets the number of inner channels
    sees_all: ClassVar[str] = "causal=False"  # the option that undoes `causal_by_build`
    bias: bool = True
    dropout: float = 0.0
    impl: str = "auto"
    preset: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            errors.check_plain(field.name, getattr(self, field.name))
        errors.check_choice("preset", self.preset, (None, *self.presets))
        if self.preset is not None and not self.forms:
            got = f"{self.preset!r} for {self.name}, which has no other form than its defaults"
            raise errors.OptionError("preset", got, "None", "Leave it out.")
        errors.check_choice("impl", self.impl, type(self).mixer.impls)
        errors.check_choice("bias", self.bias, (True, False))
        errors.check_number("dropout", self.dropout, 0.0, 1.0, "a probability in [0, 1)", 0.0)
        self.check()

    def check(self) -> None:
        """Raise OptionError if an option is out of range, or has no effect beside another."""

    def build(
        self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **changes: Any
    ) -> TokenMixer:
        """Build the mixer for `dim` channels. `changes` replace options first."""
        errors.check_int("dim", dim, 1, errors.MAX_TOKENS)
        place = check_place(device, dtype)
        config, kw = self.changed(**changes), {"device": place, "dtype": dtype}
        if place != torch.device("meta") and _largest(dim, config) > _ALWAYS_FITTING_WEIGHTS:
            what = f"{self.name} with dim={dim}"
            check_model(lambda: type(self).mixer(config, dim, **{**kw, "device": "meta"}), "dim", what)
            with bounded("dim", what):
                return type(self).mixer(config, dim, **kw)
        return type(self).mixer(config, dim, **kw)

    def changed(self: Self, **changes: Any) -> Self:
        """A copy with some options replaced.

        A new `preset` sets its options, as in the constructor, and takes back those of the old one.

        Raises:
            OptionError: an option is unknown, or the options do not fit together.
        """
        check_options(type(self), changes)
        if "preset" in changes:
            old, new = (self.forms.get(preset or "", {}) for preset in (self.preset, changes["preset"]))
            defaults = {field.name: field.default for field in fields(self)}
            back = {name: defaults[name] for name, value in old.items() if getattr(self, name) == value}
            changes = {**back, **new, **changes}
        return replace(self, **changes)

    @property
    def unnamed(self: Self) -> Self:
        """The same options without the name of the form that set them."""
        return replace(self, preset=None) if self.preset in self.forms else self

    def to_dict(self) -> dict[str, Any]:
        """The mixer's name and options, ready for JSON. `mixer_config` reads them back."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def annotations(cls) -> dict[str, str]:
        """The annotation of each option, as written in the source."""
        return {field.name: str(field.type) for field in fields(cls)}

    @property
    def attends(self) -> bool:
        """Whether the mixer has `attend`: it can use queries, keys and values that a layer projects for it."""
        return False

    # -- what the host decides; a config without the option returns itself

    @property
    def built_grid(self) -> tuple[int, ...] | None:
        """The token grid that the mixer is built for."""
        return None

    @property
    def prefix(self) -> int:
        """Number of tokens in front of the grid."""
        return 0

    @property
    def causal_by_build(self) -> bool:
        """Whether the weights make the mixer causal, rather than `causal=` in the call."""
        return False

    @property
    def reach(self) -> int | None:
        """The most tokens that a token sees; None: all."""
        return None

    @property
    def rotary_base(self) -> float | None:
        """The base of the rotary positions; None without them."""
        return None

    @property
    def placed(self) -> bool:
        """Whether the output depends on where tokens lie on a grid."""
        return False

    @property
    def needs_grid(self) -> bool:
        """Whether the mixer depends on a grid that this config does not have."""
        grid_missing = self.placed and self.built_grid is None
        return not self.causal_by_build and (grid_missing or bool(self.call_options((1, 1))))

    @property
    def width_unit(self) -> int:
        """A number that the number of inner channels has to be a multiple of."""
        return 1

    def with_width(self: Self, width: int, dim: int) -> Self:
        """With this many inner channels, for `dim` channels. Configs with a `width_option` override it."""
        return self

    def for_heads(self: Self, heads: int) -> Self:
        """Fill in the number of heads if it was left open (None)."""
        return self

    def fits_heads(self, heads: int) -> bool:
        """Whether the mixer can take its tokens from so many heads of a host."""
        return True

    def for_grid(self: Self, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> Self:
        """Fill in the host's grid and number of prefix tokens, if the mixer depends on them.

        Raises:
            OptionError: the config has another grid, or the mixer cannot take prefix tokens.
        """
        if self.causal_by_build and num_prefix_tokens:
            got = f"a causal {self.name} in a host whose class token stands first and would see only itself"
            cure = f"Use {self.sees_all}, or a host without a class token."
            raise errors.OptionError("mixer", got, "a mixer that is not causal", cure)
        if self.causal_by_build or not self.placed:
            return self
        if self.built_grid not in (None, grid):
            raise errors.OptionError(
                "grid", self.built_grid, f"None or the host's grid {grid}", "Leave it out: the host fills it in."
            )
        return self._on_grid(grid, num_prefix_tokens)

    def _on_grid(self: Self, grid: tuple[int, ...], num_prefix_tokens: int) -> Self:
        return self

    def without_grid(self: Self) -> Self:
        """Remove the grid and prefix tokens again."""
        return self

    def for_order(self: Self) -> Self:
        """Make the config causal for a causal host, if the weights decide that."""
        return self

    def for_rotary(self: Self, base: float | None) -> Self:
        """Turn on rotary positions with this base, if the mixer has them and the option was left open."""
        return self

    def for_relative(self: Self, relative: bool) -> Self:
        """Turn the learned relative position bias on or off, if the mixer has one."""
        return self

    def for_scales(self: Self, scales: tuple[int, ...]) -> Self:
        """Fill in the sizes of the host's multi-scale branches, if the mixer can have them and left them open."""
        return self

    def call_options(self, grid: tuple[int, ...]) -> dict[str, Any]:
        """Keyword arguments that every call needs: the grid, if the mixer reads it from the call."""
        return {}


def _largest(dim: int, config: MixerConfig) -> float:
    """An estimate of the mixer's weights from above: dim² times the two largest numbers among the options."""
    numbers = [float(text) for text in re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", repr(asdict(config)))]
    return float(dim) ** 2 * math.prod(sorted(max(number, 1.0) for number in numbers)[-2:])


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(MixerConfig):
    """Base of configs with heads.

    Args:
        heads: number of heads. None: one for every 64 channels.
    """

    heads: int | None = None

    def for_heads(self: Self, heads: int) -> Self:
        return self.changed(heads=heads) if self.heads is None else self  # type: ignore[attr-defined]

    def fits_heads(self, heads: int) -> bool:
        return self.heads in (None, heads)


@dataclass(frozen=True, kw_only=True)
class GridConfig(MixerConfig):
    """Base of configs whose mixers depend on a token grid.

    Args:
        grid: (N,), (H, W) or (T, H, W) of the tokens.
    """

    grid: tuple[int, ...] | None = None

    @property
    def built_grid(self) -> tuple[int, ...] | None:
        return self.grid

    @property
    def placed(self) -> bool:
        return True

    def _on_grid(self: Self, grid: tuple[int, ...], num_prefix_tokens: int) -> Self:
        if num_prefix_tokens:
            got = f"{self.name}, which cannot take a class token"
            allowed = "a mixer with num_prefix_tokens, or without a grid"
            raise errors.OptionError("mixer", got, allowed, "Use class_token=False, or another mixer.")
        return self.changed(grid=grid)

    def without_grid(self: Self) -> Self:
        return self.changed(grid=None)


@dataclass(frozen=True, kw_only=True)
class PrefixedGridConfig(GridConfig):
    """Base of configs whose mixers depend on a token grid and accept tokens in front of it.

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


@dataclass(frozen=True, kw_only=True)
class ScanConfig(MixerConfig):
    """Base of configs whose mixers scan the tokens from the first to the last.

    Args:
        bidirectional: a second branch with its own weights scans from the last token to the first, and the branches
            are added: every token sees all others, and the mixer is not causal.
        class_token: where both scans meet the tokens in front of the grid: "first", or in the "middle" of the others,
            as in Vision Mamba. "middle" needs bidirectional=True and a host with such tokens.
        num_prefix_tokens: number of those tokens (class token, registers), with class_token="middle".
    """

    sees_all: ClassVar[str] = "bidirectional=True"
    bidirectional: bool = False
    class_token: str = "first"
    num_prefix_tokens: int = 0

    def check(self) -> None:
        errors.check_choice("bidirectional", self.bidirectional, (True, False))
        errors.check_choice("class_token", self.class_token, ("first", "middle"))
        errors.check_int("num_prefix_tokens", self.num_prefix_tokens, 0)
        if self.class_token == "middle" and not self.bidirectional:
            got = "'middle' with bidirectional=False, where it would see half of the tokens"
            raise errors.OptionError("class_token", got, "'first'", "Use bidirectional=True, or leave it out.")
        if self.num_prefix_tokens and self.class_token == "first":
            got = f"{self.num_prefix_tokens} with class_token='first'"
            cure = "Leave it out: tokens in front are scanned first anyway."
            raise errors.OptionError("num_prefix_tokens", got, "0", cure)

    def check_built(self) -> None:
        """Raise OptionError if class_token="middle" has no tokens to move."""
        if self.class_token == "middle" and not self.num_prefix_tokens:
            got = "'middle' without tokens in front of the grid"
            cure = "Pass num_prefix_tokens=, use a host with a class token, or leave class_token out."
            raise errors.OptionError("class_token", got, "'first'", cure)

    @property
    def prefix(self) -> int:
        return self.num_prefix_tokens

    @property
    def causal_by_build(self) -> bool:
        return not self.bidirectional

    def for_grid(self: Scan, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> Scan:
        config = super().for_grid(grid, num_prefix_tokens)
        return config.changed(num_prefix_tokens=num_prefix_tokens) if self.class_token == "middle" else config

    def without_grid(self: Scan) -> Scan:
        return self.changed(num_prefix_tokens=0)


def create_mixer(
    name: str, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any
) -> TokenMixer:
    """Build a mixer by name.

    Args:
        name: one of `list_mixers()`.
        dim: number of channels D.
        device, dtype: of the parameters.
        options: the fields of the mixer's config.

    Raises:
        UnknownNameError: no mixer has this name.
        OptionError: an option is unknown or out of range, or has no effect beside another.

    Example: create_mixer("padre", dim=192, degree=3, grid=(14, 14))
    """
    config = config_class(name)
    check_options(config, options)
    return config(**options).build(dim, device=device, dtype=dtype)
