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

from polymix.errors import DataError, OptionError
from polymix.models import Diffusion, Flow, Sampler
from polymix.tasks.classify.data import _list_folder, _open, find_splits, load_digits
from polymix.tasks.classify.data import check as check_pictures
from polymix.tasks.classify.pictures import FORMATS, fitted
from polymix.tasks.classify.stream import Pictures, Unreadable
from polymix.tasks.images.inception import Inception
from polymix.tasks.images.latents import MANIFEST, Autoencoder, Cache, check_cache, write_cache
from polymix.tasks.images.quality import Judge, batches, some, train_judge
from polymix.tasks.images.recipe import ImagesRecipe

LAYOUTS = ("folder", "pictures", "latents")  # a folder per class; pictures without classes; a cache of latents
TEST_EVERY = 5  # of pictures without classes, every fifth is for the test
Shape = tuple[int, int, int]


class Decoded(Dataset[Any]):
    """Pictures with their classes as (3, S, S) from -1 to 1, decoded when used. Raises DataError for broken ones."""

    def __init__(self, pictures: Pictures, size: int) -> None:
        self.pictures, self.size = pictures, size

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        try:
            image = fitted(self.pictures[place], self.size)
        except Unreadable as error:
            raise DataError("data", str(error), "pictures that can be read", "--check lists all others.") from error
        return image.float() / 127.5 - 1, int(self.pictures.labels[place])


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


