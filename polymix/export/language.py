"""A language model as two graphs that carry its state: prefill.onnx reads a prompt, step.onnx one more token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from polymix.convert.adapters.libraries import load_whole
from polymix.errors import DataError, OptionError, PolymixError, ResultsError, one_line
from polymix.export.graph import Graph, about
from polymix.export.manifest import MANIFEST, read_manifest
from polymix.export.state import named_tensors, rebuilt
from polymix.files import read_json
from polymix.mixers.cache import StateLayer
from polymix.models.language import PolymixGPTForCausalLM, PolymixLlamaForCausalLM
from polymix.models.language.layout import SequenceLayout
from polymix.models.language.model import PolymixForCausalLM

PROMPT = 12  # tokens of the example that is exported and checked
LANGUAGE, FOLDER = "language", "tokenizer"  # in the manifest; the folder of the tokenizer


class LanguageInfo(NamedTuple):
    """What the manifest says of a language model: tokens that it knows, the longest text or None, and end tokens."""

    vocabulary: int
    positions: int | None
    ends: list[int]


def tell_language(model: PolymixForCausalLM) -> dict[str, Any]:
    """What `about_language` reads, for the manifest."""
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    limit = model.config.max_position_embeddings if model.model.position is not None else None
    return {LANGUAGE: LanguageInfo(model.config.vocab_size, limit, ends)._asdict()}


def about_language(folder: Path) -> LanguageInfo:
    """What the manifest says of its language model. Raises DataError: there is none, or it is damaged."""
    try:
        entry = read_manifest(folder)[LANGUAGE]
        limit = entry["positions"]
        return LanguageInfo(
            int(entry["vocabulary"]), None if limit is None else int(limit), [int(end) for end in entry["ends"]]
        )
    except (KeyError, TypeError, ValueError) as error:
        got = f"{folder / MANIFEST}, which describes no language model"
        raise DataError("folder", got, "the export of a language model", "Export it again.") from error


class KeysAndValues(NamedTuple):
    """What attention keeps of the tokens so far: two tensors (B, heads, past, d), which grow."""

    keys: Tensor
    values: Tensor


class _Attention:
    """A layer of a cache that keeps keys and values by joining them, as a graph can."""

    def __init__(self, state: KeysAndValues | None) -> None:
        self.state = state


class _States:
    """What a block sees of a cache: a state for each layer.

    states: of attention KeysAndValues, of other mixers (window, state); None at the start of a text.
    """

    layer_class_to_replicate = None

    def __init__(self, states: list[Any], attention: list[bool]) -> None:
        self.layers: list[Any] = []
        for state, grows in zip(states, attention, strict=True):
            layer: Any = _Attention(state) if grows else StateLayer()
            layer.state = state
            self.layers.append(layer)

    def update(self, keys: Tensor, values: Tensor, index: int) -> KeysAndValues:
        """All keys and values of an attention layer, with those of the new tokens."""
        layer, new = self.layers[index], KeysAndValues(keys, values)
        if layer.state is not None:
            pairs = zip(layer.state, new, strict=True)
            new = KeysAndValues(*(torch.cat(pair, dim=2) for pair in pairs))
        layer.state = new
        return new


class _Reader(nn.Module):
    """Tokens (B, N) after some others -> the logits (B, V) of the next token, and the state after them."""

    def __init__(self, model: PolymixForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.attention = [block.mix.mixer.config.cache_grows for block in model.model.blocks]

    def start(self) -> list[Any]:
        """The states before a text."""
        return [None] * len(self.attention)

    def read(self, ids: Tensor, place: Tensor, past: int, states: list[Any]) -> tuple[Tensor, list[Any]]:
        """place: (N,), positions of the tokens. past: 0 at the start of a text; what else it is does not matter."""
        body, cache = self.model.model, _States(states, self.attention)
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
        logits, states = self.read(input_ids, place, 0, self.start())
        return {"logits": logits, **named(states)[0]}


class Step(_Reader):
    """input_ids (B, 1), position (1,), state.* -> logits (B, V), next_state.*; position counts the tokens before."""

    def __init__(self, model: PolymixForCausalLM, names: list[str], spec: TreeSpec, leaves: list[Any]) -> None:
        super().__init__(model)
        self.names, self.spec, self.leaves = names, spec, leaves

    def forward(self, input_ids: Tensor, position: Tensor, **state: Tensor) -> dict[str, Tensor]:
        before = rebuilt(state, self.names, self.spec, self.leaves)
        logits, states = self.read(input_ids, position, 1, before)
        return {"logits": logits, **{f"next_{name}": value for name, value in named(states)[0].items()}}


def named(states: list[Any]) -> tuple[dict[str, Tensor], TreeSpec, list[Any]]:
    """The tensors of all layers' states by name, such as state.0.mixer.total or state.1.keys; and how they nest."""
    leaves, spec = tree_flatten(states)
    names: dict[str, Tensor] = {}
    for layer, state in enumerate(states):
        if isinstance(state, KeysAndValues):
            names.update(named_tensors(f"state.{layer}", state))
            continue
        window, mixer = state
        if isinstance(window, Tensor):
            names[f"state.{layer}.window"] = window
        names.update(named_tensors(f"state.{layer}.mixer", mixer))
    return names, spec, list(leaves)


