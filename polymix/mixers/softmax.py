"""Softmax attention, the yardstick: PyTorch's fused kernel behind the contract of a mixer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError, check_choice, check_grid_option, check_number
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import GridConfig, HeadsConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.inheritance import AttentionMaps, Sources
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.attention import softmax_attention
from polymix.ops.shared.masks import rows_of_mask
from polymix.ops.shared.rotary import rotary, rotate
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense


class SoftmaxMixer(HeadsMixer):
    """Softmax attention (Vaswani et al. 2017) by PyTorch's fused kernel: the mixer that all others are compared with.

        Y = softmax(Q Kᵀ / √d + bias) V     per head; W_o joins the heads

    `relative` learns the bias, one number per head for each offset between two places of `grid` (as Swin does).
    `rotary` rotates queries and keys by their positions (RoPE, channel pairs (k, k + d/2)). Without either, positions
    do not matter. A query that sees nothing gets zeros before W_o. There is no recurrent form, as its cache would
    grow with N.

    Raises: OptionError for a grid without `relative`; ShapeError for another grid than the one it was built for.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    Source: Vaswani et al. 2017, Eq. 1.
    """

    name = "softmax"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding", "arbitrary", "block_causal", "segments"}),
        sequence="gather",
    )  # fmt: skip
    config: SoftmaxConfig
    offset: Tensor

    def __init__(self, config: SoftmaxConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)
        self.table: nn.Parameter | None = None
        if config.relative:
            config.check_grid()
            offsets = math.prod(2 * size - 1 for size in config.grid or ())
            self.table = nn.Parameter(torch.zeros(offsets, self.heads, **kw))
            self.register_buffer("offset", _offsets(config.grid or ()), persistent=False)
        tied = config.relative
        self.capabilities = replace(
            type(self).capabilities, cross=not (tied or config.rotary), any_length=not tied,
            grids=(len(config.grid or ()),) if tied else (),
        )  # fmt: skip

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, context, call.values))
        scale = q.shape[-1] ** -0.5
        if self.config.rotary is not None:
            q, k = self._rotated(torch.arange(q.shape[2], device=q.device), q, k)
        if self.config.relative and call.grid != tuple(self.config.grid or ()):
            raise ShapeError(
                "grid", call.grid, f"{self.config.grid}, whose offsets it learned", "Build it for this grid."
            )
        bias = self._bias()
        y = softmax_attention(
            q, k, v, scale=scale, mask=call.mask, causal=call.causal, segments=call.segments,
            bias=None if bias is None else bias.to(q.dtype),
        )  # fmt: skip
        return self.proj(y.transpose(1, 2).flatten(-2))

    def mix_part(self, x: Tensor, places: Tensor, gather: Callable[[Tensor], Tensor], call: MixerCall) -> Tensor:
        """`mix` of a part of a sequence: its tokens x (B, n, D) at `places` (n) of N see those of all parts.

        gather: keys and values (B, n, ·) of this part to those of the whole. call: of the whole.
        """
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, x))
        if self.config.rotary is not None:
            q, k = self._rotated(places, q, k)
        both = gather(torch.cat((k, v), dim=-1).transpose(1, 2))
        k, v = both.transpose(1, 2).chunk(2, dim=-1)
        bias, visible = self._bias(), rows_of_mask(places, k.shape[2], call.mask, call.causal, call.segments)
        y = softmax_attention(
            q, k, v, scale=q.shape[-1] ** -0.5, bias=None if bias is None else bias[:, places].to(q.dtype),
            mask=None if visible is None else visible.expand(x.shape[0], -1, -1),
        )  # fmt: skip
        return self.proj(y.transpose(1, 2).flatten(-2))

    def _rotated(self, places: Tensor, q: Tensor, k: Tensor) -> list[Tensor]:
        assert self.config.rotary is not None
        turns = rotary(places, q.shape[-1], axes=1, heads=None, base=self.config.rotary)
        return [rotate(part, turns, axes=1) for part in (q, k)]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """As `TokenMixer.attend`; the mask may also be (B, N, M). Positions are the matter of whoever projects."""
        return softmax_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask, causal=int(causal)), None

    def _bias(self) -> Tensor | None:
        """The relative position bias (heads, N, N), or None."""
        return None if self.table is None else self.table[self.offset].permute(2, 0, 1)

    @torch.no_grad()
    def inherit(self, attention: AttentionMaps) -> Sources:
        """Copy all four projections and the relative bias."""
        sources = super().inherit(attention)
        if self.table is not None and attention.relative is not None:
            self.table.copy_(attention.relative.weight)
            sources["table"] = attention.relative.keys
        return sources

    def no_weight_decay(self) -> set[str]:
        return set() if self.table is None else {"table"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return {**self.qkv.named_matrices(self.proj), "bias": self._bias()}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        attention = Op("attention", (self.heads, n, n, self.dim // self.heads))
        return [self.qkv.op(n), attention, linear_op(n, self.proj)]


@register(SoftmaxMixer)
@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(HeadsConfig, GridConfig):
    """Options of softmax attention.

    Args:
        relative: learn a bias for each offset on the grid.
        grid: (N,), (H, W) or (T, H, W) of the tokens, for `relative`.
        rotary: base of the rotary angles, usually 1e4; None for no rotary positions.
    """

    name: ClassVar[str] = "softmax"
    output: ClassVar[str] = "softmax attention by PyTorch's fused kernel: the yardstick"
    cost_formula: ClassVar[str] = "4 N D² + 2 N² D"
    sees: ClassVar[str] = "any mask"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"bias": True}, "equations": {"bias": False}}
    is_attention: ClassVar[bool] = True
    keeps_bias: ClassVar[bool] = True
    cache_grows: ClassVar[bool] = True
    relative: bool = False
    rotary: float | None = None

    @property
    def attends(self) -> bool:
        return True

    def check(self) -> None:
        check_choice("relative", self.relative, (True, False))
        if self.rotary is not None:
            check_number("rotary", self.rotary, 1.0, math.inf, "a base of at least 1", 1e4)
        if self.grid is not None:
            if not self.relative:
                raise OptionError(
                    "grid", self.grid, "None without relative=True", "Leave it out: no position plays a part."
                )
            self.check_grid()

    @property
    def placed(self) -> bool:
        return self.relative

    @property
    def rotary_base(self) -> float | None:
        return self.rotary

    def for_rotary(self, base: float | None) -> SoftmaxConfig:
        return self.changed(rotary=base) if self.rotary is None else self

    def for_relative(self, relative: bool) -> SoftmaxConfig:
        return self.changed(relative=relative)

    def check_grid(self) -> None:
        check_grid_option(self.grid, (1, 2, 3))


def _offsets(grid: tuple[int, ...]) -> Tensor:
    """(N, N): the index of the offset from position j to position i of the grid; the first axis varies slowest."""
    position = torch.cartesian_prod(*(torch.arange(size) for size in grid)).reshape(-1, len(grid))
    offset = position[:, None] - position[None] + torch.tensor(grid) - 1
    index = torch.zeros(offset.shape[:2], dtype=torch.int64)
    for axis, size in enumerate(grid):
        index = index * (2 * size - 1) + offset[..., axis]
    return index
