"""Sequences in pieces: each mixer continues from its state, in training and inference, on one process or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix.errors import CapabilityError, OptionError
from polymix.mixers.mixer import TokenMixer, is_shared
from polymix.mixers.registry import missing_capability
from polymix.parallel.mix import refuse_pieces


class Stream:
    """The states of a model's mixers between two pieces of a sequence.

    Attributes:
        states: by the mixer's name in the model; they fit `stream(model, states)`.
    """

    def __init__(self, states: dict[str, Any], truncated: bool) -> None:
        self.states, self.truncated = dict(states), truncated
        self.entered: dict[str, Any] = {}  # the states with which the last piece began

    def detach(self) -> None:
        """Cut the gradients between the pieces so far and those that follow."""
        self.states = tree_map_only(Tensor, Tensor.detach, self.states)

    def forward(
        self, name: str, mixer: TokenMixer, x: Tensor, context: Any = None, *, mask: Tensor | None = None,
        causal: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        other = next((key for key, value in options.items() if value is not None), None)
        if context is not None or other or int(mixer.config.causal_by_build if causal is None else causal) != 1:
            got = f"{other or 'a call without causal=True'} in a stream"
            raise CapabilityError("causal", got, "causal=True and padding alone", "A state is of one causal sequence.")
        if torch._C._current_autograd_node() is not None:  # a checkpoint computes the piece again
            return mixer.prefill(x, self.entered.get(name), mask=mask)[0]
        state = self.states.get(name)
        if self.truncated:
            state = tree_map_only(Tensor, Tensor.detach, state)
        self.entered[name] = state
        y, self.states[name] = mixer.prefill(x, state, mask=mask)
        return y


@contextmanager
def stream(model: nn.Module, states: dict[str, Any] | None = None, *, truncated: bool = True) -> Iterator[Stream]:
    """Within it, each causal call of the model continues the sequence where its last call ended.

        with stream(model) as pieces:
            for tokens, labels in chunks:
                loss(model(tokens), labels).backward()       truncated backpropagation through time

    With `parallelize`, each piece is shared by the processes. `with alone(model), stream(model, pieces.states)` then
    decodes on one of them. Positions outside the mixers are whose who calls the model.

    Args:
        states: of an earlier stream; None: the beginning of a sequence.
        truncated: no gradients pass from one piece to those before it. False: keep them, up to `Stream.detach`.

    Raises:
        CapabilityError: a mixer has no recurrent form, or hands no state on between processes (hyena); or a call is not
            causal, or has segments.
        OptionError: the model has no mixers.
    """
    mixers = {name: part for name, part in model.named_modules() if isinstance(part, TokenMixer)}
    if not mixers:
        raise OptionError("model", "a model without mixers", "mixers of polymix", "Convert its attention first.")
    for mixer in mixers.values():
        if not mixer.capabilities.recurrent:
            raise missing_capability(mixer.name, "recurrent", "mixer", "a stream of pieces")
        if is_shared(mixer):
            refuse_pieces(mixer)
    pieces = Stream(states or {}, truncated)
    held = {name: vars(mixer).get("forward") for name, mixer in mixers.items()}
    for name, mixer in mixers.items():
        mixer.forward = partial(pieces.forward, name, mixer)  # type: ignore[method-assign]
    try:
        yield pieces
    finally:
        for name, mixer in mixers.items():
            vars(mixer).pop("forward")
            if held[name] is not None:
                vars(mixer)["forward"] = held[name]
