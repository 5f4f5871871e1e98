"""A language model as two graphs that carry its state: prefill.onnx reads a prompt, step.onnx one more token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from polymix._io import read_json
from polymix.errors import CapabilityError, OptionError
from polymix.export.graph import Graph, about
from polymix.mixers.cache import StateLayer
from polymix.models.language import PolymixGPTForCausalLM, PolymixLlamaForCausalLM
from polymix.models.language.layers import mixers_of
from polymix.models.language.layout import SequenceLayout
from polymix.models.language.model import PolymixForCausalLM

PROMPT = 12  # tokens of the example that is exported and checked


class _States:
    """What a block sees of a cache: a state for each layer."""

    layer_class_to_replicate = None

    def __init__(self, states: list[Any]) -> None:
        self.layers = [StateLayer() for _ in states]
        for layer, state in zip(self.layers, states, strict=True):
            layer.state = state


class _Reader(nn.Module):
    """Tokens (B, N) after some others -> the logits (B, V) of the next token, and the state after them."""

    def __init__(self, model: PolymixForCausalLM) -> None:
        super().__init__()
        self.model = model

    def read(self, ids: Tensor, place: Tensor, past: int, states: list[Any]) -> tuple[Tensor, list[Any]]:
        """place: (N,), positions of the tokens. past: 0 at the start of a text; what else it is does not matter."""
        body, cache = self.model.model, _States(states)
        layout = SequenceLayout(past, None, None, place[None])
        x = body.embed(ids)
        if body.position is not None:
            x = x + body.position(layout.place)
        for block in body.blocks:
            x = block(x, layout, past_key_values=cache)
        logits = self.model.lm_head(body.norm(x[:, -1]))
        return logits, [layer.state for layer in cache.layers]


class Prefill(_Reader):
    """input_ids (B, N) -> logits (B, V), state.*"""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits, states = self.read(input_ids, place, 0, [None] * len(self.model.model.blocks))
        return {"logits": logits, **named(states)[0]}


class Step(_Reader):
    """input_ids (B, 1), position (1,), state.* -> logits (B, V), next_state.*; position counts the tokens before."""

    def __init__(self, model: PolymixForCausalLM, names: list[str], spec: TreeSpec, leaves: list[Any]) -> None:
        super().__init__(model)
        self.names, self.spec, self.leaves = names, spec, leaves

    def forward(self, input_ids: Tensor, position: Tensor, **state: Tensor) -> dict[str, Tensor]:
        parts = iter(state[name] for name in self.names)
        leaves = [next(parts) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        logits, states = self.read(input_ids, position, 1, tree_unflatten(leaves, self.spec))
        return {"logits": logits, **{f"next_{name}": value for name, value in named(states)[0].items()}}


def named(states: list[Any]) -> tuple[dict[str, Tensor], TreeSpec, list[Any]]:
    """The tensors of all layers' states by name, such as state.0.mixer.sums; and what puts them together again."""
    leaves, spec = tree_flatten(states)
    names: dict[str, Tensor] = {}
    for layer, state in enumerate(states):
        window, mixer = state
        if isinstance(window, Tensor):
            names[f"state.{layer}.window"] = window
        names.update(_parts(f"state.{layer}.mixer", mixer))
    return names, spec, list(leaves)


def _parts(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors in a state, in the order in which PyTorch takes it apart."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        fields = list(value.items())
    elif isinstance(value, (tuple, list)):
        keys = getattr(value, "_fields", range(len(value)))
        fields = list(zip(keys, value, strict=True))
    else:
        return {}
    return {inner: tensor for key, part in fields for inner, tensor in _parts(f"{name}.{key}", part).items()}


def load_language_model(folder: Path) -> PolymixForCausalLM:
    """The language model in a folder. Raises OptionError: its architecture is not one of polymix's."""
    saved = read_json(folder / "config.json", OptionError, "--model", "a folder of a language model")
    kinds = {kind.__name__: kind for kind in (PolymixGPTForCausalLM, PolymixLlamaForCausalLM)}
    name = next(iter(saved.get("architectures") or [""]))
    if name not in kinds:
        raise OptionError("--model", f"{folder}, of the architecture {name!r}", f"one of {', '.join(kinds)}", "")
    model: PolymixForCausalLM = kinds[name].from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return model.float()


def language_graphs(model: PolymixForCausalLM, source: str | None = None, *, seed: int = 0) -> list[Graph]:
    """The graphs `prefill` and `step` of a language model whose state has a fixed size.

        prefill   input_ids (B, N)                        -> logits (B, V), state.*
        step      input_ids (B, 1), position (1,), state.* -> logits (B, V), next_state.*

    logits are of the token after the last one given. A program feeds next_state.* of a step as state.* to the next one;
    their sizes do not depend on how many tokens there were.

    Raises CapabilityError: a layer is attention, whose keys and values grow with every token.
    """
    growing = [place for place, mixer in enumerate(mixers_of(model)) if not mixer.capabilities.recurrent]
    if growing:
        got = f"a model with attention in layer {growing[0]}, whose keys and values grow with every token"
        raise CapabilityError("model", got, "recurrent mixers in every layer", "Convert it with pom, say.")
    model = model.eval()
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (2, PROMPT), generator=draw)
    prefill = Prefill(model).eval()
    with torch.no_grad():
        _, states = prefill.read(ids, torch.arange(PROMPT), 0, [None] * len(model.model.blocks))
    given, spec, leaves = named(states)
    batched = {name: {0: "batch"} for name, value in given.items() if value.ndim and len(value) == len(ids)}
    said = about(model, source)
    inputs = {"input_ids": ids[:, :1].contiguous(), "position": torch.tensor([PROMPT]), **given}
    step = Step(model, list(given), spec, leaves).eval()
    return [
        Graph("prefill", prefill, {"input_ids": ids}, {"input_ids": {0: "batch", 1: "tokens"}}, said),
        Graph("step", step, inputs, {"input_ids": {0: "batch"}, **batched}, said),
    ]
