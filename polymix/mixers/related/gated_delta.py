"""Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.delta import DeltaConfig, DeltaMixer
from polymix.structured.dense import Dense


class GatedDeltaMixer(DeltaMixer):
    """Gated DeltaNet: a memory of keys and values that each token corrects at its key, and that fades.

        [Q, K, V] = silu(conv_k(X [W_q, W_k, W_v] + [b_q, b_k, b_v]))    causal, a kernel per channel
        S_t = a_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,   y_t = S_tᵀ q_t / √d     per head, q and k of length 1
        a_t = exp(-A softplus(x_t W_a + b_a)),   β_t = sigmoid(x_t W_β + b_β)          a number a head
        Y = (y / rms(y) ⊙ gain ⊙ silu(X W_g)) W_o + b_o                                rms over the d channels of a head

    Linear attention only adds; here what the memory holds at k_t is moved to v_t by the fraction β_t, so that an old
    value is replaced. The products run in chunks of 16 tokens (a triangular system within each), and the memory passes
    from chunk to chunk. Padding is skipped. torch.export then needs a fixed length. It is the past alone that a token
    sees. The authors' layer has values twice as wide and no bias at β.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: d² numbers per head and 3 D (k - 1).
    Source: Yang, Kautz and Hatamizadeh (2025), Gated Delta Networks: Improving Mamba2 with Delta Rule, ICLR,
    arXiv 2412.06464; fla's layer.
    """

    name = "gated_delta"
    capabilities = Capabilities(causal=True, masks=frozenset({"padding"}), recurrent=True)
    config: GatedDeltaConfig
    spread = 0.55
    channels_fade_apart = False

    def maps(self, dim: int, **kw: Any) -> tuple[nn.Module, nn.Module | None]:
        return Dense(dim, self.heads, False, **kw), Dense(dim, dim, False, **kw) if self.config.gate else None

    def opened(self, gate: Tensor) -> Tensor:
        return F.silu(gate)


@register(GatedDeltaMixer)
@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(DeltaConfig):
    """Options of Gated DeltaNet."""

    name: ClassVar[str] = "gated_delta"
    output: ClassVar[str] = "a fading memory, corrected at each key"
    cost_formula: ClassVar[str] = (
        "4 N D² + 2 N D heads + 3 N D conv_kernel + ⌈N / 16⌉ (D (1536 + 48 d + d²) + 1920 heads); plus N D² if gate"
    )
