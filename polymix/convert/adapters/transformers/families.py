"""Attention of any family of transformers without an adapter of its own, by the names of its linear maps and by proof.

Names and sizes propose how a layer is read; a recorded call decides. It also shows who sees whom: flags of classes and
configs, which some families set wrongly, are not read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, refusal_of
from polymix.convert.adapters.transformers.attention_function import NAME, asking, proven_sizes
from polymix.convert.adapters.transformers.causal import rope
from polymix.convert.adapters.transformers.encoders import EncoderAdapter
from polymix.convert.adapters.transformers.visibility import within
from polymix.convert.find import SPLIT, head_count
from polymix.convert.heads import LOGITS, Heads, attended, normed
from polymix.convert.spec import AttentionSpec, grid_among, linear, repeated
from polymix.convert.tracing import LayerCall, arguments_of, mode, same, tensors
from polymix.errors import CapabilityError
from polymix.mixers import MixerConfig, TokenMixer
from polymix.mixers.cache import LentLayer, state_layer
from polymix.mixers.heads_mixer import borrowing
from polymix.mixers.inheritance import Projection

FAMILIES = "transformers.models."
TOKENS = ("hidden_states", "hidden_state", "x", "input", "inputs", "query_states")  # names of a layer's first argument
CONTEXT = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")
CACHE = ("past_key_values", "past_key_value", "layer_past", "cache")
BIASES = ("position_bias", "alibi", "relative_pos", "rel_pos", "relative_position_bias", "rel_embeddings",
          "relative_position_embeddings", "relative_positions_bucket", "relative_attention_bias")  # fmt: skip
SOFT_CAPS = ("attn_logit_softcapping", "attention_logits_soft_cap", "softcap", "soft_cap")
SINK_NAMES = ("sinks", "sink", "attention_sinks")
IGNORED = ("position_embeddings", "position_ids", "cache_position", "rotary_pos_emb", "rotary_emb", "rope", "mask",
           "position_embedding", "attention_mask", "encoder_attention_mask", "key_padding_mask", "padding_mask",
           "layer_head_mask", "head_mask", "cos", "sin", "freqs_cis", "sequence_length", "head_indices")  # fmt: skip
FUSED = ("qkv", "qkv_proj", "Wqkv", "query_key_value", "c_attn", "in_proj", "att_proj", "query_key_value_proj")
OUTPUT_NAMES = ("o_proj", "out_proj", "proj", "dense", "o", "out_lin", "c_proj", "Wo", "wo", "out", "linear_out",
                "projection", "proj_out", "out_project", "attn_out", "output")  # fmt: skip
FULL_KINDS = ("full_attention", "attention", "global", "hybrid")  # kinds of layers whose attention sees all tokens
Maps = tuple[Projection | None, Projection | None, Projection | None]  # query, key, value


def takes(module: nn.Module) -> bool:
    """Whether a module is a layer of attention that this adapter can stand for."""
    kind = type(module)
    if not kind.__module__.startswith(FAMILIES) or "ttention" not in kind.__name__ or refusal_of(module) is not None:
        return False
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return bool(names) and names[0] in TOKENS and next(readings(module), None) is not None


def readings(module: nn.Module) -> Iterator[AttentionSpec]:
    """The ways to read a layer's linear maps by their names and sizes; likeliest first, the output map alone last."""
    out = next((_map(module, name) for name in OUTPUT_NAMES if _linear(module, name)), None)
    split = next((names for names in SPLIT if all(_linear(module, name) for name in names)), None)
    fused = next((_map(module, name) for name in FUSED if _linear(module, name)), None)
    ways: list[Maps] = []
    if split is not None:
        query, key, value = (_map(module, name) for name in split)
        ways.append((query, key, value))
    elif fused is not None:
        ways += _parts(fused, *_head_counts(module))
    for maps in ways:
        yield from _read(module, maps, out)
    if out is not None and (fused is not None or head_count(module) is not None):
        yield _spec(module, (None, None, None), out, head_count(module) or 1)


