"""The layers of the language models: a causal mixer with its cache, and the block around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from polymix.errors import CapabilityError, StateError
from polymix.mixers import MixerConfig, SoftmaxMixer, TokenMixer
from polymix.mixers.cache import StateLayer, state_layer
from polymix.mixers.mixer import is_shared
from polymix.mixers.registry import missing_capability
from polymix.models.language.config import PolymixConfig
from polymix.models.language.growing import grow
from polymix.models.language.layout import SequenceLayout
from polymix.ops.decode import try_rms_norm
from polymix.ops.related.attention import softmax_attention
from polymix.ops.shared.rotary import rotary, rotate
from polymix.ops.shared.sequences import apart, causal_conv, next_window, without_padding
from polymix.ops.shared.tensors import accumulator
from polymix.structured.dense import apply_feed_forward


class CausalLayer(nn.Module):
    """mixer(conv(x)), causal: (B, N, D) -> (B, N, D), continuing from a cache if there is one.

    conv is a causal depthwise convolution with `short_conv` taps in front of any mixer but attention, and starts as
    the identity. The cache keeps its window and the mixer's state, whose size does not depend on N. Softmax attention
    keeps keys and values instead.
    """

    def __init__(self, config: MixerConfig, dim: int, index: int, short_conv: int = 0, **kw: Any) -> None:
        super().__init__()
        self.index, self.taps = index, 0 if config.is_attention else short_conv
        self.unfilled = False
        self.mixer = config.build(dim, **kw)
        if not self.mixer.capabilities.recurrent and not isinstance(self.mixer, SoftmaxMixer):
            raise missing_capability(
                config.name, "recurrent", f"mixers, layer {index}", "a language model's constant state"
            )
        self.conv: nn.Parameter | None = None
        if self.taps:
            self.conv = nn.Parameter(torch.randn(dim, 1, self.taps, **kw) * 0.02)
            with torch.no_grad():
                self.conv[..., -1] = 1.0

    @property
    def unsplit(self) -> str | None:
        """Why processes cannot share the sequence outside the mixer, or None if they can."""
        return None if self.conv is None else f"a convolution of {self.taps} taps in front of a mixer (short_conv)"

    def again(self, **kw: Any) -> CausalLayer:
        """A fresh layer with the same options."""
        return CausalLayer(self.mixer.config, self.mixer.dim, self.index, self.taps, **kw)

    def forward(self, x: Tensor, layout: SequenceLayout, cache: Any = None) -> Tensor:
        if is_shared(self.mixer) and (cache is None or layout.segments is not None):
            return self.mixer(x, mask=layout.padding, causal=True, segments=layout.segments)
        if isinstance(self.mixer, SoftmaxMixer):
            if is_shared(self.mixer):
                got = "a cache of keys and values on several processes"
                raise CapabilityError("past_key_values", got, "none beside softmax", "Pass use_cache=False.")
            return attend(self.mixer, x, layout, cache, self.index)
        if layout.segments is not None:
            return self._packed(x, layout.segments, layout.padding)
        if cache is None:
            return self._mix(x, layout.padding)
        layer = state_layer(cache, self.index)
        layer.follows(layout.before)
        window, state = (None, None) if layer.state is None else layer.state
        x, window = self._convolve(x, window, layout.padding)
        y, state = self.mixer.prefill(x, state, mask=layout.padding)
        layer.advance((window, state), x.shape[1], layout.padding)
        return y

    def _mix(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return self.mixer(self._convolve(x, None, padding)[0], mask=padding, causal=True)

    def _packed(self, x: Tensor, segments: Tensor, padding: Tensor | None) -> Tensor:
        if self.conv is None and self.mixer.capabilities.has("segments"):
            return self.mixer(x, mask=padding, causal=True, segments=segments)
        rows, mask, where = apart(x, segments, padding)
        return self._mix(rows, mask)[where].view_as(x)

    def _convolve(self, x: Tensor, window: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x convolved, continuing from `window`, and the next window."""
        if self.conv is None:
            return x, None
        left: list[Tensor] = []

        def run(u: Tensor, real: Tensor | None) -> Tensor:
            assert self.conv is not None
            y, seen = causal_conv(u, self.conv, None, window)
            left.append(next_window(seen, u.shape[1], real))
            return y

        return without_padding(x, padding, run), left[0]


