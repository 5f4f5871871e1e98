"""Poly-SA: multi-head self-attention as a polynomial of third order, in linear time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix import ops
from polymix.errors import OptionError, check_choice, check_grid_option, check_int
from polymix.mixers.checks import MixerCall, check_grid
from polymix.mixers.config import HeadsConfig, PrefixedGridConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Place, PooledState, Summary, count_tokens
from polymix.ops import pooled
from polymix.ops.dispatch import IMPLS
from polymix.ops.shared.activations import SIGMAS
from polymix.structured import Dense, Prefixed, Site, StructuredMap, token_map
from polymix.structured.cost import Op
from polymix.structured.dense import affine

# How much smaller the output is than q at init, for each σ, with p_1 = 1 and p_2 = 1/N. The init of W_o corrects it.
_GAIN = {"softmax": lambda d: d, "sigmoid": lambda d: 2.0, "tanh": lambda d: 8.0, "identity": lambda d: 8.0}


class PolySaMixer(TokenMixer):
    """Poly-SA: multi-head self-attention as a polynomial of degree 3.

        Y = Q ⊙ p_1 σ(p_2ᵀ (K ⊙ V))     per head; W_o joins the heads

    p_1 and p_2 in ℝᴺ are learned position weights, one pair per head. σ is a softmax over a head's channels, or
    `sigma`. The position weights belong to `grid`. Other sizes resample them, linearly in 1-D and bicubically in 2-D,
    without the prefix tokens. The parameter is N · p_2, so that resampling keeps the sum of p_2 and with it the scale
    of the pooled vector. With `positions="mean"` p_1 = 1 and p_2 = 1/N, for any length and padding masks. With
    `head_mixing="depthwise"` a 3×3 depthwise convolution replaces W_o. Queries, keys and values may have inputs of
    their own, as behind CvT's convolutions: `mixer(x, keys, values=values)`, each (B, N, D).

    Raises: OptionError for a grid that is missing, or has no effect.

    Shapes: (B, N, D) -> (B, N, D).
    Source: Poly-SA, Eq. 16-18, Sec. 5.2.2 (depthwise head mixing).
    """

    name = "poly_sa"
    capabilities = Capabilities(keys=True, values=True, masks=frozenset({"padding"}), grids=(1, 2), sequence="sum")
    impls = IMPLS
    config: PolySaConfig

    def __init__(self, config: PolySaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        if config.placed:
            config.check_grid()
        self.heads = head_count(config.heads, dim)
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        p, gain = config.num_prefix_tokens, INIT_STD * _GAIN[config.sigma](dim // self.heads)
        self.proj: StructuredMap | Prefixed
        if config.head_mixing == "depthwise":
            site = Site("token", dim, kernel=(3, 3))
            self.proj = token_map("depthwise", site, prefix=p, bias=config.bias, **kw)
        else:
            self.proj = Dense(dim, dim, config.bias, **kw)
        self.proj.scale_(gain)
        self.learned = config.positions == "learned"
        if self.learned:
            assert config.grid is not None
            size = p + torch.Size(config.grid).numel()
            self.p_1 = nn.Parameter(torch.ones(self.heads, size, **kw))
            self.p_2 = nn.Parameter(torch.ones(self.heads, size, **kw))  # N · p_2
        self.capabilities = Capabilities(
            keys=True,
            values=True,
            masks=frozenset() if self.learned else frozenset({"padding"}),
            grids=() if config.grid is None else (len(config.grid),),
            sequence=None if config.head_mixing else "sum",  # a convolution behind a sum
        )

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        p_1, p_2 = self._positions(call.grid, x.shape[1])
        proj = affine(self.proj) if self.config.head_mixing is None else None
        y = ops.poly_sa(
            x, affine(self.qkv.qkv), proj, p_1, p_2, heads=self.heads, sigma=self.config.sigma, mask=call.mask,
            keys=context if call.cross else None, values=call.values, impl=self.config.impl,
        )  # fmt: skip
        return y if proj is not None else self.proj(y, call.grid, call.mask)

    def summary(self, x: Tensor, mask: Tensor | None = None, place: Place | None = None, start: Any = None) -> Summary:
        _, p_2 = self._positions_at(x, place)
        total = pooled.poly_sa_summary(x, affine(self.qkv.qkv), p_2, mask=mask)
        return Summary(PooledState(total, count_tokens(x, mask)))

    def read_state(
        self, x: Tensor, state: PooledState, mask: Tensor | None = None, place: Place | None = None
    ) -> Tensor:
        p_1, _ = self._positions_at(x, place)
        total = state.total if self.learned else state.total / state.count.clamp_min(1).unsqueeze(-1)
        options: dict[str, Any] = {"heads": self.heads, "sigma": self.config.sigma}
        return pooled.poly_sa_read(x, total, state.count, affine(self.qkv.qkv), affine(self.proj), p_1, **options)

    def _positions_at(self, x: Tensor, place: Place | None) -> tuple[Tensor | None, Tensor | None]:
        """`_positions` of a part of a sequence."""
        if not self.learned or place is None:
            return self._positions(self.config.grid, x.shape[1])
        p_1, p_2 = self._positions(place.grid, place.total)
        assert p_1 is not None and p_2 is not None
        part = slice(place.first, place.first + x.shape[1])
        return p_1[:, part], p_2[:, part]

    def _positions(self, grid: tuple[int, ...] | None, n: int) -> tuple[Tensor | None, Tensor | None]:
        """p_1 and p_2, (heads, N), for this grid; None for both if they are not learned."""
        if not self.learned:
            return None, None
        assert grid is not None and self.config.grid is not None
        p_1, p_2 = (resample(p, self.config.grid, grid, self.config.num_prefix_tokens) for p in (self.p_1, self.p_2))
        return p_1, p_2 / n

    @property
    def polynomial(self) -> Polynomial:
        return Polynomial(3, homogeneous=not self.config.bias) if self.config.sigma == "identity" else Polynomial()

    def no_weight_decay(self) -> set[str]:
        return {"p_1", "p_2"} if self.learned else set()

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        grid = check_grid(self, grid, n - self.config.num_prefix_tokens)
        matrices = self.qkv.named_matrices(self.proj if isinstance(self.proj, Dense) else None)
        if not isinstance(self.proj, Dense):
            matrices |= {"W_o": self.proj.dense(n, grid), "b_o": self.proj.bias}
        p_1, p_2 = self._positions(grid, n)
        ones = self.qkv.qkv.weight.new_ones(self.heads, n)
        return {**matrices, "p_1": ones if p_1 is None else p_1, "p_2": ones / n if p_2 is None else p_2}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        grid = check_grid(self, grid, n - self.config.num_prefix_tokens)
        return [self.qkv.op(n), *self.proj.cost_ops(n, grid)]


def resample(p: Tensor, old: tuple[int, ...], new: tuple[int, ...], prefix: int) -> Tensor:
    """Resample position weights from grid `old`, (heads, prefix + ∏ old), to grid `new`: linear or bicubic."""
    if tuple(old) == tuple(new):
        return p
    first, rest = p[:, :prefix], p[:, prefix:].unflatten(1, old).unsqueeze(0)
    mode = "linear" if len(old) == 1 else "bicubic"
    rest = F.interpolate(rest, size=tuple(new), mode=mode, align_corners=False)
    return torch.cat((first, rest[0].flatten(1)), dim=1)


@register(PolySaMixer)
@dataclass(frozen=True, kw_only=True)
class PolySaConfig(HeadsConfig, PrefixedGridConfig):
    """Options of Poly-SA.

    Args:
        grid: (N,) or (H, W) of the position weights.
        sigma: "softmax" (over a head's channels), "sigmoid", "tanh" or "identity".
        positions: "learned" or "mean".
        head_mixing: None (W_o) or "depthwise" (3×3 convolution on a 2-D grid).
    """

    name: ClassVar[str] = "poly_sa"
    output: ClassVar[str] = "Q ⊙ p₁ σ(p₂ᵀ(K ⊙ V)), heads"
    cost_formula: ClassVar[str] = "4 N D²; 3 N D² + 9 H W D if head_mixing"
    sees: ClassVar[str] = "everything"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"bias": True}, "equations": {"bias": False}}
    sigma: str = "softmax"
    positions: str = "learned"
    head_mixing: str | None = None

    def check(self) -> None:
        check_choice("sigma", self.sigma, SIGMAS)
        check_choice("positions", self.positions, ("learned", "mean"))
        check_choice("head_mixing", self.head_mixing, (None, "depthwise"))
        check_int("num_prefix_tokens", self.num_prefix_tokens, 0)
        if self.placed and self.grid is not None:
            self.check_grid()
        if not self.placed and (self.grid is not None or self.num_prefix_tokens):
            cure = "Leave them out: this form treats all positions the same."
            got = f"grid={self.grid}, num_prefix_tokens={self.num_prefix_tokens}"
            raise OptionError("positions", f'"mean" with {got}', "positions that play a part", cure)

    @property
    def placed(self) -> bool:
        return self.positions == "learned" or self.head_mixing is not None

    def check_grid(self) -> None:
        cure = 'Pass grid=, or positions="mean" without head_mixing, which needs none.'
        check_grid_option(self.grid, (2,) if self.head_mixing else (1, 2), cure)
