"""Kimi Delta Attention (KDA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.delta import DeltaConfig, DeltaMixer
from polymix.structured.dense import Dense


class KdaMixer(DeltaMixer):
    """Kimi Delta Attention (KDA): a memory that each token corrects at its key, and whose channels fade apart.

        [Q, K, V] = silu(conv_k(X [W_q, W_k, W_v] + [b_q, b_k, b_v]))    causal, a kernel per channel
        S_t = (I - β_t k_t k_tᵀ) diag(a_t) S_{t-1} + β_t k_t v_tᵀ,   y_t = S_tᵀ q_t / √d    per head, |q| = |k| = 1
        a_t = exp(-A softplus(x_t W_a1 W_a2 + b_a)), d numbers a head;   β_t = sigmoid(x_t W_β + b_β), one
        Y = (y / rms(y) ⊙ gain ⊙ sigmoid(X W_g1 W_g2 + b_g)) W_o + b_o                      rms over a head's channels

    It is gated_delta with a decay for each channel of the keys, and with gates that are sigmoids of a map of rank d.
    The products run in chunks of 16 tokens (a triangular system within each, whose decays are computed for each pair,
    so that none overflows), and the memory passes from chunk to chunk. Padding is skipped. torch.export then needs a
    fixed length. It is the past alone that a token sees. Its b_a starts as gated_delta's; β has no bias in fla.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: d² numbers per head and 3 D (k - 1).
    Source: Kimi Team (2025), Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv 2510.26692; fla's
    layer.
    """

    name = "kda"
    capabilities = Capabilities(causal=True, masks=frozenset({"padding"}), recurrent=True)
    config: KdaConfig
    spread = 0.47
    channels_fade_apart = True

    def maps(self, dim: int, **kw: Any) -> tuple[nn.Module, nn.Module | None]:
        d = dim // self.heads

        def narrow(bias: bool) -> nn.Module:
            return nn.Sequential(Dense(dim, d, False, **kw), Dense(d, dim, bias, **kw))

        return narrow(False), narrow(True) if self.config.gate else None

    def opened(self, gate: Tensor) -> Tensor:
        return gate.sigmoid()


@register(KdaMixer)
@dataclass(frozen=True, kw_only=True)
class KdaConfig(DeltaConfig):
    """Options of Kimi Delta Attention."""

    name: ClassVar[str] = "kda"
    output: ClassVar[str] = "a memory corrected at each key, each channel fading"
    cost_formula: ClassVar[str] = (
        "4 N D² + 2 N D d + N D heads + 3 N D conv_kernel + ⌈N / 16⌉ (D (2048 + 48 d + d²) + 1920 heads); "
        "plus 2 N D d if gate"
    )