@dataclass
class GeneratorData:
    """Real images, and the judge whose features measure drawn ones.

    Args:
        name: what the images are. classes: their names; ("all",) where they have none.
        shape: (C, H, W) of an image or its latents.
        real, test: data sets of (image, class).
        train: `real` with times and noise.
        judge, accuracy: of `train_judge`.
        autoencoder: decodes latents; None: the images are pixels, or latents that nothing decodes.
        latents: checksum of the autoencoder that made them; None: the images are pixels.
        flow, sampler: what is learnt, and how images are drawn.
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
    flow: Flow | Diffusion = field(default_factory=Flow)
    sampler: Sampler = field(default_factory=Sampler)
    history: dict[int, Tensor] = field(default_factory=dict)  # a few drawn images by training step

    def summary(self) -> dict[str, Any]:
        """What results.json keeps: enough to build the model."""
        return {"name": self.name, "classes": list(self.classes), "shape": list(self.shape),
                "train": len(self.real), "test": len(self.test), "judge_accuracy": self.accuracy,
                "latents": self.latents}  # fmt: skip

    def real_features(self, extract: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Features of at most `count` training and test images."""
        one, two = (
            torch.cat([extract(images) for images, _ in batches(part, some(part, count))])
            for part in (self.real, self.test)
        )
        return one, two

    @cached_property
    def fixed(self) -> dict[Any, Any]:
        """What is measured of real images once, by what measured it."""
        return {}

    def decoded(self, images: Tensor) -> Tensor:
        """Images or latents (B, C, H, W) as pictures (B, 1 or 3, H, W) from -1 to 1."""
        if self.autoencoder is not None:
            return self.autoencoder.decode(images)
        return images[:, :1] if images.shape[1] == 2 else images[:, :3]  # of latents that nothing decodes

    def pictures(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) as bytes (B, 1 or 3, H, W)."""
        return ((self.decoded(images).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def load(recipe: ImagesRecipe, folder: Path, say: Callable[[str], None]) -> GeneratorData:
    """The images of a recipe, and their judge, which is trained once and kept in `folder`.

    Raises:
        DataError: the folder has no pictures, or one cannot be read, or the file of Inception's weights has others.
            OptionError: a cache of another autoencoder.
    """
    inception = None if recipe.inception is None else Inception(recipe.inception)  # before training, not after
    data = _load(recipe, folder, say)
    if inception is not None:
        data.fixed["inception"] = inception
    return data


def _load(recipe: ImagesRecipe, folder: Path, say: Callable[[str], None]) -> GeneratorData:
    cached = _cached(recipe, folder, say)
    if cached is not None:
        cache, autoencoder = cached
        _check_classes(recipe, cache.classes)
        parts: list[Any] = [cache.split("train"), cache.split("test")]
        judge, accuracy = train_judge(
            parts[0], parts[1], cache.shape, len(cache.classes), recipe.judge_steps, folder / "images" / "judge.pt", say
        )
        train = Noised(cache.split("train", draws=True), flip=False)  # the cache has mirrored pictures
        return GeneratorData(
            str(recipe.data), cache.classes, cache.shape, parts[0], parts[1], train, judge, accuracy, autoencoder,
            cache.content["autoencoder"], recipe.flow(), recipe.make_sampler(),
        )  # fmt: skip
    if recipe.data is None:
        digits = load_digits()
        if recipe.image_size != 8:
            digits = load_digits(recipe.image_size)
        parts = [TensorDataset(images / 8 - 1, labels) for images, labels in (digits.train, digits.test)]
        name, classes, channels = digits.name, digits.classes, 1
    else:
        source = Path(recipe.data)
        name, channels = str(source), 3
        classes, *listed = _listed(source, recipe.layout)
        parts = [Decoded(part, recipe.image_size) for part in listed]
        say(f"{len(parts[0]):,} training and {len(parts[1]):,} test pictures of {len(classes)} classes")
    shape = (channels, recipe.image_size, recipe.image_size)
    _check_classes(recipe, classes)
    file = folder / "images" / "judge.pt"
    judge, accuracy = train_judge(parts[0], parts[1], shape, len(classes), recipe.judge_steps, file, say)
    train = Noised(parts[0], recipe.flip)
    return GeneratorData(name, classes, shape, parts[0], parts[1], train, judge, accuracy,
                         flow=recipe.flow(), sampler=recipe.make_sampler())  # fmt: skip


def _cached(recipe: ImagesRecipe, folder: Path, say: Callable[[str], None]) -> tuple[Cache, Autoencoder | None] | None:
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
        classes, *listed = _listed(source, recipe.layout)
        pictures = [Decoded(part, recipe.image_size) for part in listed]
        place = folder / "latents" if recipe.cache is None else Path(recipe.cache)
        listing = crc32(repr([part.fingerprint() for part in listed]).encode())
        cache = write_cache(place, pictures, classes, autoencoder, recipe.image_size, recipe.flip, listing, say)
    if recipe.flip != cache.content["flip"]:
        got = f"{recipe.flip} for latents with flip={cache.content['flip']}"
        raise OptionError("flip", got, "that of the cache", "Change it, or write another cache.")
    return cache, autoencoder


def _check_classes(recipe: ImagesRecipe, classes: Sequence[str]) -> None:
    if recipe.conditional and len(classes) < 2:
        raise DataError("data", f"{recipe.data} without classes", "a folder per class", "Pass conditional=False.")


def _listed(source: Path, layout: str | None) -> tuple[tuple[str, ...], Pictures, Pictures]:
    """Classes, training and test pictures."""
    if layout == "folder" or (layout is None and _has_classes(source)):
        return _list_folder(source)
    files = _flat(source)
    if len(files) < 2:
        raise DataError("data", f"{source} with {len(files)} pictures", "a folder with pictures", "Check the path.")
    test = [place for place in range(len(files)) if place % TEST_EVERY == 0]
    train = [place for place in range(len(files)) if place % TEST_EVERY]
    whole = Pictures(torch.zeros(len(files), dtype=torch.int64), [str(file) for file in files], read=_open)
    return ("all",), whole.chosen(torch.tensor(train)), whole.chosen(torch.tensor(test))


def _flat(source: Path) -> list[Path]:
    if not source.is_dir():
        raise DataError("data", f"{source}, which is no folder", "a folder of pictures", "Check the path.")
    return sorted(path for path in source.iterdir() if path.suffix.lower() in FORMATS and path.is_file())


def _has_classes(source: Path) -> bool:
    return not _flat(source)


def check(folder: str | Path, layout: str | None = None) -> list[str]:
    """All problems of a folder, in sentences that name the file or the class; reads every picture, or all latents."""
    source = Path(folder)
    if layout == "latents" or (layout is None and (source / MANIFEST).is_file()):
        return check_cache(source)
    try:
        if layout == "folder" or (layout is None and _has_classes(source)):
            find_splits(source)
            return check_pictures(source, "folder")
        _, *parts = _listed(source, layout)
    except DataError as error:
        return [str(error)]
    problems = []
    for part in parts:
        for place in range(len(part)):
            try:
                part[place]
            except Unreadable as error:
                problems.append(str(error))
    return problems


def from_summary(recipe: ImagesRecipe, summary: Mapping[str, Any]) -> GeneratorData | None:
    """The data of a trained model without its images; None where results.json does not have it."""
    if "shape" not in summary:
        return None
    channels, height, width = summary["shape"]
    latents = summary.get("latents")
    return GeneratorData(str(summary["name"]), tuple(summary["classes"]), (channels, height, width), latents=latents)
