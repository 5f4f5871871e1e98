"""Focused linear attention (FLatten)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError, check_grid_option, check_int, check_number
from polymix.mixers.checks import MixerCall, check_grid
from polymix.mixers.config import HeadsConfig, PrefixedGridConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.loading import attention_projections, check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD, TokenMixer
from polymix.mixers.poly_sa import resample
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.linear_attention import linear_attention
from polymix.ops.shared.depthwise import effective_kernel
from polymix.ops.shared.tensors import accumulator
from polymix.structured.base import init_
from polymix.structured.conv import conv_after_prefix, conv_after_prefix_matrix
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

EPS = 1e-6
_AUTHORS = {"dim": None, "num_heads": "heads", "qkv_bias": None, "proj_drop": "dropout", "qk_scale": None,
            "attn_drop": None, "num_patches": None, "window_size": "grid"}  # fmt: skip
_PLAIN = ("scale", "positional_encoding", "dwc.weight", "dwc.bias", "sr.weight", "sr.bias", "norm.weight", "norm.bias")


class FocusedMixer(TokenMixer):
    """Focused linear attention: queries and keys are drawn towards their largest channels (FLatten).

        y_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (φ(q_i) · Σ_j φ(k_j) + 1e-6 n) + (M V)_i     per head; W_o joins the heads
        φ(x) = |u| u^p / |u^p|,   u = (relu(x) + 1e-6) / softplus(scale)            over all D channels

    p is `focusing_factor`. Keys first get a learned positional encoding. M is a depthwise convolution on the grid
    with the same d kernels for every head. With sr_ratio s > 1, keys and values come from a map that is s times
    smaller along each side, made by a strided convolution and a layer norm; the branch reads V stretched back to N
    tokens in row-major order. The encoding belongs to `grid`; other grids resample it bicubically. Prefix tokens have
    an encoding of their own but lie outside the convolution. Padding masks work at sr_ratio 1, where the branch reads
    padding as zero.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads, n keys.
    Source: Han et al. (2023).
    """

    name = "focused"
    capabilities = Capabilities(values=True, masks=frozenset({"padding"}), grids=(2,))
    config: FocusedConfig

    def __init__(self, config: FocusedConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        check_grid_option(config.grid, (2,))
        assert config.grid is not None
        self.heads = head_count(config.heads, dim)
        d, k, s = dim // self.heads, config.kernel_size, config.sr_ratio
        keys = config.num_prefix_tokens + math.prod(self._reduced(config.grid))
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)
        self.scale = nn.Parameter(torch.zeros(1, 1, dim, **kw))
        self.positional_encoding = nn.Parameter(torch.zeros(1, keys, dim, **kw))
        self.dwc = nn.Conv2d(d, d, k, padding=k // 2, groups=d, bias=config.bias, **kw)
        init_(self.dwc.weight, k * k, INIT_STD)
        self.sr = self.norm = None
        if s > 1:
            self.sr = nn.Conv2d(dim, dim, s, stride=s, bias=config.bias, **kw)
            self.norm = nn.LayerNorm(dim, bias=config.bias, **kw)
            init_(self.sr.weight, dim * s * s)
            self.capabilities = Capabilities(values=True, grids=(2,))
        for conv in (self.dwc, self.sr):
            if conv is not None and conv.bias is not None:
                nn.init.zeros_(conv.bias)

    def _reduced(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        s = self.config.sr_ratio
        if s == 1:
            return grid
        if min(grid) < s:
            raise ShapeError("grid", grid, f"at least sr_ratio={s} rows and columns", "Build it with sr_ratio=1.")
        return tuple(size // s for size in grid)

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        assert call.grid is not None
        values = None if call.values is None else self._context(call.values, call.grid)
        q, k, v = (part.flatten(-2) for part in self.qkv(x, self._context(x, call.grid), values))
        if call.mask is not None:
            k, v = (part.masked_fill(~call.mask.unsqueeze(-1), 0.0) for part in (k, v))
        dtype = accumulator(v.dtype)
        q, k = self._focus(q.to(dtype)), self._focus(k.to(dtype) + self._positions(call.grid).to(dtype))
        heads = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        y = linear_attention(*heads, mask=call.mask, eps=EPS).transpose(1, 2).flatten(-2)
        if self.sr is not None:
            v = F.interpolate(v.transpose(1, 2), size=x.shape[1], mode="linear", align_corners=False).transpose(1, 2)
        branch = conv_after_prefix(v, self._kernel(), call.grid, self.config.num_prefix_tokens)
        if self.dwc.bias is not None:
            shift = self.dwc.bias.repeat(self.heads).to(branch.dtype).expand_as(branch)
            p = self.config.num_prefix_tokens
            branch = branch + (torch.cat((torch.zeros_like(shift[:, :p]), shift[:, p:]), dim=1) if p else shift)
        return self.proj(y + branch)

    def _context(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        """The tokens that keys and values are computed from: x, or its reduced map."""
        if self.sr is None or self.norm is None:
            return x
        self._reduced(grid)  # raises if the grid is too small
        return self.norm(self.sr(x.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2))

    def _focus(self, x: Tensor) -> Tensor:
        u = (F.relu(x) + EPS) / F.softplus(self.scale.to(x.dtype))
        # The scale of u cancels, so take the power of numbers up to 1, which cannot overflow.
        power = (u / u.detach().amax(-1, keepdim=True)) ** self.config.focusing_factor
        return power * (u.norm(dim=-1, keepdim=True) / power.norm(dim=-1, keepdim=True))

    def _positions(self, grid: tuple[int, ...]) -> Tensor:
        assert self.config.grid is not None
        old, new = self._reduced(self.config.grid), self._reduced(grid)
        return resample(self.positional_encoding[0].t(), old, new, self.config.num_prefix_tokens).t()

    def _kernel(self) -> Tensor:
        return self.dwc.weight.repeat(self.heads, 1, 1, 1)  # (D, 1, k, k)

    def no_weight_decay(self) -> set[str]:
        return {"scale", "positional_encoding"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        grid = self._grid(n, grid)
        bias = None if self.dwc.bias is None else self.dwc.bias.repeat(self.heads)
        branch = conv_after_prefix_matrix(self._kernel(), grid, self.config.num_prefix_tokens)
        matrices = {**self.qkv.named_matrices(self.proj), "scale": self.scale[0, 0], "P": self._positions(grid),
                 "M": branch, "b_M": bias}  # fmt: skip
        if self.sr is not None and self.norm is not None:
            matrices |= {"W_s": self.sr.weight, "b_s": self.sr.bias, "gain": self.norm.weight, "shift": self.norm.bias}
        return matrices

    def _grid(self, n: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
        grid = check_grid(self, grid, n - self.config.num_prefix_tokens)
        assert grid is not None
        return grid

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        grid, d, s = self._grid(n, grid), self.dim // self.heads, self.config.sr_ratio
        keys = self.config.num_prefix_tokens + math.prod(self._reduced(grid))
        ops = [self.qkv.op(n)]
        if s > 1:
            shapes = ((keys, self.dim * s * s, self.dim), (n, self.dim, self.dim), (keys, self.dim, 2 * self.dim))
            ops = [Op("linear", (*shape, 1)) for shape in shapes]
        ops += [Op("matmul", (self.heads, d, keys, d + 1)), Op("matmul", (self.heads, n, d, d + 1))]
        taps = effective_kernel((self.config.kernel_size,) * 2, grid)
        return [*ops, Op("depthwise", grid, taps, self.dim), linear_op(n, self.proj)]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> FocusedMixer:
        """A mixer with the weights of the authors' focused attention, PVT form (q, kv) or Swin form (qkv).

        `options` are arguments of their constructors (num_heads defaults to 8; qk_scale and attn_drop are ignored, as
        they do) or ours. The grid is window_size, else grid=, else a square. A missing bias of q and kv is zero.
        """
        weights = dict(state_dict)
        for kind in ("weight", "bias"):  # the same layout for both forms
            if f"q.{kind}" in weights and f"kv.{kind}" in weights:
                weights[f"qkv.{kind}"] = torch.cat((weights.pop(f"q.{kind}"), weights.pop(f"kv.{kind}")))
        reduced = _PLAIN[4:] if "sr.weight" in weights else ()
        check_keys(weights, ("qkv.weight", "proj.weight", "proj.bias", *_PLAIN[:4], *reduced), ("qkv.bias",))
        settings = {"heads": 8, **translate(FocusedConfig, options, _AUTHORS)}
        own = {
            "bias": True,
            "kernel_size": weights["dwc.weight"].shape[-1],
            "sr_ratio": weights["sr.weight"].shape[-1] if reduced else 1,
        }
        settings = options_beyond_weights(settings, own) | own
        patches = weights["positional_encoding"].shape[1] * settings["sr_ratio"] ** 2
        side = math.isqrt(patches)
        if settings.get("grid") is None and side * side != patches:
            raise OptionError("grid", None, f"(H, W), as {patches} tokens are not a square", "Pass grid=(H, W).")
        settings["grid"] = tuple(settings.get("grid") or (side, side))
        like = weights["proj.weight"]
        mixer = cls(FocusedConfig(**settings), like.shape[0], device=like.device, dtype=like.dtype)
        load(mixer, {**attention_projections(weights), **{name: weights[name] for name in _PLAIN if name in weights}})
        return mixer


@register(FocusedMixer)
@dataclass(frozen=True, kw_only=True)
class FocusedConfig(HeadsConfig, PrefixedGridConfig):
    """Options of focused linear attention.

    Args:
        grid: (H, W) of the positional encoding.
        focusing_factor: the power p.
        kernel_size: of the branch, odd.
        sr_ratio: how many times smaller the map of the keys is along each side.
        num_prefix_tokens: tokens before the grid (class token, registers); only with sr_ratio=1.
    """

    name: ClassVar[str] = "focused"
    output: ClassVar[str] = "focused linear attention with a depthwise branch"
    cost_formula: ClassVar[str] = (
        "4 N D² + 2 N D (d + 1) + H W D taps; "
        "2 N D² + n D² (sr_ratio² + 2) + (N + n) D (d + 1) + H W D taps if sr_ratio > 1; "
        "where n = ⌊H / sr_ratio⌋ ⌊W / sr_ratio⌋; where taps = kernel_size²"
    )
    sees: ClassVar[str] = "everything"
    focusing_factor: float = 3
    kernel_size: int = 5
    sr_ratio: int = 1

    def check(self) -> None:
        if self.grid is not None:
            check_grid_option(self.grid, (2,))
        check_number("focusing_factor", self.focusing_factor, 1.0, math.inf, "a number of at least 1", 3)
        check_int("kernel_size", self.kernel_size, 1)
        check_int("sr_ratio", self.sr_ratio, 1)
        check_int("num_prefix_tokens", self.num_prefix_tokens, 0)
        if self.kernel_size % 2 == 0:
            raise OptionError(
                "kernel_size", self.kernel_size, "an odd size", f"Pass {self.kernel_size + 1}, for example."
            )
        if self.sr_ratio > 1 and self.num_prefix_tokens:
            allowed = "sr_ratio=1 with num_prefix_tokens, which the strided convolution cannot read"
            raise OptionError("sr_ratio", self.sr_ratio, allowed, "Drop one of them.")