def _read(module: nn.Module, maps: Maps, out: Projection | None) -> Iterator[AttentionSpec]:
    """The layer with these maps, if their sizes fit; grouped keys and values are repeated for all heads."""
    query, key, value = maps
    assert query is not None and key is not None and value is not None
    inner, width, dim = query.weight.shape[0], value.weight.shape[0], value.weight.shape[1]
    heads, size = head_count(module), getattr(module, "head_dim", None)
    size = size if type(size) is int and size else inner // heads if heads else inner
    if inner % size or width % size or inner % width:
        return
    if width < inner:
        key, value = repeated(key, inner // width, size), repeated(value, inner // width, size)
    if out is None and inner == dim:  # the layer around it has the output map
        out = Projection(torch.eye(dim, dtype=value.weight.dtype, device=value.weight.device), None, ())
    if out is not None and tuple(out.weight.shape) == (dim, inner):
        yield _spec(module, (query, key, value), out, inner // size)


def _spec(module: nn.Module, maps: Maps, out: Projection, heads: int) -> AttentionSpec:
    dim, (query, key, value) = out.weight.shape[0], maps
    scales = (getattr(module, name, None) for name in ("scaling", "scale"))
    lost = getattr(module, "attention_dropout", getattr(module, "dropout", 0.0))
    return AttentionSpec(
        dim=dim, heads=heads if dim % heads == 0 else 1, query=query, key=key, value=value, out=out,
        scale=next((scale for scale in scales if type(scale) is float), None), any_length=True,
        drops={"dropout": LOGITS} if getattr(lost, "p", lost) else {},
    )  # fmt: skip


def _head_counts(module: nn.Module) -> tuple[int, int]:
    """The numbers of query heads and of key heads that a layer or its config states; 1 where it states none."""
    heads, places = head_count(module) or 1, (module, getattr(module, "config", None))
    names = ("num_key_value_heads", "num_kv_heads", "kv_heads")
    counts = (getattr(place, name, None) for place in places for name in names)
    return heads, next((count for count in counts if type(count) is int and 0 < count <= heads), heads)


def _parts(fused: Projection, heads: int, groups: int) -> list[Maps]:
    """Query, key and value in a fused map: one after another, head by head, or group by group."""
    rows = fused.weight.shape[0]
    if rows % (heads + 2 * groups):
        return []
    size, each = rows // (heads + 2 * groups), heads // groups
    number = torch.arange(rows)
    after = number.split([heads * size, groups * size, groups * size])
    grouped = number.unflatten(0, (groups, each + 2, size))  # each group: its query heads, its key, its value
    inside = (grouped[:, :each].flatten(), grouped[:, -2].flatten(), grouped[:, -1].flatten())
    return [
        tuple(_rows(fused, where, name) for where, name in zip(places, ("query", "key", "value"), strict=True))  # type: ignore[misc]
        for places in (after, inside)
    ]


def _rows(fused: Projection, places: Tensor, name: str) -> Projection:
    bias, places = fused.bias, places.to(fused.weight.device)
    keys = tuple(f"{key}[{name}]" for key in fused.keys)
    return Projection(fused.weight[places], None if bias is None else bias[places], keys)


def _linear(module: nn.Module, name: str) -> bool:
    weight = getattr(getattr(module, name, None), "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def _map(module: nn.Module, name: str) -> Projection:
    return linear(module, name, transposed=type(getattr(module, name)).__name__ == "Conv1D")


def limited(module: nn.Module) -> str | None:
    """What keeps a layer from being replaced: it sees a window or chunks alone, or shares its keys and values."""
    if getattr(module, "is_kv_shared_layer", False) or getattr(module, "store_full_length_kv", False):
        return "keys and values that several layers share"
    if "cache_params" in inspect.signature(type(module).forward).parameters:
        return "a state of its own, as linear attention has"
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and type(index) is int and index < len(kinds):
        return None if kinds[index] in FULL_KINDS else str(kinds[index]).replace("_", " ")
    stated = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    window = getattr(module, "sliding_window", stated)
    return f"a window of {window:,} tokens" if type(window) is int and window > 0 else None


def returned(kind: type[nn.Module]) -> tuple[int, bool]:
    """How many values the forward of a class returns, 0 for one value by itself; and whether they are in a list."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))

    def forms(value: ast.expr | None) -> list[tuple[int, bool]]:
        if isinstance(value, (ast.Tuple, ast.List)):
            return [(len(value.elts), isinstance(value, ast.List))]
        if isinstance(value, ast.BinOp) and isinstance(value.left, ast.List):  # [output] + what was asked for beside
            return forms(value.left)
        if isinstance(value, ast.IfExp):
            return forms(value.body) + forms(value.orelse)
        if isinstance(value, ast.Name):
            places = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and value.id in names(node))
            return [form for node in places if not isinstance(node.value, ast.Name) for form in forms(node.value)]
        return []

    def names(node: ast.Assign) -> list[str]:
        return [target.id for target in node.targets if isinstance(target, ast.Name)]

    ends = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return min(forms(ends[-1]), default=(0, False)) if ends else (0, False)


class FamilyAdapter(EncoderAdapter):
    """Takes the arguments of the layer that it replaces, by name, and returns as many values, in a tuple or a list.

    They are the output and None for each other. In a decoder the cache holds the mixer's state.
    """

    way = "the layer was read by names and a call"
    needs_call: ClassVar[bool] = True

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        self.layer_idx = getattr(module, "layer_idx", getattr(module, "layer_id", None))  # GPT-Neo: layer_id
        self.cross = attention.cross
        self.returned, self.listed = returned(type(module))

    def read_signature(self, module: nn.Module) -> None:
        self.names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        self.config = getattr(module, "config", None)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = super().named(args, kwargs)
        if type(arguments.get("layer_idx")) is int:  # Zamba 2: one layer in several places
            self.layer_idx = arguments["layer_idx"]
        return arguments

    @classmethod
    def forms(cls) -> tuple[type[Adapter], ...]:
        return FamilyAdapter, BorrowingAdapter

    @classmethod
    def serving(cls, config: MixerConfig, spec: AttentionSpec) -> tuple[type[Adapter], AttentionSpec]:
        """Mixers of queries, keys and values borrow those of the layer, where that is proven to work."""
        if not spec.lends(config):
            return cls, spec
        assert spec.projected is not None
        drops = {name: why for name, why in spec.drops.items() if name not in ("rotary", "qk_norm")}  # the layer's own
        return BorrowingAdapter, replace(spec, heads=spec.projected[0], rotary=None, drops=drops)

    @classmethod
    def by_default(cls, module: nn.Module, host: Host) -> bool:
        return super().by_default(module, host) and limited(module) is None

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        if (limit := limited(module)) is not None:
            shared = "share" in limit
            cure = "Keep it." if shared else "Keep it, or build the model without: sliding_window=None in its config."
            allowed = "a layer with its own" if shared else "a layer that sees every token"
            raise CapabilityError("attention", f"a layer with {limit}", allowed, cure)
        config = getattr(module, "config", None)
        limit = getattr(config, "max_position_embeddings", None)
        return replace(next(readings(module)), grid=host.grid(), max_tokens=limit if type(limit) is int else None)

    @classmethod
    @torch.no_grad()
    def proven(cls, spec: AttentionSpec, module: nn.Module, call: LayerCall) -> AttentionSpec:
        """The spec with what the layer does in a call in place of what its names say.

        Where all tokens are equal, softmax attention returns W_o W_v x whatever its logits: this proves the reading of
        both maps. Where the last token changes and the first output does not, the order is causal.
        """
        arguments = arguments_of(module, call.args, call.kwargs)
        known = {*IGNORED, *BIASES, *CONTEXT, next(iter(arguments))}
        if unknown := [name for name, value in arguments.items() if isinstance(value, Tensor) and name not in known]:
            got = f"a layer that also takes {', '.join(unknown)}"
            raise CapabilityError("attention", got, "a layer of tokens, masks and positions", "Keep this layer.")
        x = tensors(tuple(arguments.values()))[0]
        if x.ndim != 3:
            got, cure = f"a layer of tensors with {x.ndim} axes, {tuple(x.shape)}", "Keep this layer."
            raise CapabilityError("attention", got, "a layer of tokens (B, N, D)", cure)
        with mode(module, False):
            context = next((arguments[name] for name in CONTEXT if isinstance(arguments.get(name), Tensor)), x)
            token = torch.randn(x.shape[0], 1, context.shape[-1], generator=torch.Generator().manual_seed(0)).to(x)
            equal = token.expand_as(context).contiguous()
            theirs = _again(module, call, equal if context is x else x, None if context is x else equal)
            changed = x.clone()
            changed[:, -1] += x.std() + 1
            first, later = _again(module, call, x)[:, 0], _again(module, call, changed)[:, 0]
            causal = not spec.cross and x.shape[1] > 1 and bool(torch.allclose(first, later, rtol=1e-5, atol=1e-6))
            projected, lost = proven_sizes(module, call, causal, spec.cross)
        if theirs.shape[-1] != spec.dim or x.shape[-1] != spec.dim:
            got = f"a layer of {x.shape[-1]} channels that returns {theirs.shape[-1]}"
            raise CapabilityError("attention", got, f"as many as its output map has, {spec.dim}", "Keep this layer.")
        maps = [reading for reading in readings(module) if reading.value is not None]
        if context is x and any(_proves(reading, token, theirs - token) for reading in maps):
            cure = "Keep this layer."
            raise CapabilityError("attention", "a layer that adds its input to its output", "attention alone", cure)
        reading = next((reading for reading in maps if _proves(reading, token, theirs)), None)
        if reading is None:
            spec = replace(spec, value=None, query=None, key=None)
        else:
            query, key, value, out = reading.query, reading.key, reading.value, reading.out
            spec = replace(spec, query=query, key=key, value=value, out=out, heads=reading.heads)
        base, kind = rope(getattr(module, "config", None))
        drops = logit_parts(module, arguments) | dict.fromkeys(lost, LOGITS) | normed(module)
        if base is not None and kind != "default":
            drops["rotary"] = f"rotary angles of type {kind!r}, which no mixer has"
        rotary = None if reading is None or "rotary" in drops else base
        spec = replace(spec, rotary=rotary, drops={**spec.drops, **drops})
        grid, prefix = grid_among(None if causal else spec.grid, x.shape[1])
        return replace(spec, causal=causal, grid=grid, prefix=prefix, projected=projected)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.named(args, kwargs)
        x = arguments[self.names[0]]
        context = _first(arguments, CONTEXT)
        if self.cross:
            if context is None:  # Mllama passes it once, and then relies on cached keys
                cure = "Pass use_cache=False, also to generate(); or keep this layer, or give it a mixer such as qt."
                raise CapabilityError("context", "None", "the context in every call, which has no keys here", cure)
            mask = arguments.get("encoder_attention_mask")
            y = self.across(x, context, arguments.get("attention_mask") if mask is None else mask)
        else:
            cache = _first(arguments, CACHE)
            y = self.alone(x, arguments, cache)
        values = [y, *[None] * (self.returned - 1)]
        return (values if self.listed else tuple(values)) if self.returned else y


class BorrowingAdapter(FamilyAdapter):
    """Runs the layer itself, with the mixer in the place of its attention function: maps, norms and angles stay."""

    way = "keeps the layer's maps, norms and angles around the mixer"
    cache_layer = LentLayer

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(borrowing(mixer, attention.dim), attention, module)
        self.attention = asking(module, self)
        self.calls, self.latest_cache = _Calls(), None

    @classmethod
    def width(cls, spec: AttentionSpec) -> int:
        assert spec.projected is not None
        return spec.projected[0] * spec.projected[1]

    @classmethod
    def copied_parts(cls, module: nn.Module, mixer: TokenMixer) -> dict[str, str]:
        return {"attention": ""}

    def output_map(self) -> nn.Linear | None:
        last = next((getattr(self.attention, name) for name in OUTPUT_NAMES if _linear(self.attention, name)), None)
        return last if isinstance(last, nn.Linear) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.named(args, kwargs)
        cache = _first(arguments, CACHE)
        cache = None if self.cross else cache
        if cache is not None:
            state_layer(cache, self.layer_idx, self.cache_layer)  # before the layer puts its keys into it
        vars(self.attention)[NAME] = self  # a replica's layer asks the replica
        self.latest_cache = cache
        if torch.compiler.is_compiling():
            output = self.attention(*args, **kwargs)
            self.latest_cache = None
            return output
        outer, self.calls.running = self.calls.running, (cache,)
        try:
            return self.attention(*args, **kwargs)
        finally:
            self.calls.running, self.latest_cache = outer, None

    def running_cache(self) -> Any:
        """The cache of the call that asks.

        A graph cannot read what belongs to a thread. Where a graph breaks inside a layer, `forward` may be compiled and
        what asks not, or the other way round.
        """
        running = () if torch.compiler.is_compiling() else self.calls.running
        return running[0] if running else self.latest_cache

    def answer(self, heads: Heads, mask: Any, others: Mapping[str, Any]) -> Tensor:
        tokens: Any = heads  # they have the shape of tokens, which is all that is read before they are mixed
        if self.cross:
            y = self.across(tokens, tokens, mask)
        else:
            y = self.alone(tokens, {**others, "attention_mask": mask}, self.running_cache())
        return self.mixer.drop(y)

    def mix(self, x: Any, context: Any = None, **options: Any) -> Tensor:
        mask, segments, causal = (options.get(name) for name in ("mask", "segments", "causal"))
        causal = self.causal if causal is None else causal
        packed: dict[str, Any] = {}
        if segments is not None and self.mixer.config.attends_apart:
            packed = {"segments": segments}
        elif segments is not None:
            mask, causal = within(segments, bool(causal)), False
        heads = x.under(mask, bool(causal))
        return attended(self.mixer, heads, cross=self.cross, argument="attention_mask", **packed)[0]

    def prefill(self, x: Any, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        return attended(self.mixer, x.under(mask, True), cross=False, state=state)


class _Calls(threading.local):
    """The cache of a layer's running call, or no call; every thread has its own. Copies start without any."""

    running: tuple[()] | tuple[Any] = ()

    def __reduce__(self) -> tuple[type[_Calls], tuple[()]]:
        return _Calls, ()


def logit_parts(module: nn.Module, arguments: Mapping[str, Any]) -> dict[str, str]:
    """What acts on the logits of a layer, by its names in `convert(drop=)`."""
    own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    biased = any(isinstance(arguments.get(name), Tensor) for name in BIASES)
    parts = {
        "position_bias": biased or any(bias in name for bias in BIASES for name in own),
        "soft_cap": any(getattr(module, name, None) is not None for name in SOFT_CAPS),
        "sinks": any(isinstance(getattr(module, name, None), Tensor) for name in SINK_NAMES),
    }
    return {name: LOGITS for name, there in parts.items() if there}


def _first(arguments: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of the arguments of these names that is given; None if none is."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def _again(module: nn.Module, call: LayerCall, x: Tensor, context: Tensor | None = None) -> Tensor:
    """The layer's output in the same call with other tokens, and with another context, if one is given."""
    names = list(inspect.signature(module.forward).parameters)
    others = {} if context is None else {name: context for name in CONTEXT if name in names}
    args = [others.get(name, value) for name, value in zip(names, call.args, strict=False)]
    kwargs = {**call.kwargs, **{name: value for name, value in others.items() if name in call.kwargs}}
    if args:
        return tensors(module(x, *args[1:], **kwargs))[0]
    return tensors(module(**{**kwargs, names[0]: x}))[0]


def _proves(spec: AttentionSpec, token: Tensor, theirs: Tensor) -> bool:
    """Whether W_o W_v x is what the layer makes of equal tokens x."""
    assert spec.value is not None and spec.out is not None
    values = nn.functional.linear(token[:, 0], spec.value.weight, spec.value.bias)
    ours = nn.functional.linear(values, spec.out.weight, spec.out.bias)
    return same(ours, theirs[:, -1])


def any_adapter(module: nn.Module) -> type[Adapter] | None:
    """The adapter of a layer whose class has none of its own."""
    return FamilyAdapter if takes(module) else None
