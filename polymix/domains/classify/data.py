"""Images with their classes: handwritten digits, scenes of them, CIFAR-100, MNIST's like, or a folder of your own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polymix.domains.classify import cifar
from polymix.domains.classify.augment import transforms
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.scenes import scenes
from polymix.errors import DataError
from polymix.numbers import plural
from polymix.train.data import idx
from polymix.train.data.images import (
    FOLDER,
    ImageData,
    Samples,
    fit_memory,
    from_arrays,
    load_digits,
    load_folder,
    refused,
)
from polymix.train.data.labelled import (
    DIGIT_NAMES,
    DIGITS,
    Part,
    Pictures,
    by_class,
    digits,
    find_splits,
    folder_problems,
    list_folder,
)

LAYOUTS = (FOLDER, cifar.BINARY, cifar.PYTHON, idx.IDX)
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet's bytes, as all its checkpoints have it
IMAGENET_CLASSES = 1000


def load(recipe: ClassifyRecipe, say: Callable[[str], None] = lambda text: None) -> ImageData:
    """The images of a recipe: its folder's, or the default data; in memory, or decoded when they are used.

    Raises DataError: what `load_folder`, `cifar.read`, `idx.located` and `idx.read` raise, and with broken="refuse" the
    first unreadable file.
    """
    size, name, source = recipe.image_size, str(Path(recipe.data or "")), idx.located(recipe.data or "")
    layout = None if recipe.data is None else recipe.layout or recognise(source)
    if recipe.stream or recipe.looks_again or (recipe.stream is None and too_many(source, layout, size)):
        return _streamed(recipe, name, source, layout, say)
    if layout is None:
        return load_digits(size) if recipe.default_data == "digits" else load_scenes(recipe.seed)
    if layout != FOLDER:
        classes, *parts = _arrays(source, layout, recipe.allow_pickle, say)
        return from_arrays(name, classes, parts, size, layout)
    images = load_folder(source, size)
    for line in images.skipped:
        if recipe.broken == "refuse":
            raise refused(line)
        say(f"Skipped {line}")
    return images


def recognise(folder: Path) -> str:
    """The layout of a folder, by its files."""
    return cifar.recognise(folder) or idx.recognise(folder) or FOLDER


def _arrays(
    source: Path, layout: str, allow_pickle: bool, say: Callable[[str], None] = lambda text: None
) -> tuple[tuple[str, ...], Part, Part]:
    """The classes and the two parts of a data set whose files hold arrays."""
    return idx.read(source) if layout == idx.IDX else cifar.read(source, layout, allow_pickle, say)


def benchmark(data: ImageData) -> str | None:
    """The published data set that images are, by its layout and classes, as published.toml names it."""
    if data.layout in cifar.FILES and len(data.classes) == cifar.CLASSES:
        return "CIFAR-100"
    names = len(data.classes) == IMAGENET_CLASSES and all(re.fullmatch(r"n\d{8}", name) for name in data.classes)
    return "ImageNet" if names else None


def load_scenes(seed: int = 0) -> ImageData:
    """Scenes of four handwritten digits, of which the first says which of the others is the answer (see `scenes`)."""
    return ImageData.in_memory("digit scenes", DIGIT_NAMES, *scenes(seed))


def too_many(source: Path, layout: str | None, size: int) -> bool:
    """Whether a folder's images, decoded and `size` pixels wide, do not fit into memory."""
    if layout is None:
        return False
    if layout != FOLDER:
        return not fit_memory(idx.count(source) if layout == idx.IDX else cifar.IMAGES, size)
    parts = [by_class(part) for part in find_splits(source) if part is not None]
    return not fit_memory(sum(len(files) for part in parts for files in part.values()), size)


def _streamed(
    recipe: ClassifyRecipe, name: str, source: Path, layout: str | None, say: Callable[[str], None]
) -> ImageData:
    """The images of a recipe, in colour, decoded when they are used; normalised by ImageNet's mean and deviation."""
    if layout == FOLDER:
        classes, *parts = list_folder(source)
    else:
        if layout is None:
            name, classes = DIGITS, DIGIT_NAMES
            pixels: Sequence[Part] = digits() if recipe.default_data == "digits" else scenes(recipe.seed)
        else:
            classes, *pixels = _arrays(source, layout, recipe.allow_pickle, say)
        parts = [Pictures(labels, rows=rows) for rows, labels in pixels]
    say(
        f"{len(parts[0]):,} training and {len(parts[1]):,} test images of {plural(len(classes), 'class')}, "
        "decoded when used"
    )
    refuse = recipe.broken == "refuse"
    train, test = (Samples(part, how, refuse) for part, how in zip(parts, transforms(recipe), strict=True))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return ImageData(name, classes, train, test, mean, std, recipe.image_size, layout=layout)


def list_problems(folder: str | Path, layout: str | None = None, allow_pickle: bool = False) -> list[str]:
    """Every problem of a folder of images, in sentences. allow_pickle: read pickles, which can run any code."""
    try:
        folder = idx.located(str(folder))
        layout = layout or recognise(folder)
        if layout == FOLDER:
            return folder_problems(folder)
        _arrays(folder, layout, allow_pickle)
    except DataError as error:
        return [str(error)]
    return []


def from_summary(recipe: ClassifyRecipe, summary: Mapping[str, Any]) -> ImageData:
    """The data of a finished run without its images: what building its model needs."""
    channels, size = int(summary["channels"]), recipe.image_size
    kind = torch.uint8 if summary["bytes"] else torch.float32
    none = (torch.zeros(2, channels, size, size, dtype=kind), torch.zeros(2, dtype=torch.int64))
    return ImageData.in_memory(str(summary["name"]), tuple(summary["classes"]), none, none).known_as(summary)
