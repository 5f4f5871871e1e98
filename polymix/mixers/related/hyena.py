"""Hyena: gates with convolutions as long as the sequence between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError, check_choice, check_int, check_number
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import ScanConfig
from polymix.mixers.loading import check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import StateSpec
from polymix.ops.shared.fft_conv import causal_fft_conv, fft_size
from polymix.ops.shared.sequences import after_window, causal_conv, next_window, scan_order, without_padding
from polymix.ops.shared.tensors import Shape, accumulator, without_autocast
from polymix.structured.conv import conv_matrix
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense
from polymix.structured.toeplitz import at_lag

MAX_DIRECT_TAPS = 64  # up to this many taps a direct convolution is faster than FFTs, and exactly causal
_IMPLICIT = ("filter_width", "filter_depth", "emb_dim", "frequency", "shift")  # options of the network


class HyenaState(NamedTuple):
    """The last inputs of the short convolution (B, k - 1, (order + 1) D) and of each long one (B, length - 1, D)."""

    short: Tensor
    long: tuple[Tensor, ...]


class HyenaMixer(TokenMixer):
    """Hyena: products of `order` + 1 projections, with causal convolutions as long as the sequence between them.

        [x_0, …, x_{order-1}, v] = conv_k(X W_in + b_in) + b_short     causal, a kernel per channel
        v ← h_s * (v ⊙ x_{order-s}) + bias_s ⊙ (v ⊙ x_{order-s})       s = 1 … order - 1
        Y = (v ⊙ x_0) W_out + b_out

    `order` counts as in the authors' code: order 2 has two gates and ONE long convolution. The paper's operator of
    order N has N convolutions: it also filters before the first gate, which the code leaves to the short convolution.
    Both are polynomials of degree order + 1 in X, homogeneous without biases, as the filters h do not depend on X.
    The filters come from a small network of the position ("implicit"), or are `length` learned taps ("explicit").

    Convolutions of more than 64 taps use FFTs, which are causal up to rounding. Padding is skipped. With explicit
    filters there is a recurrent form.

    `bidirectional`, which is not in the paper, adds a second branch: its own conv_k, h and bias (`self.back`) read
    X W_in + b_in from the last token to the first, and its v ⊙ x_0 is added before W_out. It is not causal and has no
    state. With class_token="middle" both branches meet the prefix tokens after half of the others.

    Raises: OptionError for class_token="middle" without prefix tokens; ShapeError for more than `length` tokens with
    implicit filters.

    Shapes: (B, N, D) -> (B, N, D), N ≤ length with implicit filters.
    State: D (order - 1) (length - 1) + D (order + 1) (k - 1) numbers.
    Source: Poli et al. (2023); PADRe, Eq. 35-50.
    """

    name = "hyena"
    capabilities = Capabilities(
        causal=True, masks=frozenset({"padding"}), recurrent=True, isolates_future=True, sequence="channels"
    )
    config: HyenaConfig
    short_filter: Any
    filter: Any
    skip: Any

    def __init__(self, config: HyenaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        config.check_built()
        explicit, one_way = config.filter == "explicit", not config.bidirectional
        self.capabilities = Capabilities(
            causal=one_way,
            masks=frozenset({"padding"}),
            recurrent=explicit and one_way,
            any_length=explicit,
            isolates_future=explicit and config.length <= MAX_DIRECT_TAPS and one_way,
            sequence="channels",
        )
        self.in_proj = Dense(dim, (config.order + 1) * dim, config.bias, **kw)
        _add_filters(self, config, dim, **kw)
        self.out_proj = Dense(dim, dim, config.bias, **kw)
        self.back: nn.Module | None = None
        if config.bidirectional:
            self.back = nn.Module()
            _add_filters(self.back, config, dim, **kw)
        _draw_filters(self, config)
        if self.back is not None:
            _draw_filters(self.back, config)
        with torch.no_grad():
            self.out_proj.weight *= INIT_STD * (1 if one_way else 0.5**0.5)

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        self.check_length(x.shape[1])
        if self.back is None:
            return self.scan(x, None, call.mask)[0]
        out: Tensor = self.out_proj(self.of_channels(self.in_proj(x), call.mask, slice(None)))
        return out

    def check_length(self, n: int) -> None:
        """Raise ShapeError for more tokens than implicit filters are scaled to."""
        if self.config.filter == "implicit" and n > self.config.length:
            allowed = f"at most length={self.config.length}, which the filters are scaled to"
            cure = "Build it with a larger length, or with filter='explicit' for any N."
            raise ShapeError("x", f"{n} tokens", allowed, cure)

    def scan(self, x: Tensor, state: HyenaState | None, mask: Tensor | None) -> tuple[Tensor, HyenaState]:
        ends: list[HyenaState] = []

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            y, end = self._branch(self, self.in_proj(x), real, state)
            ends.append(end)
            return y

        return self.out_proj(without_padding(x, mask, run)), ends[0]

    def of_channels(self, u: Tensor, mask: Tensor | None, channels: slice) -> Tensor:
        """What W_out reads of some channels: for processes that share the channels of X W_in + b_in.

        Args:
            u: X W_in + b_in of all tokens, (B, N, (order + 1) d): those channels of x_0, …, x_{order-1} and v.
            mask: (B, N), True for real tokens.
            channels: which d of the D channels of each.
        """
        prefix = 0 if self.back is None else self.config.num_prefix_tokens

        def direction(part: Any) -> Tensor:
            run = lambda u, real: self._branch(part, u, real, None, channels)[0]  # noqa: E731
            return scan_order(u, mask, run, backward=part is not self, prefix=prefix)

        return direction(self) if self.back is None else direction(self) + direction(self.back)

    def _branch(
        self, part: Any, u: Tensor, real: Tensor | None, state: HyenaState | None, channels: slice = slice(None)
    ) -> tuple[Tensor, HyenaState]:
        """The convolutions and gates of one direction, with the filters of `part`."""
        n, gated = u.shape[1], self.config.order + 1
        weight, bias = (
            None if p is None else p.unflatten(0, (gated, -1))[:, channels].flatten(0, 1)
            for p in (part.short_filter.weight, part.short_filter.bias)
        )
        assert weight is not None
        u, seen = causal_conv(u, weight, bias, None if state is None else state.short)
        *gates, v = u.chunk(gated, dim=-1)
        taps, skip = part.filter(n)[:, channels], part.skip.view(self.dim, -1)[channels]
        windows = []
        for s, gate in enumerate(reversed(gates[1:])):
            v = v * gate
            past = None if state is None else state.long[s]
            long, whole = self._long_conv(v, taps[s], past)
            v = long.to(v.dtype) + skip[:, s].to(v.dtype) * v
            if whole is not None:
                windows.append(next_window(whole, n, real))
        return v * gates[0], HyenaState(next_window(seen, n, real), tuple(windows))

    def _long_conv(self, v: Tensor, taps: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Σ_t taps[t] v[n - t]; with explicit filters also the window and v joined."""
        if self.config.filter == "implicit":
            return causal_fft_conv(v.transpose(1, 2), taps).transpose(1, 2), None
        if self.config.length <= MAX_DIRECT_TAPS:
            return causal_conv(v, taps.flip(-1).unsqueeze(1), None, past)
        reach = self.config.length - 1
        seen = after_window(v, v.new_zeros(v.shape[0], reach, v.shape[2]) if past is None else past)
        rows = v if past is None else seen  # leading zeros would only make the transform longer
        y = causal_fft_conv(rows.transpose(1, 2), taps).transpose(1, 2)
        return (y if past is None else y[:, reach:]), seen

    def state_spec(self, batch: int) -> StateSpec:
        config = self.config
        long: list[Shape] = [(batch, config.length - 1, self.dim)] * (config.order - 1)
        return StateSpec(HyenaState, (batch, config.kernel_size - 1, (config.order + 1) * self.dim), long)

    @property
    def polynomial(self) -> Polynomial:
        return Polynomial(self.config.order + 1, homogeneous=not self.config.bias)

    def no_weight_decay(self) -> set[str]:
        own = {"filter.z", "filter.frequency"} if self.config.filter == "implicit" else set()
        own |= {"skip"}
        return own if self.back is None else own | {f"back.{name}" for name in own}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """With `bidirectional`, "back" holds the other branch's, for tokens in reverse. All are in the scan's order."""
        back = {} if self.back is None else {"back": self._filter_matrices(self.back, n)}
        return {
            "W_in": self.in_proj.weight.t(), "b_in": self.in_proj.bias, **self._filter_matrices(self, n), **back,
            "W_out": self.out_proj.weight.t(), "b_out": self.out_proj.bias,
        }  # fmt: skip

    def _filter_matrices(self, part: Any, n: int) -> dict[str, Any]:
        taps = part.filter(n)
        place = torch.arange(n, device=taps.device)
        eye = torch.eye(n, device=taps.device, dtype=taps.dtype)
        skip = part.skip.view(self.dim, -1).t()[..., None, None] * eye
        return {
            "T": conv_matrix(part.short_filter.weight, (n,), causal=True), "b_short": part.short_filter.bias,
            "H": list((at_lag(taps, place[:, None] - place) + skip).unbind()), "h": taps[..., :n],
            "bias": part.skip.view(self.dim, -1).t(),
        }  # fmt: skip

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        config, steps = self.config, self.config.order - 1
        short = Op("depthwise", (n,), (config.kernel_size,), (config.order + 1) * self.dim)
        if config.filter == "explicit" and config.length <= MAX_DIRECT_TAPS:
            long = Op("depthwise", (n,), (config.length,), self.dim)
        else:  # transforms of v and of the taps, and back
            long = Op("fft", (3 * self.dim, fft_size(n + min(n, config.length) - 1)))
        branch = [short, *self.filter.cost_ops(n), *[long] * steps]
        return [linear_op(n, self.in_proj), *branch * (1 + config.bidirectional), linear_op(n, self.out_proj)]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], *, k: Tensor | None = None, **options: Any) -> HyenaMixer:
        """A mixer with the weights of the authors' operator, and the same outputs.

        With filter="explicit" the taps are `k`, or "k" in the state dict: (order - 1, D, length), as their filter
        returns them; the weights of implicit filters are then not needed. Widths come from the weights. Raises
        OptionError for keys or shapes that do not fit.
        """
        names = {"d_model": None, "l_max": "length", "filter_order": "filter_width", "num_inner_mlps": "filter_depth"}
        settings = translate(HyenaConfig, options, {**names, "w": "frequency", "short_filter_order": "kernel_size"})
        weights = dict(state_dict) if k is None else {**state_dict, "k": k}
        explicit = settings.get("filter") == "explicit"
        if settings.get("bidirectional"):
            got = "True, for weights of one direction"
            raise OptionError("bidirectional", got, "False", "Leave it out, and load the second branch yourself.")
        plain = ["in_proj.weight", "short_filter.weight", "out_proj.weight", "filter_fn.bias"]
        biases = ["in_proj.bias", "short_filter.bias", "out_proj.bias"]
        mlp = "filter_fn.implicit_filter"
        depth = sum(key.startswith(mlp) and key.endswith(".bias") for key in weights)
        implicit = [f"{mlp}.{2 * i}.{part}" for i in range(depth) for part in ("weight", "bias")]
        implicit += [f"{mlp}.{2 * i + 1}.freq" for i in range(depth)] + [f"{mlp}.{2 * depth}.weight"]
        implicit += ["filter_fn.pos_emb.z", "filter_fn.pos_emb.t", "filter_fn.modulation.deltas"]
        check_keys(weights, [*plain, "k"] if explicit else plain + implicit, biases + implicit if explicit else biases)
        dim = weights["out_proj.weight"].shape[0]
        settled: dict[str, Any] = {
            "order": weights["in_proj.weight"].shape[0] // dim - 1, "bias": any(key in weights for key in biases),
            "kernel_size": weights["short_filter.weight"].shape[-1],
        }  # fmt: skip
        if explicit:
            settled["length"] = weights["k"].shape[-1]
            settings = {key: value for key, value in settings.items() if key not in (*_IMPLICIT, "length")}
        else:
            settled |= {"length": weights["filter_fn.pos_emb.z"].shape[1], "filter_depth": depth - 1,
                        "emb_dim": weights["filter_fn.pos_emb.z"].shape[2],
                        "filter_width": weights[f"{mlp}.0.weight"].shape[0]}  # fmt: skip
        settings = options_beyond_weights(settings, settled)
        like = weights["out_proj.weight"]
        mixer = cls(HyenaConfig(**{**settings, **settled}), dim, device=like.device, dtype=like.dtype)
        new = {key: weights[key] for key in plain[:3]} | {"skip": weights["filter_fn.bias"]}
        if settled["bias"]:
            own = mixer.state_dict()
            new |= {key: weights.get(key, torch.zeros_like(own[key])) for key in biases}
        if explicit:
            new["filter.taps"] = weights["k"]
        else:
            for i in range(depth):
                new |= {f"filter.layers.{i}.{part}": weights[f"{mlp}.{2 * i}.{part}"] for part in ("weight", "bias")}
            new |= {"filter.last.weight": weights[f"{mlp}.{2 * depth}.weight"],
                    "filter.frequency": weights[f"{mlp}.1.freq"][0], "filter.z": weights["filter_fn.pos_emb.z"][0],
                    "filter.t": weights["filter_fn.pos_emb.t"].flatten(),
                    "filter.deltas": weights["filter_fn.modulation.deltas"].flatten()}  # fmt: skip
        load(mixer, new, "Check order and the widths.")
        return mixer


