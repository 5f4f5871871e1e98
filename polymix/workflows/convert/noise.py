"""Noise as the input and the training data of generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix._io import one_line
from polymix.errors import OptionError
from polymix.models import SiT
from polymix.tasks.distill.noise import NoiseBatches, noise_batches, prediction, shape_of
from polymix.workflows.convert.generators import generates
from polymix.workflows.convert.settings import NOISE
from polymix.workflows.convert.sources import Source

BATCHES, HELD_BACK = 64, 8  # batches of an epoch, and for the error
CAPTION = 32  # tokens of a random caption


def noise_input(model: Any, source: Source, batch: int, size: int | None) -> dict[str, Any]:
    """Noise with times and classes, and random captions where the model reads some, as keyword arguments."""
    captions: Any = None if isinstance(model, SiT) else model.config.get("caption_channels")

    def conditions(draw: torch.Generator, count: int) -> dict[str, Any]:
        texts = torch.randn(count, CAPTION, captions, generator=draw)
        return {"encoder_hidden_states": texts, "encoder_attention_mask": torch.ones(count, CAPTION)}

    size_of = None if size is None else (size, size)
    drawn = torch.zeros(1, *shape_of(model, size_of))  # any image: noise is added to it
    found = noise_batches(
        model, batches=1, batch_size=batch, process=source.process, size=size_of, images=drawn,
        conditions=conditions if captions else None,
    )  # fmt: skip
    device = next(model.parameters()).device
    inputs: dict[str, Any] = tree_map_only(Tensor, lambda t: t.to(device), found.input)
    with torch.no_grad():
        try:
            model(**inputs)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            got = f"{type(model).__name__}, which fails on noise ({one_line(error)[:200]})"
            cure = "Write a file.py:function that returns (model, input)."
            raise OptionError("--model", got, "a transformer such as DiT, PixArt or SiT", cure) from error
    return inputs


class Noise:
    """Noisy images that the model itself draws, with times and classes: what a generator is distilled on."""

    batch, metric = 16, "relative_error"
    learning: Mapping[str, Any] = {"forward": prediction, "loss": "squares"}

    def __init__(self, model: nn.Module, source: Source, size: int | None, seed: int) -> None:
        if not generates(model):
            got = f"noise for {type(model).__name__}"
            raise OptionError("--data", got, "a folder of images or text for this model", "Pass --data DIR.")
        if not isinstance(model, SiT) and getattr(model, "config", {}).get("caption_channels"):
            got = f"noise for {type(model).__name__}, which reads captions"
            cure = "Use polymix.distill with noise_batches(conditions=…)."
            raise OptionError("--data", got, "a model of classes", cure)
        self.model, self.source, self.seed = model, source, seed
        self.side = None if size is None else (size, size)
        self.made: tuple[NoiseBatches, NoiseBatches] | None = None

    @property
    def size(self) -> str:
        return f"{BATCHES} batches of noisy images that the model draws"

    def sample(self, model: nn.Module, batch: int, device: str) -> dict[str, Any]:
        return noise_input(model, self.source, batch, None if self.side is None else self.side[0])

    def prepare(self, batch: int) -> None:
        """Draw all batches; by the original model, so before the conversion."""
        train, held = (
            noise_batches(
                self.model, batches=count, batch_size=batch, process=self.source.process, size=self.side,
                answers=answers, seed=2 * self.seed + answers,
            )
            for count, answers in ((BATCHES, False), (HELD_BACK, True))
        )  # fmt: skip
        self.made = train, held

    def loaders(self, batch: int) -> tuple[NoiseBatches, NoiseBatches]:
        assert self.made is not None
        return self.made

    def notes(self) -> list[str]:
        return [
            f"Data: {self.size}, at uniform noise levels, with random classes; no pictures were used. The relative "
            "error compares the predictions with those of the original model, on other noisy images."
        ]

    def card(self, title: str, value: float | None) -> dict[str, Any]:
        return {"pipeline_tag": "unconditional-image-generation"}

    def to_dict(self) -> dict[str, Any]:
        return {"name": NOISE, "train": BATCHES, "test": HELD_BACK}
