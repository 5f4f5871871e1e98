"""Pictures with boxes: digits on photographs, or a folder in COCO's or VOC's layout."""

from __future__ import annotations

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
from polymix.tasks.boxes import coco, voc
from polymix.tasks.boxes.fitting import Variation, fit
from polymix.tasks.boxes.options import PicturesRecipe
from polymix.tasks.boxes.pictures import Mistakes, Picture, Pictures, natural

LAYOUTS, SPLITS = ("coco", "voc"), ("train", "val")
MADE = "digits on photographs"
HELD_OUT = 5  # every fifth picture of a json without a val
UNUSED = 8  # training scenes that are made where only the test scenes are measured
IN_MEMORY = 1 << 28  # bytes of fitted pictures that are kept
Sample = tuple[Tensor, dict[str, Tensor]]


class Fitted(Dataset[Sample]):
    """Pictures fitted into squares, kept in memory if they are few and never vary.

    Args:
        size, short, long: as `fit` takes them.
        variation: what is drawn anew whenever a picture is read; None: nothing.
    """

    def __init__(
        self, pictures: Pictures, size: int, short: int | None = None, long: int | None = None,
        variation: Variation | None = None,
    ) -> None:  # fmt: skip
        self.pictures, self.size, self.short, self.long, self.variation = pictures, size, short, long, variation
        few = 3 * size**2 * len(pictures) <= IN_MEMORY
        self.kept: dict[int, Sample] | None = {} if few and not variation else None

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: int) -> Sample:
        if self.kept is not None and place in self.kept:
            return self.kept[place]
        pixels, target = self.pictures[place]
        if self.variation:
            pixels, varied, short = self.variation.apply(pixels, target)
            return fit(pixels, varied, self.size, short, self.long)
        sample = fit(pixels, target, self.size, self.short, self.long)
        if self.kept is not None:
            self.kept[place] = sample
        return sample

    def keep_all(self) -> Fitted:
        """Read all pictures now, because their files are about to go; returns itself."""
        self.kept = {}
        for place in range(len(self)):
            self[place]
        return self


@dataclass(frozen=True)
class DetectionData:
    """Training and test pictures, and their classes."""

    name: str
    classes: tuple[str, ...]
    train: Fitted
    test: Fitted

    @staticmethod
    def collate(samples: Sequence[Sample]) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Pictures (B, 3, S, S) as bytes, and their targets."""
        return torch.stack([image for image, _ in samples]), [target for _, target in samples]

    def fingerprint(self) -> list[Any]:
        """The number of pictures and the sums of their boxes."""
        pictures = self.train.pictures.pictures
        total = sum(sum(thing.box) * (thing.label + 1) for picture in pictures for thing in picture.things)
        return [len(pictures), round(total, 3)]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs: the classes in order; and how many pictures there were."""
        return {"name": self.name, "classes": list(self.classes), "train": len(self.train), "test": len(self.test)}


def load(recipe: PicturesRecipe, folder: Path, say: Callable[[str], None]) -> DetectionData:
    """The pictures of a recipe: the default data, which it makes in `folder`, --data, or one json and its folder."""
    mistakes = Mistakes()
    if recipe.annotations_file is not None and recipe.images is not None:
        everything, classes = coco.read(Path(recipe.annotations_file), Path(recipe.images), mistakes)
        everything = tuple(sorted(everything, key=lambda picture: natural(picture.file.name)))
        test = everything[::HELD_OUT]
        train = tuple(picture for place, picture in enumerate(everything) if place % HELD_OUT)
        name = recipe.annotations_file
    else:
        if recipe.data is None:
            made(folder, recipe.seed, question=recipe.question, count=recipe.scenes, tests=recipe.test_scenes,
                 size=min(recipe.image_size, scenes.LARGEST))  # fmt: skip
        train, test, classes = read(folder if recipe.data is None else Path(recipe.data), recipe.layout, mistakes)
        name = MADE if recipe.data is None else str(recipe.data)
    if recipe.with_masks:
        train, test = (_with_shapes(part, mistakes) for part in (train, test))
    mistakes.settle(recipe.mistakes, say)
    for part, pictures in (("training", train), ("test", test)):
        if not any(picture.things for picture in pictures):
            raise DataError("data", f"{name} without an object in the {part} pictures", "at least one", "")
    sets = [Pictures(part, classes, recipe.with_masks) for part in (train, test)]
    learning = Fitted(sets[0], **recipe.sizes, variation=recipe.variation)
    return DetectionData(name, classes, learning, Fitted(sets[1], **recipe.sizes))


def _with_shapes(pictures: tuple[Picture, ...], mistakes: Mistakes) -> tuple[Picture, ...]:
    """The pictures without the objects that have no mask, which are noted."""
    kept = []
    for picture in pictures:
        shaped = tuple(thing for thing in picture.things if thing.shape is not None)
        if len(shaped) < len(picture.things):
            without = len(picture.things) - len(shaped)
            mistakes.add(picture.file, f"{without} of {len(picture.things)} objects", "has no segmentation")
        kept.append(replace(picture, things=shaped))
    return tuple(kept)


