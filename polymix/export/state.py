"""A recurrent mixer as two graphs that carry its state: prefill reads a chunk of tokens, step one more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from polymix.mixers import TokenMixer


class Prefill(nn.Module):
    """x (B, N, D) -> output (B, N, D), state.*"""

    def __init__(self, mixer: TokenMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output, state = self.mixer.prefill(x)
        return {"output": output, **named_tensors("state", state)}


class Step(nn.Module):
    """x_t (B, D), state.* -> output (B, D), next_state.*"""

    def __init__(self, mixer: TokenMixer, names: list[str], spec: TreeSpec, leaves: list[Any]) -> None:
        super().__init__()
        self.mixer, self.names, self.spec, self.leaves = mixer, names, spec, leaves

    def forward(self, x_t: Tensor, **state: Tensor) -> dict[str, Tensor]:
        output, after = self.mixer.step(x_t, rebuilt(state, self.names, self.spec, self.leaves))
        return {"output": output, **named_tensors("next_state", after)}


def carried(mixer: TokenMixer, x: Tensor) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """The modules `Prefill` and `Step` of a mixer, and the inputs of the second one after the tokens x (B, N, D)."""
    with torch.no_grad():
        _, state = mixer.prefill(x)
    leaves, spec = tree_flatten(state)
    tensors = named_tensors("state", state)
    step = Step(mixer, list(tensors), spec, list(leaves))
    return Prefill(mixer).eval(), step.eval(), {"x_t": x[:, -1].contiguous(), **tensors}


def rebuilt(state: Mapping[str, Tensor], names: list[str], spec: TreeSpec, leaves: list[Any]) -> Any:
    """A state from its tensors by name; what is no tensor comes from `leaves`."""
    parts = iter(state[name] for name in names)
    return tree_unflatten([next(parts) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def named_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors in a state, such as state.moments, in the order in which PyTorch takes it apart."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        fields = list(value.items())
    elif isinstance(value, (tuple, list)):
        keys = getattr(value, "_fields", range(len(value)))
        fields = list(zip(keys, value, strict=True))
    else:
        return {}
    return {inner: tensor for key, part in fields for inner, tensor in named_tensors(f"{name}.{key}", part).items()}
