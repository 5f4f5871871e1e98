"""Images to learn from, between -1 and 1: scikit-learn's digits, folders of pictures, or cached latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from polymix.domains.generation.inception import Inception
from polymix.domains.generation.latents import MANIFEST, Autoencoder, Cache, check_cache, write_cache
from polymix.domains.generation.quality import Judge, batches, train_judge
from polymix.domains.generation.recipe import GenerationRecipe
from polymix.errors import DataError, OptionError
from polymix.train.data.labelled import DIGIT_NAMES, DIGITS, Pictures, digits, fitted, folder_problems, list_folder
from polymix.train.data.pictures import SUFFIXES
from polymix.train.data.problems import Problems
from polymix.train.data.splits import held_out, spread
from polymix.train.task import Data

LAYOUTS = ("folder", "pictures", "latents")  # a folder per class; pictures without classes; a cache of latents
Shape = tuple[int, int, int]


class Decoded(Dataset[Any]):
    """Pictures with their classes as (3, S, S) from -1 to 1, decoded when used. Raises DataError for broken ones."""

    def __init__(self, pictures: Pictures, size: int) -> None:
        self.pictures, self.labels, self.size = pictures, pictures.labels, size

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return fitted(self.pictures[place], self.size).float() / 127.5 - 1, int(self.labels[place])


class Noised(Dataset[Any]):
    """Images (C, H, W) with their classes, a time in [0, 1) and noise, which depend on the sample's row alone."""

    def __init__(self, images: Any, flip: bool) -> None:
        self.images, self.flip = images, flip

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Tensor, int, Tensor, Tensor]:
        image, label = self.images[place]
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, int(label), torch.rand(()), torch.randn(image.shape)


