"""Images with their classes, prepared for a model: rows in memory, or pictures decoded when they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.errors import DataError
from polymix.train.data import idx
from polymix.train.data.labelled import (
    DIGIT_NAMES,
    DIGIT_SIDE,
    DIGITS,
    SPLIT_SEED,
    Part,
    Pictures,
    check_classes,
    digits,
    fitted,
    list_folder,
)
from polymix.train.data.pictures import as_image, middle_square, resized
from polymix.train.data.problems import Problems
from polymix.train.task import Data

FOLDER = "folder"  # the layout of a folder per class, with or without train and val
MAX_BYTES = 4 << 30  # of images in memory
STATISTICS_IMAGES = 2048  # of which mean and deviation are taken
LOG = logging.getLogger(__name__)
Transform = Callable[[Any], Tensor]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Images (C, S, S) of bytes or small floats with their classes: rows in memory, or decoded when they are used.

    Args:
        pictures: files, or rows.
        transform: what makes an image of a picture of Pillow; None: the rows are the images.
        refuse: raise DataError for a picture that cannot be read. Else the next one takes its place in training, it is
            left out of `batches`, and a log entry names it.
    """

    def __init__(self, pictures: Pictures, transform: Transform | None = None, refuse: bool = False) -> None:
        self.pictures, self.transform, self.refuse = pictures, transform, refuse
        self.unreadable: set[int] = set()

    @property
    def labels(self) -> Tensor:
        """The classes (N)."""
        return self.pictures.labels

    @property
    def images(self) -> Tensor:
        """The images in memory (N, C, S, S)."""
        if self.transform is not None or self.pictures.rows is None:
            raise TypeError("images that are decoded when they are used are not in memory; see batches")
        return self.pictures.rows

    def image(self, place: int) -> Tensor:
        """An image (C, S, S). Raises DataError where it cannot be read."""
        return self.images[place] if self.transform is None else self.transform(self.pictures[place])

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        if not 0 <= place < len(self):
            raise IndexError(place)  # which ends a loop over the samples
        for step in range(len(self)):
            at = (place + step) % len(self)
            if (image := self._read(at)) is not None:
                return image, self.labels[at]
        raise DataError("--data", "no picture that can be read", "readable pictures", "")

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images and their classes in order, `size` at a time."""
        if self.transform is None:
            yield from zip(self.images.split(size), self.labels.split(size), strict=True)
            return
        for places in torch.arange(len(self)).split(size):
            images = {place: image for place in places.tolist() if (image := self._read(place)) is not None}
            if images:
                yield torch.stack([*images.values()]), self.labels[[*images]]

    def _read(self, place: int) -> Tensor | None:
        """An image; None, and a word in the log the first time, where it cannot be read."""
        if place in self.unreadable:
            return None
        try:
            return self.image(place)
        except DataError as error:
            if self.refuse:
                raise refused(str(error.got)) from error
            LOG.warning("Skipped %s", error.got)
            self.unreadable.add(place)
            return None

    def of(self, pictures: Pictures) -> Samples:
        """Other pictures, prepared in the same way."""
        return Samples(pictures, self.transform, self.refuse)


def refused(problem: str) -> DataError:
    """What broken="refuse" raises for an unreadable picture."""
    cure = "Repair or delete it, or pass --set broken=skip. --check lists all."
    return DataError("--data", problem, "pictures that can be read", cure)


@dataclass(frozen=True)
class ImageData(Data):
    """Images for training and for the test, with the names of their classes.

    Attributes:
        mean, std: of a channel (1, C, 1, 1), by which images become inputs.
        image_size: side of an image in pixels. is_bytes: images are bytes, as pictures are, and not small floats.
        skipped: what could not be read. layout: of the folder; None: no folder.
    """

    name: str
    classes: tuple[str, ...]
    train: Samples
    test: Samples
    mean: Tensor
    std: Tensor
    image_size: int
    is_bytes: bool = True
    skipped: tuple[str, ...] = ()
    layout: str | None = None

    @staticmethod
    def in_memory(name: str, classes: Sequence[str], train: Part, test: Part, **options: Any) -> ImageData:
        """Images (N, C, S, S) with their labels; mean and deviation are those of the first training images."""
        sample = train[0][:STATISTICS_IMAGES].float()
        mean, std = sample.mean((0, 2, 3), keepdim=True), sample.std((0, 2, 3), keepdim=True).clamp_min(1e-6)
        samples, tests = (Samples(Pictures(labels, rows=rows)) for rows, labels in (train, test))
        is_bytes = train[0].dtype == torch.uint8
        return ImageData(name, tuple(classes), samples, tests, mean, std, train[0].shape[-1], is_bytes, **options)

    @property
    def streamed(self) -> bool:
        """Whether images are decoded when they are used."""
        return self.test.transform is not None

    @property
    def channels(self) -> int:
        """Of an image."""
        return self.mean.shape[1]

    @property
    def counts(self) -> tuple[int, int]:
        """Training and test images."""
        return len(self.train), len(self.test)

    @property
    def majority(self) -> tuple[str, float]:
        """The most frequent class of the test images, and its share: what always answering with it would reach."""
        counts = torch.bincount(self.test.labels, minlength=len(self.classes))
        return self.classes[int(counts.argmax())], (counts.max() / counts.sum()).item()

    def normalise(self, images: Tensor) -> Tensor:
        """Images as inputs, with mean 0 and variance 1 per channel over the images that mean and std are of."""
        return (images.float() - self.mean.to(images.device)) / self.std.to(images.device)

    def thumbnail(self, place: int, side: int = 64) -> bytes:
        """A test image as a PNG file, at most `side` pixels wide."""
        image = self.test.image(place).float()
        low, high = (0.0, 255.0) if self.is_bytes else (image.min().item(), image.max().item())
        image = resized(image, side, side) if image.shape[-1] > side else image
        grey = ((image - low) / ((high - low) or 1) * 255).round().clamp(0, 255).to(torch.uint8)
        file = BytesIO()
        as_image(grey.expand(3, -1, -1)).save(file, "PNG")
        return file.getvalue()

    def fingerprint(self) -> Any:
        """Tells other files, classes or pixels apart; files are not decoded."""
        parts = (self.train.pictures, self.test.pictures)
        return [*self.counts, *(part.fingerprint() for part in parts)] if self.streamed else super().fingerprint()

    def summary(self) -> dict[str, Any]:
        """What a saved model needs to take other images: the classes in order, channels, mean and deviation."""
        return {
            "name": self.name, "classes": list(self.classes), "channels": self.channels, "bytes": self.is_bytes,
            "train": self.counts[0], "test": self.counts[1], "image_size": self.image_size,
            "skipped": list(self.skipped),
            "mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist(),
        }  # fmt: skip

    def known_as(self, summary: Mapping[str, Any]) -> ImageData:
        """These images for a model trained on others: with its channels, its classes and its mean and deviation.

        Raises DataError for a class that the model does not know, or images of another kind.
        """
        classes, channels = tuple(summary["classes"]), int(summary["channels"])
        odd = [name for name in self.classes if name not in classes]
        if odd:
            allowed = f"the model's {len(classes)} classes: {', '.join(classes[:20])}" + " …" * (len(classes) > 20)
            raise DataError("--data", f"the class {odd[0]!r} in {self.name}", allowed, "Rename its folder.")
        if summary["bytes"] != self.is_bytes:
            got, cure = f"{self.name} for a model trained on {summary['name']}", "Their values have other ranges."
            raise DataError("--data", got, "images like those of the training", cure)
        if self.channels not in (1, channels):
            got = f"images with {self.channels} channels in {self.name}"
            raise DataError("--data", got, f"{channels}, as the model takes", "Convert them to grey.")
        order = torch.tensor([classes.index(name) for name in self.classes])

        def known(part: Samples) -> Samples:
            pictures = replace(part.pictures, labels=order[part.labels])
            if not self.streamed:
                pictures = replace(pictures, rows=part.images.expand(-1, channels, -1, -1))
            return part.of(pictures)

        mean, std = (torch.tensor(summary[name]).reshape(1, -1, 1, 1) for name in ("mean", "std"))
        return replace(self, classes=classes, mean=mean, std=std, train=known(self.train), test=known(self.test))

    def restricted(self, whole: bool, limit: int | None) -> ImageData:
        """Measured on all images instead of those held out, and on at most `limit`, drawn by a fixed seed."""
        test = self.train.pictures.joined(self.test.pictures) if whole else self.test.pictures
        if limit is not None and limit < len(test):
            test = test.chosen(torch.randperm(len(test), generator=torch.Generator().manual_seed(SPLIT_SEED))[:limit])
        return replace(self, test=self.test.of(test))


def load_digits(image_size: int = DIGIT_SIDE) -> ImageData:
    """The 1,797 handwritten digits (8 × 8 pixels) that come with scikit-learn, split 80 : 20 by a fixed seed."""
    return ImageData.in_memory(DIGITS, DIGIT_NAMES, *digits(image_size))


def fit_memory(images: int, side: int) -> bool:
    """Whether so many images of colour, decoded and `side` pixels wide, take at most MAX_BYTES."""
    return images * 3 * side**2 <= MAX_BYTES


def check_size(total: int, image_size: int) -> None:
    """Raise DataError for images that do not fit into memory."""
    if not fit_memory(total, image_size):
        got = f"{total} images, {total * 3 * image_size**2 / 2**30:.1f} GiB at {image_size} × {image_size}"
        raise DataError("--data", got, f"at most {MAX_BYTES >> 30} GiB", "Use a smaller --image-size or fewer images.")


def from_arrays(name: str, classes: Sequence[str], parts: Sequence[Part], image_size: int, layout: str) -> ImageData:
    """The middle squares of images in memory (N, C, H, W), training and test, as squares of image_size.

    Raises DataError: they do not fit into memory.
    """
    check_size(sum(len(labels) for _, labels in parts), image_size)
    train, test = ((middle_square(images, image_size), labels) for images, labels in parts)
    return ImageData.in_memory(name, classes, train, test, layout=layout)


def load_own(source: str, image_size: int) -> ImageData:
    """Your own images, as `--data` names them: idx files, or a folder for each class (see `load_folder`)."""
    folder = idx.located(source)
    if idx.recognise(folder) is None:
        return load_folder(folder, image_size)
    classes, *parts = idx.read(folder)
    return from_arrays(str(Path(source)), classes, parts, image_size, idx.IDX)


def load_folder(folder: Path, image_size: int) -> ImageData:
    """Your own images, one folder per class, resized (short side) and centre-cropped to squares of image_size.

    A folder with train and val (or test), each with a folder per class, is split as it is; another one 80 : 20. If all
    images are grey, they keep one channel. Of an animation the first frame is used. Unreadable files, and those with
    more pixels than Pillow reads, are left out and named in `.skipped`; so is a class without any other.

    Raises:
        DataError: no such folder, fewer than two classes with two readable images each, other classes in train than in
            val, or too many images for memory.
    """
    classes, *parts = list_folder(folder)
    check_size(sum(map(len, parts)), image_size)
    problems, images, labels = Problems(), (list[Tensor](), list[Tensor]()), (list[int](), list[int]())
    for which, part in enumerate(parts):
        for place in range(len(part)):
            with problems.noting():
                images[which].append(fitted(part[place], image_size))
                labels[which].append(int(part.labels[place]))
    counts = torch.bincount(torch.tensor([*labels[0], *labels[1]], dtype=torch.int64), minlength=len(classes))
    check_classes(dict(zip(classes, counts.tolist(), strict=True)), problems.lines)
    order = (counts > 0).cumsum(0) - 1
    classes = tuple(name for name, count in zip(classes, counts, strict=True) if count)
    grey = all(bool((image[0] == image[1]).all() and (image[0] == image[2]).all()) for part in images for image in part)
    channels = 1 if grey else 3
    train, test = ((torch.stack(images[which])[:, :channels].contiguous(), order[torch.tensor(labels[which])])
                   for which in range(2))  # fmt: skip
    skipped = tuple(problems.lines)
    return ImageData.in_memory(str(folder), classes, train, test, skipped=skipped, layout=FOLDER)
