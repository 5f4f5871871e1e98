"""The user's images, prepared for one model: size, channels, normalisation and classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from polymix.convert.find import pixels
from polymix.convert.tracing import mode
from polymix.errors import DataError, OptionError
from polymix.numbers import figure, percent
from polymix.workflows.convert.inputs import NO_OPTIONS, PIXELS, card_metadata
from polymix.workflows.convert.sources import Source

if TYPE_CHECKING:
    from polymix.train.data.images import ImageData, Samples

DIGITS = "digits"
_BYTE = 255.0
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation in torchvision's transforms


def class_folders(data: str) -> list[str]:
    """The names of the classes, without reading the images."""
    if data == DIGITS:
        return [str(digit) for digit in range(10)]
    from polymix.train.data import idx
    from polymix.train.data.labelled import by_class, find_splits

    folder = idx.located(data)
    return list(idx.classes(folder) if idx.recognise(folder) else by_class(find_splits(folder)[0]))


class Images:
    """Images in a folder for each class or in idx files, or the digits, prepared for the model of `source`.

    Images are normalised as the model's library specifies, else by their own mean and deviation. Grey images are
    repeated for a model with more channels. Classes have the model's numbers, where the model names the same classes.
    features: whether the model's last features are learnt, so that it needs no head for these classes.
    """

    batch, metric = 32, "accuracy"
    learning = NO_OPTIONS

    def __init__(self, data: str, source: Source, size: int | None, *, features: bool = False) -> None:
        from polymix.train.data.images import load_digits, load_own

        model, self.features = source.model, features
        side, other = pixels(model) or (PIXELS, PIXELS)
        if size is None and side != other:
            got = f"None, and {type(model).__name__} takes images of {side} × {other}"
            raise OptionError("--image-size", got, "a size for square images", "For others, call polymix.distill.")
        self.data = load_digits(size or side) if data == DIGITS else load_own(data, size or side)
        first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
        self.channels = self.data.channels if first is None else first.in_channels
        if self.data.channels not in (1, self.channels):
            got = f"images with {self.data.channels} channels"
            allowed = (
                f"images with {self.channels} channel{'s' * (self.channels != 1)}, which {type(model).__name__} takes"
            )
            raise OptionError("--data", got, allowed, "")
        self.unit = _BYTE if self.data.is_bytes else 1.0
        own = tuple((part / self.unit).flatten().tolist() for part in (self.data.mean, self.data.std))
        mean, std = (expected_statistics(source, self.channels) if self.unit == _BYTE else None) or own
        self.mean, self.std = (torch.tensor(part).reshape(1, -1, 1, 1) for part in (mean, std))
        numbers = getattr(getattr(model, "config", None), "label2id", None) or {}
        known = set(numbers) == set(self.data.classes)
        self.order = torch.tensor([numbers[name] if known else place for place, name in enumerate(self.data.classes)])

    @property
    def name(self) -> str:
        return Path(self.data.name).name

    @property
    def size(self) -> str:
        return f"{len(self.data.train):,} images"

    def sample(self, model: nn.Module, batch: int, device: str) -> Tensor:
        images = self.inputs(self.data.train.images[:batch]).to(device)
        self.check_head(model, images)
        return images

    def loaders(self, batch: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        return self.loader(self.data.train, batch, shuffle=True), self.loader(self.data.test, batch, shuffle=False)

    def inputs(self, images: Tensor) -> Tensor:
        wide = images.expand(-1, self.channels, -1, -1).float() / self.unit
        return (wide - self.mean) / self.std

    def as_the_model_knows_them(self, names: Sequence[str] = ()) -> ImageData:
        """These images with the model's classes in its order, and the mean and deviation that it expects.

        names: of its outputs in order; empty: the classes of the images are the model's.
        """
        known = names or [self.data.classes[place] for place in self.order.argsort()]
        mean, std = ((self.unit * part).flatten().tolist() for part in (self.mean, self.std))
        return self.data.known_as({
            "name": self.name, "classes": known, "channels": self.channels, "bytes": self.data.is_bytes,
            "mean": mean, "std": std,
        })  # fmt: skip

    @staticmethod
    def logits(model: nn.Module) -> nn.Module:
        """The model as a module that returns logits, whatever it wraps them in."""
        return _Logits(model)

    def loader(self, part: Samples, batch: int, *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(TensorDataset(part.images, part.labels), batch, shuffle=shuffle, collate_fn=self._batch)

    def _batch(self, rows: list[Any]) -> tuple[Tensor, Tensor]:
        images, labels = default_collate(rows)
        return self.inputs(images), self.order[labels]

    @torch.no_grad()
    def check_head(self, model: nn.Module, images: Tensor) -> None:
        """Raise OptionError unless the model takes these images and, to learn classes, has one output for each."""
        from polymix.train.distill.batches import logits_of, run

        try:
            with mode(model, False):
                if self.features:
                    run(model, images[:1])
                    return
                logits = logits_of(model, images[:1])
        except DataError as error:
            got = f"images in classes for {type(model).__name__}, which returns no logits"
            cure = "Only polymix convert --distill-loss features needs none."
            raise OptionError("--data", got, "a model with a classifier head", cure) from error
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            got = f"images {tuple(images.shape[1:])}, on which it fails ({' '.join(str(error).split())[:200]})"
            raise OptionError("--data", got, "images that the model takes", "Pass --image-size.") from error
        if logits.ndim != 2 or logits.shape[1] != len(self.data.classes):
            got = f"{len(self.data.classes)} classes for an output {tuple(logits.shape)}"
            cure = "Make one sub-folder per class, or first give the model another head and train it."
            raise OptionError("--data", got, "as many classes as the model has", cure)

    def notes(self) -> list[str]:
        data, scale = self.data, "divided by 255, " if self.unit > 1 else ""
        measured = "error of the features" if self.features else "accuracy"
        text = (
            f"Data: {self.name}, {len(data.train):,} images for training and {len(data.test):,} for the "
            f"{measured}, {data.image_size} × {data.image_size} pixels. Values are {scale}normalised with mean "
            f"{_row(self.mean)} and deviation {_row(self.std)}."
        )
        if not self.features:
            largest, share = data.majority
            names = ", ".join(data.classes[:12]) + " …" * (len(data.classes) > 12)
            text += f" Classes: {names}. The largest, {largest}, has {percent(share)} of the images for the accuracy."
        left = [f"{len(data.skipped)} unreadable images were left out, such as {name}." for name in data.skipped[:1]]
        return [text, *left]

    def card(self, title: str, value: float | None) -> dict[str, Any]:
        data = self.name.replace(" ", "-"), f"{self.name}, {len(self.data.test):,} images held back"
        return card_metadata("image-classification", title, data, self.metric, value)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "classes": [self.data.classes[i] for i in self.order.argsort()],
            "train": len(self.data.train), "test": len(self.data.test), "image_size": self.data.image_size,
            "mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist(), "unit": self.unit,
            "skipped": len(self.data.skipped),
        }  # fmt: skip


class _Logits(nn.Module):
    """A model whose output is its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        from polymix.train.distill.batches import logits_of

        return logits_of(self.model, x)


def expected_statistics(source: Source, channels: int) -> tuple[Any, Any] | None:
    """The mean and deviation of each channel, for values from 0 to 1, that the model's weights expect."""
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
    return " / ".join(map(figure, values.flatten().tolist()))


def _read(folder: Path | None, file: str) -> Any:
    if folder is None or not (folder / file).is_file():
        return {}
    try:
        return json.loads((folder / file).read_text("utf-8"))
    except ValueError:
        return {}
