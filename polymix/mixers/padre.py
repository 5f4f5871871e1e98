"""PADRe, the polynomial attention drop-in replacement, with all structures, bases and extensions of its paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix import ops
from polymix.errors import OptionError
from polymix.mixers.checks import MixerCall, check_grid
from polymix.mixers.inheritance import AttentionMaps, Sources, add_sources, copy_map, joined, smooth_
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.padre_capabilities import capabilities_of, halo
from polymix.mixers.padre_config import PadreConfig
from polymix.mixers.padre_contexts import cross_factors, crossing, hide
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import StateSpec
from polymix.ops.dispatch import IMPLS
from polymix.ops.padre import SPREAD, Convolution, PadreMaps, PadreTerms, merged_first, size
from polymix.ops.padre.eager import Map
from polymix.ops.shared.sequences import without_padding
from polymix.ops.shared.tensors import Linear
from polymix.structured import (
    DepthwiseConv,
    Identity,
    ParallelLinear,
    Prefixed,
    Site,
    StructuredMap,
    create_map,
    token_map,  # fmt: skip
)
from polymix.structured.cost import Op
from polymix.structured.dense import Dense, affine
from polymix.structured.registry import crosses

_FIRST_WEIGHTS = "B_1 D_1"


class PadreState(NamedTuple):
    """The states of the causal token maps, in the order A_1 … A_d, C_1 … C_{d-1}; at least float32, of fixed size.

    A convolution keeps its last inputs (B, reach, D). A mean keeps its sum (B, 1, D) and its count (B, 1, 1), int64.
    """

    windows: tuple[Tensor, ...]


class PadreMixer(TokenMixer):
    """A polynomial of degree d in the tokens, made of linear maps and Hadamard products (PADRe).

        Y_i = A_i (X B_i + b_B) + b_A                                               i = 1 … d
        Z_1 = Y_1,   Z_{i+1} = a_i (C_i (Z_i D_i + b_D) + b_C) ⊙ Y_{i+1} - b_i Z_{i-1}     monomials: a_i = 1, b_i = 0
        P   = Σ_{i in terms} W_i ⊙ Z_i + L
        P   = P / (R² + ε),   R = Σ_k Q_k ⊙ Z'_k + S on Y_{d+1} … Y_{d+e}       with a denominator; P / R at ε = 0
        O   = U P V                                                                 with out_tokens or out_dim

    B_i and D_i mix channels, A_i and C_i mix tokens. Each is a structured map; by default B_i and D_i are dense, and
    A_i and C_i are depthwise convolutions over a 1-D, 2-D or 3-D grid. The mixer is causal in 1-D with `causal=True`,
    if every token map has a causal form. `heads` independent copies share the channels among them. (The paper calls
    the denominator's Q, S and R by the letters Q, P and 𝒟, and L in Eq. 18 by V.)

    With a `pattern`, Y_i reads x or one of the contexts, which may have other lengths; pass a tuple as `context` if
    there are several. Several patterns are added: P = Σ_patterns Σ_i W_i ⊙ Z_i + L. Without biases Z_i is homogeneous
    of degree i in X (Lemma 1, monomials).

    A padding mask removes tokens from a 1-D sequence, and ends the grid there in 2-D and 3-D; padding gets zeros.
    With a pattern, `mask` hides context tokens. A tuple with one mask more than there are contexts begins with the
    mask of x, whose hidden tokens read as zeros. With values of their own (`values=`), Y_d reads them, not x.

    The token maps cost O(N) or O(N log N), except dense, block_diagonal and sparse (N² by blocks and density) and
    monarch (N^1.5).

    Raises: OptionError for options that do not fit together; ShapeError for another grid than W, L or a map was
    built for.

    Shapes: (B, N, D) -> (B, N, D); (B, F, G) with out_tokens and out_dim.
    State: the last k - 1 tokens of every convolution.
    Source: PADRe, Eq. 1-7, Lemma 1, Eq. 11 and App. A.1 (contexts), Eq. 15-20 (denominators), Tables 2 and 6 (costs).
    """

    A: Any  # A, C, D: ModuleLists of maps; B: a ModuleDict from an input's letter to its ParallelLinear
    B: Any
    C: Any
    D: Any
    name = "padre"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, isolates_future=True,
        grids=(1, 2, 3), sequence="halo",
    )  # fmt: skip
    impls = IMPLS
    config: PadreConfig

    def __init__(self, config: PadreConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        plan = self.plan = config.plan(dim)
        self.axes = 1 if config.grid is None else len(config.grid)
        self.terms, self.inputs = plan.terms, sorted(set(plan.letters))
        self.contexts, self.needs_context = len(self.inputs) - 1, len(self.inputs) > 1
        p, bias = config.num_prefix_tokens, config.bias
        n = None if config.grid is None else math.prod(config.grid)
        site = Site("token", dim, n, n, config.heads, config.causal, kernel=plan.kernel)

        def tokens(spec: str, letter: str = "a") -> StructuredMap | Prefixed:
            lengths = config.context_lengths
            length = None if lengths is None or letter == "a" else lengths[self.inputs.index(letter) - 1]
            if letter == "a" or not crosses(spec):  # what cannot change the length needs inputs as long as x
                if None not in (n, length) and length != p + (n or 0):
                    cure = f"Name an A for input {letter} that changes the length, such as mean or dense."
                    raise OptionError("context_tokens", length, f"{p + (n or 0)}, as many as x, with A={spec!r}", cure)
                return token_map(spec, site, prefix=p, bias=bias, **kw)
            cross = Site("token", dim, length, None if n is None else p + n, config.heads, cross=True)
            return create_map(spec, cross, bias=bias, **kw)

        mixed = Site("channel", dim, dim // config.heads, dim // config.heads, config.heads)
        specs_B = {letter: tuple(b for b, c in zip(plan.B, plan.letters, strict=True) if c == letter)
                   for letter in self.inputs}  # fmt: skip
        self.B = nn.ModuleDict(
            {c: ParallelLinear(specs, dim, config.heads, bias, **kw) for c, specs in specs_B.items()}
        )
        self.A = nn.ModuleList(tokens(*pair) for pair in zip(plan.A, plan.letters, strict=True))
        self.D = nn.ModuleList(create_map(spec, mixed, bias=bias, **kw) for spec in plan.D)
        self.C = nn.ModuleList(tokens(spec) for spec in plan.C)
        total = () if n is None else (p + n,)
        sizes = {"ones": None, None: None, "channel": (dim,), "full": (*total, dim)}
        w, constant = sizes[config.weight], sizes[config.constant]
        self.W = None if w is None else nn.Parameter(torch.ones(len(plan.patterns) * len(self.terms), *w, **kw))
        self.L = None if constant is None else nn.Parameter(torch.zeros(*constant, **kw))
        below = config.denominator
        self.Q = nn.Parameter(torch.ones(below, *(w or (dim,)), **kw)) if below else None
        self.S = nn.Parameter(torch.ones(*(constant or (dim,)), **kw)) if below else None
        whole = total[0] if total else None
        self.U: StructuredMap | None = None
        self.V: StructuredMap | None = None
        if config.out_tokens is not None:
            self.U = create_map(config.U or "dense", Site("token", dim, whole, config.out_tokens), **kw)
        if config.out_dim is not None:
            self.V = create_map(config.V or "dense", Site("channel", dim, dim, config.out_dim), **kw)
        if not any(True for _ in self.parameters()):
            cure = 'Use a map that is learned, such as dense, or weight="channel".'
            raise OptionError("A, B, C, D", "maps without a parameter", "at least one that is learned", cure)
        self._init_scale()
        self._settle_capabilities()

    def _settle_capabilities(self) -> None:
        config = self.config
        full = "full" in (config.weight, config.constant)
        tops = [part for part in (*self.A, *self.C, self.U) if part is not None]  # with the parts of composite maps
        self.tied = any(part.fixed for top in tops for part in top.modules() if isinstance(part, StructuredMap))
        self.one_grid = full or self.tied
        self.dense = set(self.plan.B) == {"dense"} and {*self.plan.D} <= {"dense", "identity"}
        self.capabilities = capabilities_of(self, self.one_grid, full)

    def halo(self) -> tuple[int, int]:
        return halo(self.A, self.C, self.config.degree)

    def _init_scale(self) -> None:
        """Scale the init so that the output's standard deviation is near attention's.

        One map is scaled that changes all terms: every Z_i is linear in Y_1 and so in B_1, unless Y_1 is normalised;
        all but Z_1 are linear in D_1 and C_1. In other bases than the monomials only W works, if it is learned.
        """
        config, patterns = self.config, self.plan.patterns
        gain = INIT_STD * (len(patterns) * len(self.terms)) ** -0.5
        if self.Q is not None:  # R starts near S = 1, away from its zeros, and the quotient near P / (1 + ε)
            gain *= 1 + config.eps
            with torch.no_grad():
                for k in range(config.denominator):
                    self.Q[k] = 0.02 / size(config.basis, k + 1)
        if SPREAD[config.basis] != 1:
            for i in range(len(self.plan.B)):
                self._scale_B(i, SPREAD[config.basis])
        monomial = config.basis == "monomial"
        if monomial and config.normalize is None:
            scaled = [self._scale_B(i, gain) for i in sorted({factors[0] for factors in patterns})]
            if all(scaled):
                return
        if monomial and config.normalize is not None and config.degree > 1 and self.D[0].scale_(gain):
            return
        if self.W is not None:
            with torch.no_grad():
                for place, i in enumerate(self.terms * len(patterns)):
                    self.W[place] = gain / size(config.basis, i)
            return
        if monomial:
            any(part.scale_(gain) for part in (*self.D[:1], *self.C[:1]))  # the first that can

    def _scale_B(self, i: int, gain: float) -> bool:
        letter = self.plan.letters[i]
        return self.B[letter].scale_(self.plan.letters[:i].count(letter), gain)

    def merge(self) -> dict[str, Linear]:
        first = None if self.needs_context else merged_first(self._maps((), use_folded=False), self._terms())
        return {_FIRST_WEIGHTS: first} if first else {}

    def merged_layers(self) -> tuple[nn.Module | None, ...]:
        return (*(part.maps for part in self.B.values()), *self.D[:1])

    @property
    def polynomial(self) -> Polynomial:
        config = self.config
        if config.normalize is not None:
            return Polynomial()
        chains = ["".join(self.plan.letters[i] for i in factors) for factors in self.plan.patterns]
        a = [letters[:i].count("a") for letters in chains for i in self.terms]  # in x alone, the contexts fixed
        if config.denominator:
            below = self.plan.letters[config.degree :].count("a") * (2 if config.eps else 1)
            if below:  # U and V add quotients of different denominators
                added = (1 if self.V is None else self.dim) * (1 if self.U is None else self.U.site.size or 1)
                return Polynomial(rational=(max(a) + below * (added - 1), below * added))
        monomial = config.basis == "monomial" or config.degree == 1  # where all bases are one
        plain = not config.bias and self.L is None and monomial
        return Polynomial(max(a), homogeneous=plain and len(set(a)) == 1)

    def mix(self, x: Tensor, context: Any, call: MixerCall) -> Tensor:
        grid = (x.shape[1] - self.config.num_prefix_tokens,) if call.grid is None else call.grid
        if self.one_grid:
            self.config.check_built_for(grid, self.tied)
        if self.needs_context:
            contexts = tuple(context) if isinstance(context, (tuple, list)) else (context,)
            masks = tuple(call.mask) if isinstance(call.mask, (tuple, list)) else (call.mask,) * len(contexts)
            masks = masks if len(masks) > len(contexts) else (None, *masks)
            inputs = [hide(*pair) for pair in zip((x, *contexts), masks, strict=True)]
            maps = self._cross(dict(zip(self.inputs, zip(inputs, masks, strict=True), strict=True)), grid)
            parts = [ops.padre(x, m, self._terms(i), grid, impl=self.config.impl) for i, m in enumerate(maps)]
            p = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            return self._resize(hide(p, masks[0]), masks[0])

        x = x if call.values is None else torch.cat((x, call.values), dim=-1)  # padding moves both together
        maps_of = self._maps if call.values is None else self._maps_apart
        if call.mask is None:
            return self._resize(ops.padre(x, maps_of(grid), self._terms(), grid, impl=self.config.impl), None)

        def run(x: Tensor, mask: Tensor | None) -> Tensor:
            return ops.padre(x, maps_of(grid, mask), self._terms(), grid, impl=self.config.impl)

        if self.axes == 1:
            p = without_padding(x, call.mask, run, prefix=self.config.num_prefix_tokens)
        else:
            p = hide(run(hide(x, call.mask), call.mask), call.mask)
        return self._resize(p, call.mask)

    def scan(self, x: Tensor, state: PadreState | None, mask: Tensor | None) -> tuple[Tensor, PadreState]:
        maps = [part for part in (*self.A, *self.C) if isinstance(part, StructuredMap)]
        if state is None:
            past = {part: part.start(x.shape[0], x) for part in maps}
        else:
            windows = iter(state.windows)
            past = {part: [next(windows) for _ in part.memory(0)] for part in maps}

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            def recurrent(part: Any) -> Map:
                def step(u: Tensor) -> Tensor:
                    y, past[part] = part.scan(u, past[part], real)
                    return y if part.bias is None else y + part.bias.to(y.dtype)

                return step

            grid = (x.shape[1],)
            maps = self._maps(grid, token=recurrent)
            return ops.padre(x, maps, self._terms(), grid, impl=self.config.impl)

        p = without_padding(x, mask, run)
        return self._resize(p, mask), PadreState(tuple(tensor for memory in past.values() for tensor in memory))

    def _maps(
        self, grid: tuple[int, ...], mask: Tensor | None = None, *, token: Callable[[Any], Map] | None = None,
        use_folded: bool = True,
    ) -> PadreMaps:  # fmt: skip
        """The maps of one call.

        mask: (B, N), True for real tokens. token: turns a token map into a function, for calls with a state.
        use_folded: use the product that `fold` merged instead of its factors.
        """
        why = None if token is None else "keeps no recurrent state"
        A: list[Convolution | Map | None] = []
        C: list[Convolution | Map | None] = []
        for functions, parts in ((A, self.A), (C, self.C)):
            for part in parts:
                if isinstance(part, Identity):
                    functions.append(None)
                elif token is not None:
                    functions.append(token(part))
                elif isinstance(inner := part.inner if isinstance(part, Prefixed) else part, DepthwiseConv):
                    prefix = part.prefix_map if isinstance(part, Prefixed) else None
                    shape = inner.site.causal, inner.dilation
                    functions.append(Convolution(inner.weight, part.bias, *shape, prefix, mask))
                else:
                    functions.append(partial(part, grid=grid, mask=mask))
                    why = why or "supports depthwise token maps only"
        channels: list[Linear | Map | None] = []
        one_head, steps = self.config.heads == 1, token is not None and self.config.impl != "eager"
        for part, spec in zip(self.D, self.plan.D, strict=True):
            if isinstance(part, Identity):
                channels.append(None)
            elif spec == "dense" and one_head and not steps:  # with several heads the product is block-diagonal
                channels.append((part.weight, part.bias) if type(part) is Dense else affine(part))
            else:
                channels.append(part)
        if not self.dense:
            why = "supports dense channel maps only"
        shared: Linear | None = None
        if self.plan.B[0] == "dense" and (first := self.B["a"].maps) is not None:
            shared = (first.weight, first.bias) if type(first) is Dense else affine(first)
        merged = self.merged().get(_FIRST_WEIGHTS) if use_folded and self._folded is not None else None
        project = None if self.dense and one_head and not steps else lambda x: self.B["a"](x, merged)
        if merged is not None:  # it includes D_1
            shared, channels[0] = merged, None
        return PadreMaps(project, A, C, channels, shared, why)

    def _maps_apart(self, *arguments: Any) -> PadreMaps:
        """The maps for x with the values behind it, (B, N, 2D): Y_d reads the values, all other factors x."""
        maps, last, one_head = self._maps(*arguments), self.config.degree - 1, self.config.heads == 1

        def project(both: Tensor) -> list[Tensor]:
            us = self.B["a"](both[..., : self.dim], maps.shared if one_head else None)
            return [*us[:last], self.B["a"].one(last, both[..., self.dim :]), *us[last + 1 :]]

        return maps._replace(project=project, shared=None, unsupported="reads the same tokens in all factors")

    def _terms(self, pattern: int = 0) -> PadreTerms:
        """The terms of one pattern. The constant belongs to the first."""
        config = self.config
        W = self.W if self.W is None or len(self.plan.patterns) == 1 else self.W.chunk(len(self.plan.patterns))[pattern]
        return PadreTerms(
            config.degree, self.terms, W, None if pattern else self.L, self.Q, self.S, config.basis, config.normalize,
            config.heads, config.eps,
        )  # fmt: skip

    def _cross(self, inputs: dict[str, tuple[Tensor, Tensor | None]], grid: tuple[int, ...]) -> list[PadreMaps]:
        """The maps of each pattern in a call with contexts; inputs: tokens and mask by letter."""
        ys = cross_factors(self.A, self.B, self.plan.letters, inputs, grid)
        C = [lambda u, part=part: part(u, grid, inputs["a"][1]) for part in self.C]
        why = "supports one head and the monomial basis only (no normalize, denominator or pattern)"

        def maps(y: list[Tensor]) -> PadreMaps:
            return PadreMaps(lambda x: y, (None,) * len(y), C, list(self.D), None, why)

        return [maps([ys[i] for i in factors]) for factors in self.plan.patterns]

    def _resize(self, p: Tensor, mask: Tensor | None) -> Tensor:
        p = p if self.U is None else self.U(p, None, mask)
        return p if self.V is None else self.V(p)

    def state_spec(self, batch: int) -> StateSpec:
        maps = [part for part in (*self.A, *self.C) if isinstance(part, StructuredMap)]
        return StateSpec(PadreState, [shape for part in maps for shape in part.memory(batch)])

    @torch.no_grad()
    def inherit(self, attention: AttentionMaps) -> Sources:
        """Start as a local mean of the attention's values: B_d = W_v W_o, A_d a local mean, the factor of Y_d near 1.

        Copies nothing in other bases than the monomials, with several inputs, or without dense B_d and biases.
        """
        value, out, degree = attention.value, attention.out, self.config.degree
        last = self.B["a"].linear(degree - 1) if not self.needs_context else None
        if value is None or out is None or last is None or self.config.basis != "monomial" or last[1] is None:
            return {}
        both = joined(value, out)
        if both.weight.shape != last[0].shape:
            return {}
        sources: Sources = {}
        add_sources(sources, "B.a.maps", copy_map(both, *last))
        smooth_(self.A[degree - 1])
        if degree > 1:  # the gate C_{d-1} (Z_{d-1} D_{d-1}) + b_C
            gate = self.C[degree - 2] if self.C[degree - 2].bias is not None else self.D[degree - 2]
            self.D[degree - 2].scale_(0.25)
            gate.bias.fill_(1.0)
        return sources

    @torch.no_grad()
    def scale_output_(self, factor: float) -> bool:
        """Scale Y_1, b_D and b_C, in which every Z_i is linear, and L."""
        if self.config.basis != "monomial" or self.config.normalize is not None or self.needs_context:
            return False
        first = self.B["a"].linear(0)
        if first is None:
            return False
        below = (*self.C[: self.config.degree - 1], *self.D[: self.config.degree - 1])
        for part in (*first, self.A[0].bias, self.L, *(part.bias for part in below)):
            if part is not None:
                part.mul_(factor)
        return True

    def no_weight_decay(self) -> set[str]:
        return {name for name in ("W", "L", "Q", "S") if getattr(self, name) is not None}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """With several patterns, "patterns" lists A, B, b_A, b_B and W of each; the others are shared."""
        config, like = self.config, next(self.parameters())
        tokens = n - config.num_prefix_tokens
        grid = check_grid(self, grid, tokens) or (tokens,)
        config.check_built_for(grid, self.tied)
        lengths = dict(zip(self.inputs[1:], config.context_lengths or (), strict=False))

        def token(part: Any, letter: str = "a") -> Tensor:
            if crossing(part):
                return part.dense(lengths.get(letter, n), None, n)
            return part.dense(n, grid)

        nth = [self.plan.letters[:i].count(c) for i, c in enumerate(self.plan.letters)]
        B, b_B = zip(*(self.B[c].dense(i) for c, i in zip(self.plan.letters, nth, strict=True)), strict=True)
        ones, zeros = like.new_ones(n, self.dim), like.new_zeros(n, self.dim)
        A = [token(*pair) for pair in zip(self.A, self.plan.letters, strict=True)]
        b_A = [part.bias for part in self.A]
        chains = []
        for pattern, indices in enumerate(self.plan.patterns):
            W, weight = [zeros] * config.degree, self._terms(pattern).weight
            for place, i in enumerate(self.terms):
                W[i - 1] = ones if weight is None else weight[place].expand(n, self.dim)
            factors = {"A": A, "B": B, "b_A": b_A, "b_B": b_B}
            chains.append({**{name: [parts[i] for i in indices] for name, parts in factors.items()}, "W": W})
        matrices = {
            **(chains[0] if len(chains) == 1 else {"patterns": chains}),
            "C": [token(part) for part in self.C], "D": [part.dense() for part in self.D],
            "b_C": [part.bias for part in self.C], "b_D": [part.bias for part in self.D],
            "L": None if self.L is None else self.L.expand(n, self.dim),
            "U": None if self.U is None else self.U.dense(n), "V": None if self.V is None else self.V.dense(),
        }  # fmt: skip
        if self.S is not None:
            below = range(config.denominator)
            matrices["Q"] = [ones if self.Q is None else self.Q[k].expand(n, self.dim) for k in below]
            matrices["S"] = self.S.expand(n, self.dim)
        return matrices

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        tokens = n - self.config.num_prefix_tokens
        grid = check_grid(self, grid, tokens) or (tokens,)
        lengths = dict(zip(self.inputs[1:], self.config.context_lengths or (), strict=False))
        ops = [op for c in self.inputs for op in self.B[c].cost_ops(lengths.get(c, n))]
        for part, c in zip(self.A, self.plan.letters, strict=True):
            ops += part.cost_ops(lengths.get(c, n), None, n) if crossing(part) else part.cost_ops(n, grid)
        again = [op for part in self.D for op in part.cost_ops(n)]
        again += [op for part in self.C for op in part.cost_ops(n, grid)]
        ops += again * len(self.plan.patterns)
        ops += [] if self.U is None else self.U.cost_ops(n)
        return ops + ([] if self.V is None else self.V.cost_ops(self.config.out_tokens or n))


register(PadreMixer)(PadreConfig)
