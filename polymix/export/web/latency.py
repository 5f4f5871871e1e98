"""Mixers alone as ONNX files for several numbers of tokens: what a page measures against attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from polymix.export.graph import Graph, about
from polymix.mixers import MixerConfig, TokenMixer, create_mixer

TOKENS = (256, 576, 1024, 2304, 4096)  # squares, for mixers on a grid
ATTENTION = "softmax"


@dataclass(frozen=True)
class Curve:
    """A line of the plot.

    Args:
        label: the mixer's name, with a number if it stands there twice. dim: channels.
        config: without the host's grid. axes: of that grid; 0 if the mixer has none.
    """

    label: str
    dim: int
    config: MixerConfig
    axes: int = 0

    @property
    def attention(self) -> bool:
        return self.config.name == ATTENTION

    @property
    def omitted(self) -> str:
        """Why the page cannot measure this mixer; empty if it can."""
        mixer = self.config.mixer
        if self.axes > 2:
            return "its grid has three axes"
        if mixer.needs_context or self.config.call_options((1, 1)):
            return "it needs more than tokens"
        return ""

    def graphs(self, by_length: bool = False) -> Iterator[tuple[int, Graph]]:
        """Graphs by numbers of tokens: one under 0 for all, or one for each if the mixer has a grid or `by_length`."""
        if not self.axes and not by_length:
            yield 0, self._graph(self.config, 0)
            return
        for tokens in TOKENS:
            side = math.isqrt(tokens)
            grid = (tokens,) if self.axes == 1 else (side, side)
            yield tokens, self._graph(self.config.for_grid(grid) if self.axes else self.config, tokens)

    def _graph(self, config: MixerConfig, tokens: int) -> Graph:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            mixer = config.build(self.dim).eval()
            x = torch.randn(1, tokens or TOKENS[0], self.dim)
        parts = ("latency", *self.label.split(), str(self.dim), *([str(tokens)] if tokens else []))
        free = {} if tokens else {"x": {1: "tokens"}}
        return Graph("-".join(parts), mixer, {"x": x}, free, about(mixer, None))


def curves(models: Iterable[nn.Module]) -> list[Curve]:
    """The different mixers in models, without their weights, and softmax attention of the same width before them.

    Empty for models without mixers.
    """
    keys = []
    for model in models:
        for mixer in model.modules():
            if isinstance(mixer, TokenMixer):
                config = mixer.config.without_grid()
                axes = len(mixer.config.built_grid or ()) if mixer.config.placed else 0
                key = (config, mixer.dim, axes)
                if key not in keys:
                    keys.append(key)
    for dim in dict.fromkeys(dim for _, dim, _ in keys):
        if not any(config.name == ATTENTION and dim == other for config, other, _ in keys):
            keys.append((create_mixer(ATTENTION, dim, device="meta").config, dim, 0))
    keys.sort(key=lambda key: key[0].name != ATTENTION)
    lines: list[Curve] = []
    for config, dim, axes in keys:
        same = sum(line.config.name == config.name for line in lines)
        lines.append(Curve(config.name + (f" {same + 1}" if same else ""), dim, config, axes))
    return lines
