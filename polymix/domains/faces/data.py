"""Pictures with faces: faces pasted into photographs, or WIDER FACE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polymix.domains.faces import wider
from polymix.domains.faces.recipe import FacesRecipe
from polymix.domains.faces.synthetic import synthetic
from polymix.errors import DataError
from polymix.train.data.boxes.annotations import AnnotatedPicture, AnnotatedPictures
from polymix.train.data.boxes.data import UNUSED, DetectionData, Fitted, check_pictures
from polymix.train.data.problems import Problems
from polymix.train.data.scenes import MAX_SIDE
from polymix.train.data.synthetic import cached
from polymix.train.task import Say, silent

LAYOUTS = ("wider",)
SYNTHETIC = "faces pasted into photographs"
CLASSES = ("face",)


@dataclass(frozen=True)
class FaceData(DetectionData):
    """Training and test pictures, and for each test picture the faces that count in each subset."""

    counted: Mapping[str, tuple[frozenset[int], ...]]


def load(recipe: FacesRecipe, folder: Path, say: Callable[[str], None]) -> FaceData:
    """The default data, which lie in `folder`, or WIDER FACE's folder."""
    if recipe.data is None:
        settings: dict[str, Any] = {
            "seed": recipe.seed, "question": recipe.question, "count": recipe.scenes, "tests": recipe.test_scenes,
            "size": min(recipe.image_size, MAX_SIDE),
        }  # fmt: skip
        source = cached(folder, "faces", settings, lambda place: synthetic(place, **settings))
    else:
        source = Path(recipe.data)
    problems = Problems()
    train, test, counted = read(source, problems)
    problems.settle(recipe.broken, say, skippable=True)
    name = SYNTHETIC if recipe.data is None else str(recipe.data)
    for part, pictures in (("training", train), ("test", test)):
        if all(face.crowd for picture in pictures for face in picture.objects):
            raise DataError("data", f"{name} without a face in the {part} pictures", "at least one", "")
    unused = sum(face.crowd for picture in train for face in picture.objects)
    if unused:
        say(f"{unused:,} training faces are invalid or have no area: they are no targets")
    if "all" in counted:
        say(f"No {wider.SUBSET_FILE.format('easy')}: AP_all counts every face that is valid")
    return FaceData(name, CLASSES, _fitted(train, recipe), _fitted(test, recipe), counted)


def _fitted(pictures: tuple[AnnotatedPicture, ...], recipe: FacesRecipe) -> Fitted:
    return Fitted(AnnotatedPictures(pictures, CLASSES), recipe.image_size)


def read(
    folder: Path, problems: Problems
) -> tuple[tuple[AnnotatedPicture, ...], tuple[AnnotatedPicture, ...], wider.Counted]:
    """Training pictures, test pictures, and the faces that count, of a folder in WIDER FACE's layout."""
    _check_folder(folder)
    train, test = (wider.read(folder, split, problems) for split in ("train", "val"))
    return train, test, wider.read_subsets(folder, test, problems)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        got = f"{folder}, which is no folder"
        raise DataError("data", got, "a folder in WIDER FACE's layout", "Check the path.")


def check(folder: str | Path, say: Say = silent) -> list[str]:
    """All mistakes in a folder, each a line that names file and entry. Every picture is decoded.

    say: is told of what could be meant otherwise.
    """
    problems, folder = Problems(), Path(folder)
    with problems.noting():
        _check_folder(folder)
        for split in ("train", "val"):
            with problems.noting():
                pictures = wider.read(folder, split, problems)
                if split == "val":
                    wider.read_subsets(folder, pictures, problems)
                check_pictures(pictures, problems)
    problems.tell(say)
    return problems.lines


def for_evaluation(recipe: FacesRecipe, whole: bool, limit: int | None, say: Callable[[str], None]) -> FaceData:
    """The pictures to measure: those of val, or with `whole` also those of train, all of whose valid faces count."""
    if recipe.data is None and not whole:
        recipe = recipe.changed(scenes=min(recipe.scenes, UNUSED))
    with TemporaryDirectory() as scratch:
        data = load(recipe, Path(scratch), say)
        pictures, counted = data.test.pictures.pictures, dict(data.counted)
        if whole:
            train = data.train.pictures.pictures
            valid = tuple(frozenset(i for i, face in enumerate(p.objects) if not face.crowd) for p in train)
            pictures, counted = (*train, *pictures), {name: (*valid, *rows) for name, rows in counted.items()}
        counted = {name: rows[:limit] for name, rows in counted.items()}
        test = _fitted(pictures[:limit], recipe)
        return replace(data, test=test.keep_all() if recipe.data is None else test, counted=counted)


def from_summary(recipe: FacesRecipe, summary: Mapping[str, Any]) -> FaceData:
    """The data of a finished run without its pictures: what building its model needs."""
    none = _fitted((), recipe)
    return FaceData(str(summary["name"]), CLASSES, none, none, {})
