"""Mamba's mixer, on the layer of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, OptionError, check_int, check_number
from polymix.extras import needs
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import ScanConfig
from polymix.mixers.loading import check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Place, StateSpec, Summary
from polymix.ops.related.selective_scan import selective_scan, selective_summary
from polymix.ops.shared.sequences import causal_conv, next_window, scan_order, without_padding
from polymix.ops.shared.tensors import accumulator
from polymix.structured.base import init_
from polymix.structured.conv import conv_matrix
from polymix.structured.cost import Op, linear_op


class MambaState(NamedTuple):
    """The convolution's last k - 1 inputs (B, k - 1, E) and the recurrence's state (B, E, S), at least float32."""

    window: Tensor
    hidden: Tensor

    def merge(self, later: MambaState, carry: Tensor | None = None) -> MambaState:
        """The state after both parts of a sequence, if `later` continued from this window.

        carry: what `later` has left of earlier states, (B, E, S).
        """
        hidden = later.hidden + (self.hidden if carry is None else carry * self.hidden)
        return MambaState(later.window, hidden)


class MambaMixer(TokenMixer):
    """Mamba: a linear recurrence whose decay, input and output depend on the token.

        [U, Z] = X W_in + b_in,    U ← silu(conv_k(U) + b_conv)     causal, a kernel per channel, E = expand · D
        Δ  = softplus(U W_Δ1 W_Δ2 + b_Δ),   B = U W_B,   C = U W_C
        h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t u_t B_t,    y_t = C_t · h_t + D ⊙ u_t     A = -exp(A_log), E × S
        Y  = (y ⊙ silu(Z)) W_out + b_out

    The parameters are those of transformers' layer (`self.layer`), under its names, with its initialisation of A, D,
    Δ and the convolution; W_in and W_out start as in all mixers here. The layer's own forward is not used, because it
    has no chunked prefill, and padding would change its convolution and state. Here padding is skipped. Training
    keeps two arrays of (B, N, E, S). Because of exp, silu and softplus it is not a polynomial.

    `bidirectional` is Vision Mamba's form: a second branch, with its own convolution, W_Δ1, W_Δ2, b_Δ, W_B, W_C, A and
    D (`self.back`), reads U from the last token to the first, and Y = ((y + y_back) ⊙ silu(Z)) W_out + b_out. It is
    not causal and has no state. With class_token="middle" both scans meet the prefix tokens after half of the others.

    Raises: OptionError for class_token="middle" without prefix tokens; MissingExtraError without transformers.

    Shapes: (B, N, D) -> (B, N, D).
    State: E (S + k - 1) numbers.
    Source: Gu and Dao (2023); Zhu et al. (2024), Vision Mamba, Algorithm 1 (bidirectional).
    """

    name = "mamba"
    capabilities = Capabilities(
        causal=True, masks=frozenset({"padding"}), recurrent=True, isolates_future=True, sequence="scan"
    )
    config: MambaConfig

    def __init__(self, config: MambaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        config.check_built()
        self.layer = _layer(config, dim, **kw)
        self.back = _Branch(_layer(config, dim, **kw)) if config.bidirectional else None
        if config.bidirectional:
            self.capabilities = Capabilities(masks=frozenset({"padding"}))
        self.inner: int = self.layer.intermediate_size
        self.sizes: tuple[int, int, int] = (self.layer.time_step_rank, config.state_size, config.state_size)
        with torch.no_grad():
            for linear in (self.layer.in_proj, self.layer.out_proj):
                init_(linear.weight, linear.in_features)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            if self.back is not None:  # two branches are added
                self.layer.out_proj.weight.mul_(0.5**0.5)

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        if self.back is None:
            return self.scan(x, None, call.mask)[0]
        u, z = self.layer.in_proj(x).chunk(2, dim=-1)

        def branch(part: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
            return lambda u, real: self._branch(part, u, None, real, None)[0]

        y = self._ordered(u, call.mask, branch(self.layer)) + self._ordered(u, call.mask, branch(self.back), True)
        wide = accumulator(y.dtype)
        out: Tensor = self.layer.out_proj((y.to(wide) * F.silu(z.to(wide))).to(y.dtype))
        return out

    def _ordered(
        self, u: Tensor, mask: Tensor | None, run: Callable[[Tensor, Tensor | None], Tensor], backward: bool = False
    ) -> Tensor:
        return scan_order(u, mask, run, backward=backward, prefix=self.config.num_prefix_tokens)

    def scan(self, x: Tensor, state: MambaState | None, mask: Tensor | None) -> tuple[Tensor, MambaState]:
        ends = []

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            u, z = self.layer.in_proj(x).chunk(2, dim=-1)
            y, end = self._branch(self.layer, u, z, real, state)
            ends.append(end)
            return y

        return self.layer.out_proj(without_padding(x, mask, run)), ends[0]

    def _branch(
        self, part: Any, u: Tensor, z: Tensor | None, real: Tensor | None, state: MambaState | None
    ) -> tuple[Tensor, MambaState]:
        """The convolution and the recurrence of one direction, with the weights of `part`."""
        n = u.shape[1]
        u, seen = causal_conv(u, part.conv1d.weight, part.conv1d.bias, None if state is None else state.window)
        u = F.silu(u)
        steps, B, C = part.x_proj(u).split(self.sizes, dim=-1)
        y, hidden = selective_scan(
            u, F.linear(steps, part.dt_proj.weight), _decay(part), B, C, part.D, z, part.dt_proj.bias,
            delta_softplus=True, mask=real, state=None if state is None else state.hidden,
        )  # fmt: skip
        return y, MambaState(next_window(seen, n, real), hidden)

    @property
    def memory(self) -> int:
        return self.config.conv_kernel - 1

    def summary(
        self, x: Tensor, mask: Tensor | None = None, place: Place | None = None, start: MambaState | None = None
    ) -> Summary:
        ends: list[MambaState] = []
        carries: list[Tensor] = []
        window = None if start is None else start.window

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            layer, n = self.layer, x.shape[1]
            u, seen = causal_conv(layer.in_proj(x).chunk(2, dim=-1)[0], layer.conv1d.weight, layer.conv1d.bias, window)
            u = F.silu(u)
            steps, B, _ = layer.x_proj(u).split(self.sizes, dim=-1)
            hidden, carry = selective_summary(
                u, F.linear(steps, layer.dt_proj.weight), _decay(layer), B, layer.dt_proj.bias, real
            )
            ends.append(MambaState(next_window(seen, n, real), hidden))
            carries.append(carry)
            return x

        without_padding(x, mask, run)
        return Summary(ends[0], carries[0])

    def time_steps(self, x: Tensor, *, backward: bool = False) -> Tensor:
        """Δ (B, N, E) for x (B, N, D). The closer Δ is to a constant, the closer the mixer is to a polynomial.

        `backward` gives Δ of the branch that scans from the last token; CapabilityError without `bidirectional`.
        """
        part: Any = self.back if backward else self.layer
        if part is None:
            got = "True, for a mamba that scans in one direction"
            raise CapabilityError("backward", got, "False", "Build it with bidirectional=True.")

        def run(u: Tensor, real: Tensor | None) -> Tensor:
            u = F.silu(causal_conv(u, part.conv1d.weight, part.conv1d.bias, None)[0])
            return F.softplus(part.dt_proj(part.x_proj(u)[..., : self.sizes[0]]))

        return self._ordered(self.layer.in_proj(x).chunk(2, dim=-1)[0], None, run, backward)

    def state_spec(self, batch: int) -> StateSpec:
        window = (batch, self.config.conv_kernel - 1, self.inner)
        return StateSpec(MambaState, window, (batch, self.inner, self.config.state_size))

    def no_weight_decay(self) -> set[str]:
        parts = ("layer",) if self.back is None else ("layer", "back")
        return {f"{part}.{name}" for part in parts for name in ("A_log", "D", "dt_proj.bias")}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """With `bidirectional`, "back" holds the other branch's, for tokens in reverse. T is in the scan's order."""
        layer = self.layer
        back = {} if self.back is None else {"back": self._scan_matrices(self.back, n)}
        return {
            "W_in": layer.in_proj.weight.t(), "b_in": layer.in_proj.bias, **self._scan_matrices(layer, n), **back,
            "W_out": layer.out_proj.weight.t(), "b_out": layer.out_proj.bias,
        }  # fmt: skip

    def _scan_matrices(self, part: Any, n: int) -> dict[str, Any]:
        low, to_b, to_c = part.x_proj.weight.split(self.sizes)
        return {
            "T": conv_matrix(part.conv1d.weight, (n,), causal=True), "b_conv": part.conv1d.bias,
            "W_Delta1": low.t(), "W_Delta2": part.dt_proj.weight.t(), "b_Delta": part.dt_proj.bias,
            "W_B": to_b.t(), "W_C": to_c.t(), "A": _decay(part), "D": part.D,
        }  # fmt: skip

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        layer, states = self.layer, self.config.state_size
        branch = [
            Op("depthwise", (n,), (self.config.conv_kernel,), self.inner),
            linear_op(n, layer.x_proj), linear_op(n, layer.dt_proj),
            Op("elementwise", (4 * n * self.inner * states,)),  # Δ A, Δ u B, and two of decay · h + gain
            Op("matmul", (n, self.inner, states, 1)),
        ]  # fmt: skip
        return [linear_op(n, layer.in_proj), *branch * (1 + self.config.bidirectional), linear_op(n, layer.out_proj)]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> MambaMixer:
        """A mixer with the weights of transformers' or mamba_ssm's layer, and the same outputs.

        Widths come from the weights. Missing biases are zero. Raises OptionError for keys or shapes that do not fit.
        """
        names: dict[str, str | None] = {"d_state": "state_size", "d_conv": "conv_kernel", "dt_rank": "time_step_rank"}
        names |= {"d_model": None, "hidden_size": None, "use_bias": None, "use_conv_bias": None, "layer_idx": None}
        names |= {"intermediate_size": None}
        settings = translate(MambaConfig, options, names)
        if settings.get("bidirectional"):
            got = "True, for weights of one direction"
            raise OptionError("bidirectional", got, "False", "Leave it out, and load the second branch yourself.")
        weights = ("in_proj.weight", "conv1d.weight", "x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D",
                   "out_proj.weight")  # fmt: skip
        biases = ("in_proj.bias", "conv1d.bias", "out_proj.bias")
        check_keys(state_dict, weights, biases)
        dim, inner = state_dict["out_proj.weight"].shape
        settled = {
            "state_size": state_dict["A_log"].shape[1], "conv_kernel": state_dict["conv1d.weight"].shape[-1],
            "time_step_rank": state_dict["dt_proj.weight"].shape[1], "expand": inner / dim,
            "bias": any(key in state_dict for key in biases),
        }  # fmt: skip
        settings = options_beyond_weights(settings, settled, unset=(None,))
        like = state_dict["A_log"]
        config = MambaConfig(**{**settings, **settled})
        mixer = cls(config, dim, device=like.device, dtype=like.dtype)
        own = mixer.layer.state_dict()
        missing = {key: torch.zeros_like(own[key]) for key in biases if settled["bias"] and key not in state_dict}
        load(mixer.layer, {**state_dict, **missing})
        return mixer


@register(MambaMixer)
@dataclass(frozen=True, kw_only=True)
class MambaConfig(ScanConfig):
    """Options of Mamba.

    Args:
        bias: of W_in, W_out and the convolution. Δ always has a bias; W_B, W_C and W_Δ1 never have one.
        state_size: S.
        conv_kernel: number of taps k of the convolution.
        expand: E / D.
        time_step_rank: width between W_Δ1 and W_Δ2; None for D / 16, rounded up.
        dt_min, dt_max: softplus(b_Δ) is initialised between these, uniformly on a log scale.
    """

    name: ClassVar[str] = "mamba"
    output: ClassVar[str] = "selective scan"
    cost_formula: ClassVar[str] = (
        "N E (3 D + 2 R + 7 S + conv_kernel); plus N E (2 R + 7 S + conv_kernel) if bidirectional; "
        "where E = expand D; where R = time_step_rank or ⌈D / 16⌉; where S = state_size"
    )
    sees: ClassVar[str] = "the past, or everything"
    layer_of: ClassVar[str | None] = "transformers"
    width_option: ClassVar[str | None] = "expand"
    state_size: int = 16
    conv_kernel: int = 4
    expand: float = 2
    time_step_rank: int | None = None
    dt_min: float = 1e-3
    dt_max: float = 0.1

    def with_width(self, width: int, dim: int) -> MambaConfig:
        return self.changed(expand=width / dim)

    def check(self) -> None:
        super().check()
        check_int("state_size", self.state_size, 1)
        check_int("conv_kernel", self.conv_kernel, 1)
        check_number("expand", self.expand, 1e-6, math.inf, "a positive number", 2)
        if self.time_step_rank is not None:
            check_int("time_step_rank", self.time_step_rank, 1)
        check_number("dt_max", self.dt_max, 1e-12, math.inf, "a positive number", 0.1)
        if not isinstance(self.dt_min, (int, float)) or not 0 < self.dt_min <= self.dt_max:
            raise OptionError("dt_min", repr(self.dt_min), f"a positive number up to dt_max={self.dt_max}", "")


class _Branch(nn.Module):
    """What a second direction has of its own: all but W_in and W_out of transformers' layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.conv1d, self.x_proj, self.dt_proj = layer.conv1d, layer.x_proj, layer.dt_proj
        self.A_log, self.D = layer.A_log, layer.D