@dataclass(frozen=True)
class GenerationData(Data):
    """Real images, and the judge whose features measure drawn ones.

    Args:
        name: what the images are. classes: their names; ("all",) where they have none.
        shape: (C, H, W) of an image or its latents.
        real, test: data sets of (image, class).
        train: `real` with times and noise.
        judge, accuracy: of `train_judge`.
        autoencoder: decodes latents; None: the images are pixels, or latents that nothing decodes.
        latents: checksum of the autoencoder that made them; None: the images are pixels.
        history: a few drawn images by training step.
    """

    name: str
    classes: tuple[str, ...]
    shape: Shape
    real: Any = ()
    test: Any = ()
    train: Any = ()
    judge: Judge | None = None
    accuracy: float | None = None
    autoencoder: Autoencoder | None = None
    latents: str | None = None
    history: dict[int, Tensor] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """What results.json keeps: enough to build the model."""
        return {"name": self.name, "classes": list(self.classes), "shape": list(self.shape),
                "train": len(self.real), "test": len(self.test), "judge_accuracy": self.accuracy,
                "latents": self.latents}  # fmt: skip

    def real_features(self, extract: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Features of at most `count` training and test images."""
        one, two = (
            torch.cat([extract(images) for images, _ in batches(part, spread(len(part), count))])
            for part in (self.real, self.test)
        )
        return one, two

    @cached_property
    def measured(self) -> dict[Any, Any]:
        """What is measured of real images once, by what measured it; and the Inception network."""
        return {}

    def decoded(self, images: Tensor) -> Tensor:
        """Images or latents (B, C, H, W) as pictures (B, 1 or 3, H, W) from -1 to 1."""
        if self.autoencoder is not None:
            return self.autoencoder.decode(images)
        return images[:, :1] if images.shape[1] == 2 else images[:, :3]  # of latents that nothing decodes

    def pictures(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) as bytes (B, 1 or 3, H, W)."""
        return ((self.decoded(images).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def load(recipe: GenerationRecipe, folder: Path, say: Callable[[str], None]) -> GenerationData:
    """The images of a recipe, and their judge, which is trained once and kept in `folder`.

    Raises:
        DataError: the folder has no pictures, or one cannot be read, or the file of Inception's weights has others.
        OptionError: a cache of another autoencoder.
    """
    inception = None if recipe.inception is None else Inception(recipe.inception)  # before training, not after
    entry = _cached(recipe, folder, say)
    autoencoder = latents = None
    real: Any
    test: Any
    if entry is not None:
        cache, autoencoder = entry
        name, classes, shape, latents = str(recipe.data), cache.classes, cache.shape, cache.content["autoencoder"]
        real, test = cache.split("train"), cache.split("test")
        train = Noised(cache.split("train", draws=True), flip=False)  # the cache has mirrored pictures
    else:
        size = recipe.image_size
        if recipe.data is None:
            name, classes, channels = DIGITS, DIGIT_NAMES, 1
            real, test = (TensorDataset(images / 8 - 1, labels) for images, labels in digits(size))
        else:
            name, channels = recipe.data, 3
            classes, *parts = _listed(Path(recipe.data), recipe.layout)
            real, test = (Decoded(part, size) for part in parts)
            say(f"{len(real):,} training and {len(test):,} test pictures of {len(classes)} classes")
        shape, train = (channels, size, size), Noised(real, recipe.flip)
    if recipe.conditional and len(classes) < 2:
        raise DataError("data", f"{recipe.data} without classes", "a folder per class", "Pass conditional=False.")
    judge, accuracy = train_judge(real, test, shape, len(classes), recipe.judge_steps, folder / "judge.pt", say)
    data = GenerationData(name, classes, shape, real, test, train, judge, accuracy, autoencoder, latents)
    if inception is not None:
        data.measured["inception"] = inception
    return data


def _cached(
    recipe: GenerationRecipe, folder: Path, say: Callable[[str], None]
) -> tuple[Cache, Autoencoder | None] | None:
    """The latents of a recipe and what decodes them; None for pixels."""
    if recipe.data is None:
        return None
    source = Path(recipe.data)
    autoencoder = None if recipe.vae is None else Autoencoder.load(recipe.vae, recipe.device)
    if recipe.layout == "latents" or (recipe.layout is None and (source / MANIFEST).is_file()):
        cache = Cache.read(source)
        if autoencoder is not None:
            autoencoder.check_same(cache.content["autoencoder"], "vae")
    elif autoencoder is None:
        return None
    else:
        classes, *parts = _listed(source, recipe.layout)
        pictures = [Decoded(part, recipe.image_size) for part in parts]
        place = folder / "latents" if recipe.cache is None else Path(recipe.cache)
        listing = crc32(repr([part.fingerprint() for part in parts]).encode())
        cache = write_cache(place, pictures, classes, autoencoder, recipe.image_size, recipe.flip, listing, say)
    if recipe.flip != cache.content["flip"]:
        got = f"{recipe.flip} for latents with flip={cache.content['flip']}"
        raise OptionError("flip", got, "that of the cache", "Change it, or write another cache.")
    return cache, autoencoder


def _listed(source: Path, layout: str | None) -> tuple[tuple[str, ...], Pictures, Pictures]:
    """Classes, training and test pictures. Of pictures without classes every fifth is for the test."""
    if layout == "folder" or (layout is None and not _flat(source)):
        return list_folder(source)
    files = _flat(source)
    if len(files) < 2:
        raise DataError("data", f"{source} with {len(files)} pictures", "a folder with pictures", "Check the path.")
    train, test = held_out(files)
    return ("all",), _without_classes(train), _without_classes(test)


def _without_classes(files: Sequence[Path]) -> Pictures:
    return Pictures(torch.zeros(len(files), dtype=torch.int64), [str(file) for file in files])


def _flat(source: Path) -> list[Path]:
    if not source.is_dir():
        raise DataError("data", f"{source}, which is no folder", "a folder of pictures", "Check the path.")
    return sorted(path for path in source.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def problems_of(source: str | Path, layout: str | None = None) -> list[str]:
    """All problems of a folder, in sentences that name the file or the class; reads every picture, or all latents."""
    source, problems = Path(source), Problems()
    if layout == "latents" or (layout is None and (source / MANIFEST).is_file()):
        return check_cache(source)
    try:
        if layout == "folder" or (layout is None and not _flat(source)):
            return folder_problems(source)
        _, *parts = _listed(source, layout)
    except DataError as error:
        return [str(error)]
    for part in parts:
        for place in range(len(part)):
            with problems.noting():
                part[place]
    return problems.lines


def from_summary(summary: Mapping[str, Any]) -> GenerationData | None:
    """The data of a trained model without its images; None where results.json does not have it."""
    if "shape" not in summary:
        return None
    channels, height, width = summary["shape"]
    latents = summary.get("latents")
    return GenerationData(str(summary["name"]), tuple(summary["classes"]), (channels, height, width), latents=latents)


def classes_of_latents(recipe: GenerationRecipe) -> tuple[str, ...]:
    """The classes of pictures that become latents, or of a cache of latents; none for pixels. Raises DataError."""
    if recipe.data is None:
        return ()
    source = Path(recipe.data)
    if (source / MANIFEST).is_file():
        return Cache.read(source).classes
    return () if recipe.vae is None else _listed(source, recipe.layout)[0]
