"""Pictures that are decoded when they are used: folders larger than memory, and crops that differ every time."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.convert.adapters.libraries import load_library
from polymix.errors import DataError, OptionError
from polymix.tasks.classify.pictures import fitted
from polymix.tasks.classify.recipe import ImageRecipe

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet's bytes, as all its checkpoints have it
LOG = logging.getLogger(__name__)  # warnings are silent while Lightning trains
Transform = Callable[[Any], Tensor]


class Unreadable(Exception):
    """A picture cannot be read; the text names the file and the reason."""


@dataclass(frozen=True)
class Pictures:
    """Pictures of Pillow with their classes: files, or rows (N, C, H, W) of bytes or small floats.

    Args:
        labels: (N), int64.
        files: paths; empty where rows are given.
        read: opens a file as an upright RGB picture, or raises `Unreadable`.
    """

    labels: Tensor
    files: Sequence[str] = ()
    rows: Tensor | None = None
    read: Callable[[Path], Any] = field(default=lambda path: None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> Any:
        if self.rows is None:
            return self.read(Path(self.files[place]))
        from PIL import Image

        pixels = self.rows[place]
        if pixels.dtype != torch.uint8:
            pixels = (pixels * (255 / max(self.highest, 1e-9))).round().clamp(0, 255).to(torch.uint8)
        pixels = pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous()
        return Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels.numpy().tobytes())

    @cached_property
    def highest(self) -> float:
        """The largest value of all rows, which becomes white."""
        return 0.0 if self.rows is None else self.rows.max().item()

    def chosen(self, places: Tensor) -> Pictures:
        files = [self.files[place] for place in places.tolist()] if self.rows is None else ()
        return replace(
            self, labels=self.labels[places], files=files, rows=None if self.rows is None else self.rows[places]
        )

    def readable(self, skipped: list[str], tell: Callable[[], None]) -> Pictures:
        """Those that can be read. The reasons for the others are added to `skipped`; `tell` is called after each."""
        places: list[int] = []
        for place in range(len(self)):
            try:
                self[place]
                places.append(place)
            except Unreadable as error:
                skipped.append(str(error))
            tell()
        return self.chosen(torch.tensor(places, dtype=torch.int64))

    def joined(self, other: Pictures) -> Pictures:
        rows = None if self.rows is None or other.rows is None else torch.cat((self.rows, other.rows))
        files = [*self.files, *other.files]
        return replace(self, labels=torch.cat((self.labels, other.labels)), files=files, rows=rows)

    def fingerprint(self) -> int:
        """Tells other files, other classes or other pixels apart, without decoding."""
        crc = zlib.crc32(repr((list(self.files), self.labels.tolist())).encode())
        return crc if self.rows is None else zlib.crc32(self.rows.numpy().tobytes(), crc)


class Samples(Dataset[tuple[Tensor, int]]):
    """Pictures as bytes (3, S, S), with their classes.

    Where a picture cannot be read, the next one takes its place, and a log entry names it. With refuse=True
    it is a DataError.
    """

    def __init__(self, pictures: Pictures, transform: Transform, refuse: bool) -> None:
        self.pictures, self.transform, self.refuse = pictures, transform, refuse
        self.skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if not 0 <= place < len(self):
            raise IndexError(place)  # which ends a loop over the samples
        for step in range(len(self)):
            at = (place + step) % len(self)
            if at in self.skipped:
                continue
            try:
                return self.transform(self.pictures[at]), int(self.pictures.labels[at])
            except Unreadable as error:
                if self.refuse:
                    raise refused(error) from error
                self._skip(at, str(error))
        raise DataError("--data", "no picture that can be read", "readable pictures", "")

    def _skip(self, at: int, reason: str) -> None:
        self.skipped[at] = reason
        LOG.warning("Skipped %s", reason)


def refused(error: Exception) -> DataError:
    """What broken="refuse" raises for an unreadable picture."""
    cure = "Repair or delete it, or pass --set broken=skip. --check lists all."
    return DataError("--data", str(error), "pictures that can be read", cure)


class Labelled:
    """What images in memory and streamed ones share: `classes`, and `mean` and `std` of a channel (1, C, 1, 1)."""

    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor

    @property
    def is_bytes(self) -> bool:
        """Whether images are bytes, as pictures are, and not small floats."""
        return True

    @property
    def test_labels(self) -> Tensor:
        """The classes of the test images."""
        raise NotImplementedError(f"{type(self).__name__} has no test_labels")

    def test_image(self, place: int) -> Tensor:
        """A test image (C, H, W)."""
        raise NotImplementedError(f"{type(self).__name__} has no test_image")

    def data_sets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """The training and the test images with their classes, as PyTorch data sets."""
        raise NotImplementedError(f"{type(self).__name__} has no data_sets")

    @property
    def majority(self) -> tuple[str, float]:
        """The most frequent class of the test images, and its share: what always answering with it would reach."""
        counts = torch.bincount(self.test_labels, minlength=len(self.classes))
        return self.classes[int(counts.argmax())], (counts.max() / counts.sum()).item()

    def thumbnail(self, place: int, side: int = 64) -> bytes:
        """A test image as a PNG file, at most `side` pixels wide."""
        from PIL import Image

        image = self.test_image(place).float()
        low, high = (0.0, 255.0) if self.is_bytes else (image.min().item(), image.max().item())
        if image.shape[-1] > side:
            image = torch.nn.functional.interpolate(image[None], size=side, mode="bilinear", antialias=True)[0]
        grey = ((image - low) / ((high - low) or 1) * 255).round().clamp(0, 255).to(torch.uint8)
        rgb = grey.expand(3, -1, -1).permute(1, 2, 0).contiguous()
        file = BytesIO()
        Image.frombytes("RGB", (rgb.shape[1], rgb.shape[0]), bytes(rgb.flatten().tolist())).save(file, "PNG")
        return file.getvalue()

    def normalise(self, images: Tensor) -> Tensor:
        """Images as inputs, with mean 0 and variance 1 per channel over the images that mean and std are of."""
        return (images.float() - self.mean.to(images.device)) / self.std.to(images.device)


@dataclass(frozen=True)
class StreamedImages(Labelled):
    """The pictures of a run, decoded when they are used: as `ImageData`, without tensors of all images."""

    name: str
    classes: tuple[str, ...]
    training: Pictures
    held_out: Pictures
    image_size: int
    test_transform: Transform = field(repr=False)
    refuse: bool = False
    skipped: tuple[str, ...] = ()
    mean: Tensor = field(default_factory=lambda: torch.tensor(MEAN).view(1, 3, 1, 1))
    std: Tensor = field(default_factory=lambda: torch.tensor(STD).view(1, 3, 1, 1))
    channels: int = 3

    @property
    def counts(self) -> tuple[int, int]:
        """Training and test pictures."""
        return len(self.training), len(self.held_out)

    @property
    def test_labels(self) -> Tensor:
        return self.held_out.labels

    def test_image(self, place: int) -> Tensor:
        return self.test_transform(self.held_out[place])

    def data_sets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Both as tests see them: without augmentation."""
        train, test = (Samples(part, self.test_transform, self.refuse) for part in (self.training, self.held_out))
        return train, test

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The test pictures and their classes, `size` at a time. Unreadable ones are left out, or refused."""
        for places in torch.arange(len(self.held_out)).split(size):
            images, labels = [], []
            for place in places.tolist():
                try:
                    images.append(self.test_transform(self.held_out[place]))
                    labels.append(self.held_out.labels[place])
                except Unreadable as error:
                    if self.refuse:
                        raise refused(error) from error
                    LOG.warning("Left out %s", error)
            if images:
                yield torch.stack(images), torch.stack(labels)

    def known_as(self, summary: Mapping[str, Any]) -> StreamedImages:
        """These pictures with the classes of a trained model. Raises DataError for a class that it does not know."""
        known = tuple(summary["classes"])
        odd = [name for name in self.classes if name not in known]
        if odd:
            got = f"the class {odd[0]!r} in {self.name}"
            allowed = f"the model's {len(known)} classes, such as {known[0]}"
            raise DataError("--data", got, allowed, "Rename its folder.")
        order = torch.tensor([known.index(name) for name in self.classes])
        parts = (replace(part, labels=order[part.labels]) for part in (self.training, self.held_out))
        training, held_out = parts
        return replace(self, classes=known, training=training, held_out=held_out)

    def restricted(self, whole: bool, limit: int | None, seed: int) -> StreamedImages:
        """Measured on all pictures instead of those held out, and on at most `limit`, drawn with a fixed seed."""
        test = self.training.joined(self.held_out) if whole else self.held_out
        if limit is not None and limit < len(test):
            test = test.chosen(torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))[:limit])
        return replace(self, held_out=test)


def transforms(recipe: ImageRecipe) -> tuple[Transform, Transform]:
    """Pictures to bytes (3, S, S): for training and for tests. timm's, where the recipe augments or crops.

    Raises MissingExtraError where they need timm, and OptionError for an auto_augment that timm does not know.
    """
    size = recipe.image_size
    if not recipe.looks_again:
        return (lambda picture: fitted(picture, size),) * 2
    create_transform = load_library("timm.data.transforms_factory").create_transform
    shared: dict[str, Any] = {"input_size": size, "interpolation": recipe.interpolation, "normalize": False}
    test: Any = create_transform(**shared, is_training=False, crop_pct=recipe.crop)
    if not recipe.augment:
        return test, test
    more: dict[str, Any] = {"auto_augment": recipe.auto_augment, "color_jitter": None, "re_prob": 0.0}
    try:
        training: Any = create_transform(**shared, **more, is_training=True)
    except Exception as error:  # timm asserts, or fails on parts of the string
        got = f"{recipe.auto_augment!r} ({type(error).__name__})"
        raise OptionError("auto_augment", got, "a string of timm such as 'rand-m9-mstd0.5-inc1'", "") from error
    return training, test
