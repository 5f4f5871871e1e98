"""Squeeze-and-excitation: one gate a channel, from the mean of all tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polymix.errors import OptionError, check_choice
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.loading import check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.timm_layers import (
    check_reduced,
    initialise,
    pointwise_matrices,
    pointwise_op,
    reduced,
    timm_layer,
)
from polymix.ops.pooled import mean_over_tokens
from polymix.ops.shared.activations import hardsigmoid
from polymix.structured.cost import Op

# The bias at which a gate is INIT_STD, for the sigmoid and for the hard sigmoid clamp(x / 6 + 1/2).
_SHIFT = {"squeeze": math.log(INIT_STD / (1 - INIT_STD)), "effective": 6 * (INIT_STD - 0.5)}


class SeMixer(TokenMixer):
    """Squeeze-and-excitation: a gate per channel, computed from the mean of all tokens.

        s = mean_j x_j, or ½ mean_j + ½ max_j with `add_maxpool`
        squeeze    Y = X ⊙ sigmoid(relu(s W_1 + b_1) W_2 + b_2)     D -> r -> D
        effective  Y = X ⊙ hardsigmoid(s W_1 + b_1)                 D -> D

    A separate context is what the gate is computed from. The gate multiplies the token itself, so the output does not
    shrink with N as attention's does. The last bias therefore starts where the gate is 0.125, the spread of
    attention's output over 196 tokens; without biases the gate starts at ½. The layer is timm's SEModule or
    EffectiveSEModule. Means and products add O(N D).

    Shapes: (B, N, D) or (B, D, H, W), returned alike.
    Source: Hu et al. (2018).
    """

    name = "se"
    capabilities = Capabilities(cross=True, masks=frozenset({"padding"}))
    feature_maps = True
    config: SeConfig
    layer: Any

    def __init__(self, config: SeConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        if config.form == "effective":
            self.layer = timm_layer("EffectiveSEModule")(dim, add_maxpool=config.add_maxpool, **kw)
        else:
            self.layer = timm_layer("SEModule")(
                dim, add_maxpool=config.add_maxpool, bias=config.bias,
                **reduced(config.rd_ratio, config.rd_channels), **kw,
            )  # fmt: skip
        for conv in self._convs:
            initialise(conv, config.bias, shift=_SHIFT[config.form] if conv is self._convs[-1] else 0.0)

    @property
    def _convs(self) -> list[Any]:
        return [self.layer.fc] if self.config.form == "effective" else [self.layer.fc1, self.layer.fc2]

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        # timm's forward pools without a mask, in the dtype of x. After the pooling, its layers are used.
        layer = self.layer
        s = mean_over_tokens(context, call.mask)
        if self.config.add_maxpool:
            s = 0.5 * s + 0.5 * _max_over_tokens(context, call.mask)
        s = s.to(x.dtype).transpose(1, 2).unsqueeze(-1)  # (B, D, 1, 1)
        if self.config.form == "effective":
            gate = hardsigmoid(layer.fc(s))
        else:
            gate = layer.gate(layer.fc2(layer.act(layer.bn(layer.fc1(s)))))
        return x * gate.squeeze(-1).transpose(1, 2)

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        letters: dict[str, Any] = {"W_2": None, "b_2": None}
        for place, conv in enumerate(self._convs, start=1):
            letters |= pointwise_matrices(str(place), conv)
        return letters

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        return [pointwise_op(1, conv) for conv in self._convs]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> SeMixer:
        """A mixer with the weights of timm's SEModule or EffectiveSEModule, and the same outputs.

        `options` are arguments of timm's classes, or ours. The form and the widths come from the weights. Raises
        OptionError for keys or shapes that do not fit.
        """
        form = "effective" if "fc.weight" in state_dict else "squeeze"
        layers = ("fc",) if form == "effective" else ("fc1", "fc2")
        bias = f"{layers[0]}.bias" in state_dict
        check_keys(state_dict, [f"{name}.{part}" for name in layers for part in ("weight", "bias")[: 1 + bias]])
        like = state_dict[f"{layers[0]}.weight"]
        inner, dim = like.shape[:2]
        arguments = {"form": form, "channels": dim, "bias": bias}
        arguments["_class"] = "EffectiveSEModule" if form == "effective" else "SEModule"
        width: dict[str, Any] = {} if form == "effective" else {"rd_channels": int(inner)}
        rest = options_beyond_weights(options, arguments | width, unset=(None,))
        own = translate(SeConfig, rest, {"rd_ratio": None, "rd_divisor": None})
        mixer = cls(SeConfig(**own, **width, form=form, bias=bias), int(dim), device=like.device, dtype=like.dtype)
        load(mixer.layer, state_dict)
        return mixer


def _max_over_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, N, D) -> (B, 1, D): the maximum over the real tokens, zero if there are none."""
    if mask is None:
        return x.amax(1, keepdim=True)
    largest = x.masked_fill(~mask.unsqueeze(-1), -math.inf).amax(1, keepdim=True)
    return largest.masked_fill(~mask.any(1)[:, None, None], 0.0)


@register(SeMixer)
@dataclass(frozen=True, kw_only=True)
class SeConfig(MixerConfig):
    """Options of squeeze-and-excitation.

    Args:
        form: "squeeze" or "effective".
        rd_ratio: r / D; None for timm's 1/16. timm rounds r to a multiple of 8, at least 8.
        rd_channels: r itself, instead of rd_ratio.
        add_maxpool: also pool the maximum of each channel.
    """

    name: ClassVar[str] = "se"
    output: ClassVar[str] = "squeeze and excite"
    cost_formula: ClassVar[str] = "2 D r; D² if form = effective; where r = rd_channels"
    sees: ClassVar[str] = "everything"
    layer_of: ClassVar[str | None] = "timm"
    form: str = "squeeze"
    rd_ratio: float | None = None
    rd_channels: int | None = None
    add_maxpool: bool = False

    def check(self) -> None:
        check_choice("form", self.form, ("squeeze", "effective"))
        check_choice("add_maxpool", self.add_maxpool, (True, False))
        check_reduced(self.rd_ratio, self.rd_channels)
        if self.form == "effective" and (self.rd_ratio is not None or self.rd_channels is not None):
            got = f"rd_ratio={self.rd_ratio}, rd_channels={self.rd_channels}"
            raise OptionError(
                "form", f'"effective" with {got}', "neither, as this form has no bottleneck", "Leave them out."
            )