def load_language_model(folder: Path) -> PolymixForCausalLM:
    """The language model in a folder.

    Raises:
        OptionError: its architecture is not one of polymix's. ResultsError: weights are missing, or cannot be read.
    """
    saved = read_json(folder / "config.json", OptionError, "--model", "a folder of a language model")
    kinds = {kind.__name__: kind for kind in (PolymixGPTForCausalLM, PolymixLlamaForCausalLM)}
    name = next(iter(saved.get("architectures") or [""]))
    if name not in kinds:
        raise OptionError("--model", f"{folder}, of the architecture {name!r}", f"one of {', '.join(kinds)}", "")
    try:
        model: PolymixForCausalLM = load_whole(kinds[name], folder, "--model")[0]
    except PolymixError:
        raise
    except Exception as error:  # whatever transformers raises on a damaged folder
        got = f"{folder}, which cannot be read ({one_line(error)[:200]})"
        raise ResultsError("--model", got, "a folder of a language model", "Fetch or save it again.") from error
    return model.float()


def language_graphs(model: PolymixForCausalLM, source: str | None = None, *, seed: int = 0) -> list[Graph]:
    """The graphs `prefill` and `step` of a language model.

        prefill   input_ids (B, N)                         -> logits (B, V), state.*
        step      input_ids (B, 1), position (1,), state.* -> logits (B, V), next_state.*

    logits are of the token after the last one given. A program feeds next_state.* of a step as state.* to the next one.
    The states of mixers have a fixed size. Layers with attention have state.*.keys and state.*.values (B, heads, past,
    d), where past is the number of tokens so far.
    """
    model = model.eval()
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (2, PROMPT), generator=draw)
    prefill = Prefill(model).eval()
    with torch.no_grad():
        _, states = prefill.read(ids, torch.arange(PROMPT), 0, prefill.start())
    tensors, spec, leaves = named(states)
    axes = {name: {0: "batch"} for name, value in tensors.items() if value.ndim and len(value) == len(ids)}
    for layer, grows in enumerate(prefill.attention):
        if grows:
            for field in KeysAndValues._fields:
                axes[f"state.{layer}.{field}"][2] = "past"
    said = about(model, source)
    inputs = {"input_ids": ids[:, :1].contiguous(), "position": torch.tensor([PROMPT]), **tensors}
    step = Step(model, list(tensors), spec, leaves).eval()
    return [
        Graph("prefill", prefill, {"input_ids": ids}, {"input_ids": {0: "batch", 1: "tokens"}}, said),
        Graph("step", step, inputs, {"input_ids": {0: "batch"}, **axes}, said),
    ]
