"""Noise as the input and the training data of generators; and the input of any model without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix.errors import OptionError, one_line
from polymix.models.generator import ImageGenerator, shape_of
from polymix.workflows.convert.generators import generates, generator_task
from polymix.workflows.convert.inputs import check_call, random_input
from polymix.workflows.convert.settings import NOISE
from polymix.workflows.convert.sources import Source

if TYPE_CHECKING:
    from polymix.train.generators import NoiseBatches

BATCHES, HELD_BACK = 64, 8  # batches of an epoch, and for the error
CAPTION = 32  # tokens of a random caption


def noise_input(model: Any, source: Source, batch: int, size: int | None) -> dict[str, Any]:
    """Noise with times and classes, and random captions where the model reads some, as keyword arguments."""
    captions, pooled = _captions(model)

    def conditions(draw: torch.Generator, count: int) -> dict[str, Any]:
        texts = {"encoder_hidden_states": torch.randn(count, CAPTION, captions, generator=draw)}
        if pooled:
            return {**texts, "pooled_projections": torch.randn(count, pooled, generator=draw)}
        return {**texts, "encoder_attention_mask": torch.ones(count, CAPTION)}

    size_of = None if size is None else (size, size)
    drawn = torch.zeros(1, *shape_of(model, size_of))  # any image: noise is added to it
    noise = generator_task().noise(
        model, batches=1, batch_size=batch, process=source.process, size=size_of, images=drawn,
        conditions=conditions if captions else None,
    )  # fmt: skip
    device = next(model.parameters()).device
    inputs: dict[str, Any] = tree_map_only(Tensor, lambda t: t.to(device), noise.input)
    with torch.no_grad():
        try:
            model(**inputs)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            got = f"{type(model).__name__}, which fails on noise ({one_line(error)[:200]})"
            cure = "Write a file.py:function that returns (model, input)."
            raise OptionError("--model", got, "a transformer such as DiT, PixArt, SD3 or SiT", cure) from error
    return inputs


def _captions(model: Any) -> tuple[int, int]:
    """The channels of a caption's tokens and of the whole caption, as PixArt and SD3 state them; 0: it reads none."""
    if isinstance(model, ImageGenerator):
        return 0, 0
    config = getattr(model, "config", {})
    each = config.get("caption_channels") or config.get("joint_attention_dim")
    return int(each or 0), int(config.get("pooled_projection_dim") or 0)


def own_input(
    model: nn.Module, source: Source, batch: int | None = None, size: int | None = None, tokens: int | None = None
) -> Any:
    """The input that came with a model, on the model's device; or random images, tokens or noise, as it takes them.

    Raises OptionError: the model fails on it, or an option means nothing for it.
    """
    if source.input is None:
        if generates(model):
            if tokens is not None:
                raise OptionError("--tokens", tokens, "no tokens for a generator", "Pass --image-size.")
            return noise_input(model, source, batch or 1, size)
        inputs = random_input(model, batch=batch or 1, size=size, tokens=tokens)
    else:
        device = next(model.parameters()).device
        inputs = tree_map_only(Tensor, lambda t: t.to(device), source.input)
        for option, value in (("--batch", batch), ("--image-size", size), ("--tokens", tokens)):
            if value is not None:
                raise OptionError(option, value, "no such option: the function returns the input", "")
    check_call(model, inputs)
    return inputs


class Noise:
    """Noisy images that the model itself draws, with times and classes: what a generator is distilled on."""

    batch, metric = 16, "relative_error"

    def __init__(self, model: nn.Module, source: Source, size: int | None, seed: int) -> None:
        from polymix.train.generators import prediction

        if not generates(model):
            got = f"noise for {type(model).__name__}"
            raise OptionError("--data", got, "a folder of images or text for this model", "Pass --data DIR.")
        if _captions(model)[0]:
            got = f"noise for {type(model).__name__}, which reads captions"
            cure = "Use polymix.distill with noise_batches(conditions=…)."
            raise OptionError("--data", got, "a model of classes", cure)
        self.model, self.source, self.seed = model, source, seed
        self.learning: Mapping[str, Any] = {"forward": prediction, "loss": "squares"}
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
            generator_task().noise(
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
