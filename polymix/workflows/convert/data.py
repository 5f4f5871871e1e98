"""The user's own data, whichever kind it is."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from polymix.workflows.convert.inputs import reads_text
from polymix.workflows.convert.settings import Settings
from polymix.workflows.convert.sources import Source


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


def open_data(settings: Settings, source: Source) -> Data:
    """Text for a model that foretells the next token, else images."""
    assert settings.data is not None
    if reads_text(source.model):
        from polymix.workflows.convert.text import Text

        return Text(settings.data, source, settings)
    from polymix.workflows.convert.images import Images

    return Images(settings.data, source, settings.image_size)


def result(task: str, title: str, data: tuple[str, str], metric: str, value: float | None) -> dict[str, Any]:
    """The metadata of a card with one figure, on `data`, its type and its name."""
    if value is None:
        return {}
    measured = {
        "task": {"type": task}, "dataset": dict(zip(("type", "name"), data, strict=True)),
        "metrics": [{"type": metric, "value": value}],
    }  # fmt: skip
    return {"pipeline_tag": task, "model-index": [{"name": title, "results": [measured]}]}
