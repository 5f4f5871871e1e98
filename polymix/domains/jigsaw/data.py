"""Puzzles: crops of photographs, cut into pieces that are shuffled. The photographs need no labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.domains.jigsaw.recipe import JigsawRecipe
from polymix.errors import DataError
from polymix.extras import needs
from polymix.train.data.pictures import SUFFIXES, find_pictures, read_picture, resized
from polymix.train.data.problems import Problems
from polymix.train.data.sampling import isolated_random_state
from polymix.train.data.splits import HELD_OUT, TRAINING, held_out
from polymix.train.data.synthetic import cached
from polymix.train.task import Data

Names = tuple[tuple[str, ...], tuple[str, ...]]
CROPS_AN_EPOCH = 20_000
MAX_SIDE = 320  # shorter side of a photograph that is kept in memory, in pixels
# The photographs of scikit-image, and those of scikit-learn. None of the test photographs shows a training scene.
BUNDLED = {
    "train": ("astronaut", "camera", "chelsea", "coins", "hubble_deep_field", "motorcycle", "retina", "china.jpg",
              "brick", "gravel", "immunohistochemistry"),
    "val": ("coffee", "rocket", "flower.jpg", "grass", "moon"),
}  # fmt: skip


@dataclass(frozen=True)
class Puzzles(Data):
    """The photographs, and test puzzles cut from photographs that are not among the training's.

    test: pieces (puzzles, pieces², 3, piece_size, piece_size) in [0, 1], shuffled, and the place (puzzles, pieces²) of
    each, counted along the rows.
    """

    train: Dataset[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    names: Names
    skipped: tuple[str, ...] = ()

    def summary(self) -> dict[str, Any]:
        """The photographs of both parts, by name."""
        return {"train": list(self.names[0]), "test": list(self.names[1])}


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Puzzles from random squares of photographs, of random size, half of them mirrored."""

    def __init__(self, photographs: Sequence[Tensor], pieces: int, size: int, length: int = CROPS_AN_EPOCH) -> None:
        self.photographs, self.pieces, self.size, self.length = photographs, pieces, size, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        photograph, side = self.photographs[index % len(self.photographs)], self.pieces * self.size
        shorter = min(photograph.shape[1:])
        width = min(shorter, round(side * 2 ** (2 * torch.rand(()).item())))  # from 1 to 4 pixels for one of a piece
        top, left = (int(torch.randint(length - width + 1, ())) for length in photograph.shape[1:])
        crop = resized(photograph[:, top : top + width, left : left + width].float() / 255, side, side)
        return shuffled(crop.flip(2) if torch.rand(()) < 0.5 else crop, self.pieces)


def cut(picture: Tensor, pieces: int) -> Tensor:
    """The pieces (pieces², 3, h, w) of a picture (3, pieces · h, pieces · w), row by row."""
    rows = picture.unflatten(1, (pieces, -1)).unflatten(3, (pieces, -1))  # (3, n, h, n, w)
    return rows.permute(1, 3, 0, 2, 4).flatten(0, 1)


def joined(pieces: Tensor) -> Tensor:
    """The picture of pieces in the order of their places: the inverse of `cut`."""
    side = round(len(pieces) ** 0.5)
    return pieces.unflatten(0, (side, side)).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)