def _add_filters(part: nn.Module, config: HyenaConfig, dim: int, **kw: Any) -> None:
    """Give `part` what a direction has of its own: the short filter, the long ones and their skips."""
    channels, steps = (config.order + 1) * dim, config.order - 1
    part.short_filter = nn.Conv1d(channels, channels, config.kernel_size, groups=channels, bias=config.bias, **kw)
    part.filter = (ExplicitFilter if config.filter == "explicit" else ImplicitFilter)(config, dim * steps, **kw)
    part.skip = nn.Parameter(torch.empty(dim * steps, **kw))  # the steps of a channel are adjacent


@torch.no_grad()
def _draw_filters(part: Any, config: HyenaConfig) -> None:
    """Draw the short filter and the skips of a direction; the long filters are drawn as they are built."""
    part.short_filter.weight.normal_(std=config.kernel_size**-0.5)
    if part.short_filter.bias is not None:
        part.short_filter.bias.zero_()
    part.skip.normal_()


def decay_rates(config: HyenaConfig, channels: int) -> Tensor:
    """Decay rates from slow to fast, evenly spaced over the channels."""
    slow, fast = config.decay
    return torch.linspace(slow, fast, channels, dtype=torch.float64)


class ImplicitFilter(nn.Module):
    """taps[t] = (e^(-δ t') + shift) ⊙ MLP(z_t), t' = t / (length - 1), for (order - 1) D channels.

    z_t, learned, starts as [t', cos 2π f t / length, -sin 2π f t / length], f from 0.0001 in steps of about 1. The
    MLP has `filter_depth` inner layers with the activation sin(frequency ⊙ ·), where all layers share one learned
    frequency per unit. Computed at least in float32. Weights cast to bf16 keep three digits of a position, too few
    for filters of more than some hundred taps; use autocast there.
    """

    def __init__(self, config: HyenaConfig, channels: int, **kw: Any) -> None:
        super().__init__()
        self.config = config
        length, width, bands = config.length, config.filter_width, (config.emb_dim - 1) // 2
        t = torch.linspace(0, 1, length, dtype=torch.float64)
        f = torch.linspace(1e-4, bands - 1, bands, dtype=torch.float64)
        angle = 2 * math.pi * torch.arange(length, dtype=torch.float64)[:, None] / length * f
        like = torch.empty(0, **kw)
        z = torch.cat((t[:, None], angle.cos(), -angle.sin()), dim=1).to(like)
        self.z = nn.Parameter(z)
        self.register_buffer("t", t.to(like))
        self.register_buffer("deltas", decay_rates(config, channels).to(like))
        widths = chain((config.emb_dim,), repeat(width, config.filter_depth))  # one by one, so that a limit can stop it
        self.layers = nn.ModuleList(nn.Linear(inside, width, **kw) for inside in widths)
        self.last = nn.Linear(width, channels, bias=False, **kw)
        self.frequency = nn.Parameter(torch.full((width,), float(config.frequency), **kw))
        if self.z.device.type != "meta":
            self._scale()

    @torch.no_grad()
    def _scale(self) -> None:
        """Scale the taps to unit energy per channel on average, estimated from about a thousand taps."""
        places = torch.linspace(0, self.config.length - 1, min(1024, self.config.length), device=self.z.device).long()
        energy = self._taps(places).square().sum(0).mean() * (self.config.length / len(places))
        self.last.weight /= energy.sqrt().clamp_min(1e-6).to(self.last.weight.dtype)

    def forward(self, n: int) -> Tensor:
        """The first n taps (order - 1, D, n), at least in float32."""
        taps = self._taps(slice(0, n)).transpose(0, 1)  # (D (order - 1), n), the steps of a channel adjacent
        return taps.unflatten(0, (-1, self.config.order - 1)).transpose(0, 1)

    def _taps(self, places: Tensor | slice) -> Tensor:
        wide = accumulator(self.z.dtype)
        with without_autocast(self.z.device):
            h = self.z[places].to(wide)
            for layer in self.layers:
                assert isinstance(layer, nn.Linear)
                h = torch.sin(self.frequency.to(wide) * F.linear(h, layer.weight.to(wide), layer.bias.to(wide)))
            h = F.linear(h, self.last.weight.to(wide))
            t, deltas = self.get_buffer("t")[places].to(wide), self.get_buffer("deltas").to(wide)
            return h * (torch.exp(-t[:, None] * deltas.abs()) + self.config.shift)

    def cost_ops(self, n: int) -> list[Op]:
        layers = [layer for layer in (*self.layers, self.last) if isinstance(layer, nn.Linear)]
        return [linear_op(n, layer) for layer in layers]


