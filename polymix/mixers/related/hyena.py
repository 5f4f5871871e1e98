"""Hyena: gates with convolutions as long as the sequence between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.errors import ShapeError
from polymix.mixers.checks import MixerCall
from polymix.mixers.loading import check_keys, load, settle, translate
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.hyena_config import HyenaConfig
from polymix.mixers.related.hyena_filters import ExplicitFilter, ImplicitFilter
from polymix.ops.shared.fft_conv import causal_fft_conv, fft_size
from polymix.ops.shared.sequences import after_window, causal_conv, next_window, without_padding
from polymix.structured.conv import conv_matrix
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense
from polymix.structured.toeplitz import at_lag

DIRECT = 64  # up to so many taps a convolution costs less than the transforms for it, and is causal to the last bit


class HyenaState(NamedTuple):
    """The last inputs of the short convolution (B, k - 1, (order + 1) D) and of each long one (B, length - 1, D)."""

    short: Tensor
    long: tuple[Tensor, ...]


class HyenaMixer(TokenMixer):
    """Products of `order` + 1 projections with long causal convolutions between them (Hyena; Poli et al. 2023).

        [x_0, …, x_{order-1}, v] = conv_k(X W_in + b_in) + b_short            k = 3, causal, one kernel a channel
        v ← h_s * (v ⊙ x_{order-s}) + bias_s ⊙ (v ⊙ x_{order-s})             s = 1 … order - 1
        Y = (v ⊙ x_0) W_out + b_out

    `order` counts as the authors' code does: order 2 is two gates and ONE long convolution. The paper's operator of
    order N has N convolutions; it is the code's with a filter before the first gate too, which the code leaves to the
    short convolution. Both are polynomials of degree order + 1 in X (3 at order 2), homogeneous without biases; the
    filters h do not depend on X. They come from a network of the position (implicit) or are `length` taps (explicit).

    Shapes: (B, N, D) -> (B, N, D), N ≤ length for implicit filters. Cost: (order + 2) N D² + 3 (order + 1) N D and,
    for each of order - 1 convolutions, about 7.5 N D log₂ 2N multiply-adds by FFT (N D length for up to 64 explicit
    taps), plus the network that makes implicit taps, N D width. Causal by build (by FFT up to rounding); padding is as
    if it were not there. Recurrent with explicit filters; state: D (order - 1) (length - 1) + D (order + 1) (k - 1).
    Source: PD-036 … PD-038, PD-061.
    """

    name = "hyena"
    capabilities = Capabilities(causal=True, masks=frozenset({"padding"}), recurrent=True)
    config: HyenaConfig

    def __init__(self, config: HyenaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        channels, steps = (config.order + 1) * dim, config.order - 1
        explicit = config.filter == "explicit"
        self.capabilities = Capabilities(
            causal=True, masks=frozenset({"padding"}), recurrent=explicit, any_length=explicit
        )
        self.in_proj = Dense(dim, channels, config.bias, **kw)
        self.short_filter = nn.Conv1d(channels, channels, config.kernel_size, groups=channels, bias=config.bias, **kw)
        self.filter = (ExplicitFilter if explicit else ImplicitFilter)(config, dim * steps, **kw)
        self.skip = nn.Parameter(torch.empty(dim * steps, **kw))  # a channel's steps lie together
        self.out_proj = Dense(dim, dim, config.bias, **kw)
        with torch.no_grad():
            self.short_filter.weight.normal_(std=config.kernel_size**-0.5)
            if self.short_filter.bias is not None:
                self.short_filter.bias.zero_()
            self.skip.normal_()
            self.out_proj.weight *= INIT_STD

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        if self.config.filter == "implicit" and x.shape[1] > self.config.length:
            raise ShapeError(
                "x", f"{x.shape[1]} tokens", f"at most length={self.config.length}, to which the filters are scaled",
                "Build it with a greater length, or with filter='explicit', which takes any N.",
            )  # fmt: skip
        return self.scan(x, None, call.mask)[0]

    def scan(self, x: Tensor, state: HyenaState | None, mask: Tensor | None) -> tuple[Tensor, HyenaState]:
        ends: list[HyenaState] = []

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            n = x.shape[1]
            u, seen = causal_conv(
                self.in_proj(x),
                self.short_filter.weight,
                self.short_filter.bias,
                None if state is None else state.short,
            )
            *gates, v = u.chunk(self.config.order + 1, dim=-1)
            taps, skip = self.filter(n), self.skip.view(self.dim, -1)
            windows = []
            for s, gate in enumerate(reversed(gates[1:])):
                v = v * gate
                past = None if state is None else state.long[s]
                long, whole = self._long_conv(v, taps[s], past)
                v = long.to(v.dtype) + skip[:, s].to(v.dtype) * v
                if whole is not None:
                    windows.append(next_window(whole, n, real))
            ends.append(HyenaState(next_window(seen, n, real), tuple(windows)))
            return v * gates[0]

        return self.out_proj(without_padding(x, mask, run)), ends[0]

    def _long_conv(self, v: Tensor, taps: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Σ_t taps[t] v[n - t], and with explicit filters the window and v together."""
        if self.config.filter == "implicit":
            return causal_fft_conv(v.transpose(1, 2), taps).transpose(1, 2), None
        if self.config.length <= DIRECT:
            return causal_conv(v, taps.flip(-1).unsqueeze(1), None, past)
        reach = self.config.length - 1
        seen = after_window(v, v.new_zeros(v.shape[0], reach, v.shape[2]) if past is None else past)
        rows = v if past is None else seen  # zeros in front would only make the transform longer
        y = causal_fft_conv(rows.transpose(1, 2), taps).transpose(1, 2)
        return (y if past is None else y[:, reach:]), seen

    def check_state(self, state: Any, x: Tensor) -> str | None:
        batch, config = x.shape[0], self.config
        short = (batch, config.kernel_size - 1, (config.order + 1) * self.dim)
        long = [(batch, config.length - 1, self.dim)] * (config.order - 1)
        if isinstance(state, HyenaState):
            shapes = tuple(state.short.shape), [tuple(window.shape) for window in state.long]
            if shapes == (short, long):
                return None
        return f"a HyenaState of short {short} and long {long}"

    @property
    def polynomial(self) -> Polynomial:
        return Polynomial(self.config.order + 1, homogeneous=not self.config.bias)

    def no_weight_decay(self) -> set[str]:
        own = {"filter.z", "filter.frequency"} if self.config.filter == "implicit" else set()
        return {"skip"} | own

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        taps = self.filter(n)
        place = torch.arange(n, device=taps.device)
        eye = torch.eye(n, device=taps.device, dtype=taps.dtype)
        skip = self.skip.view(self.dim, -1).t()[..., None, None] * eye
        return {
            "W_in": self.in_proj.weight.t(), "b_in": self.in_proj.bias,
            "T": conv_matrix(self.short_filter.weight, (n,), causal=True), "b_short": self.short_filter.bias,
            "H": list((at_lag(taps, place[:, None] - place) + skip).unbind()), "h": taps[..., :n],
            "bias": self.skip.view(self.dim, -1).t(),
            "W_out": self.out_proj.weight.t(), "b_out": self.out_proj.bias,
        }  # fmt: skip

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        config, steps = self.config, self.config.order - 1
        short = Op("depthwise", (n,), (config.kernel_size,), (config.order + 1) * self.dim)
        if config.filter == "explicit" and config.length <= DIRECT:
            long = Op("depthwise", (n,), (config.length,), self.dim)
        else:  # of v, of the taps and back
            long = Op("fft", (3 * self.dim, fft_size(n + min(n, config.length) - 1)))
        return [
            linear_op(n, self.in_proj),
            short,
            *self.filter.cost_ops(n),
            *[long] * steps,
            linear_op(n, self.out_proj),
        ]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], *, k: Tensor | None = None, **options: Any) -> HyenaMixer:
        """A mixer with the weights, and the outputs, of a state dict of the authors' operator.

        With filter="explicit" the taps are `k`, or the state dict's "k": (order - 1, D, length), as their filter
        returns them; what makes implicit taps may then be left out. Widths come from the weights. Raises OptionError
        for keys or shapes that do not fit.
        """
        names = {"d_model": None, "l_max": "length", "filter_order": "filter_width", "num_inner_mlps": "filter_depth"}
        found = translate(HyenaConfig, options, {**names, "w": "frequency", "short_filter_order": "kernel_size"})
        weights = dict(state_dict) if k is None else {**state_dict, "k": k}
        explicit = found.get("filter") == "explicit"
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
            found = {key: value for key, value in found.items() if key not in (*_NETWORK, "length")}
        else:
            settled |= {"length": weights["filter_fn.pos_emb.z"].shape[1], "filter_depth": depth - 1,
                        "emb_dim": weights["filter_fn.pos_emb.z"].shape[2],
                        "filter_width": weights[f"{mlp}.0.weight"].shape[0]}  # fmt: skip
        found = settle(found, settled)
        like = weights["out_proj.weight"]
        mixer = cls(HyenaConfig(**{**found, **settled}), dim, device=like.device, dtype=like.dtype)
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


_NETWORK = ("filter_width", "filter_depth", "emb_dim", "frequency", "shift")  # what explicit taps play no part in

register(HyenaMixer)(HyenaConfig)
