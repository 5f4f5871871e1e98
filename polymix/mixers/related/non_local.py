"""The non-local block: softmax attention of one head on feature maps, or its dot-product form in linear time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, check_choice
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.loading import check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.timm_layers import (
    batch_norm,
    check_reduced,
    initialise,
    pointwise,
    pointwise_matrices,
    pointwise_op,
    reduced,
    timm_layer,
)
from polymix.mixers.states import Counts, StateSpec
from polymix.ops.related.attention import softmax_attention
from polymix.ops.related.linear_attention import LinearState, linear_attention, linear_causal
from polymix.ops.shared.tensors import accumulator
from polymix.structured.cost import Op

_EVERY_MASK = frozenset({"padding", "arbitrary", "block_causal", "segments"})
_NORM_KEYS = ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


class NonLocalMixer(TokenMixer):
    """The non-local block: attention of one head on feature maps, or its dot-product form in linear time.

        θ = X W_t, φ = X W_p, g = X W_g     D -> r channels
        softmax      Y = softmax_j(s θ_i·φ_j) g     (embedded Gaussian)
        dot_product  Y = (1/N) s θ (φᵀ g)           N: the number of visible tokens; without 1/N with reduction="sum"
        Z = norm(Y W_z), and Z + X with `residual`

    s = D^-½ as in timm (not r^-½), or 1 without `use_scale`. Without `projection` there is no W_z, and W_g maps D
    to D. Poly-NL's Eq. 6-7 have neither s nor 1/N nor W_z: preset="equations"; a sum grows with N. The block of its
    Table 1a is preset="paper". `norm` is None or a BatchNorm. In training a
    BatchNorm mixes tokens and samples, so that form takes neither masks nor causality. `residual` adds X as timm
    does; a host with its own residual connection would then add it twice. timm starts with Z = 0; here the first
    outputs are as large as attention's, with logits of unit variance. In the softmax form b_p has no effect, as it
    shifts all logits of a query alike; its gradient is rounding noise. The causal dot_product form works in chunks of
    128 tokens; torch.export then needs a fixed length. The layer is timm's NonLocalAttn.

    Shapes: (B, N, D) or (B, D, H, W), returned alike.
    State: r² numbers (dot_product).
    Source: Wang et al. (2018); Poly-NL, Eq. 6-8.
    """

    name = "non_local"
    capabilities = Capabilities(causal=True, cross=True, values=True, masks=_EVERY_MASK, recurrent=True)
    feature_maps = True
    config: NonLocalConfig
    layer: Any

    def __init__(self, config: NonLocalConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        layer = timm_layer("NonLocalAttn")(
            dim, use_scale=config.use_scale, **reduced(config.rd_ratio, config.rd_channels), **kw
        )
        self.inner, self.scale = layer.t.out_channels, float(layer.scale)
        gain = (self.scale * self.inner**0.5) ** -0.5  # of both θ and φ, for logits of unit variance
        for conv, its_gain in ((layer.t, gain), (layer.p, gain), (layer.g, 1.0), (layer.z, 1.0)):
            initialise(conv, config.bias, its_gain)
        self.out = self.inner if config.projection else dim  # the width of g
        if not config.projection:
            layer.z, layer.g = None, nn.Conv2d(dim, dim, 1, **kw)
            initialise(layer.g, config.bias, 1.0)
        # On rows of tokens, with the parameters of timm's BatchNorm2d. The CPU backward of that one is wrong on a view
        # (B, D, N, 1) of tokens if the gradient has another memory format than the input (PyTorch 2.13).
        layer.norm = nn.Identity() if config.norm is None else nn.BatchNorm1d(dim, **kw)
        if config.norm is not None:
            nn.init.constant_(layer.norm.weight, INIT_STD)
        self.layer = layer
        softmax, alone = config.form == "softmax", config.norm is None
        masks = _EVERY_MASK if softmax else frozenset({"padding"})
        self.capabilities = Capabilities(
            causal=alone,
            cross=True,
            values=True,
            masks=masks if alone else frozenset(),
            recurrent=alone and not softmax,
        )

    def _embedded(self, x: Tensor, context: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """θ, φ and g as a single head (B, 1, ·, r)."""
        layer = self.layer
        inputs = ((layer.t, x), (layer.p, context), (layer.g, context if values is None else values))
        t, p, g = (pointwise(conv, tokens).unsqueeze(1) for conv, tokens in inputs)
        return t, p, g

    @property
    def _whole(self) -> float | None:
        """The factor of the sum over the tokens; None for one over their number."""
        return None if self.config.reduction == "mean" else 1.0

    def _join(self, x: Tensor, y: Tensor) -> Tensor:
        y = y.squeeze(1) if self.layer.z is None else pointwise(self.layer.z, y.squeeze(1))
        if self.config.norm is not None:
            y = batch_norm(self.layer.norm, y.flatten(0, 1)).view_as(y)
        return x + y if self.config.residual else y

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        # timm's forward takes only feature maps, without mask or context, and builds the N × N matrix.
        if self.config.form == "softmax":
            t, p, g = self._embedded(x, context, call.values)
            y = softmax_attention(t, p, g, scale=self.scale, mask=call.mask, causal=call.causal, segments=call.segments)
        elif call.causal:
            return self.scan(x, None, call.mask, call.values)[0]
        else:
            t, p, g = self._embedded(x, context, call.values)
            y = linear_attention(
                t.to(accumulator(t.dtype)) * self.scale, p, g, mask=call.mask, normalize=False, scale=self._whole
            )
        return self._join(x, y)

    def scan(
        self, x: Tensor, state: LinearState | None, mask: Tensor | None, values: Tensor | None = None
    ) -> tuple[Tensor, LinearState]:
        t, p, g = self._embedded(x, x, values)
        t = t.to(accumulator(t.dtype)) * self.scale
        y, state = linear_causal(t, p, g, mask=mask, state=state, normalize=False, scale=self._whole)
        return self._join(x, y), state

    def state_spec(self, batch: int) -> StateSpec:
        return StateSpec(LinearState, (batch, 1, self.inner, self.out), Counts((batch,)))

    @property
    def polynomial(self) -> Polynomial:
        config = self.config
        if config.form == "softmax" or (config.norm is not None and self.training):
            return Polynomial()
        return Polynomial(3, homogeneous=not config.bias and config.norm is None and not config.residual)

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """`gain` and `shift` of a BatchNorm in evaluation; None without one."""
        letters: dict[str, Any] = {"gain": None, "shift": None, "W_z": None, "b_z": None}
        for name in "tpgz" if self.config.projection else "tpg":
            letters |= pointwise_matrices(name, getattr(self.layer, name))
        if self.config.norm is not None:
            norm = self.layer.norm
            gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
            letters |= {"gain": gain, "shift": norm.bias - gain * norm.running_mean}
        return letters

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        r = self.inner
        mixed = [Op("matmul", (1, r, n, self.out)), Op("matmul", (1, n, r, self.out))]
        if self.config.form == "softmax":
            apart = [Op("matmul", (1, n, r, n)), Op("matmul", (1, n, n, self.out))]
            mixed = [Op("attention", (1, n, n, r))] if self.out == r else apart
        into = [pointwise_op(n, conv) for conv in (self.layer.t, self.layer.p, self.layer.g)]
        return [*into, *mixed, *([pointwise_op(n, self.layer.z)] if self.config.projection else [])]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> NonLocalMixer:
        """A mixer with the weights of timm's NonLocalAttn, and the same outputs.

        `options` are arguments of timm's class, or ours. `residual` defaults to True, as timm adds x. `norm` comes
        from the weights; call eval() to use its running averages. Raises OptionError for keys or shapes that do not
        fit.
        """
        keys = [f"{name}.weight" for name in "tpgz"]
        bias, norm = "t.bias" in state_dict, "norm.weight" in state_dict
        keys += [f"{name}.bias" for name in "tpgz"] if bias else []
        check_keys(state_dict, keys + (list(_NORM_KEYS) if norm else []))
        like = state_dict["t.weight"]
        inner, dim = like.shape[:2]
        arguments = {"_class": "NonLocalAttn", "in_channels": dim, "rd_channels": inner, "bias": bias}
        arguments["norm"] = "batch" if norm else None
        names = {"rd_ratio": None, "rd_divisor": None}
        own = translate(NonLocalConfig, options_beyond_weights(options, arguments, unset=(None,)), names)
        config = NonLocalConfig(
            **{"residual": True, **own}, rd_channels=int(inner), bias=bias, norm="batch" if norm else None
        )
        mixer = cls(config, int(dim), device=like.device, dtype=like.dtype)
        load(mixer.layer, state_dict)
        return mixer


@register(NonLocalMixer)
@dataclass(frozen=True, kw_only=True)
class NonLocalConfig(MixerConfig):
    """Options of the non-local block.

    Args:
        form: "softmax", or "dot_product" (linear in N, a polynomial).
        use_scale: scale the logits by D^-½.
        rd_ratio: r / D; None for timm's 1/8. timm rounds r to a multiple of 8, at least 8.
        rd_channels: r itself, instead of rd_ratio.
        reduction: of dot_product: "mean" over the visible tokens, or "sum".
        projection: multiply by W_z; without it W_g maps D to D.
        norm: None or "batch".
        residual: add X to the output.
    """

    name: ClassVar[str] = "non_local"
    output: ClassVar[str] = "the non-local block, softmax or dot product"
    cost_formula: ClassVar[str] = (
        "4 N D r + 2 N² r; 4 N D r + 2 N r² if form = dot_product; 2 N D r + N D² + N² (r + D) if not projection; "
        "4 N D r + N D² if form = dot_product and not projection; where r = rd_channels"
    )
    sees: ClassVar[str] = "everything"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # of Poly-NL's Table 1a, and of its Eq. 6 and 7
        "paper": {"form": "softmax", "rd_ratio": 0.5, "projection": False, "bias": True},
        "equations": {
            "form": "dot_product", "use_scale": False, "reduction": "sum", "projection": False, "rd_ratio": 1,
            "bias": False,
        },
    }  # fmt: skip
    layer_of: ClassVar[str | None] = "timm"
    form: str = "softmax"
    use_scale: bool = True
    rd_ratio: float | None = None
    rd_channels: int | None = None
    reduction: str = "mean"
    projection: bool = True
    norm: str | None = None
    residual: bool = False

    def check(self) -> None:
        check_choice("form", self.form, ("softmax", "dot_product"))
        check_choice("use_scale", self.use_scale, (True, False))
        check_choice("reduction", self.reduction, ("mean", "sum"))
        check_choice("projection", self.projection, (True, False))
        if self.reduction == "sum" and self.form == "softmax":
            cure = 'Use form="dot_product", or leave it out.'
            raise OptionError("reduction", "'sum' with form='softmax', which is a mean", "'mean'", cure)
        check_choice("norm", self.norm, (None, "batch"))
        check_choice("residual", self.residual, (True, False))
        check_reduced(self.rd_ratio, self.rd_channels)
