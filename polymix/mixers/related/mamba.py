"""Mamba's mixer, on the layer of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.compat import cure_torchvision
from polymix.errors import MissingExtraError, OptionError, check_int, check_number
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.loading import check_keys, load, settle, translate
from polymix.mixers.mixer import TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.selective_scan import selective_scan
from polymix.ops.shared.sequences import causal_conv, next_window, without_padding
from polymix.ops.shared.tensors import accumulator
from polymix.structured.base import init_
from polymix.structured.conv import conv_matrix
from polymix.structured.cost import Op, linear_op


class MambaState(NamedTuple):
    """The convolution's last k - 1 inputs (B, k - 1, E) and the recurrence's state (B, E, S), at least float32."""

    window: Tensor
    hidden: Tensor


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

    Shapes: (B, N, D) -> (B, N, D).
    State: E (S + k - 1) numbers.
    Source: Gu and Dao (2023).
    """

    name = "mamba"
    capabilities = Capabilities(causal=True, masks=frozenset({"padding"}), recurrent=True, isolates_future=True)
    config: MambaConfig

    def __init__(self, config: MambaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.layer = _layer(config, dim, **kw)
        self.inner: int = self.layer.intermediate_size
        self.sizes: tuple[int, int, int] = (self.layer.time_step_rank, config.state_size, config.state_size)
        with torch.no_grad():
            for linear in (self.layer.in_proj, self.layer.out_proj):
                init_(linear.weight, linear.in_features)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        return self.scan(x, None, call.mask)[0]

    def scan(self, x: Tensor, state: MambaState | None, mask: Tensor | None) -> tuple[Tensor, MambaState]:
        layer, ends = self.layer, []

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            u, z, seen = self._inputs(x, None if state is None else state.window)
            steps, B, C = layer.x_proj(u).split(self.sizes, dim=-1)
            y, hidden = selective_scan(
                u, F.linear(steps, layer.dt_proj.weight), self._decay(), B, C, layer.D, z, layer.dt_proj.bias,
                delta_softplus=True, mask=real, state=None if state is None else state.hidden,
            )  # fmt: skip
            ends.append(MambaState(next_window(seen, x.shape[1], real), hidden))
            return y

        return layer.out_proj(without_padding(x, mask, run)), ends[0]

    def _inputs(self, x: Tensor, window: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """U after its convolution, Z, and the inputs of the convolution."""
        u, z = self.layer.in_proj(x).chunk(2, dim=-1)
        u, seen = causal_conv(u, self.layer.conv1d.weight, self.layer.conv1d.bias, window)
        return F.silu(u), z, seen

    def _decay(self) -> Tensor:
        """A, at least in float32; bf16 would round the decays of neighbouring states to the same value."""
        log: Tensor = self.layer.A_log
        return -log.to(accumulator(log.dtype)).exp()

    def time_steps(self, x: Tensor) -> Tensor:
        """Δ (B, N, E) for x (B, N, D). The closer Δ is to a constant, the closer the mixer is to a polynomial."""
        u, _, _ = self._inputs(x, None)
        steps = self.layer.x_proj(u)[..., : self.sizes[0]]
        return F.softplus(self.layer.dt_proj(steps))

    def check_state(self, state: Any, x: Tensor) -> str | None:
        batch = x.shape[0]
        window = (batch, self.config.conv_kernel - 1, self.inner)
        hidden = (batch, self.inner, self.config.state_size)
        fits = isinstance(state, MambaState) and (tuple(state.window.shape), tuple(state.hidden.shape))
        return None if fits == (window, hidden) else f"a MambaState of window {window} and hidden {hidden}"

    def no_weight_decay(self) -> set[str]:
        return {"layer.A_log", "layer.D", "layer.dt_proj.bias"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        layer = self.layer
        low, to_b, to_c = layer.x_proj.weight.split(self.sizes)
        return {
            "W_in": layer.in_proj.weight.t(), "b_in": layer.in_proj.bias,
            "T": conv_matrix(layer.conv1d.weight, (n,), causal=True), "b_conv": layer.conv1d.bias,
            "W_Delta1": low.t(), "W_Delta2": layer.dt_proj.weight.t(), "b_Delta": layer.dt_proj.bias,
            "W_B": to_b.t(), "W_C": to_c.t(), "A": self._decay(), "D": layer.D,
            "W_out": layer.out_proj.weight.t(), "b_out": layer.out_proj.bias,
        }  # fmt: skip

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        layer, states = self.layer, self.config.state_size
        return [
            linear_op(n, layer.in_proj), Op("depthwise", (n,), (self.config.conv_kernel,), self.inner),
            linear_op(n, layer.x_proj), linear_op(n, layer.dt_proj),
            Op("elementwise", (4 * n * self.inner * states,)),  # Δ A, Δ u B, and two of decay · h + gain
            Op("matmul", (n, self.inner, states, 1)), linear_op(n, layer.out_proj),
        ]  # fmt: skip

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> MambaMixer:
        """A mixer with the weights of transformers' or mamba_ssm's layer, and the same outputs.

        Widths come from the weights. Missing biases are zero. Raises OptionError for keys or shapes that do not fit.
        """
        names: dict[str, str | None] = {"d_state": "state_size", "d_conv": "conv_kernel", "dt_rank": "time_step_rank"}
        names |= {"d_model": None, "hidden_size": None, "use_bias": None, "use_conv_bias": None, "layer_idx": None}
        names |= {"intermediate_size": None}
        found = translate(MambaConfig, options, names)
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
        found = settle(found, settled, unsaid=(None,))
        like = state_dict["A_log"]
        config = MambaConfig(**{**found, **settled})
        mixer = cls(config, dim, device=like.device, dtype=like.dtype)
        own = mixer.layer.state_dict()
        missing = {key: torch.zeros_like(own[key]) for key in biases if settled["bias"] and key not in state_dict}
        load(mixer.layer, {**state_dict, **missing})
        return mixer


@register(MambaMixer)
@dataclass(frozen=True, kw_only=True)
class MambaConfig(MixerConfig):
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
        "N E (3 D + 2 R + 7 S + conv_kernel); where E = expand D; where R = time_step_rank or ⌈D / 16⌉; "
        "where S = state_size"
    )
    sees: ClassVar[str] = "the past"
    layer_of: ClassVar[str | None] = "transformers"
    state_size: int = 16
    conv_kernel: int = 4
    expand: float = 2
    time_step_rank: int | None = None
    dt_min: float = 1e-3
    dt_max: float = 0.1

    @property
    def causal_by_build(self) -> bool:
        return True

    def check(self) -> None:
        check_int("state_size", self.state_size, 1)
        check_int("conv_kernel", self.conv_kernel, 1)
        check_number("expand", self.expand, 1e-6, math.inf, "a positive number", 2)
        if self.time_step_rank is not None:
            check_int("time_step_rank", self.time_step_rank, 1)
        check_number("dt_max", self.dt_max, 1e-12, math.inf, "a positive number", 0.1)
        if not isinstance(self.dt_min, (int, float)) or not 0 < self.dt_min <= self.dt_max:
            raise OptionError("dt_min", repr(self.dt_min), f"a positive number up to dt_max={self.dt_max}", "")


def _layer(config: MambaConfig, dim: int, **kw: Any) -> Any:
    """The layer of transformers that holds the parameters."""
    try:
        cure_torchvision()
        from transformers.models.mamba.configuration_mamba import MambaConfig as Options
        from transformers.models.mamba.modeling_mamba import MambaMixer as Layer
    except ImportError as error:
        cure = "pip install 'polymix[text]'"
        raise MissingExtraError(
            "transformers", "not installed", "transformers, as this mixer wraps its layer", cure
        ) from error
    inner = round(config.expand * dim)
    if inner < 1 or abs(inner - config.expand * dim) > 1e-6:
        raise OptionError(
            "expand", config.expand, f"a factor that makes expand · {dim} an integer", "Change expand or dim."
        )
    options = Options(
        hidden_size=dim, state_size=config.state_size, conv_kernel=config.conv_kernel,
        use_bias=config.bias, use_conv_bias=config.bias, time_step_min=config.dt_min, time_step_max=config.dt_max,
        time_step_floor=min(1e-4, config.dt_min), num_hidden_layers=1,
        time_step_rank=config.time_step_rank or math.ceil(dim / 16),
    )  # fmt: skip
    options.intermediate_size = inner  # theirs allows only integers
    with torch.device(kw.get("device") or torch.get_default_device()):
        layer = Layer(options, layer_idx=0)
    return layer.to(dtype=kw.get("dtype") or torch.get_default_dtype())
