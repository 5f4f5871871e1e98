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
from polymix.train.data import scenes
from polymix.train.data.boxes import coco, voc
from polymix.train.data.boxes.annotations import AnnotatedPicture, AnnotatedPictures, Parts
from polymix.train.data.boxes.fitting import Variation, fit
from polymix.train.data.boxes.options import PicturesRecipe
from polymix.train.data.problems import Problems
from polymix.train.data.splits import held_out, natural
from polymix.train.data.synthetic import cached
from polymix.train.task import Data, Say, silent

LAYOUTS, SPLITS = ("coco", "voc"), ("train", "val")
SYNTHETIC = "digits on photographs"
UNUSED = 8  # training scenes that are written where only the test scenes are measured
IN_MEMORY = 1 << 28  # bytes of fitted pictures that are kept
Sample = tuple[Tensor, dict[str, Tensor]]


class Fitted(Dataset[Sample]):
    """Pictures fitted into squares, kept in memory if they are few and never vary.

    Args:
        size, short, long: as `fit` takes them.
        variation: what is drawn anew whenever a picture is read; None: nothing.
    """

    def __init__(
        self, pictures: AnnotatedPictures, size: int, short: int | None = None, long: int | None = None,
        variation: Variation | None = None,
    ) -> None:  # fmt: skip
        self.pictures, self.size, self.short, self.long, self.variation = pictures, size, short, long, variation
        few = 3 * size**2 * len(pictures) <= IN_MEMORY
        self.memory: dict[int, Sample] | None = {} if few and not variation else None

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: int) -> Sample:
        if self.memory is not None and place in self.memory:
            return self.memory[place]
        pixels, target = self.pictures[place]
        if self.variation:
            pixels, varied, short = self.variation.apply(pixels, target)
            return fit(pixels, varied, self.size, short, self.long)
        sample = fit(pixels, target, self.size, self.short, self.long)
        if self.memory is not None:
            self.memory[place] = sample
        return sample

    def keep_all(self) -> Fitted:
        """Read all pictures now, because their files are about to go; returns itself."""
        self.memory = {}
        for place in range(len(self)):
            self[place]
        return self


@dataclass(frozen=True)
class DetectionData(Data):
    """Training and test pictures, and their classes."""

    name: str
    classes: tuple[str, ...]
    train: Fitted
    test: Fitted

    def collate(self, samples: Sequence[Sample]) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Pictures (B, 3, S, S) as bytes, and their targets."""
        return torch.stack([image for image, _ in samples]), [target for _, target in samples]

    def fingerprint(self) -> list[Any]:
        """The number of pictures and the sums of their boxes."""
        pictures = self.train.pictures.pictures
        total = sum(sum(thing.box) * (thing.label + 1) for picture in pictures for thing in picture.objects)
        return [len(pictures), round(total, 3)]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs: the classes in order; and how many pictures there were."""
        return {"name": self.name, "classes": list(self.classes), "train": len(self.train), "test": len(self.test)}


def load(recipe: PicturesRecipe, folder: Path, say: Callable[[str], None], source: Path | None = None) -> DetectionData:
    """The pictures of a recipe: the default data, which lie in `folder`, --data, or one json and its pictures.

    source: a folder in COCO's layout to read in place of these.
    """
    problems = Problems()
    name = SYNTHETIC if recipe.synthetic else str(recipe.source)
    if source is not None:
        train, test, classes = read(source, "coco", problems, recipe.with_masks)
    elif recipe.synthetic:
        train, test, classes = read(synthetic_folder(recipe, folder), "coco", problems, recipe.with_masks)
    elif recipe.annotations is not None:
        file, below = Path(recipe.annotations), Path(str(recipe.images))
        everything, classes = coco.read(file, below, problems, recipe.with_masks)
        parts = held_out(sorted(everything, key=lambda picture: natural(picture.file.name)))
        train, test = (tuple(part) for part in parts)
    else:
        train, test, classes = read(Path(str(recipe.data)), recipe.layout, problems, recipe.with_masks)
    if recipe.with_masks:
        train, test = (_with_shapes(part, problems) for part in (train, test))
    problems.settle(recipe.broken, say, skippable=True)
    for part, pictures in (("training", train), ("test", test)):
        if not any(picture.objects for picture in pictures):
            raise DataError("data", f"{name} without an object in the {part} pictures", "at least one", "")
    sets = [AnnotatedPictures(part, classes, recipe.with_masks) for part in (train, test)]
    learning = Fitted(sets[0], **recipe.sizes, variation=Variation.of(recipe))
    return DetectionData(name, classes, learning, Fitted(sets[1], **recipe.sizes))


def synthetic_folder(recipe: PicturesRecipe, folder: Path) -> Path:
    """Where the default data of a recipe lie below `folder`, written if they are not there."""
    settings: dict[str, Any] = {
        "seed": recipe.seed, "question": recipe.question, "count": recipe.scenes, "tests": recipe.test_scenes,
        "size": min(recipe.image_size, scenes.MAX_SIDE),
    }  # fmt: skip
    return cached(folder, "digits", settings, lambda place: synthetic(place, **settings))


