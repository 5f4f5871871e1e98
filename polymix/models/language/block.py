"""The two families' blocks: a causal layer and a feed-forward, each behind a norm, in the residual stream."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from polymix.mixers import MixerConfig
from polymix.models.language.config import PolymixConfig
from polymix.models.language.layer import CausalLayer
from polymix.models.language.order import Order


class Mlp(nn.Module):
    """GELU (by tanh, as in GPT-2) between two linear layers."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) ⊙ up(x)), as in Llama."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias)
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


FAMILIES: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "polymix-gpt": (nn.LayerNorm, Mlp), "polymix-llama": (nn.RMSNorm, SwiGLU),
}  # fmt: skip


class LanguageBlock(GradientCheckpointingLayer):
    """X ← X + mix(norm(X)), then X ← X + FF(norm(X)). The unit that is checkpointed, and sharded by FSDP."""

    def __init__(self, config: PolymixConfig, mixer: MixerConfig, index: int) -> None:
        super().__init__()
        norm, feed_forward = FAMILIES[config.model_type]
        self.norm1 = norm(config.hidden_size, eps=config.norm_eps)
        self.mix = CausalLayer(mixer, config.hidden_size, index, config.short_conv)
        self.norm2 = norm(config.hidden_size, eps=config.norm_eps)
        self.mlp = feed_forward(config.hidden_size, config.intermediate_size, config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, order: Order, past_key_values: Any = None) -> Tensor:
        x = x + self.mix(self.norm1(x), order, past_key_values)
        return x + self.drop(self.mlp(self.norm2(x)))
