"""XCA, cross-covariance attention (XCiT), on timm's layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from polymix.errors import check_choice
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import head_count
from polymix.mixers.loading import check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.timm_layers import timm_layer
from polymix.ops.related.channel_attention import cross_covariance
from polymix.ops.shared.tensors import project
from polymix.structured.base import init_
from polymix.structured.cost import Op, linear_op

_AUTHORS = {"dim": None, "num_heads": "heads", "qkv_bias": None, "proj_drop": "dropout", "qk_scale": None}


class XcaMixer(TokenMixer):
    """Cross-covariance attention: attention among channels instead of tokens (XCiT).

        Y = V Aᵀ,   A = softmax(τ Q̂ᵀ K̂) over d × d channels     per head; W_o joins the heads

    The columns of Q̂ and K̂ have unit length along the tokens, and τ is a learned factor per head. Not causal,
    because all tokens share one A. The layer is timm's XCA, with its parameter names.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    Source: El-Nouby et al. (2021).
    """

    name = "xca"
    capabilities = Capabilities(values=True, masks=frozenset({"padding"}))
    config: XcaConfig

    def __init__(self, config: XcaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.xca = timm_layer("XCA")(dim, num_heads=self.heads, qkv_bias=config.bias).to(**kw)
        if not config.bias:
            self.xca.proj = nn.Linear(dim, dim, bias=False, **kw)
        init_(self.xca.qkv.weight, dim)
        init_(self.xca.proj.weight, dim, INIT_STD * (dim // self.heads) ** 0.5)  # all entries of A start near 1/d
        for layer in (self.xca.qkv, self.xca.proj):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        # timm's forward is not used: it ignores padding, and sums over the tokens in the dtype of x.
        maps = (self.xca.qkv.weight, self.xca.qkv.bias)
        parts = self.xca.qkv(x).chunk(3, dim=-1) if call.values is None else project(maps, x, x, call.values)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, h, N, d)
        y = cross_covariance(q, k, v, self.xca.temperature, mask=call.mask)
        return self.xca.proj(y.transpose(1, 2).flatten(-2))

    def no_weight_decay(self) -> set[str]:
        return {"xca.temperature"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        qkv, proj = self.xca.qkv, self.xca.proj
        matrices: dict[str, Any] = {f"W_{c}": w.t() for c, w in zip("qkv", qkv.weight.chunk(3), strict=True)}
        biases = (None,) * 3 if qkv.bias is None else qkv.bias.chunk(3)
        matrices |= {f"b_{c}": b for c, b in zip("qkv", biases, strict=True)}
        return {**matrices, "W_o": proj.weight.t(), "b_o": proj.bias, "tau": self.xca.temperature[:, 0, 0]}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d = self.dim // self.heads
        pool, ask = Op("matmul", (self.heads, d, n, d)), Op("matmul", (self.heads, n, d, d))
        return [linear_op(n, self.xca.qkv), pool, ask, linear_op(n, self.xca.proj)]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> XcaMixer:
        """A mixer with the weights of the authors' or timm's XCA, which have the same names, and the same outputs.

        `options` are arguments of their constructor (num_heads defaults to 8, attn_drop must be 0; qk_scale is
        ignored, as they do) or ours. A missing bias of qkv is zero.
        """
        check_keys(state_dict, ("temperature", "qkv.weight", "proj.weight"), ("qkv.bias", "proj.bias"))
        check_choice("attn_drop", float(options.pop("attn_drop", 0.0)), (0.0,))
        settings = {"heads": 8, **translate(XcaConfig, options, _AUTHORS)}
        own = {"bias": "proj.bias" in state_dict}
        settings = options_beyond_weights(settings, own) | own
        like = state_dict["qkv.weight"]
        mixer = cls(XcaConfig(**settings), like.shape[1], device=like.device, dtype=like.dtype)
        zero = {"xca.qkv.bias": like.new_zeros(like.shape[0])} if settings["bias"] else {}
        load(mixer, {**zero, **{f"xca.{name}": value for name, value in state_dict.items()}})
        return mixer


@register(XcaMixer)
@dataclass(frozen=True, kw_only=True)
class XcaConfig(HeadsConfig):
    """Options of XCA: only those of every mixer with heads."""

    name: ClassVar[str] = "xca"
    output: ClassVar[str] = "attention among channels (XCiT)"
    cost_formula: ClassVar[str] = "4 N D² + 2 N D d"
    sees: ClassVar[str] = "everything"
    layer_of: ClassVar[str | None] = "timm"
