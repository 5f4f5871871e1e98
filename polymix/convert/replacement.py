"""What `polymix.distill` trains: a model some parts of which were replaced, and how it was before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polymix.numbers import metric


def unit_of(kind: str) -> str:
    """The unit of what a conversion's results measure: of accuracy, perplexity and relative error one is a share."""
    return "%" if kind == "accuracy" else ""


class Replacement(ABC):
    """A model with new parts, and its former ones. A subclass exchanges them and says in `undone` which are in place.

    model: with the new parts. originals: the parts that were replaced, by name. adapters: the mixers among the new.
    accuracy: results by stage, such as "before", "converted" and "distilled"; `polymix.distill` fills them in. metric:
    what these measure. kept: the stage whose weights the model has; None: the last one. schedule: after how many steps
    of fine-tuning each layer got its mixer, where `polymix.distill` replaced them one by one.
    """

    model: nn.Module
    undone: bool

    def __init__(self, host: nn.Module) -> None:
        self.accuracy: dict[str, float] = {}
        self.metric = "accuracy"
        self.kept: str | None = None
        self.schedule: dict[str, int] = {}
        self.untrained: dict[str, Tensor] | None = None  # weights before a distillation that has not ended
        self._host = host
        self._before: dict[str, nn.Module] = {}
        self._weights: dict[str, Tensor] | None = None

    @abstractmethod
    def _withdraw(self) -> nn.Module:
        """Put the former parts and weights back, and return the original model."""

    @abstractmethod
    def _install(self) -> nn.Module:
        """Put the new parts and weights in place, and return the new model."""

    @property
    def originals(self) -> dict[str, nn.Module]:
        """The parts that were replaced, by name."""
        return dict(self._before)

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The adapters that replace attention, by name; none where other parts were replaced."""
        return {}

    @property
    def taken_out(self) -> tuple[str, ...]:
        """The parts of the host, by their attributes, that it runs without while the new ones are in it."""
        return ()

    @contextmanager
    def former(self) -> Iterator[nn.Module]:
        """Context manager: the original model, which takes as many tokens. The new parts return afterwards."""
        host = self._withdraw()
        try:
            yield host
        finally:
            self._install()

    def remember(self) -> None:
        """Keep a copy of the original model's weights before they are trained, for `undo`."""
        if self._weights is None and not self.undone:
            self._withdraw()
            self._weights = {name: value.detach().to("cpu", copy=True) for name, value in self._tensors()}
            self._install()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the weights in the original model for the copy. Buffers whose shape has changed are left alone."""
        if self._weights is not None:
            weights, self._weights = self._weights, {}
            for name, value in self._tensors():
                self._weights[name] = value.detach().to("cpu", copy=True)
                if name in weights and weights[name].shape == value.shape:
                    value.copy_(weights[name])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._host.named_parameters()
        yield from self._host.named_buffers()

    @property
    def result(self) -> float | None:
        """The result of the weights that the model has; None where it was not measured."""
        stages = [name for name in self.accuracy if name != "before"]
        return self.accuracy.get(self.kept or (stages[-1] if stages else ""))

    def written(self, value: float) -> str:
        """A result as tables and sentences have it."""
        return metric(value, unit_of(self.metric))

    @property
    def unimproved(self) -> str | None:
        """A sentence where training was no gain, so that the model is as the conversion left it; else None."""
        if self.kept != "converted":
            return None
        return (
            "WARNING: training made the converted model no better, so its weights are those of the conversion. Train "
            "for more epochs or on more data, or at another learning rate."
        )