def synthetic(
    folder: Path, seed: int = 0, *, question: str = "which", count: int = 3000, tests: int = 200, size: int = 64
) -> None:
    """Write the default data in COCO's layout. Test scenes have digits and parts of photographs of their own."""
    classes = scenes.classes_of(question)
    for split, number in (("train", count), ("val", tests)):
        drawn = scenes.make(number, question=question, test=split == "val", size=size, seed=seed)
        coco.write(folder, split, list(drawn), classes)


def _with_shapes(pictures: tuple[AnnotatedPicture, ...], problems: Problems) -> tuple[AnnotatedPicture, ...]:
    """The pictures without the objects that have no mask, which are noted."""
    shaped = []
    for picture in pictures:
        objects = tuple(thing for thing in picture.objects if thing.shape is not None)
        if len(objects) < len(picture.objects):
            without = len(picture.objects) - len(objects)
            entry = f"{picture.file}: {without} of {len(picture.objects)} objects"
            problems.add(picture.source or picture.file, entry, "has no segmentation")
        shaped.append(replace(picture, objects=objects))
    return tuple(shaped)


def read(folder: Path, layout: str | None, problems: Problems, masks: bool = True) -> Parts:
    """Training pictures, test pictures and classes of a folder. masks: read the segmentations."""
    if _is_voc(folder, layout):
        return voc.read(folder, problems)
    (train, classes), (test, others) = (coco.read(*coco.split(folder, name), problems, masks) for name in SPLITS)
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
        train, test = (coco.split(folder, name)[0] for name in SPLITS)
        got = f"{test} with other categories than {train}: {', '.join(odd[:5])}"
        raise DataError("data", got, "the same categories with the same order of ids", "")


def check(
    source: str | Path,
    layout: str | None = None,
    images: str | Path | None = None,
    masks: bool = False,
    say: Say = silent,
) -> list[str]:
    """All mistakes in a data set, each a line that names file and entry. Every picture is decoded.

    Args:
        source: a folder; or a json, with `images`, its folder of pictures.
        masks: whether every object needs a mask, which is then decoded.
        say: is told of what could be meant otherwise.
    """
    problems, source, parts = Problems(), Path(source), list[tuple[AnnotatedPicture, ...]]()
    with problems.noting():
        if images is not None:
            parts.append(coco.read(source, Path(images), problems, masks)[0])
        elif _is_voc(source, layout):
            parts.extend(voc.read(source, problems)[:2])
        else:
            classes = list[tuple[str, ...]]()
            for name in SPLITS:
                with problems.noting():
                    pictures, named = coco.read(*coco.split(source, name), problems, masks)
                    parts.append(pictures)
                    classes.append(named)
            if len(classes) == len(SPLITS):
                _check_categories(source, *classes)
    for part in parts:
        if masks:
            _with_shapes(part, problems)
        check_pictures(part, problems)
    problems.tell(say)
    return problems.lines


def check_pictures(pictures: Sequence[AnnotatedPicture], problems: Problems) -> None:
    """Decode every picture, and note those that cannot be read, such as files that end too soon."""
    for picture in pictures:
        with problems.noting():
            picture.pixels()


def for_evaluation(
    recipe: PicturesRecipe, classes: tuple[str, ...], whole: bool, limit: int | None, say: Callable[[str], None],
    write: Callable[[Path], None] | None = None,
) -> DetectionData:  # fmt: skip
    """The pictures of a recipe as a trained model knows them. Raises DataError for a class that it does not know.

    write: writes data in COCO's layout, to be read in place of the recipe's.
    """
    if recipe.synthetic and not whole:
        recipe = recipe.changed(scenes=min(recipe.scenes, UNUSED))
    with TemporaryDirectory() as scratch:
        if write is not None:
            write(Path(scratch))
        source = None if write is None else Path(scratch)
        data = _with_classes(load(recipe, Path(scratch), say, source), recipe, classes, whole, limit)
        return replace(data, test=data.test.keep_all()) if recipe.synthetic or source else data


def _with_classes(
    data: DetectionData, recipe: PicturesRecipe, classes: tuple[str, ...], whole: bool, limit: int | None
) -> DetectionData:
    """Data with the classes of a trained model. Raises DataError for a class that it does not know."""
    odd = [name for name in data.classes if name not in classes]
    if odd:
        got = f"the class {odd[0]!r} in {data.name}"
        raise DataError("data", got, f"the model's classes: {', '.join(classes)}", "Train a model with it.")
    order = [classes.index(name) for name in data.classes]
    pictures = (*data.train.pictures.pictures, *data.test.pictures.pictures) if whole else data.test.pictures.pictures
    renamed = tuple(
        replace(picture, objects=tuple(replace(thing, label=order[thing.label]) for thing in picture.objects))
        for picture in pictures[:limit]
    )
    test = Fitted(AnnotatedPictures(renamed, classes, recipe.with_masks), **recipe.sizes)
    return replace(data, classes=classes, test=test)


def from_summary(recipe: PicturesRecipe, summary: Mapping[str, Any]) -> DetectionData:
    """The data of a finished run without its pictures: what building its model needs."""
    classes = tuple(summary["classes"])
    none = Fitted(AnnotatedPictures((), classes, recipe.with_masks), **recipe.sizes)
    return DetectionData(str(summary["name"]), classes, none, none)