def shuffled(picture: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """The pieces of a picture in random order, and the place of each."""
    order = torch.randperm(pieces**2)
    return cut(picture, pieces)[order], order


def write_bundled(folder: Path) -> None:
    """Write the photographs that come with scikit-image and scikit-learn below folder/train and folder/val.

    Raises MissingExtraError where one of the packages is missing.
    """
    with needs("train,photos", "Puzzles are cut from its photographs where there is no --data."):
        from PIL import Image
        from skimage import data
        from sklearn.datasets import load_sample_image
    for part, names in BUNDLED.items():
        for name in names:
            if name.endswith(".jpg"):
                pixels = load_sample_image(name)
            else:
                pixels = data.stereo_motorcycle()[0] if name == "motorcycle" else getattr(data, name)()
            image = Image.fromarray(pixels).convert("RGB")
            image.thumbnail((2 * MAX_SIDE, 2 * MAX_SIDE))
            (folder / part).mkdir(exist_ok=True)
            image.save(folder / part / f"{name.removesuffix('.jpg')}.png")


def list_photographs(folder: Path) -> tuple[list[Path], list[Path]]:
    """The training and the test photographs of a folder: those of train and val where it has them, else every fifth.

    Raises DataError: there is no such folder, or one of the two parts has no picture file.
    """
    if not folder.is_dir():
        raise DataError("--data", folder, "a folder of photographs", "Check the path.")
    subs = {sub.name.lower(): sub for sub in sorted(folder.iterdir()) if sub.is_dir()}
    parts = [[subs[name] for name in names if name in subs][:1] for names in (TRAINING, HELD_OUT)]
    if all(parts):
        train, test = (find_pictures(part[0]) for part in parts)
    else:
        train, test = held_out(find_pictures(folder))
    if not train or not test:
        got = f"{folder} with {len(train)} photographs for training and {len(test)} for the test"
        cure = f"Put in more pictures ({', '.join(sorted(SUFFIXES))}), or into both of train and val."
        raise DataError("--data", got, "at least one of each", cure)
    return train, test


def list_problems(folder: Path) -> list[str]:
    """Every photograph that cannot be read, with the reason."""
    problems = Problems()
    with problems.noting():
        for part in list_photographs(folder):
            _read(part, problems)
    return problems.lines


def load(recipe: JigsawRecipe, folder: Path, say: Callable[[str], None] = lambda text: None) -> Puzzles:
    """The puzzles of a recipe: from its folder, or from the photographs that `write_bundled` writes.

    What cannot be read is left out, and named. Raises DataError where nothing is left of a part.
    """
    (train, test), names, problems = _photographs(recipe, folder, say)
    return Puzzles(Crops(train, recipe.pieces, recipe.piece_size), fixed(recipe, test), names, tuple(problems.lines))


def for_evaluation(recipe: JigsawRecipe, whole: bool, limit: int | None, say: Callable[[str], None]) -> Puzzles:
    """The puzzles to measure: `limit` of those of the test photographs, or with `whole` of all photographs."""
    with TemporaryDirectory() as scratch:
        (train, test), names, problems = _photographs(recipe, Path(scratch), say)
    count = min(limit or recipe.test_puzzles, recipe.test_puzzles)
    measured = fixed(recipe, [*train, *test] if whole else test, count)
    return Puzzles(Crops(train, recipe.pieces, recipe.piece_size), measured, names, tuple(problems.lines))


def _photographs(
    recipe: JigsawRecipe, folder: Path, say: Callable[[str], None]
) -> tuple[list[list[Tensor]], Names, Problems]:
    """The photographs of both parts as bytes, their names, and the files that cannot be read."""
    if recipe.data is None:
        source = cached(folder, "photographs", {**BUNDLED, "side": 2 * MAX_SIDE}, write_bundled)
    else:
        source = Path(recipe.data)
    parts, problems = list_photographs(source), Problems()
    photographs = [_read(files, problems) for files in parts]
    if not all(photographs):
        raise DataError("--data", f"no readable photograph: {'; '.join(problems.lines)}", "at least one", "")
    for line in problems.lines:
        say(f"Skipped {line}")
    train, test = (tuple(str(file.relative_to(source)) for file in files) for files in parts)
    return photographs, (train, test), problems


def fixed(recipe: JigsawRecipe, photographs: Sequence[Tensor], count: int | None = None) -> tuple[Tensor, Tensor]:
    """The same test puzzles whatever the recipe's seed: the first `count`, or all of them."""
    crops = Crops(photographs, recipe.pieces, recipe.piece_size, count or recipe.test_puzzles)
    with isolated_random_state():
        torch.manual_seed(0)
        pieces, places = zip(*(crops[index] for index in range(len(crops))), strict=True)
    return torch.stack(pieces), torch.stack(places)


def _read(files: Sequence[Path], problems: Problems) -> list[Tensor]:
    """The photographs that can be read, as bytes of limited size."""
    photographs = []
    for file in files:
        with problems.noting():
            picture = read_picture(file)
            height, width = picture.shape[1:]
            factor = min(1.0, MAX_SIDE / min(height, width))
            photographs.append(resized(picture, max(1, round(factor * height)), max(1, round(factor * width))))
    return photographs


def from_summary(recipe: JigsawRecipe) -> Puzzles:
    """Puzzles without photographs, for a trained model: `predict` brings its own."""
    nothing = torch.zeros(0, recipe.pieces**2, 3, recipe.piece_size, recipe.piece_size)
    return Puzzles(Crops([], recipe.pieces, recipe.piece_size, 0), (nothing, nothing[:, :, 0, 0, 0].long()), ((), ()))
