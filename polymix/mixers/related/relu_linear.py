"""ReLU linear attention over one or several scales (EfficientViT), on timm's layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, check_choice, check_number
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig, PrefixedGridConfig
from polymix.mixers.heads import head_count
from polymix.mixers.loading import check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD, TokenMixer
from polymix.mixers.multi_scale import (
    called_grid,
    check_scales,
    scale_grid,
    smooth,
    smoothing_matrix,
    smoothing_ops,
)
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.timm_layers import batch_norm, timm_layer
from polymix.ops.related.linear_attention import linear_attention
from polymix.structured.base import init_
from polymix.structured.cost import Op

_PADDING = frozenset({"padding"})


class ReluLinearMixer(TokenMixer):
    """Linear attention with relu features, on the tokens and on smoothed copies of them (EfficientViT).

        y_i = relu(q_i) Σ_j relu(k_j)ᵀ v_j / (relu(q_i) · Σ_j relu(k_j) + eps)     per head; then W_o and BatchNorm

    For each s in `scales`, q, k and v also pass an s × s depthwise convolution and a block-diagonal map, which gives
    as many heads again. There, a prefix token is a 1 × 1 map of its own, and padding reads as zero. Scales need a
    grid, in the options or the call. The layer is timm's LiteMLA, with its parameter names. Its BatchNorm uses the
    batch's statistics in training (of the real tokens under a mask), and running averages in evaluation.

    Shapes: (B, N, D) or (B, D, H, W), returned alike, d = D / heads.
    Source: EfficientViT (Cai et al. 2023).
    """

    name = "relu_linear"
    capabilities = Capabilities(values=True, masks=_PADDING, grids=(2,))
    feature_maps = True
    projections = ("mla",)
    config: ReluLinearConfig

    def __init__(self, config: ReluLinearConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        batch = config.norm == "batch"
        self.mla = timm_layer("LiteMLA")(
            dim, dim, heads=self.heads, dim=dim // self.heads, scales=tuple(config.scales), eps=config.eps,
            use_bias=(config.bias, config.bias and not batch),  # a BatchNorm would cancel the last bias
            norm_layer=(None, nn.BatchNorm2d if batch else None),
        ).to(**kw)  # fmt: skip
        for conv in self.mla.modules():
            if isinstance(conv, nn.Conv2d):
                init_(conv.weight, conv.weight[0].numel())
                if conv.bias is not None:
                    nn.init.zeros_(conv.bias)
        if batch:
            nn.init.constant_(self.mla.proj.norm.weight, INIT_STD)
        else:  # for a mean of 196 values with almost equal weights
            init_(self.mla.proj.conv.weight, self.mla.proj.conv.in_channels, INIT_STD * 14)
        self.capabilities = Capabilities(values=True, masks=_PADDING, grids=(2,) if config.scales else ())

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        grid = called_grid(call.grid) if self.config.scales else ()
        mask, prefix = call.mask, self.config.num_prefix_tokens
        qkv = self.mla.qkv(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1)  # (B, 3D, N), head by head [q, k, v]
        if call.values is not None:
            other = self.mla.qkv(call.values.transpose(1, 2).unsqueeze(-1)).squeeze(-1)
            both = (part.unflatten(1, (self.heads, 3, -1)) for part in (qkv, other))
            qk, v = (part[:, :, rows] for part, rows in zip(both, (slice(0, 2), slice(2, 3)), strict=True))
            qkv = torch.cat((qk, v), dim=2).flatten(1, 3)
        if mask is not None:
            qkv = qkv.masked_fill(~mask.unsqueeze(1), 0.0)
        scales = [qkv] + [smooth(branch, qkv, grid, prefix) for branch in self.mla.aggreg]
        heads = torch.cat(scales, dim=1).unflatten(1, (-1, 3, self.dim // self.heads)).transpose(-1, -2)
        q, k, v = heads.unbind(2)  # (B, heads · (1 + S), N, d)
        y, _ = self.attend(q, k, v, mask=mask)
        y = self.mla.proj.conv(y.transpose(-1, -2).flatten(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        return y if self.config.norm is None else self._normalise(y, mask)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        # timm's attention is not used: it computes in float32 even for float64 weights, and ignores padding.
        return linear_attention(F.relu(q), F.relu(k), v, mask=mask, eps=self.config.eps, relative=False), None

    def _normalise(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """timm's BatchNorm on (B, N, D). In training over the real tokens only; padding gets zeros."""
        real = mask if self.training else None
        rows = y.flatten(0, 1) if real is None else y[real]
        # Each token is an image of its own: PyTorch's CPU backward is wrong for the memory format of (B, D, N, 1).
        rows = batch_norm(self.mla.proj.norm, rows.contiguous()[..., None, None]).flatten(1)
        if real is None:
            return rows.unflatten(0, y.shape[:2])
        return rows.new_zeros(y.shape).masked_scatter(real.unsqueeze(-1), rows)

    def no_weight_decay(self) -> set[str]:
        return {"mla.proj.norm.weight", "mla.proj.norm.bias"} if self.config.norm else set()

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """W_q, W_k, W_v; for each scale also M (3D, N, N) and W_M (3D, 3D), which act on [Q | K | V]."""
        d, norm = self.dim // self.heads, self.mla.proj.norm if self.config.norm else None
        order = torch.arange(3 * self.dim).view(self.heads, 3, d).transpose(0, 1).flatten()
        weight, bias = self.mla.qkv.conv.weight.flatten(1)[order], self.mla.qkv.conv.bias
        matrices: dict[str, Any] = {f"W_{c}": w.t() for c, w in zip("qkv", weight.chunk(3), strict=True)}
        biases = (None,) * 3 if bias is None else bias[order].chunk(3)
        matrices |= {f"b_{c}": b for c, b in zip("qkv", biases, strict=True)}
        matrices |= {"W_o": self.mla.proj.conv.weight.flatten(1).t(), "b_o": self.mla.proj.conv.bias}
        for name, kind in (("gain", "weight"), ("shift", "bias"), ("mean", "running_mean"), ("var", "running_var")):
            matrices[name] = None if norm is None else getattr(norm, kind)
        matrices |= {"M": [], "b_M": [], "W_M": [], "c_M": []}
        grid = self._grid(n, grid)
        for conv, mix in self.mla.aggreg:
            matrices["M"].append(smoothing_matrix(conv.weight[order], grid, self.config.num_prefix_tokens))
            matrices["b_M"].append(None if conv.bias is None else conv.bias[order])
            blocks = torch.block_diag(*mix.weight.view(3 * self.heads, d, d).transpose(1, 2))
            matrices["W_M"].append(blocks[order][:, order])
            matrices["c_M"].append(None if mix.bias is None else mix.bias[order])
        return matrices

    def _grid(self, n: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
        return scale_grid(self, n, grid) if self.config.scales else (n,)

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        D, d, p = self.dim, self.dim // self.heads, self.config.num_prefix_tokens
        scales, heads = self.config.scales, self.heads * (1 + len(self.config.scales))
        ops = [Op("linear", (n, D, 3 * D, 1)), *smoothing_ops(n, D, self.heads, scales, self._grid(n, grid), p)]
        ops += [Op("matmul", (heads, d, n, d + 1)), Op("matmul", (heads, n, d, d + 1))]
        return [*ops, Op("linear", (n, heads * d, D, 1))]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> ReluLinearMixer:
        """A mixer with the weights of the authors' or timm's LiteMLA, which have the same names.

        `options` are arguments of their constructor, or ours. `dim` (default 8) is the width of a head. norm, scales
        and use_bias come from the weights. Pass eps=1e-5 for timm's outputs.
        """
        conv, out = state_dict.get("qkv.conv.weight"), state_dict.get("proj.conv.weight")
        if conv is None or out is None:
            check_keys(state_dict, ("qkv.conv.weight", "proj.conv.weight"))
            raise AssertionError
        width = conv.shape[1]
        settings = cls._arguments(width, options)
        count = out.shape[1] * 3 // conv.shape[0] - 1
        smooth = [f"aggreg.{i}.{j}" for i in range(count) for j in (0, 1)]
        norm = "proj.norm.weight" in state_dict
        bias = "qkv.conv.bias" in state_dict or (not norm and "proj.conv.bias" in state_dict)
        own: dict[str, Any] = {"norm": "batch" if norm else None, "bias": bias}
        settings = options_beyond_weights(settings, own) | own
        sizes = [state_dict.get(f"aggreg.{i}.0.weight", conv).shape[-1] for i in range(count)]
        own = {"scales": tuple(sizes)}
        settings = options_beyond_weights(settings, own) | own
        norm_parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        keys = ["qkv.conv.weight", "proj.conv.weight", *(f"{name}.weight" for name in smooth)]
        keys += [f"proj.norm.{name}" for name in norm_parts] if norm else []
        keys += ["qkv.conv.bias", *(f"{name}.bias" for name in smooth)] if bias else []
        keys += ["proj.conv.bias"] if bias and not norm else []
        check_keys(state_dict, keys)
        mixer = cls(ReluLinearConfig(**settings), width, device=conv.device, dtype=conv.dtype)
        load(mixer, {f"mla.{name}": value for name, value in state_dict.items()})
        return mixer

    @staticmethod
    def _arguments(width: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Our options for the authors' arguments. Raises OptionError for unsupported ones."""
        settings = dict(options)
        for name in ("in_channels", "out_channels"):
            check_choice(name, settings.pop(name, width), (width,))
        check_choice("kernel_func", settings.pop("kernel_func", "relu"), ("relu",))
        check_choice("act_func", settings.pop("act_func", (None, None)), ((None, None),))
        check_choice("heads_ratio", float(settings.pop("heads_ratio", 1.0)), (1.0,))
        if "norm" in settings and settings["norm"] not in ("batch", None):
            names = {(None, "bn2d"): "batch", (None, None): None}
            norm = tuple(settings["norm"])
            check_choice("norm", norm, names)
            settings["norm"] = names[norm]
        if "scales" in settings:
            settings["scales"] = tuple(settings["scales"])
        head = settings.pop("dim", 8)
        settings["heads"] = settings.get("heads") or max(width // head, 1)
        if settings["heads"] * head != width and "dim" in options:
            raise OptionError("dim", head, f"the width of a head, where heads · dim = {width}", "Pass dim or heads.")
        return translate(ReluLinearConfig, settings, {"use_bias": None})


@register(ReluLinearMixer)
@dataclass(frozen=True, kw_only=True)
class ReluLinearConfig(HeadsConfig, PrefixedGridConfig):
    """Options of EfficientViT's ReLU linear attention.

    Args:
        scales: sizes of the smoothing convolutions, odd; the authors' networks use (5,).
        norm: "batch" (BatchNorm after W_o, as the authors do) or None. A BatchNorm has a bias of its own.
        eps: of the denominator; the authors use 1e-15, timm 1e-5.
        grid: (H, W) for the scales; can also be passed in the call.
    """

    name: ClassVar[str] = "relu_linear"
    output: ClassVar[str] = "EfficientViT's ReLU linear attention, multi-scale"
    cost_formula: ClassVar[str] = (
        "4 N D² + 2 N D (d + 1); plus N D² + 2 N D (d + 1) + 3 N D (s² + d) for each s in scales"
    )
    sees: ClassVar[str] = "everything"
    layer_of: ClassVar[str | None] = "timm"
    scales: tuple[int, ...] = ()
    norm: str | None = "batch"
    eps: float = 1e-15

    def check(self) -> None:
        check_choice("norm", self.norm, ("batch", None))
        check_number("eps", self.eps, 1e-30, math.inf, "a positive number", 1e-15)
        check_scales(self.scales, self.grid, self.num_prefix_tokens)

    @property
    def attends(self) -> bool:
        return self.norm is None and not self.scales  # the norm comes after W_o, which a layer keeps

    @property
    def placed(self) -> bool:
        """Whether positions matter."""
        return bool(self.scales)
