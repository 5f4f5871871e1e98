"""One layer's mixer behind what a language model asks of it: caches, padding, packed sequences, a convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polymix.mixers import MixerConfig, SoftmaxMixer, TokenMixer
from polymix.mixers.cache import state_layer
from polymix.mixers.registry import lacks
from polymix.models.language.attention import attend
from polymix.models.language.order import Order, apart
from polymix.ops.shared.sequences import causal_conv, next_window, without_padding

ATTENTION = ("softmax", "local")


class CausalLayer(nn.Module):
    """mixer(conv(x)), causal: (B, N, D) -> (B, N, D), after what the cache has seen, if there is one.

    conv is a causal depthwise convolution with `short_conv` taps, the identity at init, in front of any mixer but
    attention. Its window and the mixer's state are what the cache keeps, of a size that does not depend on N; softmax
    alone keeps keys and values instead.
    """

    def __init__(self, config: MixerConfig, dim: int, index: int, short_conv: int = 0, **kw: Any) -> None:
        super().__init__()
        self.index, self.taps = index, 0 if config.name in ATTENTION else short_conv
        self.unfilled = False
        self.mixer = config.build(dim, **kw)
        if not self.mixer.capabilities.recurrent and not isinstance(self.mixer, SoftmaxMixer):
            raise lacks(config.name, "recurrent", f"mixers, layer {index}", "a language model's constant state")
        self.conv: nn.Parameter | None = None
        if self.taps:
            self.conv = nn.Parameter(torch.randn(dim, 1, self.taps, **kw) * 0.02)
            with torch.no_grad():
                self.conv[..., -1] = 1.0

    def again(self, **kw: Any) -> CausalLayer:
        """A fresh layer of the same options."""
        return CausalLayer(self.mixer.config, self.mixer.dim, self.index, self.taps, **kw)

    def forward(self, x: Tensor, order: Order, cache: Any = None) -> Tensor:
        if isinstance(self.mixer, SoftmaxMixer):
            return attend(self.mixer, x, order, cache, self.index)
        if order.segments is not None:
            return self._packed(x, order.segments, order.padding)
        if cache is None:
            return self._mix(x, order.padding)
        layer = state_layer(cache, self.index)
        layer.follows(order.before)
        window, state = (None, None) if layer.state is None else layer.state
        x, window = self._convolve(x, window, order.padding)
        y, state = self.mixer.prefill(x, state, mask=order.padding)
        layer.advance((window, state), x.shape[1], order.padding)
        return y

    def _mix(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return self.mixer(self._convolve(x, None, padding)[0], mask=padding, causal=True)

    def _packed(self, x: Tensor, segments: Tensor, padding: Tensor | None) -> Tensor:
        if self.conv is None and self.mixer.capabilities.has("segments"):
            return self.mixer(x, mask=padding, causal=True, segments=segments)
        rows, mask, where = apart(x, segments, padding)
        return self._mix(rows, mask)[where].view_as(x)

    def _convolve(self, x: Tensor, window: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x convolved after `window`, and the window that is left."""
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
    """The mixer of every layer, in order."""
    return [module.mixer for module in model.modules() if isinstance(module, CausalLayer)]
