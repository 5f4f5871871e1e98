"""Pictures with a class for every pixel: digits on photographs, or a folder in one of four layouts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.errors import DataError
from polymix.tasks import scenes
from polymix.tasks.boxes.pictures import Mistakes, read_pixels
from polymix.tasks.segment.augment import vary
from polymix.tasks.segment.layouts import (
    IGNORED,
    LAYOUTS,
    Pair,
    check_labels,
    find,
    layout_of,
    write_ade20k,
    write_names,
)
from polymix.tasks.segment.recipe import STRIDE, SegmentRecipe

__all__ = ["LAYOUTS", "SegmentData", "check", "for_evaluation", "from_summary", "load", "made"]

MADE = "digits on photographs"
DIGIT_SIDE = 16  # pixels a side of a digit in the default data: 2 × 2 of what the stem sees
UNUSED = 8  # training scenes that are made where only the test scenes are measured
IN_MEMORY = 1 << 28  # bytes of pictures that are kept
Sample = tuple[Tensor, Tensor]


class Pairs(Dataset[Sample]):
    """Whole pictures (3, H, W) and labels (H, W) of bytes; few of them are kept in memory."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = tuple(pairs)
        pixels = sum(pair.size[0] * pair.size[1] for pair in self.pairs)
        self.kept: dict[int, Sample] | None = {} if 4 * pixels <= IN_MEMORY else None

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, place: int) -> Sample:
        if self.kept is not None and place in self.kept:
            return self.kept[place]
        pair = self.pairs[place]
        try:
            labels = pair.read_labels()
        except (OSError, ValueError) as error:
            got = f"{pair.labels}, which {' '.join(str(error).split())}"
            raise DataError("data", got, "a label map", "Remove or repair it.") from error
        sample = read_pixels(pair.picture, (labels.shape[1], labels.shape[0])), labels
        if self.kept is not None:
            self.kept[place] = sample
        return sample


class Crops(Dataset[Sample]):
    """Training samples: a part of each picture, varied anew each time (see `vary`)."""

    def __init__(self, pairs: Pairs, recipe: SegmentRecipe) -> None:
        self.pairs, self.recipe = pairs, recipe

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, place: int) -> Sample:
        return vary(*self.pairs[place], self.recipe)


