"""Global context: one learned query pools all tokens, and what it finds scales or shifts every token alike."""

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
    pointwise,
    pointwise_matrices,
    pointwise_op,
    reduced,
    timm_layer,
)
from polymix.ops.pooled import mean_over_tokens
from polymix.ops.related.attention import softmax_pool
from polymix.structured.cost import Op


class GcMixer(TokenMixer):
    """Global context: one learned query pools all tokens, and the result scales or shifts every token alike (GCNet).

        c = Σ_j softmax_j(x_j W_a + b_a) x_j,   or the mean of x_j without `use_attn`
        MLP(c) = relu(LayerNorm(c W_1 + b_1)) W_2 + b_2     D -> r -> D, separate weights for scale and add
        Y = X ⊙ sigmoid(MLP_scale(c)) with `fuse_scale`,   + MLP_add(c) with `fuse_add`

    Without `fuse_scale` Y = MLP_add(c), and X + MLP_add(c) with `residual`. timm always adds X there, but a host with
    its own residual connection would add it twice. A separate context is what c is pooled from.

    The gate multiplies the token itself, so its bias starts where the gate is 0.125, the spread of attention's output
    over 196 tokens; without biases the gate starts at ½. MLP_add starts at that spread too, where timm starts at
    zero. b_a has no effect, as it shifts all logits alike; its gradient is rounding noise. The layer is timm's
    GlobalContext.

    Shapes: (B, N, D) or (B, D, H, W), returned alike.
    Source: Cao et al. (2019).
    """

    name = "gc"
    capabilities = Capabilities(cross=True, masks=frozenset({"padding"}))
    feature_maps = True
    config: GcConfig
    layer: Any

    def __init__(self, config: GcConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        layer = timm_layer("GlobalContext")(
            dim, use_attn=config.use_attn, fuse_scale=config.fuse_scale, fuse_add=config.fuse_add,
            **reduced(config.rd_ratio, config.rd_channels), **kw,
        )  # fmt: skip
        if config.use_attn:
            initialise(layer.conv_attn, config.bias)
        if config.fuse_scale:
            initialise(layer.mlp_scale.fc1, config.bias)
            initialise(layer.mlp_scale.fc2, config.bias, shift=math.log(INIT_STD / (1 - INIT_STD)))
        if config.fuse_add:  # after LayerNorm and ReLU the mean square is ½
            initialise(layer.mlp_add.fc1, config.bias)
            initialise(layer.mlp_add.fc2, config.bias, gain=2**0.5 * INIT_STD)
        self.layer = layer

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        # timm's forward pools without a mask, in the dtype of x. After the pooling, its layers are used.
        layer = self.layer
        if self.config.use_attn:
            pooled = softmax_pool(context, pointwise(layer.conv_attn, context), call.mask)
        else:
            pooled = mean_over_tokens(context, call.mask)
        pooled = pooled.to(x.dtype).transpose(1, 2).unsqueeze(-1)  # (B, D, 1, 1)
        if self.config.fuse_scale:
            x = x * _token(layer.gate(layer.mlp_scale(pooled)))
        if not self.config.fuse_add:
            return x
        added = _token(layer.mlp_add(pooled))
        return x + added if self.config.fuse_scale or self.config.residual else added.expand_as(x)

    @property
    def _branches(self) -> dict[str, Any]:
        branches = {"scale": self.layer.mlp_scale, "add": self.layer.mlp_add}
        return {name: mlp for name, mlp in branches.items() if mlp is not None}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """`scale` and `add` hold W_1, b_1, the LayerNorm's gain and shift, W_2 and b_2, or None if unused."""
        letters: dict[str, Any] = {"W_a": None, "b_a": None, "scale": None, "add": None}
        if self.config.use_attn:
            letters |= pointwise_matrices("a", self.layer.conv_attn)
        for name, mlp in self._branches.items():
            norm = {"gain": mlp.norm.weight, "shift": mlp.norm.bias}
            letters[name] = pointwise_matrices("1", mlp.fc1) | norm | pointwise_matrices("2", mlp.fc2)
        return letters

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        ops = [pointwise_op(1, conv) for mlp in self._branches.values() for conv in (mlp.fc1, mlp.fc2)]
        if self.config.use_attn:
            ops += [pointwise_op(n, self.layer.conv_attn), Op("matmul", (1, 1, n, self.dim))]
        return ops

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> GcMixer:
        """A mixer with the weights of timm's GlobalContext, and the same outputs.

        `options` are arguments of timm's class, or ours. What is fused, and the widths, come from the weights.
        `residual` defaults to True where it has an effect. Raises OptionError for keys or shapes that do not fit.
        """
        scale, add = (f"mlp_{name}.fc1.weight" in state_dict for name in ("scale", "add"))
        branches = [name for name, there in (("mlp_scale", scale), ("mlp_add", add)) if there] or ["mlp_scale"]
        bias, attn = f"{branches[0]}.fc1.bias" in state_dict, "conv_attn.weight" in state_dict
        parts = ("weight", "bias")[: 1 + bias]
        keys = [f"conv_attn.{part}" for part in parts] if attn else []
        for name in branches:
            keys += [f"{name}.{conv}.{part}" for conv in ("fc1", "fc2") for part in parts]
            keys += [f"{name}.norm.weight", f"{name}.norm.bias"]
        check_keys(state_dict, keys)
        like = state_dict[f"{branches[0]}.fc1.weight"]
        inner, dim = like.shape[:2]
        settled: dict[str, Any] = {
            "use_attn": attn,
            "fuse_scale": scale,
            "fuse_add": add,
            "rd_channels": int(inner),
            "bias": bias,
        }
        names = {"rd_ratio": None, "rd_divisor": None, "init_last_zero": None}  # timm accepts and ignores the last
        arguments = {**settled, "_class": "GlobalContext", "channels": dim}
        own = translate(GcConfig, options_beyond_weights(options, arguments, unset=(None,)), names)
        config = GcConfig(**{"residual": not scale, **own}, **settled)
        mixer = cls(config, int(dim), device=like.device, dtype=like.dtype)
        load(mixer.layer, state_dict)
        return mixer


def _token(x: Tensor) -> Tensor:
    """(B, D, 1, 1) -> (B, 1, D)."""
    return x.squeeze(-1).transpose(1, 2)


@register(GcMixer)
@dataclass(frozen=True, kw_only=True)
class GcConfig(MixerConfig):
    """Options of global context.

    Args:
        use_attn: pool with a learned query; otherwise by the mean.
        fuse_scale: scale all tokens by the pooled token.
        fuse_add: add the pooled token to all tokens. At least one of the two is needed.
        rd_ratio: r / D; None for timm's 1/8.
        rd_channels: r itself, instead of rd_ratio.
        residual: add X if there is no fuse_scale.
    """

    name: ClassVar[str] = "gc"
    output: ClassVar[str] = "global context"
    cost_formula: ClassVar[str] = (
        "2 N D + 2 D r; minus 2 N D if not use_attn; plus 2 D r if fuse_scale and fuse_add; where r = rd_channels"
    )
    sees: ClassVar[str] = "everything"
    layer_of: ClassVar[str | None] = "timm"
    use_attn: bool = True
    fuse_scale: bool = True
    fuse_add: bool = False
    rd_ratio: float | None = None
    rd_channels: int | None = None
    residual: bool = False

    def check(self) -> None:
        for name in ("use_attn", "fuse_scale", "fuse_add", "residual"):
            check_choice(name, getattr(self, name), (True, False))
        check_reduced(self.rd_ratio, self.rd_channels)
        if not (self.fuse_scale or self.fuse_add):
            raise OptionError(
                "fuse_scale",
                "False with fuse_add=False",
                "at least one of the two",
                "Set fuse_add=True, or leave both at their defaults.",
            )
        if self.residual and self.fuse_scale:
            cure = "Leave residual out; the output already contains X."
            raise OptionError("residual", "True with fuse_scale=True", "fuse_scale=False, fuse_add=True", cure)