class ExplicitFilter(nn.Module):
    """`length` learned taps per channel and step, (order - 1, D, length), initialised as decaying noise."""

    def __init__(self, config: HyenaConfig, channels: int, **kw: Any) -> None:
        super().__init__()
        steps = config.order - 1
        self.taps = nn.Parameter(torch.empty(steps, channels // steps, config.length, **kw))
        t = torch.linspace(0, 1, config.length, dtype=torch.float64)
        shape = torch.exp(-decay_rates(config, channels // steps)[:, None] * t)
        shape /= shape.square().sum(1, keepdim=True).sqrt()
        with torch.no_grad():
            self.taps.normal_().mul_(shape.to(self.taps))

    def forward(self, n: int) -> Tensor:
        return self.taps

    def cost_ops(self, n: int) -> list[Op]:
        return []


@register(HyenaMixer)
@dataclass(frozen=True, kw_only=True)
class HyenaConfig(ScanConfig):
    """Options of Hyena.

    Args:
        order: number of gates; there are order - 1 long convolutions.
        filter: "implicit" (taps from a network of the position) or "explicit" (learned taps).
        length: implicit: longest sequence, to which positions and decay are scaled. Explicit: taps of a filter.
        kernel_size: taps k of the short convolution.
        decay: decay rates of the taps over `length`, for the first and the last channel. For explicit taps only at
            init.
        filter_width: width of the network.
        filter_depth: number of its inner layers.
        emb_dim: size of its positional encoding, odd: 2 bands + 1.
        frequency: initial frequency of its sine activation.
        shift: value to which the decay tends.
    """

    name: ClassVar[str] = "hyena"
    output: ClassVar[str] = "gates with long convolutions between them"
    cost_formula: ClassVar[str] = (
        "(order + 2) N D² + (order + 1) N D kernel_size + (order - 1) T; "
        "plus N w (emb_dim + filter_depth w + (order - 1) D) if filter = implicit; "
        "minus (order - 1) (T - N D length) if filter = explicit and length ≤ 64; "
        "plus (order + 1) N D kernel_size + (order - 1) T if bidirectional; "
        "plus N w (emb_dim + filter_depth w + (order - 1) D) if filter = implicit and bidirectional; "
        "minus (order - 1) (T - N D length) if filter = explicit and length ≤ 64 and bidirectional; "
        "where w = filter_width; where T = ⌈3.75 D L log₂(L)⌉; for FFTs of length L ≥ N + min(N, length) - 1"
    )
    sees: ClassVar[str] = "the past, or everything"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"bias": True}, "equations": {"bias": False}}
    order: int = 2
    filter: str = "implicit"
    length: int = 1024
    kernel_size: int = 3
    decay: tuple[float, float] = (math.log(100) / 1.5, math.log(100) / 0.3)
    filter_width: int = 64
    filter_depth: int = 2
    emb_dim: int = 3
    frequency: float = 1.0
    shift: float = 0.0

    def check(self) -> None:
        super().check()
        check_int("order", self.order, 2)
        check_choice("filter", self.filter, ("implicit", "explicit"))
        check_int("length", self.length, 1)
        check_int("kernel_size", self.kernel_size, 1)
        rates = self.decay if isinstance(self.decay, (tuple, list)) else ()
        if len(rates) != 2 or not all(isinstance(rate, (int, float)) and rate >= 0 for rate in rates):
            raise OptionError("decay", repr(self.decay), "two rates of at least 0", "Pass decay=(3, 15), for example.")
        check_int("filter_width", self.filter_width, 1)
        check_int("filter_depth", self.filter_depth, 0)
        check_int("emb_dim", self.emb_dim, 3)
        if self.emb_dim % 2 == 0:
            raise OptionError(
                "emb_dim",
                self.emb_dim,
                "an odd number of at least 3: a time, cosines and sines",
                f"Pass {self.emb_dim + 1}.",
            )
        check_number("frequency", self.frequency, -math.inf, math.inf, "a number", 1.0)
        check_number("shift", self.shift, -math.inf, math.inf, "a number", 0.0)
        if self.filter == "explicit":
            for option in fields(self):
                if option.name in _IMPLICIT and getattr(self, option.name) != option.default:
                    got = f"{getattr(self, option.name)!r} with filter='explicit'"
                    raise OptionError(
                        option.name,
                        got,
                        "filter='implicit', as explicit taps have no network",
                        f"Leave {option.name} out.",
                    )