def read(
    folder: Path, layout: str | None, mistakes: Mistakes
) -> tuple[tuple[Picture, ...], tuple[Picture, ...], tuple[str, ...]]:
    """Training pictures, test pictures and classes of a folder."""
    if _is_voc(folder, layout):
        return voc.read(folder, mistakes)
    (train, classes), (test, others) = (coco.read(*coco.split(folder, name), mistakes) for name in SPLITS)
    _check_categories(folder, classes, others)
    return train, test, classes


def _is_voc(folder: Path, layout: str | None) -> bool:
    """Whether a folder is read in VOC's layout. Raises DataError if there is no such folder."""
    if not folder.is_dir():
        raise DataError(
            "data", f"{folder}, which is no folder", "a folder in COCO's or VOC's layout", "Check the path."
        )
    return layout == "voc" or (layout is None and (folder / "Annotations").is_dir())


def _check_categories(folder: Path, classes: Sequence[str], others: Sequence[str]) -> None:
    """Raise DataError unless train and val have the same categories."""
    if classes != others:
        odd = sorted(set(classes) ^ set(others)) or list(classes)
        got = f"{coco.split(folder, 'val')[0]} with other categories than train: {', '.join(odd[:5])}"
        raise DataError("data", got, "the same categories with the same order of ids", "")


def check(
    source: str | Path, layout: str | None = None, images: str | Path | None = None, masks: bool = False
) -> list[str]:
    """All mistakes in a data set, each a line that names file and entry. Every picture and every mask is decoded.

    Args:
        source: a folder; or a json, with `images`, its folder of pictures.
        masks: whether every object needs a mask.
    """
    mistakes, source, parts = Mistakes(), Path(source), list[tuple[Picture, ...]]()
    with mistakes.noting():
        if images is not None:
            parts.append(coco.read(source, Path(images), mistakes)[0])
        elif _is_voc(source, layout):
            parts.extend(voc.read(source, mistakes)[:2])
        else:
            classes = list[tuple[str, ...]]()
            for name in SPLITS:
                with mistakes.noting():
                    pictures, named = coco.read(*coco.split(source, name), mistakes)
                    parts.append(pictures)
                    classes.append(named)
            if len(classes) == len(SPLITS):
                _check_categories(source, *classes)
    for part in parts:
        if masks:
            _with_shapes(part, mistakes)
        mistakes.decode(part)
    return mistakes.lines


def made(
    folder: Path, seed: int = 0, *, question: str = "which", count: int = 3000, tests: int = 200, size: int = 64
) -> None:
    """Write the default data in COCO's layout. Test scenes have digits and parts of photographs of their own."""
    classes = scenes.classes_of(question)
    for split, number in (("train", count), ("val", tests)):
        drawn = scenes.make(number, question=question, test=split == "val", size=size, seed=seed)
        coco.write(folder, split, list(drawn), classes)


def for_evaluation(
    recipe: PicturesRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> DetectionData:
    """The pictures of a recipe as a trained model knows them. Raises DataError for a class that it does not know."""
    if recipe.makes_data and not whole:
        recipe = replace(recipe, scenes=min(recipe.scenes, UNUSED))
    with TemporaryDirectory() as scratch:
        data = _known(load(recipe, Path(scratch), say), recipe, tuple(summary["classes"]), whole, limit)
        return replace(data, test=data.test.keep_all()) if recipe.makes_data else data


def _known(
    data: DetectionData, recipe: PicturesRecipe, known: tuple[str, ...], whole: bool, limit: int | None
) -> DetectionData:
    """Data with the classes of a trained model. Raises DataError for a class that it does not know."""
    odd = [name for name in data.classes if name not in known]
    if odd:
        got = f"the class {odd[0]!r} in {data.name}"
        raise DataError("data", got, f"the model's classes: {', '.join(known)}", "Train a model with it.")
    order = [known.index(name) for name in data.classes]
    pictures = (*data.train.pictures.pictures, *data.test.pictures.pictures) if whole else data.test.pictures.pictures
    renamed = tuple(
        replace(picture, things=tuple(replace(thing, label=order[thing.label]) for thing in picture.things))
        for picture in pictures[:limit]
    )
    return replace(data, classes=known, test=Fitted(Pictures(renamed, known, recipe.with_masks), **recipe.sizes))


def from_summary(recipe: PicturesRecipe, summary: Mapping[str, Any]) -> DetectionData:
    """The data of a finished run without its pictures: what building its model needs."""
    classes = tuple(summary["classes"])
    none = Fitted(Pictures((), classes, recipe.with_masks), **recipe.sizes)
    return DetectionData(str(summary["name"]), classes, none, none)
