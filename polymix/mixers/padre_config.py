"""The options of PADRe, and the plan that follows from them: structures, inputs and terms."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from polymix.errors import (
    OptionError,
    ShapeError,
    check_choice,
    check_divides,
    check_grid_option,
    check_int,
    check_number,
)
from polymix.mixers.config import PrefixedGridConfig
from polymix.mixers.padre_contexts import read_patterns
from polymix.ops.padre import BASES
from polymix.structured.registry import check_spec, kinds_of, needs_kernel

MapNames = str | tuple[str, ...] | None


class Plan(NamedTuple):
    """The structure of every map: d + e of A and B, (d - 1) + (e - 1) of C and D; and the input that each Y reads.

    With several patterns there are as many A, B and letters as different factors Y.
    """

    A: tuple[str, ...]
    B: tuple[str, ...]
    C: tuple[str, ...]
    D: tuple[str, ...]
    kernel: tuple[int, ...]
    terms: tuple[int, ...]
    letters: str  # the input of each Y
    patterns: tuple[tuple[int, ...], ...]  # the Y of each pattern

    @property
    def token(self) -> set[str]:
        """The kinds of all token maps."""
        return set().union(*map(kinds_of, self.A + self.C))


@dataclass(frozen=True, kw_only=True)
class PadreConfig(PrefixedGridConfig):
    """Options of PADRe.

    A map is named by its structure: identity, dense, diagonal, block_diagonal:blocks=4, low_rank:rank=8, rank_one,
    banded:lower=5:upper=5, sparse:density=0.1:seed=0, depthwise:kernel=11:dilation=1, circulant, toeplitz
    (filter=explicit | implicit, length=, shared=), monarch:blocks= or mean. + adds maps, @ multiplies them, and ^T
    transposes one.

    Args:
        degree: degree d of the numerator, 1 to 8.
        denominator: number e of factors of the denominator, 0 to 8. The output is then num / (den² + eps), where den
            is a second chain on Y_{d+1} … Y_{d+e}; with eps=0 it is num / den.
        basis: recurrence of both chains: "monomial", "chebyshev", "legendre" or "hermite".
        preset: which token maps there are. None and "paper", the mixer of the experiments (Sec. 4.1): A_2 … A_d, and
            C_1 … C_{d-1} from degree 3 on (at degree 1, A_1), with biases. That A_1, and C_1 at degree 2, mix no tokens
            follows from Table 6, whose FLOPs leave no room for them; Sec. 4.1 by itself names all. "equations": the
            same maps without biases, unless `bias` is given. "full": all 2d - 1. A denominator's chain has the same
            maps, by its own degree.
        token: structure of the preset's token maps.
        channel: structure of all channel maps.
        A, C: token maps: one structure for all, or a tuple with one per degree (d + e for A, d - 1 + e - 1 for C).
            None takes the preset's.
        B, D: channel maps, likewise.
        pattern: the input that each Y_i reads, such as "aab": a is x; b, c, … are the contexts. C and D are then
            identities unless named (Eq. 11), and A is "mean" for a context. Several patterns, such as ("aab", "abb"),
            are added (App. A.1): each has its own W; they share C, D, and the Y of the same i and input. The
            structures dense, low_rank, rank_one, sparse and mean read contexts of any length; all others need
            contexts as long as x.
        context_tokens: number of tokens of each context (one number, or one per context), if a map depends on it.
        grid: (N,), (H, W) or (T, H, W) of the tokens; None for a 1-D sequence of any length.
        kernel_size: of the depthwise convolutions, one number or one per axis; odd unless causal.
        causal: every token sees only itself and the past. Needs 1-D and token maps with a causal form (toeplitz uses
            an FFT, so it is causal up to rounding).
        heads: number of independent copies, each on D / heads channels.
        terms: degrees that enter the sum. None is 2 … d (1 at degree 1), as a residual connection supplies degree 1;
            with a denominator 1 … d, as in Eq. 18.
        weight: the weights W_i and Q_k: "ones", "channel" (learned, D) or "full" (learned, N × D, needs a grid).
        constant: the constant L: None, "channel" or "full", and with "full" also the denominator's constant S.
        normalize: normalise Y_i over a head's channels, without learned scales: None, "rms" or "layer".
        eps: ε of the denominator. 0: the plain quotient of degree [d/e] (Eq. 20), which has poles where den is 0.
        num_prefix_tokens: tokens before the grid (class token, registers). Convolutions, Toeplitz and circulant maps
            act on the other tokens; all other maps treat them like any token.
        out_tokens: number of output tokens F, with U (Eq. 7).
        out_dim: number of output channels G, with V (Eq. 7).
        U, V: structures of U and V; None for dense. U reads num_prefix_tokens + grid tokens.
    """

    name: ClassVar[str] = "padre"
    output: ClassVar[str] = "Σᵢ Wᵢ ⊙ Zᵢ + L, Zᵢ₊₁ = (Cᵢ Zᵢ Dᵢ) ⊙ Yᵢ₊₁"
    cost_formula: ClassVar[str] = (
        "(2 degree - 1) N D d + 2 (degree - 1) N D taps; (2 degree - 1) N D d + N D taps if degree ≤ 2; "
        "for dense channel maps and the paper's token maps, depthwise with that many taps"
    )
    sees: ClassVar[str] = "a grid (1-D, 2-D, 3-D), or the past"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "bias": True, "kernel_size": 11, "heads": 1, "terms": None, "weight": "ones", "constant": None,
            "normalize": None,
        },
        "equations": {"bias": False},
    }  # fmt: skip
    presets: ClassVar[tuple[str, ...]] = ("paper", "equations", "full")
    own_values: ClassVar[bool] = False  # the equation has one input
    degree: int = 2
    denominator: int = 0
    basis: str = "monomial"
    token: str = "depthwise"
    channel: str = "dense"
    A: MapNames = None
    B: MapNames = None
    C: MapNames = None
    D: MapNames = None
    pattern: str | tuple[str, ...] | None = None
    context_tokens: int | tuple[int, ...] | None = None
    kernel_size: int | tuple[int, ...] = 11
    causal: bool = False
    heads: int = 1
    terms: tuple[int, ...] | None = None
    weight: str = "ones"
    constant: str | None = None
    normalize: str | None = None
    eps: float = 1e-3
    out_tokens: int | None = None
    out_dim: int | None = None
    U: str | None = None
    V: str | None = None

    def check(self) -> None:
        check_int("degree", self.degree, 1, 8)
        check_int("denominator", self.denominator, 0, 8)
        check_choice("basis", self.basis, BASES)
        check_choice("causal", self.causal, (True, False))
        check_choice("weight", self.weight, ("ones", "channel", "full"))
        check_choice("constant", self.constant, (None, "channel", "full"))
        check_choice("normalize", self.normalize, (None, "rms", "layer"))
        if self.eps != 0:
            check_number("eps", self.eps, 1e-12, float("inf"), "a positive number, or 0 for the plain quotient", 1e-3)
        check_int("heads", self.heads, 1)
        check_int("num_prefix_tokens", self.num_prefix_tokens, 0)
        self._check_grid()
        self._check_resizing()
        plan = make_plan(self)
        self._check_contexts(plan)
        self._check_parts(plan)

    def _default(self, option: str) -> Any:
        return type(self).__dataclass_fields__[option].default

    def _unused(self, option: str, why: str, cure: str) -> None:
        """Raise OptionError if `option` is set but has no effect."""
        if getattr(self, option) != self._default(option):
            got = f"{getattr(self, option)!r} {why}"
            raise OptionError(option, got, "an option that plays a part", f"{cure}, or leave it out.")

    def _check_parts(self, plan: Plan) -> None:
        without = {
            "kernel_size": ("without a depthwise map that has none of its own", 'Use A="depthwise"'),
            "token": ("where it decides no map", "Name it in A and C"),
            "channel": ("where it decides no map", "Name it in B and D"),
        }
        for option, reason in without.items():
            if getattr(self, option) != self._default(option):
                other = copy.copy(self)
                object.__setattr__(other, option, self._default(option))
                if make_plan(other) == plan:
                    self._unused(option, *reason)
        if self.preset == "full" and self.A is not None and (self.C is not None or not plan.C):
            self._unused("preset", "where A and C are named", "Name the maps in A and C")
        if plan.token == {"identity"}:
            self._unused("causal", "with token maps that are all identities", 'Use A="depthwise"')
            if "full" not in (self.weight, self.constant):
                self._unused("num_prefix_tokens", "with token maps that are all identities", 'Use A="depthwise"')
        maps = set().union(plan.token, *map(kinds_of, plan.B + plan.D))
        if maps == {"identity"} and self.normalize is None and self.heads > 1:
            raise OptionError("heads", f"{self.heads} with maps that are all identities",
                              "an option that plays a part", 'Use B="dense", or leave it out.')  # fmt: skip
        if self.denominator == 0:
            self._unused("eps", "without a denominator", "Use denominator=1")

    def _check_grid(self) -> None:
        grid = self.grid
        if grid is not None:
            check_grid_option(grid, (1, 2, 3))
        if self.causal and (len(grid or (0,)) != 1 or self.num_prefix_tokens):
            got = f"True with grid={grid} and num_prefix_tokens={self.num_prefix_tokens}"
            raise OptionError("causal", got, "1-D sequences without prefix tokens",
                              "Use causal=False: order has no meaning on a grid.")  # fmt: skip

    def _check_resizing(self) -> None:
        for size, letter in (("out_tokens", "U"), ("out_dim", "V")):
            spec = getattr(self, letter)
            if getattr(self, size) is None:
                self._unused(letter, f"without {size}", f"Pass {size}")
                continue
            check_int(size, getattr(self, size), 1)
            if spec is not None:
                check_spec(letter, spec)
        if self.out_tokens is not None and self.causal:
            raise OptionError(
                "out_tokens", f"{self.out_tokens} with causal=True", "None when causal", "Remove one of the two."
            )

    def _check_contexts(self, plan: Plan) -> None:
        count = len(set(plan.letters)) - 1
        if self.pattern is None:
            self._unused("context_tokens", "without a pattern", 'Pass pattern="ab"')
            return
        if self.causal:
            raise OptionError(
                "causal",
                "True with a pattern of several inputs",
                "False",
                "Use causal=False: order is defined within one input.",
            )
        if self.denominator and len(plan.patterns) > 1:
            got = f"{self.denominator} with {len(plan.patterns)} patterns"
            raise OptionError("denominator", got, "0", "Use one pattern, or one mixer for each and add them.")
        lengths = self.context_lengths
        if lengths is not None and len(lengths) != count:
            allowed = f"one number, or {count} for pattern={self.pattern!r}"
            raise OptionError("context_tokens", repr(self.context_tokens), allowed, "Pass one for each letter after a.")
        for length in lengths or ():
            check_int("context_tokens", length, 1)

    @property
    def context_lengths(self) -> tuple[int, ...] | None:
        """The number of tokens of each context, or None if it was left open."""
        tokens = self.context_tokens
        if tokens is None or isinstance(tokens, (tuple, list)):
            return None if tokens is None else tuple(tokens)
        return (tokens,) * (len(set("".join(self.pattern or "a"))) - 1)

    @property
    def causal_by_build(self) -> bool:
        return self.causal

    def for_order(self) -> PadreConfig:
        return self.changed(causal=True)

    def plan(self, dim: int) -> Plan:
        """The plan for `dim` channels. Raises OptionError if heads does not divide dim, or if W or L lacks its grid."""
        for option in ("weight", "constant"):  # not before, as a host fills in its grid
            if getattr(self, option) == "full" and self.grid is None:
                raise OptionError(
                    option, '"full" without a grid', '"full" with grid=(N,) or (H, W)', "Pass grid=: W and L need N."
                )
        check_divides("heads", self.heads, "dim", dim)
        if self.normalize == "layer" and self.heads == dim:
            raise OptionError(
                "normalize", '"layer" over heads of one channel', "heads of two channels or more", "Use fewer heads."
            )
        return make_plan(self)

    def check_built_for(self, grid: tuple[int, ...], tied: bool) -> None:
        """Raise ShapeError for another grid than the mixer was built for, if its weights depend on the grid.

        They do if W or L is "full", and on several axes if a map has weights for positions (`tied`).
        """
        full = "full" in (self.weight, self.constant)
        if (full or (tied and len(grid) > 1)) and tuple(grid) != tuple(self.grid or ()):
            cure = 'Use weight="channel" and constant="channel", and depthwise token maps, for inputs of any size.'
            raise ShapeError("grid", grid, f"{self.grid}, which W, L or a map was built for", cure)


def make_plan(config: PadreConfig) -> Plan:
    """The plan that follows from the options. Raises OptionError if they do not fit together."""
    check_spec("token", config.token)
    check_spec("channel", config.channel)
    letters, places, patterns = read_patterns(config.pattern, config.degree + config.denominator)
    A, C = _preset(config, config.degree)
    if config.denominator:
        more = _preset(config, config.denominator)
        A, C = A + more[0], C + more[1]
    B, D = (config.channel,) * len(A), (config.channel,) * len(C)
    if config.pattern is not None:
        C, D = ("identity",) * len(C), ("identity",) * len(D)
    A, B, C, D = (_names(config, *pair) for pair in (("A", A), ("B", B), ("C", C), ("D", D)))
    B = tuple(B[i] for i in places)
    A = tuple(A[i] if c == "a" or config.A is not None else "mean" for i, c in zip(places, letters, strict=True))
    kernel = _kernel(config, any(map(needs_kernel, A + C)))
    return Plan(A, B, C, D, kernel, _terms(config), letters, patterns)


def _preset(config: PadreConfig, degree: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    first = config.token if degree == 1 or config.preset == "full" else "identity"
    inner = "identity" if degree == 2 and config.preset != "full" else config.token
    return (first, *(config.token,) * (degree - 1)), (inner,) * (degree - 1)


def _names(config: PadreConfig, letter: str, preset: tuple[str, ...]) -> tuple[str, ...]:
    structure, count = getattr(config, letter), len(preset)
    if structure is None:
        return preset
    if count == 0:
        allowed = f"None at degree {config.degree}, which has no {letter}"
        raise OptionError(letter, repr(structure), allowed, "Leave it out.")
    names = tuple(structure) if isinstance(structure, (tuple, list)) else (structure,) * count
    if len(names) != count:
        of = f" and denominator {config.denominator}" if config.denominator else ""
        allowed = f"one name, or {count} of them at degree {config.degree}{of}"
        raise OptionError(letter, repr(structure), allowed, "Pass one for each degree.")
    for name in names:
        check_spec(letter, name)
    return names


def _kernel(config: PadreConfig, needed: bool) -> tuple[int, ...]:
    axes = 1 if config.grid is None else len(config.grid)
    if not needed:
        return (11,) * axes
    size = config.kernel_size
    kernel = tuple(size) if isinstance(size, (tuple, list)) else (size,) * axes
    if len(kernel) != axes:
        raise OptionError("kernel_size", repr(size), f"one number, or {axes} for grid={config.grid}",
                          "Pass one for each axis.")  # fmt: skip
    for k in kernel:
        check_int("kernel_size", k, 1)
        if k % 2 == 0 and not config.causal:
            raise OptionError("kernel_size", k, "an odd number unless causal", f"Use {k - 1} or {k + 1}.")
    return kernel


def _terms(config: PadreConfig) -> tuple[int, ...]:
    if config.terms is None:
        return tuple(range(1 if config.denominator else 2, config.degree + 1)) or (1,)
    terms = config.terms if isinstance(config.terms, (tuple, list)) else ()
    valid = all(type(i) is int and 1 <= i <= config.degree for i in terms)
    if not terms or not valid or len(set(terms)) != len(terms):
        allowed = f"different degrees from 1 to {config.degree}"
        raise OptionError("terms", repr(config.terms), allowed, f"Use for example terms=({config.degree},).")
    if config.degree not in terms:
        cure = f"Use degree={max(terms)}: higher degrees would be computed for nothing."
        raise OptionError("terms", repr(config.terms), f"terms that include the degree, {config.degree}", cure)
    return tuple(sorted(terms))
