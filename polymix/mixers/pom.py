"""PoM, the Polynomial Mixer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError, check_choice, check_divides, check_int, check_number
from polymix.mixers.base import INIT_STD, Capabilities, MixerConfig, Polynomial, TokenMixer
from polymix.mixers.checks import Call
from polymix.mixers.loading import check_keys, load
from polymix.mixers.registry import register
from polymix.ops.blocked import pom as blocked
from polymix.ops.common import ACTIVATIONS, GATES, Turns, accumulator, count_real, rotary, rotate, scaled_linear
from polymix.ops.decay import BLOCK, decayed_mean
from polymix.ops.dispatch import IMPLS, at_once
from polymix.ops.native import pom as native
from polymix.ops.pom import PomState, Terms, divide, pom_reduce
from polymix.ops.pooled_linear import linear_gated, linear_powers, wide
from polymix.ops.visibility import positions
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import linear

_AXES = {"1d": 1, "2d": 2}
_NO_STATE = "it keeps no state"
_MASKS = frozenset({"padding", "arbitrary", "block_causal", "segments"})


class PomMixer(TokenMixer):
    """A polynomial of every token, pooled, and asked by a gate (PoM, Eq. 1, 2 and 4).

        H_i = reduce_j Σ_{p=1..k} α_p ⊙ h(W_h x_j + b_h)^p        over the context tokens j that i sees
        PoM = W_o [σ(W_s x_i + b_s) ⊙ H_i] + b_o

    W_h, W_s: D -> D_inner = expand · D, α: D_inner × k, h `activation`, σ `gate`. The reduction is a mean (as in the
    authors' code; it survives a change of length) or the printed sum. Who sees whom: everything, causal, block-causal,
    padding, any boolean mask, packed segments, a separate context; a query that sees nothing gets zeros before b_o.
    `rotary` turns the terms by the context position and the gate by the query position.

    `decay`, which no paper has, makes the mixer causal and its mean forget: term j counts λ^(i-j) for token i, one λ
    for each of `decay` heads of channels, learned as the logarithm of a time, 1 / -ln λ = 4, 8, 16 … at init.

    Shapes: (B, N, D) -> (B, N, D). Cost: 3 N D D_inner multiply-adds, less what groups and selection_heads save; only
    an arbitrary mask (B, N, M) adds N M D_inner. State: D_inner sums and one count, with decay one a head.
    Permutation-equivariant without rotary and decay.
    Source: PM-001 … PM-028.
    """

    name = "pom"
    capabilities = Capabilities(causal=True, cross=True, masks=_MASKS, recurrent=True, grids=(2,))
    impls = IMPLS
    config: PomConfig

    def __init__(self, config: PomConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.inner = config.inner(dim)
        gates = config.selection_heads or self.inner
        self.poly = linear(dim, self.inner, config.groups, config.bias, **kw)  # W_h
        self.gate = linear(dim, gates, 1, config.bias, **kw)  # W_s
        self.proj = linear(self.inner, dim, 1, config.bias, **kw)  # W_o
        self.alpha = nn.Parameter(torch.empty(self.inner, config.degree, **kw))
        with torch.no_grad():  # each power contributes alike: α_p shrinks as the moment E|u|^p of a normal u grows
            for p in range(1, config.degree + 1):
                moment = 2 ** (p / 2) * math.gamma((p + 1) / 2) * math.pi**-0.5
                self.alpha[:, p - 1].normal_(std=config.degree**-0.5 / moment)
        self.times: nn.Parameter | None = None
        if config.decay is not None:
            self.causal_by_build = True
            self.times = nn.Parameter(torch.arange(2, 2 + config.decay, **kw) * math.log(2.0))
            with torch.no_grad():  # a mean over few tokens is larger than one over many
                few = (2 * self.times.exp() * INIT_STD**2 / math.e).sqrt().clamp_max(1.0)
                self.proj.weight.mul_(few.repeat_interleave(self.inner // config.decay))
        flat, forgets = config.rotary == "2d", config.decay is not None
        masks = frozenset({"padding"}) if forgets else _MASKS - {"segments"} if flat else _MASKS
        self.capabilities = Capabilities(
            causal=True, cross=not flat and not forgets, masks=masks, recurrent=not flat, grids=(2,) if flat else ()
        )

    def mix(self, x: Tensor, context: Tensor, call: Call) -> Tensor:
        if self.config.rotary == "2d" and call.grid is None:
            raise ShapeError("grid", None, "grid=(H, W) in the call", 'rotary="2d" needs to know rows and columns.')
        if self.times is not None:
            return self.scan(x, None, call.mask)[0]
        padding, visible = (call.mask, None) if call.mask is None or call.mask.ndim == 2 else (None, call.mask)
        plain = self.config.rotary is None and self.config.groups == 1 and call.segments is None and visible is None
        plain = plain and (call.causal == 0 or (call.causal == 1 and not call.cross))
        impl = self.choose(
            x, context,
            triton=None if visible is None else "an arbitrary mask is a product with the mask",
            native=self._native(plain, call) or wide(x),
            blocked=None if plain else "it is for one group, no rotary, and a context seen whole or up to the token",
        )  # fmt: skip
        if impl == "native" and not call.causal:
            return self._at_once(x, context, padding)
        if impl in ("native", "blocked"):
            poly, gate, proj = ((layer.weight, layer.bias) for layer in (self.poly, self.gate, self.proj))
            how = (self.config.activation, self.config.gate, self.config.reduction)
            parts = blocked.Parts(poly, gate, proj, self.alpha, *how)
            if not call.causal:
                return blocked.pom(x, context, parts, padding)
            return (native if impl == "native" else blocked).pom_causal(x, parts, padding)
        asks, tells = self._turns(x, context, call, padding)
        terms = self._terms(context, padding, tells, impl)
        total, count = pom_reduce(
            terms, queries=x.shape[1], visible=visible, causal=call.causal, segments=call.segments
        )
        return self._ask(x, total, count, asks)

    def _native(self, plain: bool, call: Call) -> str | None:
        """What the kernels in C have against a call."""
        if not plain:
            return "it is for one group, no rotary, and a context seen whole or up to the token"
        if self.config.selection_heads is not None:
            return "it is for a gate a channel"
        if call.causal and not at_once("native"):
            return "its causal form has no backward (call under torch.inference_mode() or torch.no_grad())"
        return None

    def _at_once(self, x: Tensor, context: Tensor, padding: Tensor | None) -> Tensor:
        """The maps with their pooling, and with what was pooled, in one operator each."""
        config, poly, gate, proj = self.config, self.poly, self.gate, self.proj
        sums = linear_powers(
            context, poly.weight, poly.bias, padding, config.activation, config.degree, impl="native"
        )  # (B, degree, E)
        pooled = (sums * self.alpha.t()).sum(1)
        if config.reduction == "mean":
            pooled = pooled / count_real(context, padding)
        return linear_gated(x, gate.weight, gate.bias, pooled, None, proj.weight, proj.bias, config.gate, impl="native")

    def scan(self, x: Tensor, state: PomState | None, mask: Tensor | None) -> tuple[Tensor, PomState]:
        if self.times is not None:
            impl = self.choose(x, triton="it does not forget", native=_NO_STATE, blocked=_NO_STATE)
            mean, state = decayed_mean(self._terms(x, mask, None, impl).values(), self.times, mask, state)
            return self._ask(x, mean, torch.ones((1, 1), device=x.device), None), state
        impl = self.choose(x, triton=None, native=_NO_STATE, blocked=_NO_STATE)
        turns = None
        if self.config.rotary is not None:
            place = positions(x.shape[1], mask, None, x.device)
            turns = place if state is None else place + state.count[:, None]
        total, count = pom_reduce(self._terms(x, mask, turns, impl), queries=x.shape[1], causal=1, state=state)
        return self._ask(x, total, count, turns), PomState(
            total[:, -1].clone(), count[:, -1].expand(x.shape[0]).clone()
        )

    def _terms(self, context: Tensor, padding: Tensor | None, place: Tensor | None, impl: str) -> Terms:
        """Of W_h x_j + b_h, turned by the positions `place`."""
        turns = None if place is None else self._turn(self.inner, place, None)
        axes = _AXES[self.config.rotary or "1d"]
        return Terms(self.poly(context), self.alpha, self.config.activation, padding, turns, axes, impl)

    def _turn(self, width: int, place: Tensor, heads: int | None) -> Turns:
        """Of `width` features at positions (N), (B, N) or in 2-D (N, 2): (B or 1, N, width / 2) each."""
        cos, sin = rotary(place, width, axes=_AXES[self.config.rotary or "1d"], heads=heads)
        return (cos, sin) if cos.ndim == 3 else (cos[None], sin[None])

    def _turns(
        self, x: Tensor, context: Tensor, call: Call, padding: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Positions of the queries and of the context tokens; None without rotary."""
        if self.config.rotary is None:
            return None, None
        if call.grid is not None:
            rows, columns = (torch.arange(size, device=x.device) for size in call.grid)
            place = torch.cartesian_prod(rows, columns)  # (N, 2)
            return place, place
        if call.cross:
            ask, tell = call.segments if isinstance(call.segments, tuple) else (None, None)
            return (
                positions(x.shape[1], None, ask, x.device),
                positions(context.shape[1], padding, tell, x.device),
            )
        assert not isinstance(call.segments, tuple)
        place = positions(x.shape[1], padding, call.segments, x.device)
        return place, place

    def _ask(self, x: Tensor, total: Tensor, count: Tensor, place: Tensor | None) -> Tensor:
        """W_o [gate ⊙ H] for total (B, N or 1, D_inner) over count (B or 1, N or 1) tokens."""
        gate = GATES[self.config.gate](self.gate(x))
        if place is not None:
            turns = self._turn(gate.shape[-1], place, self.config.selection_heads)
            gate = rotate(gate, turns, axes=_AXES[self.config.rotary or "1d"])
        mean = divide(total, count, self.config.reduction).to(gate.dtype)
        heads = gate.shape[-1]
        if heads == self.inner and mean.shape[1] == 1:
            return scaled_linear(gate, mean, self.proj.weight, self.proj.bias)
        y = (gate.unsqueeze(-1) * mean.unflatten(-1, (heads, -1))).flatten(-2) if heads != self.inner else gate * mean
        return self.proj(y)

    def check_state(self, state: Any, x: Tensor) -> str | None:
        shape = (x.shape[0], self.inner)
        count = (x.shape[0],) if self.times is None else (x.shape[0], len(self.times))
        fits = isinstance(state, PomState) and (tuple(state.total.shape), tuple(state.count.shape))
        return None if fits == (shape, count) else f"a PomState with total {shape} in {accumulator(x.dtype)}"

    @property
    def polynomial(self) -> Polynomial:
        config = self.config
        if (config.activation, config.gate) != ("identity", "identity"):
            return Polynomial()
        return Polynomial(config.degree + 1, homogeneous=config.degree == 1 and not config.bias)

    def no_weight_decay(self) -> set[str]:
        return {"alpha"} if self.times is None else {"alpha", "times"}

    def letters(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return {
            "W_h": self.poly.dense(), "W_s": self.gate.dense(), "W_o": self.proj.dense(), "alpha": self.alpha,
            "b_h": self.poly.bias, "b_s": self.gate.bias, "b_o": self.proj.bias,
            **({} if self.times is None else {"decay": (-(-self.times).exp()).exp()}),
        }  # fmt: skip

    def ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        forgets = [] if self.times is None else [Op("matmul", (n, min(n, BLOCK), self.inner + len(self.times), 1))]
        return [linear_op(n, layer) for layer in (self.poly, self.gate)] + forgets + [linear_op(n, self.proj)]

    def crossover(self) -> float:
        """Tokens from which PoM needs fewer multiplications than attention, as printed (Eq. 11)."""
        d, inner, k = self.dim, self.inner, self.config.degree
        return (inner * (3 * d + k + 1) - 4 * d * d) / (2 * d)

    @classmethod
    def from_reference(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        degree: int,
        expand: int,
        n_groups: int = 1,
        n_sel_heads: int = 1,
        rotary: str | None = None,
    ) -> PomMixer:
        """A mixer with the weights, and the outputs, of a state dict saved by the PoM authors' code.

        The authors' module takes a mean, a hard sigmoid and a clamped leaky ReLU; 0 and 1 selection heads both mean
        one gate a channel. Biases that it lacks are zeros here. `rotary` is for the state dict of their rotary
        variant, whose tables are recomputed. Raises OptionError for keys or shapes that do not fit the arguments.
        """
        weights = {key: value for key, value in state_dict.items() if not key.startswith(("freqs_", "row_", "col_"))}
        grouped = n_groups > 1
        wanted = {"po_coeff", "ag_proj.weight"}
        wanted |= {"po_proj.weight", "se_proj.weight", "se_proj.bias"} if grouped else {"qc_proj.weight", "se_bias"}
        optional = {"ag_proj.bias"} | ({"po_proj.bias"} if grouped else set())
        check_keys(weights, wanted, optional, f", and at n_groups={n_groups}")
        dim, inner = weights["ag_proj.weight"].shape
        config = PomConfig(
            degree=degree, expand=expand, activation="clamped_leaky_relu", gate="hardsigmoid", groups=n_groups,
            selection_heads=n_sel_heads if n_sel_heads > 1 else None, rotary=rotary,
        )  # fmt: skip
        like = weights["ag_proj.weight"]
        mixer = cls(config, dim, device=like.device, dtype=like.dtype)
        split = mixer.inner
        new = {
            "poly.weight": weights["po_proj.weight"] if grouped else weights["qc_proj.weight"][:split],
            "gate.weight": weights["se_proj.weight"] if grouped else weights["qc_proj.weight"][split:],
            "gate.bias": weights["se_proj.bias"] if grouped else weights["se_bias"],
            "proj.weight": like,
            "alpha": weights["po_coeff"],
            "poly.bias": weights.get("po_proj.bias", like.new_zeros(inner)),
            "proj.bias": weights.get("ag_proj.bias", like.new_zeros(dim)),
        }
        new["poly.weight"] = new["poly.weight"].reshape(mixer.poly.weight.shape) if grouped else new["poly.weight"]
        load(mixer, new, "Check degree, expand, n_groups and n_sel_heads.")
        return mixer


@register(PomMixer)
@dataclass(frozen=True, kw_only=True)
class PomConfig(MixerConfig):
    """Options of PoM.

    Args:
        degree: k. expand: D_inner / dim.
        activation: h, "gelu", "relu", "identity" or "clamped_leaky_relu" (clamp(leaky_relu(x, 0.01), -0.1, 6)).
        gate: σ, "sigmoid", "hardsigmoid" or "identity".
        reduction: "mean", or "sum" as the paper prints it.
        selection_heads: None for one gate a channel, or the number of scalar gates, each for D_inner / it channels.
        groups: blocks of W_h, each reading its own share of the channels.
        rotary: None, "1d" (positions count real tokens) or "2d" (pass grid=(H, W) in the call).
        decay: None as in the paper, or the number of heads whose causal mean forgets, each at its own learned rate
            (torch.export then needs a fixed length).
    """

    name: ClassVar[str] = "pom"
    degree: int = 2
    expand: float = 2
    activation: str = "gelu"
    gate: str = "sigmoid"
    reduction: str = "mean"
    selection_heads: int | None = None
    groups: int = 1
    rotary: str | None = None
    decay: int | None = None

    def check(self) -> None:
        check_int("degree", self.degree, 1)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("gate", self.gate, GATES)
        check_choice("reduction", self.reduction, ("mean", "sum"))
        check_int("groups", self.groups, 1)
        check_choice("rotary", self.rotary, (None, *_AXES))
        if self.decay is not None:
            check_int("decay", self.decay, 1)
            for name, wanted in (("reduction", "mean"), ("rotary", None)):
                if getattr(self, name) != wanted:
                    got = f"{getattr(self, name)!r} with decay={self.decay}"
                    raise OptionError(name, got, repr(wanted), "A mean that forgets knows how far back a token is.")
        if self.selection_heads is not None:
            check_int("selection_heads", self.selection_heads, 1)
        check_number("expand", self.expand, 1e-6, math.inf, "a positive number", 2)

    def inner(self, dim: int) -> int:
        """D_inner for `dim` channels, after the checks that depend on it."""
        inner = round(self.expand * dim)
        if inner < 1 or abs(inner - self.expand * dim) > 1e-6:
            raise OptionError("expand", self.expand, f"a factor that makes expand · {dim} whole", "")
        check_divides("groups", self.groups, "dim", dim)
        check_divides("groups", self.groups, "expand · dim", inner)
        check_divides("decay", self.decay or 1, "expand · dim", inner)
        if self.selection_heads is not None:
            check_divides("selection_heads", self.selection_heads, "expand · dim", inner)
        if self.rotary is not None:
            pairs = 2 * _AXES[self.rotary]
            for name, width in (("expand · dim", inner), ("selection_heads", self.selection_heads or inner)):
                if width % pairs:
                    raise OptionError("rotary", f"{self.rotary!r} with {name}={width}", f"a multiple of {pairs}", "")
        return inner


PoM = PomMixer
