"""Hyena's long filters: given by a small network of the position, or tap by tap."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.mixers.related.hyena_config import HyenaConfig
from polymix.ops.shared.tensors import accumulator, without_autocast
from polymix.structured.cost import Op, linear_op


def decay_rates(config: HyenaConfig, channels: int) -> Tensor:
    """From the slow rate to the fast one, evenly over the channels."""
    slow, fast = config.decay
    return torch.linspace(slow, fast, channels, dtype=torch.float64)


class ImplicitFilter(nn.Module):
    """taps[t] = (e^(-δ t') + shift) ⊙ MLP(z_t), t' = t / (length - 1), for (order - 1) D channels.

    z_t, learned, starts as [t', cos 2π f t / length, -sin 2π f t / length], f from 0.0001 in steps of about 1. The MLP
    has `depth` inner layers; its activation is sin(frequency ⊙ ·), one learned frequency a unit for all layers.
    Computed in float32 at least; weights cast to bf16 hold positions to three digits, which a filter of more than some
    hundred taps feels: use autocast there.
    """

    def __init__(self, config: HyenaConfig, channels: int, **kw: Any) -> None:
        super().__init__()
        self.config = config
        length, width, bands = config.length, config.filter_width, (config.emb_dim - 1) // 2
        t = torch.linspace(0, 1, length, dtype=torch.float64)
        f = torch.linspace(1e-4, bands - 1, bands, dtype=torch.float64)
        angle = 2 * math.pi * torch.arange(length, dtype=torch.float64)[:, None] / length * f
        made = torch.empty(0, **kw)
        z = torch.cat((t[:, None], angle.cos(), -angle.sin()), dim=1).to(made)
        self.z = nn.Parameter(z)
        self.register_buffer("t", t.to(made))
        self.register_buffer("deltas", decay_rates(config, channels).to(made))
        widths = [config.emb_dim, *[width] * (config.filter_depth + 1)]
        self.layers = nn.ModuleList(nn.Linear(inside, outside, **kw) for inside, outside in pairwise(widths))
        self.last = nn.Linear(width, channels, bias=False, **kw)
        self.frequency = nn.Parameter(torch.full((width,), float(config.frequency), **kw))
        if self.z.device.type != "meta":
            self._scale()

    @torch.no_grad()
    def _scale(self) -> None:
        """Unit energy of the taps of a channel on the average, estimated from a thousand of them."""
        places = torch.linspace(0, self.config.length - 1, min(1024, self.config.length), device=self.z.device).long()
        energy = self._taps(places).square().sum(0).mean() * (self.config.length / len(places))
        self.last.weight /= energy.sqrt().clamp_min(1e-6).to(self.last.weight.dtype)

    def forward(self, n: int) -> Tensor:
        """The first n taps, (order - 1, D, n), in float32 at least."""
        taps = self._taps(slice(0, n)).transpose(0, 1)  # (D (order - 1), n): the steps of a channel lie together
        return taps.unflatten(0, (-1, self.config.order - 1)).transpose(0, 1)

    def _taps(self, places: Tensor | slice) -> Tensor:
        wide = accumulator(self.z.dtype)
        with without_autocast(self.z.device):
            h = self.z[places].to(wide)
            for layer in self.layers:
                assert isinstance(layer, nn.Linear)
                h = torch.sin(self.frequency.to(wide) * F.linear(h, layer.weight.to(wide), layer.bias.to(wide)))
            h = F.linear(h, self.last.weight.to(wide))
            t, deltas = self.get_buffer("t")[places].to(wide), self.get_buffer("deltas").to(wide)
            return h * (torch.exp(-t[:, None] * deltas.abs()) + self.config.shift)

    def cost_ops(self, n: int) -> list[Op]:
        layers = [layer for layer in (*self.layers, self.last) if isinstance(layer, nn.Linear)]
        return [linear_op(n, layer) for layer in layers]


class ExplicitFilter(nn.Module):
    """`length` taps a channel and step, (order - 1, D, length), learned one by one; they start as decaying noise."""

    def __init__(self, config: HyenaConfig, channels: int, **kw: Any) -> None:
        super().__init__()
        steps = config.order - 1
        self.taps = nn.Parameter(torch.empty(steps, channels // steps, config.length, **kw))
        t = torch.linspace(0, 1, config.length, dtype=torch.float64)
        shape = torch.exp(-decay_rates(config, channels // steps)[:, None] * t)
        shape /= shape.square().sum(1, keepdim=True).sqrt()
        with torch.no_grad():
            self.taps.normal_().mul_(shape.to(self.taps))

    def forward(self, n: int) -> Tensor:
        return self.taps

    def cost_ops(self, n: int) -> list[Op]:
        return []
