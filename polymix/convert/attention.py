"""What an attention layer of a host is, said once for every library: its maps, and what its host asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from torch import Tensor, nn

from polymix.mixers import MixerConfig, TokenMixer
from polymix.mixers.inheritance import AttentionMaps, Projection


class Twin(NamedTuple):
    """The mixer that a layer is already: its name; the layer's parameters, whose names the mixer's have behind one part
    of its own; and what makes one with the layer's options and weights."""

    name: str
    keys: tuple[str, ...]
    build: Callable[[], TokenMixer]

    def fit(self, config: MixerConfig) -> MixerConfig:
        """The config with the layer's own options where it leaves the usual ones."""
        own = self.build().config
        usual = {f.name: getattr(own, f.name) for f in fields(config) if getattr(config, f.name) == f.default}
        return config.changed(**{name: value for name, value in usual.items() if name not in ("dropout", "impl")})


@dataclass(frozen=True, kw_only=True)
class Attention(AttentionMaps):
    """One attention layer: what it computes with, and what stands in its place must be able to do.

    dim: channels of its input and output. heads: of its queries. scale: of its logits; None: d^-½. query … out: its
    maps where it has them. causal, cross, masks: what its host will ask (masks as in `Capabilities`). grid: (H, W) of
    its tokens after `prefix` ones in front; None: they stand in a line. max_tokens: the longest line, where the host
    has a limit. any_length: whether the number of tokens changes from call to call. dropout: of its output. relative:
    a learned bias for each offset on the grid, (offsets, heads) as softmax's. rotary: the base of its angles. span: how
    many tokens each attends to, where not to all. twin: the mixer that it is, if it is one. drops: parameters that no
    mixer takes over, and why.
    """

    causal: bool = False
    cross: bool = False
    masks: frozenset[str] = frozenset()
    grid: tuple[int, ...] | None = None
    prefix: int = 0
    max_tokens: int | None = None
    any_length: bool = False
    dropout: float = 0.0
    rotary: float | None = None
    span: int | None = None
    twin: Twin | None = None
    drops: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, None]:
        """The parameters, or parts of them, of all maps that it has, in order."""
        maps = (self.query, self.key, self.value, self.out, self.relative)
        return dict.fromkeys(key for part in maps if part is not None for key in part.keys)


def linear(module: nn.Module, name: str, *, transposed: bool = False) -> Projection:
    """The linear layer module.name; transposed: its weight is (in, out), as GPT-2's."""
    layer = module.get_submodule(name)
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, Tensor)
    keys = tuple(f"{name}.{key}" for key, _ in layer.named_parameters(recurse=False))
    return Projection(weight.t() if transposed else weight, bias, keys)


def thirds(fused: Projection) -> tuple[Projection, Projection, Projection]:
    """Query, key and value out of one map of all three."""
    size = fused.weight.shape[0] // 3
    parts = [fused.rows(i * size, (i + 1) * size) for i in range(3)]
    query, key, value = (
        part._replace(keys=tuple(f"{key}[{name}]" for key in part.keys))
        for part, name in zip(parts, ("query", "key", "value"), strict=True)
    )
    return query, key, value
