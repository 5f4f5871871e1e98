"""Pictures with faces: faces pasted into photographs, or WIDER FACE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polymix.errors import DataError
from polymix.tasks.boxes.data import UNUSED, DetectionData, Fitted
from polymix.tasks.boxes.pictures import Mistakes, Picture, Pictures
from polymix.tasks.faces import scenes, wider
from polymix.tasks.faces.recipe import FacesRecipe
from polymix.tasks.scenes import LARGEST

LAYOUTS = ("wider",)
MADE = "faces pasted into photographs"
CLASSES = ("face",)


@dataclass(frozen=True)
class FaceData(DetectionData):
    """Training and test pictures, and for each test picture the faces that count in each subset."""

    counted: Mapping[str, tuple[frozenset[int], ...]]


def load(recipe: FacesRecipe, folder: Path, say: Callable[[str], None]) -> FaceData:
    """The default data, which is made in `folder`, or WIDER FACE's folder."""
    if recipe.data is None:
        made(folder, recipe.seed, count=recipe.scenes, tests=recipe.test_scenes,
             size=min(recipe.image_size, LARGEST))  # fmt: skip
    mistakes = Mistakes()
    root = folder if recipe.data is None else Path(recipe.data)
    train, test, counted = read(root, mistakes)
    mistakes.settle(recipe.mistakes, say)
    name = MADE if recipe.data is None else str(recipe.data)
    for part, pictures in (("training", train), ("test", test)):
        if all(face.crowd for picture in pictures for face in picture.things):
            raise DataError("data", f"{name} without a face in the {part} pictures", "at least one", "")
    unused = sum(face.crowd for picture in train for face in picture.things)
    if unused:
        say(f"{unused:,} training faces are invalid or have no area: they are no targets")
    if "all" in counted:
        say(f"No {wider.SUBSET_FILE.format('easy')}: AP_all counts every face that is valid")
    return FaceData(name, CLASSES, _fitted(train, recipe), _fitted(test, recipe), counted)


def _fitted(pictures: tuple[Picture, ...], recipe: FacesRecipe) -> Fitted:
    return Fitted(Pictures(pictures, CLASSES), recipe.image_size)


def read(folder: Path, mistakes: Mistakes) -> tuple[tuple[Picture, ...], tuple[Picture, ...], wider.Counted]:
    """Training pictures, test pictures, and the faces that count, of a folder in WIDER FACE's layout."""
    _check_folder(folder)
    train, test = (wider.read(folder, split, mistakes) for split in ("train", "val"))
    return train, test, wider.read_subsets(folder, test, mistakes)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        got = f"{folder}, which is no folder"
        raise DataError("data", got, "a folder in WIDER FACE's layout", "Check the path.")


def check(folder: str | Path, layout: str | None = None) -> list[str]:
    """All mistakes in a folder, each a line that names file and entry. Every picture is decoded."""
    mistakes, folder = Mistakes(), Path(folder)
    with mistakes.noting():
        _check_folder(folder)
        for split in ("train", "val"):
            with mistakes.noting():
                pictures = wider.read(folder, split, mistakes)
                if split == "val":
                    wider.read_subsets(folder, pictures, mistakes)
                mistakes.decode(pictures)
    return mistakes.lines


def made(folder: Path, seed: int = 0, *, count: int = 600, tests: int = 100, size: int = 96) -> None:
    """Write the default data in WIDER FACE's layout. Test scenes have faces and parts of photographs of their own."""
    for split, number in (("train", count), ("val", tests)):
        wider.write(folder, split, list(scenes.make(number, test=split == "val", size=size, seed=seed)))


def for_evaluation(
    recipe: FacesRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> FaceData:
    """The pictures to measure: those of val, or with `whole` also those of train, all of whose valid faces count."""
    if recipe.data is None and not whole:
        recipe = replace(recipe, scenes=min(recipe.scenes, UNUSED))
    with TemporaryDirectory() as scratch:
        data = load(recipe, Path(scratch), say)
        pictures, counted = data.test.pictures.pictures, dict(data.counted)
        if whole:
            train = data.train.pictures.pictures
            valid = tuple(frozenset(i for i, face in enumerate(p.things) if not face.crowd) for p in train)
            pictures, counted = (*train, *pictures), {name: (*valid, *rows) for name, rows in counted.items()}
        counted = {name: rows[:limit] for name, rows in counted.items()}
        test = _fitted(pictures[:limit], recipe)
        return replace(data, test=test.keep_all() if recipe.data is None else test, counted=counted)


def from_summary(recipe: FacesRecipe, summary: Mapping[str, Any]) -> FaceData:
    """The data of a finished run without its pictures: what building its model needs."""
    none = _fitted((), recipe)
    return FaceData(str(summary["name"]), CLASSES, none, none, {})