def _decay(part: Any) -> Tensor:
    """A, at least in float32; bf16 would round the decays of neighbouring states to the same value."""
    log: Tensor = part.A_log
    return -log.to(accumulator(log.dtype)).exp()


def _layer(config: MambaConfig, dim: int, **kw: Any) -> Any:
    """The layer of transformers that holds the parameters."""
    with needs("text", "This mixer wraps its layer."):
        cure_torchvision()
        from transformers.models.mamba.configuration_mamba import MambaConfig as Options
        from transformers.models.mamba.modeling_mamba import MambaMixer as Layer
    inner = round(config.expand * dim)
    if inner < 1 or abs(inner - config.expand * dim) > 1e-6:
        raise OptionError(
            "expand", config.expand, f"a factor that makes expand · {dim} an integer", "Change expand or dim."
        )
    options = Options(
        hidden_size=dim, state_size=config.state_size, conv_kernel=config.conv_kernel,
        use_bias=config.bias, use_conv_bias=config.bias,
        time_step_min=float(config.dt_min), time_step_max=float(config.dt_max),
        time_step_floor=min(1e-4, config.dt_min), num_hidden_layers=1,
        time_step_rank=config.time_step_rank or math.ceil(dim / 16),
    )  # fmt: skip
    options.intermediate_size = inner  # theirs allows only integers
    with torch.device(kw.get("device") or torch.get_default_device()):
        layer = Layer(options, layer_idx=0)
    return layer.to(dtype=kw.get("dtype") or torch.get_default_dtype())
