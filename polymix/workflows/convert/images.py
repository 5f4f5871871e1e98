"""Images of the user's, as one model takes them: size, channels, scale and classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from polymix.convert.tracing import mode
from polymix.errors import DataError, OptionError
from polymix.tasks.images import ImageData, find_images, load_digits, load_folder
from polymix.workflows.convert.data import result
from polymix.workflows.convert.inputs import PIXELS, pixels
from polymix.workflows.convert.sources import Source

DIGITS = "digits"
_BYTE = 255.0
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # as torchvision's own transforms have it


def classes(data: str) -> int:
    """How many there are, before any image is read."""
    return 10 if data == DIGITS else len(find_images(Path(data)))


class Images:
    """A folder of images, one sub-folder a class, or the digits, made ready for the model of `source`.

    They are normalised as the model's library says, else by their own mean and deviation; grey ones are repeated for a
    model with more channels; classes are numbered as the model names them, where it names these.
    """

    batch, metric = 32, "accuracy"

    def __init__(self, data: str, source: Source, size: int | None) -> None:
        model = source.model
        side, other = pixels(model) or (PIXELS, PIXELS)
        if size is None and side != other:
            got = f"None for images of {side} × {other}, as {type(model).__name__} has them"
            raise OptionError("--image-size", got, "square ones", "Distil it from Python: polymix.distill.")
        self.data: ImageData = load_digits(size or side) if data == DIGITS else load_folder(Path(data), size or side)
        first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
        self.channels = self.data.channels if first is None else first.in_channels
        if self.data.channels not in (1, self.channels):
            got = f"images of {self.data.channels} channels"
            raise OptionError("--data", got, f"{self.channels}, which {type(model).__name__} takes", "")
        self.unit = _BYTE if self.data.train[0].dtype == torch.uint8 else 1.0
        own = tuple((part / self.unit).flatten().tolist() for part in (self.data.mean, self.data.std))
        mean, std = (_statistics(source, self.channels) if self.unit == _BYTE else None) or own
        self.mean, self.std = (torch.tensor(part).reshape(1, -1, 1, 1) for part in (mean, std))
        numbers = getattr(getattr(model, "config", None), "label2id", None) or {}
        known = set(numbers) == set(self.data.classes)
        self.order = torch.tensor([numbers[name] if known else place for place, name in enumerate(self.data.classes)])

    @property
    def name(self) -> str:
        return Path(self.data.name).name

    @property
    def size(self) -> str:
        return f"{len(self.data.train[0]):,} images"

    def given(self, model: nn.Module, batch: int, device: str) -> Tensor:
        found = self.inputs(self.data.train[0][:batch]).to(device)
        self.check_head(model, found)
        return found

    def loaders(self, batch: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        return self.loader(self.data.train, batch, shuffle=True), self.loader(self.data.test, batch, shuffle=False)

    def inputs(self, images: Tensor) -> Tensor:
        wide = images.expand(-1, self.channels, -1, -1).float() / self.unit
        return (wide - self.mean) / self.std

    def loader(self, part: tuple[Tensor, Tensor], batch: int, *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*part), batch, shuffle=shuffle, collate_fn=self._batch)

    def _batch(self, rows: list[Any]) -> tuple[Tensor, Tensor]:
        images, labels = default_collate(rows)
        return self.inputs(images), self.order[labels]

    @torch.no_grad()
    def check_head(self, model: nn.Module, images: Tensor) -> None:
        """OptionError unless the model takes these images and has an output a class."""
        from polymix.tasks.distill.batches import logits_of

        try:
            with mode(model, False):
                logits = logits_of(model, images[:1])
        except DataError as error:
            got = f"classes for {type(model).__name__}, which has no logits to learn them by"
            raise OptionError("--data", got, "a model with a classifier's head", "") from error
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            got = f"images {tuple(images.shape[1:])}, which the model refuses ({' '.join(str(error).split())[:200]})"
            raise OptionError("--data", got, "images that it takes", "Pass --image-size.") from error
        if logits.ndim != 2 or logits.shape[1] != len(self.data.classes):
            got = f"{len(self.data.classes)} classes for an output {tuple(logits.shape)}"
            cure = "One sub-folder a class; or give it another head and train that first."
            raise OptionError("--data", got, "as many as the model has classes", cure)

    def told(self) -> list[str]:
        data, scale = self.data, "divided by 255" if self.unit > 1 else "as they are"
        said = (
            f"Data: {self.name}, {len(data.train[0]):,} images for training and {len(data.test[0]):,} for the "
            f"accuracy, of {data.image_size} × {data.image_size} pixels: values {scale}, less {_row(self.mean)}, "
            f"over {_row(self.std)}."
        )
        left = [f"{len(data.skipped)} unreadable images were left out, such as {name}." for name in data.skipped[:1]]
        return [said, *left]

    def card(self, title: str, value: float | None) -> dict[str, Any]:
        data = self.name.replace(" ", "-"), f"{self.name}, {len(self.data.test[0]):,} images held back"
        return result("image-classification", title, data, self.metric, value)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "classes": [self.data.classes[i] for i in self.order.argsort()],
            "train": len(self.data.train[0]), "test": len(self.data.test[0]), "image_size": self.data.image_size,
            "mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist(), "unit": self.unit,
            "skipped": len(self.data.skipped),
        }  # fmt: skip


def _statistics(source: Source, channels: int) -> tuple[Any, Any] | None:
    """Mean and deviation of each channel, on a scale of 0 to 1, that the model's weights expect."""
    trained = getattr(source.model, "pretrained_cfg", None) or {}
    processor = _read(source.folder, "preprocessor_config.json")
    before = (_read(source.folder, "config.json").get("metadata") or {}).get("data") or {}
    imagenet = _IMAGENET if type(source.model).__module__.startswith("torchvision.") else (None, None)
    for mean, std in (
        (trained.get("mean"), trained.get("std")), (processor.get("image_mean"), processor.get("image_std")),
        (before.get("mean"), before.get("std")) if before.get("unit") == _BYTE else (None, None), imagenet,
    ):  # fmt: skip
        if mean and std and len(mean) == len(std) == channels:
            return mean, std
    return None


def _row(values: Tensor) -> str:
    return " / ".join(f"{value:.4g}" for value in values.flatten().tolist())


def _read(folder: Path | None, file: str) -> Any:
    if folder is None or not (folder / file).is_file():
        return {}
    try:
        return json.loads((folder / file).read_text("utf-8"))
    except ValueError:
        return {}
