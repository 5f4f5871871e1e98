"""What a domain says of its models that turn noise into images, for convert, distill and generate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polymix.convert.tracing import mode
from polymix.models.generator import ImageGenerator
from polymix.train.task import D, R, Task


class NoiseBatches(list[dict[str, Any]]):
    """Batches of noisy images with times and classes."""

    @property
    def input(self) -> dict[str, Any]:
        """The first batch as keyword arguments of the model, for `polymix.convert`."""
        return call_of(self[0])


def call_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as keyword arguments of its model. SiT's classes are its `labels`, a name that in batches is taken."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return {"labels" if name == "classes" else name: value for name, value in inputs.items()}


def prediction(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """What a generator predicts for a batch of `noise_batches`, whose classes have "none" among them already.

    It runs in evaluation mode, where it drops no class. The `forward` of `polymix.distill` for generators.
    """
    with mode(model, False):
        output = model(**call_of(batch))
    predicted: Tensor = getattr(output, "sample", output)
    return predicted


class GeneratorTask(Task[R, D]):
    """A domain whose models are generators. `polymix convert` and `polymix generate` ask these of it besides."""

    @abstractmethod
    def opened(self, folder: Path, trust: bool) -> tuple[ImageGenerator, Any]:
        """The trained model of a folder with generator.json, on the CPU, and the process that it was trained on.

        trust: run the code that the folder of a converted model names. Raises DataError, OptionError.
        """

    @abstractmethod
    def noise(self, model: nn.Module, **options: Any) -> NoiseBatches:
        """Batches that the model makes of noise, to distil it on: of the domain's own model or of one of diffusers.

        options: of `polymix.domains.generation.noise.noise_batches`.
        """

    @abstractmethod
    def images(self, folder: Path, labels: Sequence[str], *, vae: str | None, device: str, **options: Any) -> Tensor:
        """Images (n, C, H, W) from 0 to 1, drawn by the model of a folder with generator.json.

        Args:
            labels: classes as numbers or names, which start again; empty: no class, or of a model that was trained
                without "none" one class after another. vae: folder of the autoencoder of a model of latents.
            options: of `ImagesPipeline`, whose names an OptionError has.
        """