@dataclass(frozen=True)
class SegmentData:
    """Pictures to train on and to test on, and the names of their classes."""

    name: str
    classes: tuple[str, ...]
    train: Crops
    test: Pairs

    def fingerprint(self) -> list[Any]:
        """The number of training pictures and a checksum of 64 of them with their label maps, as they lie on disk."""
        pairs, crc = self.train.pairs.pairs, 0
        for place in range(64):
            pair = pairs[len(pairs) * place // 64]
            crc = zlib.crc32(pair.labels.read_bytes(), zlib.crc32(pair.picture.read_bytes(), crc))
        return [len(pairs), crc]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs, and how many pictures there were."""
        return {"name": self.name, "classes": list(self.classes), "train": len(self.train), "test": len(self.test)}


def load(recipe: SegmentRecipe, folder: Path, say: Callable[[str], None]) -> SegmentData:
    """The pictures of a recipe: the default data, which it makes in `folder`, or --data.

    Raises DataError with the first mistake, by file and entry. Every label map is read, and every picture's header.
    """
    if recipe.data is None:
        sizes = {"count": recipe.scenes, "tests": recipe.test_scenes, "size": min(recipe.crop, scenes.LARGEST)}
        made(folder / "segment", recipe.seed, question=recipe.question, **sizes)
        say(f"{MADE}, in the layout of ADE20K: {folder / 'segment'}")
    source = folder / "segment" if recipe.data is None else Path(recipe.data)
    mistakes = Mistakes()
    train, test, classes = read(source, recipe.layout, recipe.classes, mistakes)
    if mistakes.lines:
        raise DataError.first_of(mistakes.lines)
    name = MADE if recipe.data is None else str(recipe.data)
    return SegmentData(name, classes, Crops(Pairs(train), recipe), Pairs(test))


def read(
    folder: Path, layout: str | None, classes: int | None, mistakes: Mistakes
) -> tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[str, ...]]:
    """Training pairs, test pairs and the classes of a folder; reads every label map. classes: None: as many as it has.

    Raises DataError for a folder of no layout.
    """
    layout = layout_of(folder, layout)
    found = find(folder, layout, mistakes)
    count = found.count if classes is None else classes
    there: list[set[int]] = [set(), set()]
    for part, pairs in zip(there, (found.train, found.test), strict=True):
        for pair in pairs:
            part |= check_labels(pair, 255 if count is None else count, mistakes)
    if not mistakes.lines:
        for split, part in zip(("training", "test"), there, strict=True):
            if not part:
                mistakes.add(folder, f"the {split} pictures", "have no label that counts")
            elif split == "training" and len(part) == 1:
                mistakes.add(folder, "the training pictures", f"have one class, {min(part)}; two or more are needed")
    count = max(there[0] | there[1], default=0) + 1 if count is None else count
    names = (*found.names[:count], *(f"class {place}" for place in range(len(found.names), count)))
    return found.train, found.test, names


def check(folder: str | Path, layout: str | None = None, classes: int | None = None) -> list[str]:
    """All mistakes in a data set, each a line that names file and entry. Every picture and label map is read."""
    mistakes = Mistakes()
    try:
        train, test, _ = read(Path(folder), layout, classes, mistakes)
    except DataError as error:
        return [str(error.got)]
    for pair in (*train, *test):
        try:
            read_pixels(pair.picture, pair.size)
        except DataError as error:
            mistakes.lines.append(str(error.got))
    return mistakes.lines


def made(
    folder: str | Path, seed: int = 0, *, question: str = "what", count: int = 4000, tests: int = 200, size: int = 48
) -> Path:
    """Write the default data as ADE20K has it, and return the folder; an existing set of the same options is kept.

    Three digits of 16 × 16 pixels stand at multiples of 8 pixels on a photograph. The class of a digit's pixels is what
    `question` asks. The photograph is "other", label 0 in the files, and does not count. Test scenes have digits and
    parts of the photographs of their own.
    """
    folder = Path(folder)
    stamp = folder / f".made-{seed}-{question}-{count}-{tests}-{size}"
    if stamp.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob(".made-*"), *folder.glob("*/*/ADE_*.png")):
        old.unlink()
    write_names(folder, scenes.classes_of(question))
    sides = (DIGIT_SIDE, DIGIT_SIDE)
    for split, number in (("training", count), ("validation", tests)):
        drawn = scenes.make(number, question=question, test=split == "validation", size=size, seed=seed, sides=sides,
                            snap=STRIDE)  # fmt: skip
        write_ade20k(folder, split, [{"image": scene["image"], "classes": _map(scene)} for scene in drawn])
    stamp.touch()
    return folder


def _map(scene: Mapping[str, Any]) -> Tensor:
    """The classes of a scene's pixels (H, W); IGNORED beside the digits."""
    labels = torch.full(scene["masks"].shape[1:], IGNORED)
    for mask, label in zip(scene["masks"], scene["labels"], strict=True):
        labels[mask] = label
    return labels


def for_evaluation(
    recipe: SegmentRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> SegmentData:
    """Pictures to measure a trained model on. Raises DataError for a label that the model has no class for."""
    known = tuple(summary["classes"])
    if recipe.data is None and not whole:
        recipe = replace(recipe, scenes=min(recipe.scenes, UNUSED))
    with TemporaryDirectory() as scratch:
        data = load(replace(recipe, classes=len(known)), Path(scratch), say)
        pairs = (*data.train.pairs.pairs, *data.test.pairs) if whole else data.test.pairs
        test = Pairs(pairs[:limit])
        if recipe.data is None:
            test.kept = {place: test[place] for place in range(len(test))}
    return replace(data, classes=known, test=test)


def from_summary(recipe: SegmentRecipe, summary: Mapping[str, Any]) -> SegmentData:
    """The data of a finished run without its pictures: what building its model needs."""
    none = Pairs(())
    return SegmentData(str(summary["name"]), tuple(summary["classes"]), Crops(none, recipe), none)
