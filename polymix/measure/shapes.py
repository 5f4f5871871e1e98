"""The sizes of one attention layer's call, as people write them or as a model shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from polymix.errors import OptionError, check_choice, check_divides, check_grid_option, check_int, nearest_first
from polymix.limits import LONGEST, check_memory
from polymix.options import parse_options

_HOW = "(tokens, dim), (batch, tokens, dim) or a dict with tokens and dim"
_LONGEST_SIDE = 4  # times the shorter side: a longer grid is unlikely to be an image


def near_square(n: int) -> tuple[int, int]:
    """(H, W) with H · W = n, as close to a square as n allows."""
    height = next(h for h in range(math.isqrt(n), 0, -1) if n % h == 0)
    return height, n // height


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one attention layer's call, and what the call asks of it.

    Args:
        tokens: the number of tokens, including a class token and registers.
        dim: the number of channels.
        heads: None means one for every 64 channels.
        batch: sequences in one call.
        grid: (N,), (H, W) or (T, H, W) of the tokens after the class token and registers.
        causal: a token sees only itself and the tokens before it.
        cross: the number of tokens of a separate context. True means as many as `tokens`.
        mask: the kind of mask that comes with a call, "padding" or "arbitrary". None: no mask.
        assumed: the grid was guessed, not given.
    """

    tokens: int
    dim: int
    heads: int | None = None
    batch: int = 1
    grid: tuple[int, ...] | None = None
    causal: bool = False
    cross: int | None = None
    mask: str | None = None
    assumed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.cross, bool):
            object.__setattr__(self, "cross", self.tokens if self.cross else None)
        for name in ("tokens", "dim", "batch", "heads", "cross"):
            if getattr(self, name) is not None or name in ("tokens", "dim", "batch"):
                check_int(name, getattr(self, name), 1)
        for name in ("tokens", "cross"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, LONGEST)
        check_choice("causal", self.causal, (True, False))
        check_choice("mask", self.mask, (None, "padding", "arbitrary"))
        if self.heads is not None:
            check_divides("heads", self.heads, "dim", self.dim)
        if self.causal and self.cross is not None:
            raise OptionError("causal", "True with cross", "causal or cross, not both", "Leave one of them out.")
        if self.grid is not None:
            check_grid_option(self.grid, (1, 2, 3))
            object.__setattr__(self, "grid", tuple(self.grid))
            if self.prefix < 0:
                got = f"{self.grid}, which has more than {self.tokens} places"
                raise OptionError("grid", got, f"a grid of at most {self.tokens} tokens", "Change grid or tokens.")

    def check_memory(self, device: str) -> None:
        """Raise OptionError if the input of a call, or one map of it, does not fit into the memory of the device."""
        tokens = max(self.tokens, self.cross or 1)
        sizes = f"{self.batch:,} × {tokens:,} tokens of {self.dim:,} channels"
        check_memory("shapes", sizes, 3 * 4 * self.batch * tokens * self.dim, device)
        check_memory("dim", f"a map of {self.dim:,} channels", 4 * self.dim**2, device)

    @property
    def prefix(self) -> int:
        """The number of tokens before the grid (class token, registers)."""
        return self.tokens - math.prod(self.grid) if self.grid else 0

    def placed(self) -> Shape:
        """A copy with a grid: one axis if causal; else a square, with or without a class token, or nearly one."""
        if self.grid is not None:
            return self
        if self.causal:
            return replace(self, grid=(self.tokens,))
        for prefix in (0, 1):
            side = math.isqrt(self.tokens - prefix)
            if side > 1 and side * side == self.tokens - prefix:
                return replace(self, grid=(side, side), assumed=True)
        height, width = near_square(self.tokens)
        grid = (height, width) if width <= _LONGEST_SIDE * height else (self.tokens,)
        return replace(self, grid=grid, assumed=True)

    def longer(self, factor: float) -> Shape:
        """A copy with about `factor` times as many tokens and context tokens, on a grid of the same form."""
        assert self.grid is not None
        side = factor ** (1 / len(self.grid))
        grid = tuple(max(1, round(size * side)) for size in self.grid)
        cross = self.cross and max(1, round(self.cross * factor))
        return replace(self, grid=grid, tokens=self.prefix + math.prod(grid), cross=cross)

    def small(self) -> Shape:
        """A copy small enough to be computed in float64 at no cost."""
        assert self.grid is not None
        most = 64 if len(self.grid) == 1 else 8
        grid = tuple(min(size, most) for size in self.grid)
        cross = self.cross and min(self.cross, 48)
        return replace(self, grid=grid, tokens=self.prefix + math.prod(grid), cross=cross, batch=min(self.batch, 2))

    def __str__(self) -> str:
        parts = [f"{self.tokens:,} tokens × {self.dim} channels"]
        parts += [f"{self.heads} heads" if self.heads > 1 else "1 head"] if self.heads else []
        parts += [f"batch {self.batch}"]
        if self.grid and len(self.grid) > 1:
            parts += ["grid " + "×".join(map(str, self.grid)) + (" (assumed)" if self.assumed else "")]
        parts += [name for name in ("causal",) if self.causal]
        parts += [f"{self.cross:,} context tokens"] if self.cross else []
        parts += [f"{self.mask} mask"] if self.mask else []
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def shape_of(value: Any, batch: int) -> Shape:
    """A Shape from (tokens, dim), (batch, tokens, dim), a dict or a Shape; `batch` is the default batch."""
    if isinstance(value, Shape):
        return value
    if isinstance(value, Mapping):
        known = [field.name for field in fields(Shape) if field.name != "assumed"]
        for option in value:
            if option not in known:
                raise OptionError(str(option), "an unknown key", ", ".join(nearest_first(str(option), known)), "")
        if not {"tokens", "dim"} <= set(value):
            raise OptionError("shapes", repr(dict(value)), _HOW, "Give tokens and dim.")
        return Shape(**{"batch": batch, **value})
    if isinstance(value, Sequence) and len(value) in (2, 3) and all(type(size) is int for size in value):
        return Shape(batch=value[0] if len(value) == 3 else batch, tokens=value[-2], dim=value[-1])
    raise OptionError("shapes", repr(value), _HOW, "Or pass a model and its input.")


def shapes_of(value: Any, batch: int) -> list[Shape]:
    """A list of shapes from one shape or several."""
    if isinstance(value, (Shape, Mapping)) or not isinstance(value, Sequence) or isinstance(value, str):
        return [shape_of(value, batch)]
    if not value:
        raise OptionError("shapes", "an empty list", _HOW, "Pass at least one.")
    return [shape_of(value, batch)] if isinstance(value[0], int) else [shape_of(part, batch) for part in value]


def parse_shape(text: str) -> dict[str, Any] | tuple[Any, ...]:
    """What `shape_of` reads, from "4096x192" or "16x196x384:heads=6:grid=14x14"."""
    size, *words = text.strip().split(":")
    try:
        sizes = tuple(int(part) for part in size.split("x"))
    except ValueError:
        sizes = ()
    if len(sizes) not in (2, 3):
        allowed = "tokens x channels or batch x tokens x channels, then options"
        raise OptionError("--shape", repr(text), allowed, "Try 4096x192:heads=3:causal=true.")
    return {**dict(zip(("batch", "tokens", "dim")[-len(sizes) :], sizes, strict=True)), **parse_options(words)}