def mixers_of(model: nn.Module) -> list[TokenMixer]:
    """The mixer of every layer, in layout."""
    return [module.mixer for module in model.modules() if isinstance(module, CausalLayer)]


def attend(mixer: SoftmaxMixer, x: Tensor, layout: SequenceLayout, cache: Any, index: int) -> Tensor:
    """Softmax attention on x (B, N, D), causal, over the tokens of a sequence in this call and in the cache.

    Without cache and padding it is `mixer(x, causal=True)`. Cost: 2 N (past + N) D multiply-adds.
    """
    q, k, v = (part.transpose(1, 2) for part in mixer.qkv(x, x))
    if mixer.config.rotary is not None:
        turns = rotary(layout.place, q.shape[-1], axes=1, heads=None, base=mixer.config.rotary)
        q, k = (rotate(part, (turns[0][:, None], turns[1][:, None]), axes=1) for part in (q, k))
    if cache is not None:
        if len(cache.layers) > index and isinstance(cache.layers[index], StateLayer):
            raise StateError("past_key_values", "a mixer's state for attention", "this model's cache", "Use a new one.")
        grow(cache, index)
        k, v = cache.update(k, v, index)
    scale, n, m = q.shape[-1] ** -0.5, q.shape[2], k.shape[2]
    if m == n:
        y = softmax_attention(q, k, v, scale=scale, mask=layout.mask, causal=1, segments=layout.segments)
    else:
        past = torch.ones(n, m, dtype=torch.bool, device=x.device).tril(m - n)[None] if n > 1 else None
        mask = layout.mask if past is None else past if layout.mask is None else past & layout.mask[:, None]
        y = softmax_attention(q, k, v, scale=scale, mask=None if mask is None else mask.expand(len(x), *mask.shape[1:]))
    return mixer.drop(mixer.proj(y.transpose(1, 2).flatten(-2)))


class Mlp(nn.Module):
    """down(gelu(up(x))), with the tanh approximation of GELU, as in GPT-2."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        return apply_feed_forward(self.up, self.down, x, "gelu_tanh")


class SwiGLU(nn.Module):
    """down(silu(gate(x)) ⊙ up(x)), as in Llama."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias)
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        return apply_feed_forward(self.up, self.down, x, "silu", self.gate)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, with fewer operations without gradients: on a CPU its own take longer than a small product."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.dtype != weight.dtype or self.eps is None:
            return super().forward(x)
        if (y := try_rms_norm(x, weight, self.eps)) is not None:
            return y
        wide = x.to(accumulator(x.dtype))
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(size * size / x.shape[-1] + self.eps)
        return (wide * scale).to(x.dtype) * weight


FAMILIES: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "polymix-gpt": (nn.LayerNorm, Mlp), "polymix-llama": (RMSNorm, SwiGLU),
}  # fmt: skip


class LanguageBlock(GradientCheckpointingLayer):
    """X ← X + mix(norm(X)), then X ← X + FF(norm(X)). The unit of checkpointing and of FSDP."""

    def __init__(self, config: PolymixConfig, mixer: MixerConfig, index: int) -> None:
        super().__init__()
        norm, feed_forward = FAMILIES[config.model_type]
        self.norm1 = norm(config.hidden_size, eps=config.norm_eps)
        self.mix = CausalLayer(mixer, config.hidden_size, index, config.short_conv)
        self.norm2 = norm(config.hidden_size, eps=config.norm_eps)
        self.mlp = feed_forward(config.hidden_size, config.intermediate_size, config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, layout: SequenceLayout, past_key_values: Any = None) -> Tensor:
        x = x + self.mix(self.norm1(x), layout, past_key_values)
        return x + self.drop(self.mlp(self.norm2(x)))
