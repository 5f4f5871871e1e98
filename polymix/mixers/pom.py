"""PoM, the Polynomial Mixer: a gated mean of a polynomial of every token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix import ops
from polymix.errors import OptionError, ShapeError, check_choice, check_divides, check_int, check_number
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.inheritance import AttentionMaps, Sources, add_sources, copy_map, first_rows
from polymix.mixers.loading import check_keys, load
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Counts, Place, Shape, StateSpec, Summary
from polymix.ops.dispatch import IMPLS
from polymix.ops.pom import BLOCK, PomOptions, PomState, PomWeights
from polymix.ops.pom.eager import AXES, grid_positions
from polymix.ops.shared.activations import ACTIVATIONS, GATES
from polymix.ops.shared.masks import positions
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import affine, linear

_MASKS = frozenset({"padding", "arbitrary", "block_causal", "segments"})


class PomMixer(TokenMixer):
    """The Polynomial Mixer (PoM): pool a polynomial of every token, and read the pool through a gate.

        H_i = reduce_j Σ_{p=1..k} α_p ⊙ h(W_h x_j + b_h)^p     over the context tokens j that token i sees
        PoM = W_o [σ(W_s x_i + b_s) ⊙ H_i] + b_o

    W_h and W_s map D to E = expand · D channels, α is E × k, h is `activation` and σ is `gate`. The reduction is a
    mean, as in the authors' code, or the printed sum; a mean keeps its scale when the length changes. A query that
    sees nothing gets zeros before b_o. `rotary` rotates the terms by the context position and the gate by the query
    position; with "2d" the `num_prefix_tokens` in front of the grid stay as they are, as in EVA-02. With values of
    their own (`values=`) the gate reads the queries and the pool the values; nothing reads the keys.

    `decay`, which is not in the paper, makes the mixer causal and its mean forget: for token i, term j has the weight
    λ^(i-j), with one λ for each of `decay` heads of channels. The parameter is the logarithm of the time 1 / -ln λ,
    which starts at 4, 8, 16, … tokens.

    Raises: OptionError for options that do not fit together; ShapeError if rotary="2d" is called without a grid.

    Shapes: (B, N, D) -> (B, N, D).
    State: E sums and a count; with decay, a count per head. `prefill` and `step` take causal=K as well.
    Source: PoM, Eq. 1, 2 and 4-7, Proposition 3.1, Lemma 3.3 (on finitely many inputs: `lens.contextual_mapping`),
    Eq. 11 (`crossover`).
    """

    name = "pom"
    capabilities = Capabilities(
        causal=True,
        cross=True,
        values=True,
        masks=_MASKS,
        recurrent=True,
        isolates_future=True,
        isolates_segments=True,
        grids=(2,),
        sequence="sum",
    )
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
        with torch.no_grad():  # all powers contribute equally: α_p is scaled by 1 / E|u|^p of a normal u
            for p in range(1, config.degree + 1):
                moment = 2 ** (p / 2) * math.gamma((p + 1) / 2) * math.pi**-0.5
                self.alpha[:, p - 1].normal_(std=config.degree**-0.5 / moment)
        self.times: nn.Parameter | None = None
        if config.decay is not None:
            self.times = nn.Parameter(torch.arange(2, 2 + config.decay, **kw) * math.log(2.0))
            with torch.no_grad():  # a mean over few tokens is larger than one over many
                few = (2 * self.times.exp() * INIT_STD**2 / math.e).sqrt().clamp_max(1.0)
                self.proj.weight.mul_(few.repeat_interleave(self.inner // config.decay))
        flat, forgets = config.rotary == "2d", config.decay is not None
        masks = frozenset({"padding"}) if forgets else _MASKS - {"segments"} if flat else _MASKS
        self.capabilities = Capabilities(
            causal=True,
            cross=not flat and not forgets,
            values=True,
            masks=masks,
            recurrent=not flat,
            isolates_future=not forgets,
            isolates_segments="segments" in masks,
            grids=(2,) if flat else (),
            sequence="scan" if forgets else "sum",
        )

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        if self.config.rotary == "2d" and call.grid is None:
            raise ShapeError("grid", None, "grid=(H, W) in the call", 'Pass it: rotary="2d" needs rows and columns.')
        return ops.pom(
            x, context, self._weights, self._options, mask=call.mask, causal=call.causal, grid=call.grid,
            segments=call.segments, values=call.values, impl=self.config.impl,
        )  # fmt: skip

    def scan(self, x: Tensor, state: PomState | None, mask: Tensor | None) -> tuple[Tensor, PomState]:
        return ops.pom_chunk(x, state, self._weights, self._options, mask=mask, impl=self.config.impl)

    def scan_blocks(
        self, x: Tensor, state: PomState | None, mask: Tensor | None, block: int
    ) -> tuple[Tensor, PomState]:
        return ops.pom_chunk(x, state, self._weights, self._options, mask=mask, block=block, impl=self.config.impl)

    def summary(self, x: Tensor, mask: Tensor | None = None, place: Place | None = None, start: Any = None) -> Summary:
        options, position = self._options, self._place(x, mask, place)
        state, carry = ops.pom_summary(x, self._weights, options, mask=mask, position=position, impl=self.config.impl)
        return Summary(state, carry)

    def read_state(self, x: Tensor, state: PomState, mask: Tensor | None = None, place: Place | None = None) -> Tensor:
        return ops.pom_read(x, state, self._weights, self._options, position=self._place(x, mask, place))

    def _place(self, x: Tensor, mask: Tensor | None, place: Place | None) -> Tensor | None:
        """The positions of a part of a sequence in the whole; None without rotary positions."""
        if self.config.rotary is None:
            return None
        if self.config.rotary == "2d":
            assert place is not None
            return grid_positions(place.grid or (), place.total, x.device)[place.first : place.first + x.shape[1]]
        position = positions(x.shape[1], mask, None, x.device)
        return position if place is None else position + place.before[:, None]

    @property
    def _weights(self) -> PomWeights:
        poly, gate, proj = (affine(layer) for layer in (self.poly, self.gate, self.proj))
        return PomWeights(poly, gate, proj, self.alpha, self.times)

    @property
    def _options(self) -> PomOptions:
        config = self.config
        return PomOptions(config.activation, config.gate, config.reduction, config.rotary, config.selection_heads)

    def state_spec(self, batch: int) -> StateSpec:
        counts: Shape = Counts((batch,)) if self.times is None else (batch, len(self.times))  # decayed ones are sums
        return StateSpec(PomState, (batch, self.inner), counts)

    @property
    def polynomial(self) -> Polynomial:
        config = self.config
        if (config.activation, config.gate) != ("identity", "identity"):
            return Polynomial()
        return Polynomial(config.degree + 1, homogeneous=config.degree == 1 and not config.bias)

    @torch.no_grad()
    def inherit(self, attention: AttentionMaps) -> Sources:
        """Copy W_v into the first D rows of W_h, and the attention's output map into the first columns of W_o."""
        inherited: Sources = {}
        value, out = attention.value, attention.out
        if value is not None and self.config.groups == 1 and value.weight.shape[0] <= self.inner:
            rows = slice(0, value.weight.shape[0])
            sources = copy_map(value, self.poly.weight[rows], first_rows(self.poly.bias, rows))
            add_sources(inherited, "poly", sources)
        if out is not None and out.weight.shape[0] == self.dim and out.weight.shape[1] <= self.inner:
            add_sources(inherited, "proj", copy_map(out, self.proj.weight[:, : out.weight.shape[1]], self.proj.bias))
        return inherited

    def no_weight_decay(self) -> set[str]:
        return {"alpha"} if self.times is None else {"alpha", "times"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return {
            "W_h": self.poly.dense(), "W_s": self.gate.dense(), "W_o": self.proj.dense(), "alpha": self.alpha,
            "b_h": self.poly.bias, "b_s": self.gate.bias, "b_o": self.proj.bias,
            **({} if self.times is None else {"decay": (-(-self.times).exp()).exp()}),
        }  # fmt: skip

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        forgets = [] if self.times is None else [Op("matmul", (n, min(n, BLOCK), self.inner + len(self.times), 1))]
        return [linear_op(n, layer) for layer in (self.poly, self.gate)] + forgets + [linear_op(n, self.proj)]

    def crossover(self) -> float:
        """Number of tokens from which PoM needs fewer multiplications than attention (Eq. 11, as printed)."""
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
        """A mixer with the weights of a state dict of the PoM authors' code, and the same outputs.

        The authors' module uses a mean, a hard sigmoid and a clamped leaky ReLU. Missing biases become zeros.

        Args:
            state_dict: of the authors' module.
            degree, expand, n_groups: as passed to it.
            n_sel_heads: likewise; 0 and 1 both mean one gate for each channel.
            rotary: "1d" or "2d" for the authors' rotary module. Its tables are computed again.

        Raises:
            OptionError: keys or shapes do not fit the arguments.
        """
        weights = {key: value for key, value in state_dict.items() if not key.startswith(("freqs_", "row_", "col_"))}
        grouped = n_groups > 1
        keys = {"po_coeff", "ag_proj.weight"}
        keys |= {"po_proj.weight", "se_proj.weight", "se_proj.bias"} if grouped else {"qc_proj.weight", "se_bias"}
        optional = {"ag_proj.bias"} | ({"po_proj.bias"} if grouped else set())
        check_keys(weights, keys, optional, f", and at n_groups={n_groups}")
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
        degree: highest power k.
        expand: E / D.
        activation: h: "gelu", "relu", "identity" or "clamped_leaky_relu" (clamp(leaky_relu(x, 0.01), -0.1, 6)).
        gate: σ: "sigmoid", "hardsigmoid" or "identity".
        reduction: "mean", or "sum" as printed in the paper.
        selection_heads: number of scalar gates, each for E / selection_heads channels; None for a gate per channel.
        groups: number of blocks of W_h, each of which reads its own share of the channels.
        rotary: None, "1d" (positions count real tokens) or "2d" (pass grid=(H, W) in the call).
        num_prefix_tokens: with rotary="2d", tokens before the grid (class token, registers), which are not rotated.
        decay: number of heads whose causal mean forgets, each at its own learned rate; None as in the paper.
            torch.export then needs a fixed length.
    """

    name: ClassVar[str] = "pom"
    output: ClassVar[str] = "W_o [σ(W_s x) ⊙ mean Σₚ αₚ ⊙ h(W_h x)ᵖ]"
    cost_formula: ClassVar[str] = (
        "3 N D E; N D (E / groups + gates + E) if groups > 1 or selection_heads; "
        "plus N min(N, 32) (E + decay) if decay; where E = expand D; where gates = selection_heads or E; "
        "for calls without a mask (B, N, M), which adds N M E"
    )
    reads_keys: ClassVar[bool] = False  # the gate reads the queries, the pool the values
    sees: ClassVar[str] = "everything, the past, blocks, any mask, segments, a context"
    sees_all: ClassVar[str] = "decay=None"
    width_option: ClassVar[str | None] = "expand"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # of the authors' module, and of Eq. 1 and 2
        "paper": {"bias": True, "reduction": "mean", "activation": "clamped_leaky_relu", "gate": "hardsigmoid"},
        "equations": {"bias": False, "reduction": "sum", "activation": "gelu", "gate": "sigmoid"},
    }  # fmt: skip
    degree: int = 2
    expand: float = 2
    activation: str = "gelu"
    gate: str = "sigmoid"
    reduction: str = "mean"
    selection_heads: int | None = None
    groups: int = 1
    rotary: str | None = None
    num_prefix_tokens: int = 0
    decay: int | None = None

    def check(self) -> None:
        check_int("degree", self.degree, 1)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("gate", self.gate, GATES)
        check_choice("reduction", self.reduction, ("mean", "sum"))
        check_int("groups", self.groups, 1)
        check_choice("rotary", self.rotary, (None, *AXES))
        check_int("num_prefix_tokens", self.num_prefix_tokens, 0)
        if self.num_prefix_tokens and self.rotary != "2d":
            got = f"{self.num_prefix_tokens} with rotary={self.rotary!r}"
            raise OptionError("num_prefix_tokens", got, "0", "Leave it out: only rotary=2d asks where the grid begins.")
        if self.decay is not None:
            check_int("decay", self.decay, 1)
            for name, required in (("reduction", "mean"), ("rotary", None)):
                if getattr(self, name) != required:
                    got = f"{getattr(self, name)!r} with decay={self.decay}"
                    raise OptionError(
                        name, got, repr(required), f"Leave {name} out: decay already weighs tokens by distance."
                    )
        if self.selection_heads is not None:
            check_int("selection_heads", self.selection_heads, 1)
        check_number("expand", self.expand, 1e-6, math.inf, "a positive number", 2)

    @property
    def causal_by_build(self) -> bool:
        return self.decay is not None

    @property
    def prefix(self) -> int:
        return self.num_prefix_tokens

    def for_grid(self, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> PomConfig:
        config = super().for_grid(grid, num_prefix_tokens)
        return config.changed(num_prefix_tokens=num_prefix_tokens) if self.rotary == "2d" else config

    def without_grid(self) -> PomConfig:
        return self.changed(num_prefix_tokens=0)

    def for_rotary(self, base: float | None) -> PomConfig:
        return self.changed(rotary="1d") if base is not None and self.rotary is None and self.decay is None else self

    def call_options(self, grid: tuple[int, ...]) -> dict[str, Any]:
        return {"grid": grid} if self.rotary == "2d" else {}

    @property
    def width_unit(self) -> int:
        pairs = 1 if self.rotary is None else 2 * AXES[self.rotary]
        return math.lcm(self.groups, self.selection_heads or 1, self.decay or 1, pairs)

    def with_width(self, width: int, dim: int) -> PomConfig:
        return self.changed(expand=width / dim)

    def inner(self, dim: int) -> int:
        """D_inner for `dim` channels, after the checks that depend on it."""
        inner = round(self.expand * dim)
        if inner < 1 or abs(inner - self.expand * dim) > 1e-6:
            raise OptionError(
                "expand", self.expand, f"a factor that makes expand · {dim} whole", "Change expand or dim."
            )
        check_divides("groups", self.groups, "dim", dim)
        check_divides("groups", self.groups, "expand · dim", inner)
        check_divides("decay", self.decay or 1, "expand · dim", inner)
        if self.selection_heads is not None:
            check_divides("selection_heads", self.selection_heads, "expand · dim", inner)
        if self.rotary is not None:
            pairs = 2 * AXES[self.rotary]
            for name, width in (("expand · dim", inner), ("selection_heads", self.selection_heads or inner)):
                if width % pairs:
                    allowed = f"{name} to be a multiple of {pairs}"
                    raise OptionError("rotary", f"{self.rotary!r} with {name}={width}", allowed, f"Change {name}.")
        return inner


PoM = PomMixer
