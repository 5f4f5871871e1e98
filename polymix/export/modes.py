"""The modes of a mixer as graphs: self, causal, cross, mask, and prefill with step, which carry a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError
from polymix.export.graph import Graph, about
from polymix.export.state import carried
from polymix.mixers import TokenMixer
from polymix.mixers.registry import missing_capability

MODES = ("self", "causal", "cross", "mask", "prefill", "step")

CAPABILITY_OF_MODE = {
    "self": "cross",
    "mask": "padding",
    "prefill": "recurrent",
    "step": "recurrent",
}  # for a mode, if not its name


class _Causal(nn.Module):
    """A mixer with causal=True."""

    def __init__(self, mixer: TokenMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, causal=True)


def modes_of(mixer: TokenMixer) -> tuple[str, ...]:
    """The modes that a mixer has, as it was built."""
    able = mixer.capabilities
    has = {"self": not mixer.needs_context, "causal": able.causal, "cross": able.cross or mixer.needs_context,
           "mask": "padding" in able.masks, "prefill": able.recurrent, "step": able.recurrent}  # fmt: skip
    return tuple(mode for mode in MODES if has[mode])


def mixer_graphs(
    mixer: TokenMixer, tokens: int, *, batch: int = 2, modes: Sequence[str] = ("self",), source: str | None = None,
    seed: int = 0,
) -> list[Graph]:  # fmt: skip
    """A graph for each mode, on random tokens (batch, tokens, D).

        self     x -> output                causal   x -> output, a token sees itself and earlier ones
        cross    x, context -> output       mask     x, mask -> output; mask (B, N) is True for real tokens
        prefill  x -> output, state.*       step     x_t (batch, D), state.* -> output (batch, D), next_state.*

    prefill reads a causal sequence from its start. A program feeds state.*, and later next_state.* of a step, to the
    next step as state.*; its size stays the same. The batch stays free, and the number of tokens where one set of
    weights serves all.

    Raises:
        OptionError: a mode is unknown. CapabilityError: the mixer does not have it.
    """
    free = mixer.capabilities.any_length and mixer.config.to_dict().get("grid") is None
    draw = torch.Generator().manual_seed(seed)
    graphs = []
    for mode in modes:
        if mode not in MODES:
            raise OptionError("modes", repr(mode), f"some of {', '.join(MODES)}", "Choose one of these.")
        if mode not in modes_of(mixer):
            raise missing_capability(mixer.name, CAPABILITY_OF_MODE.get(mode, mode), "modes", mode)
        inputs: dict[str, Tensor] = {"x": torch.randn(batch, tokens, mixer.dim, generator=draw)}
        axes: dict[str, dict[int, str]] = {"x": {0: "batch", **({1: "tokens"} if free else {})}}
        model: nn.Module = _Causal(mixer).eval() if mode == "causal" else mixer
        if mode == "cross":
            others = max(2, tokens - tokens // 4) if free else tokens
            inputs["context"] = torch.randn(batch, others, mixer.dim, generator=draw)
            axes["context"] = {0: "batch", **({1: "context_tokens"} if free else {})}
        if mode == "mask":
            places = torch.arange(tokens)
            inputs["mask"] = torch.stack(
                [places < max(1, tokens - 1 - row % max(1, tokens // 2)) for row in range(batch)]
            )
            axes["mask"] = dict(axes["x"])
        if mode in ("prefill", "step"):
            model, step, step_inputs = carried(mixer, inputs["x"])
            if mode == "step":
                model, inputs = step, step_inputs
                axes = {name: {0: "batch"} for name, value in step_inputs.items() if value.ndim and len(value) == batch}
        said: dict[str, Any] = {**about(mixer, source), "mode": mode}
        graphs.append(Graph("model" if tuple(modes) == ("self",) else mode, model, inputs, axes, said))
    return graphs
