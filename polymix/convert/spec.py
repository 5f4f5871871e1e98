"""AttentionSpec: what an attention layer computes and what its host asks of it, in the same terms for every library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor, nn

from polymix.mixers import MixerConfig, TokenMixer
from polymix.mixers.inheritance import AttentionMaps, Projection
from polymix.mixers.registry import mixer_class

MAX_PREFIX = 16  # more class and register tokens than any model has


class EquivalentMixer(NamedTuple):
    """The mixer that computes exactly what a layer computes.

    name: the mixer's name. parameters: the layer's parameter names; the mixer has the same names with one more part in
    front. build: makes the mixer with the layer's options and weights. sources: the layer's parameters that each
    parameter of the mixer comes from, where the names differ.
    """

    name: str
    parameters: tuple[str, ...]
    build: Callable[[], TokenMixer]
    sources: Mapping[str, tuple[str, ...]] | None = None

    def complete(self, config: MixerConfig) -> MixerConfig:
        """The config with the layer's own options wherever the config has its defaults."""
        own = self.build().config
        options = {f.name: getattr(own, f.name) for f in fields(config) if getattr(config, f.name) == f.default}
        return config.changed(**{name: value for name, value in options.items() if name not in ("dropout", "impl")})


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(AttentionMaps):
    """One attention layer: the weights that a mixer can inherit, and what the mixer must support.

    Args:
        dim: channels of its input and output.
        heads: number of query heads.
        query, key, value, out: its linear maps, where it has them.
        scale: factor on the logits; None: head_dim^-½.
        relative: learned bias for each offset on the grid, (offsets, heads), as in the softmax mixer.
        causal, cross, masks: what the host asks for. `masks` uses the names of `Capabilities`.
        grid: (H, W) of its tokens, not counting the first `prefix` ones; None: a sequence.
        prefix: number of tokens in front of the grid, such as class tokens.
        max_tokens: longest sequence that the host accepts, if it has a limit.
        any_length: whether the number of tokens changes between calls.
        biased: whether its logits get biases, beside `relative`, that softmax in its place keeps.
        talks: whether its heads exchange logits or weights, which softmax in its place keeps.
        own_values: whether its values come from another input than its keys, as in attention(x + positions, x); None:
            a call decides.
        dropout: probability, on its output.
        rotary: base of the rotary angles, if it has them.
        span: number of tokens that each token attends to; None: all.
        equivalent: the mixer that computes the same, if there is one.
        projected: (heads, d, e) of the queries and values that the layer's attention function gets, where that function
            can be exchanged and softmax attention in it is the layer itself.
        cost: FLOPs for a number of tokens, where the maps do not tell.
        drops: parameters and other parts that no mixer can take over, each with the reason.
    """

    causal: bool = False
    cross: bool = False
    masks: frozenset[str] = frozenset()
    grid: tuple[int, ...] | None = None
    prefix: int = 0
    max_tokens: int | None = None
    any_length: bool = False
    biased: bool = False
    talks: bool = False
    own_values: bool | None = False
    dropout: float = 0.0
    rotary: float | None = None
    span: int | None = None
    equivalent: EquivalentMixer | None = None
    projected: tuple[int, int, int] | None = None
    cost: Callable[[int], int] | None = None
    drops: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_logits(self) -> tuple[str, ...]:
        """What acts on its logits and softmax in its place keeps, by the names in `convert(drop=)`."""
        parts = {"position_bias": self.biased or self.relative is not None, "talking_heads": self.talks}
        return tuple(name for name, present in parts.items() if present)

    def lends(self, config: MixerConfig) -> bool:
        """Whether a mixer answers with the layer's own queries, keys and values, as they are `projected`."""
        if self.projected is None or not config.attends:
            return False
        heads, width, values = self.projected
        return config.fits_heads(heads) and (width == values or not config.equal_widths)

    @property
    def keys(self) -> dict[str, None]:
        """Names of the parameters, or parts of parameters, in all its maps, in order."""
        maps = (self.query, self.key, self.value, self.out, self.relative)
        return dict.fromkeys(key for part in maps if part is not None for key in part.keys)


def linear(module: nn.Module, name: str, *, transposed: bool = False) -> Projection:
    """The linear layer `module.name` as a Projection. `transposed`: its weight is (in, out), as in GPT-2."""
    layer = module.get_submodule(name)
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, Tensor)
    keys = tuple(f"{name}.{key}" for key, _ in layer.named_parameters(recurse=False))
    return Projection(weight.t() if transposed else weight, bias, keys)


def thirds(fused: Projection) -> tuple[Projection, Projection, Projection]:
    """Split a fused projection into query, key and value, a third of the rows each."""
    size = fused.weight.shape[0] // 3
    parts = [fused.rows(i * size, (i + 1) * size) for i in range(3)]
    query, key, value = (
        part._replace(keys=tuple(f"{key}[{name}]" for key in part.keys))
        for part, name in zip(parts, ("query", "key", "value"), strict=True)
    )
    return query, key, value


def repeated(part: Projection, groups: int, size: int) -> Projection:
    """The `size` rows of each key or value head, repeated for every query head of its group."""
    weight, bias = (
        None if t is None else t.unflatten(0, (-1, size)).repeat_interleave(groups, 0).flatten(0, 1)
        for t in (part.weight, part.bias)
    )
    assert weight is not None
    return part._replace(weight=weight, bias=bias)


def grid_among(grid: tuple[int, ...] | None, tokens: int) -> tuple[tuple[int, ...] | None, int]:
    """A model's grid and the number of tokens before it in a call; (None, 0) where it is not among the tokens."""
    prefix = -1 if grid is None else tokens - math.prod(grid)
    return (grid, prefix) if 0 <= prefix <= MAX_PREFIX else (None, 0)


def additive_spec(module: Any, **options: Any) -> AttentionSpec:
    """The spec of SwiftFormer's attention, which timm and transformers build from layers of the same names.

    options: of the mixer `additive`, which computes the same.
    """
    names = tuple(key for key, _ in module.named_parameters())

    sources = {f"qk.{key}": (f"to_query.{key}", f"to_key.{key}") for key in ("weight", "bias")} | {"w": ("w_g",)}
    for ours, theirs in (("pool", "proj"), ("proj", "final")):
        sources |= {f"{ours}.{key}": (f"{theirs}.{key}",) for key in ("weight", "bias")}

    def build() -> TokenMixer:
        kind: Any = mixer_class("additive")
        return kind.from_reference(dict(module.state_dict()), **options)

    return AttentionSpec(
        dim=module.to_query.in_features, heads=1, query=linear(module, "to_query"), key=linear(module, "to_key"),
        out=linear(module, "final"), equivalent=EquivalentMixer("additive", names, build, sources),
    )  # fmt: skip
