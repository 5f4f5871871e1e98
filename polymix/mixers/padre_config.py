"""The options of PADRe, and what they settle: one structure for every map, one kernel, the terms of the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from polymix.errors import OptionError, ShapeError, check_choice, check_divides, check_grid_option, check_int
from polymix.mixers.base import MixerConfig
from polymix.structured.channel import CHANNEL_MAPS
from polymix.structured.token import TOKEN_MAPS

MapNames = str | tuple[str, ...] | None


class Plan(NamedTuple):
    A: tuple[str, ...]
    B: tuple[str, ...]
    C: tuple[str, ...]
    D: tuple[str, ...]
    kernel: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PadreConfig(MixerConfig):
    """Options of PADRe.

    Args:
        degree: d, 1 to 8.
        preset: which token maps there are. "paper" (Sec. 4.1): A_2 … A_d, and C_1 … C_{d-1} from d = 3 on (A_1 alone
            at d = 1, which would mix no tokens otherwise). "full": all 2d - 1 of them. Channel maps are dense in both.
        grid: (N,), (H, W) or (T, H, W) of the tokens; None is a 1-D sequence of any length.
        kernel_size: of the depthwise convolutions, one number or one an axis; odd unless causal.
        causal: every token sees itself and its past alone; 1-D.
        heads: independent copies, each on dim / heads channels.
        terms: the degrees that enter the sum; None is 2 … d (1 at d = 1), the residual connection supplying degree 1.
        weight: W_i "ones", "channel" (D, learned) or "full" (N × D, learned, needs a grid).
        constant: L: None, "channel" or "full".
        normalize: Y_i not at all (None), "rms" or "layer", over a head's channels, without learned scales.
        num_prefix_tokens: tokens in front that lie outside the grid (class token, registers).
        A, C: token maps, "depthwise" or "identity", one name or one a degree (d of A, d - 1 of C); None: the preset's.
        B, D: channel maps, "dense" or "identity", likewise.
    """

    name: ClassVar[str] = "padre"
    degree: int = 2
    preset: str = "paper"
    grid: tuple[int, ...] | None = None
    kernel_size: int | tuple[int, ...] = 11
    causal: bool = False
    heads: int = 1
    terms: tuple[int, ...] | None = None
    weight: str = "ones"
    constant: str | None = None
    normalize: str | None = None
    num_prefix_tokens: int = 0
    A: MapNames = None
    B: MapNames = None
    C: MapNames = None
    D: MapNames = None

    def check(self) -> None:
        check_int("degree", self.degree, 1, 8)
        check_choice("preset", self.preset, ("paper", "full"))
        check_choice("causal", self.causal, (True, False))
        check_choice("weight", self.weight, ("ones", "channel", "full"))
        check_choice("constant", self.constant, (None, "channel", "full"))
        check_choice("normalize", self.normalize, (None, "rms", "layer"))
        check_int("heads", self.heads, 1)
        check_int("num_prefix_tokens", self.num_prefix_tokens, 0)
        self._check_grid()
        plan = self._plan()
        if "depthwise" not in plan.A + plan.C:
            for option in ("kernel_size", "causal", "num_prefix_tokens"):
                if getattr(self, option) != type(self).__dataclass_fields__[option].default:
                    got = f"{getattr(self, option)} with token maps that are all identities"
                    raise OptionError(option, got, "an option that plays a part", 'Use A="depthwise", or leave it out.')
        if "dense" not in plan.B + plan.D and self.normalize is None and self.heads > 1:
            got = f"{self.heads} with channel maps that are all identities"
            raise OptionError("heads", got, "an option that plays a part", 'Use B="dense", or leave it out.')
        if {*plan.A, *plan.B, *plan.C, *plan.D} == {"identity"} and self.weight == "ones" and self.constant is None:
            raise OptionError(
                "A, B, C, D", "identities alone", "at least one map that is learned", 'Use B="dense", say.'
            )

    def _check_grid(self) -> None:
        grid = self.grid
        if grid is not None:
            check_grid_option(grid, (1, 2, 3))
        if self.causal and (len(grid or (0,)) != 1 or self.num_prefix_tokens):
            got = f"True with grid={grid} and num_prefix_tokens={self.num_prefix_tokens}"
            raise OptionError("causal", got, "1-D sequences without prefix tokens", "Order has no meaning on a grid.")
        for option in ("weight", "constant"):
            if getattr(self, option) == "full" and grid is None:
                raise OptionError(option, '"full" without a grid', '"full" with grid=(N,) or so', "It needs to know N.")

    def plan(self, dim: int) -> Plan:
        """The plan for `dim` channels, which the heads must divide."""
        check_divides("heads", self.heads, "dim", dim)
        if self.normalize == "layer" and self.heads == dim:
            raise OptionError(
                "normalize", '"layer" over heads of one channel', "heads of two channels or more", "All would be 0."
            )
        return self._plan()

    def _plan(self) -> Plan:
        d = self.degree
        first = "depthwise" if d == 1 or self.preset == "full" else "identity"
        A = (first, *("depthwise",) * (d - 1))
        C = ("identity" if d == 2 and self.preset == "paper" else "depthwise",) * (d - 1)
        return Plan(
            self._names("A", A, TOKEN_MAPS), self._names("B", ("dense",) * d, CHANNEL_MAPS),
            self._names("C", C, TOKEN_MAPS), self._names("D", ("dense",) * (d - 1), CHANNEL_MAPS),
            self._kernel(), self._terms(),
        )  # fmt: skip

    def _names(self, letter: str, preset: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
        given, count = getattr(self, letter), len(preset)
        if given is None:
            return preset
        if count == 0:
            raise OptionError(
                letter, repr(given), f"None at degree {self.degree}, which has no {letter}", "Leave it out."
            )
        names = tuple(given) if isinstance(given, (tuple, list)) else (given,) * count
        if len(names) != count:
            raise OptionError(letter, repr(given), f"one name, or {count} of them at degree {self.degree}", "")
        for name in names:
            check_choice(letter, name, allowed)
        return names

    def _kernel(self) -> tuple[int, ...]:
        axes = 1 if self.grid is None else len(self.grid)
        size = self.kernel_size
        kernel = tuple(size) if isinstance(size, (tuple, list)) else (size,) * axes
        if len(kernel) != axes:
            raise OptionError("kernel_size", repr(size), f"one number, or {axes} for grid={self.grid}", "")
        for k in kernel:
            check_int("kernel_size", k, 1)
            if k % 2 == 0 and not self.causal:
                raise OptionError("kernel_size", k, "an odd number unless causal", f"Use {k - 1} or {k + 1}.")
        return kernel

    def _terms(self) -> tuple[int, ...]:
        if self.terms is None:
            return tuple(range(2, self.degree + 1)) or (1,)
        terms = self.terms if isinstance(self.terms, (tuple, list)) else (None,)
        if not terms or len(set(terms)) != len(terms) or not set(terms) <= set(range(1, self.degree + 1)):
            raise OptionError("terms", repr(self.terms), f"different degrees from 1 to {self.degree}", "")
        if self.degree not in terms:
            cure = f"Use degree={max(terms)}: what lies beyond would be computed for nothing."
            raise OptionError("terms", repr(self.terms), f"terms that include the degree, {self.degree}", cure)
        return tuple(sorted(terms))

    def same_as_built(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """`grid`, unless a full W or L ties the mixer to the one it was built for."""
        if "full" in (self.weight, self.constant) and tuple(grid) != tuple(self.grid or ()):
            cure = 'Use weight="channel" and constant="channel" for inputs of any size.'
            raise ShapeError("grid", grid, f"{self.grid}, which W or L was built for", cure)
        return grid
