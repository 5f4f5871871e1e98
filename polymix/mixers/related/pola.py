"""Polarity-aware linear attention (PolaFormer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, check_number
from polymix.mixers.mixer import INIT_STD
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.features import GatedConfig, GatedMixer
from polymix.ops.related.feature_maps import signed_powers

SPREAD = 0.13  # of the output before W_o, measured at 196 tokens


class PolaMixer(GatedMixer):
    """Polarity-aware linear attention (PolaFormer): channels of equal and of opposite sign meet apart.

        y_i = [ A(q⁺, q⁻) on the first half of V's channels,  A(q⁻, q⁺) on the second ]  ⊙ (x_i W_g + b_g)
        A(a, b) on V = [a, b] Σ_j [k_j⁺, k_j⁻]ᵀ v_j / ([a, b] · Σ_j [k_j⁺, k_j⁻] + 1e-6 n_i)    per head
        x⁺ = relu(x / s)^p,   x⁻ = relu(-x / s)^p,   s = softplus(scale),   p = 1 + α sigmoid(power)

    The sums run over the n_i tokens j that token i sees; W_o joins the heads. Half of the values are weighted by how
    far query and key agree in sign, the other half by how far they disagree. Each channel learns its s and p. The
    authors' gate is learned from X, as here; their block also adds positions to the keys and a depthwise convolution
    of V. The causal form works in chunks of 128 tokens; torch.export then needs a fixed length.

    Raises: OptionError for an odd number of channels a head.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: 2 d (d + 2) numbers per head.
    Source: Meng et al. (2025), PolaFormer: Polarity-aware Linear Attention for Vision Transformers, ICLR,
    arXiv 2501.15061.
    """

    name = "pola"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, sequence="sum"
    )
    config: PolaConfig

    def __init__(self, config: PolaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.add_projections(INIT_STD / SPREAD, **kw)
        d = dim // self.heads
        if d % 2:
            got = f"{self.heads}, which leaves {d} of {dim} channels a head"
            raise OptionError("heads", got, "an even number of channels a head", "Use another number of heads.")
        self.scale = nn.Parameter(torch.zeros(self.heads, 1, d, **kw))
        self.power = nn.Parameter(torch.zeros(self.heads, 1, d, **kw))

    def query_features(self, q: Tensor) -> Tensor:
        same = self._powers(q)
        return torch.cat((same, torch.cat(same.chunk(2, -1)[::-1], -1)), 1)

    def key_features(self, k: Tensor) -> Tensor:
        k = self._powers(k)
        return torch.cat((k, k), 1)

    def _powers(self, x: Tensor) -> Tensor:
        power = 1 + self.config.alpha * self.power.to(x.dtype).sigmoid()
        return signed_powers(x / F.softplus(self.scale.to(x.dtype)), power)

    @property
    def moments(self) -> tuple[int, int, int]:
        d = self.dim // self.heads
        return 2 * self.heads, 2 * d, d // 2

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        y, state = super().attend(q, k, _halves(v), mask=mask, causal=causal, cross=cross, state=state)
        return _joined(y), state

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        return super().pool(k, _halves(v), mask)

    def ask(self, q: Tensor, state: Any) -> Tensor:
        return _joined(super().ask(q, state))

    def no_weight_decay(self) -> set[str]:
        return {"scale", "power"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return {**super().named_matrices(n, grid), "scale": self.scale[:, 0], "power": self.power[:, 0]}


def _halves(v: Tensor) -> Tensor:
    """Both halves of the channels of v (B, heads, N, e) as heads: (B, 2 heads, N, e / 2)."""
    return torch.cat(v.chunk(2, -1), 1)


def _joined(y: Tensor) -> Tensor:
    """The inverse of `_halves`."""
    return torch.cat(y.chunk(2, 1), -1)


@register(PolaMixer)
@dataclass(frozen=True, kw_only=True)
class PolaConfig(GatedConfig):
    """Options of polarity-aware linear attention.

    Args:
        alpha: α; the powers p lie between 1 and 1 + α.
    """

    name: ClassVar[str] = "pola"
    output: ClassVar[str] = "linear attention, equal and opposite signs apart"
    cost_formula: ClassVar[str] = "4 N D² + 4 N D (d + 2); plus N D² if gate"
    sees: ClassVar[str] = "everything, the past, a context"
    gate: bool = True
    alpha: float = 4

    def check(self) -> None:
        super().check()
        check_number("alpha", self.alpha, 0.0, 100.0, "a number from 0 to 100", 4)
