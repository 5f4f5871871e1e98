"""The user's own data, whichever kind it is."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Data(Protocol):
    """The user's own data, as one model takes it. batch: inputs in a call, where nobody says; metric: of distill's."""

    batch: int
    metric: str

    @property
    def size(self) -> str:
        """What there is to train on, in words."""

    def given(self, model: nn.Module, batch: int, device: str) -> Any:
        """What the model is calibrated and measured with, once it is known to take it."""

    def loaders(self, batch: int) -> tuple[Any, Any]:
        """Batches to train on, and those held back."""

    def told(self) -> list[str]:
        """What a reader of the report must know of it."""

    def card(self, title: str, value: float | None) -> dict[str, Any]:
        """In a hub's terms: the task, and the figure that was reached on what was held back."""

    def to_dict(self) -> dict[str, Any]: ...


def result(task: str, title: str, data: tuple[str, str], metric: str, value: float | None) -> dict[str, Any]:
    """The metadata of a card with one figure, on `data`, its type and its name."""
    if value is None:
        return {}
    measured = {
        "task": {"type": task}, "dataset": dict(zip(("type", "name"), data, strict=True)),
        "metrics": [{"type": metric, "value": value}],
    }  # fmt: skip
    return {"pipeline_tag": task, "model-index": [{"name": title, "results": [measured]}]}
