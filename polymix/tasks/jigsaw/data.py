"""Puzzles: crops of photographs, cut into pieces that are shuffled. The photographs need no labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from polymix._io import write_whole
from polymix.errors import DataError, MissingExtraError
from polymix.tasks.classify.data import HELD_OUT, TRAINING
from polymix.tasks.classify.pictures import FORMATS, HEIC, UNREADABLE, as_tensor, read_picture
from polymix.tasks.jigsaw.recipe import JigsawRecipe

Names = tuple[tuple[str, ...], tuple[str, ...]]
LAYOUTS = ("photographs",)
TEST_SHARE = 5  # without val, every fifth photograph is for the test
EPOCH = 20_000  # crops that count as one pass through the photographs
LARGEST = 320  # shorter side of a photograph that is kept in memory, in pixels
# The photographs of scikit-image, and those of scikit-learn. None of the test photographs shows a training scene.
BUNDLED = {
    "train": ("astronaut", "camera", "chelsea", "coins", "hubble_deep_field", "motorcycle", "retina", "china.jpg",
              "brick", "gravel", "immunohistochemistry"),
    "val": ("coffee", "rocket", "flower.jpg", "grass", "moon"),
}  # fmt: skip


@dataclass(frozen=True)
class Puzzles:
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

    def __init__(self, photographs: Sequence[Tensor], pieces: int, size: int, length: int = EPOCH) -> None:
        self.photographs, self.pieces, self.size, self.length = photographs, pieces, size, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        photograph, side = self.photographs[index % len(self.photographs)], self.pieces * self.size
        shorter = min(photograph.shape[1:])
        taken = min(shorter, round(side * 2 ** (2 * torch.rand(()).item())))  # from 1 to 4 pixels for one of a piece
        top, left = (int(torch.randint(length - taken + 1, ())) for length in photograph.shape[1:])
        crop = scaled(photograph[:, top : top + taken, left : left + taken].float() / 255, side)
        return shuffled(crop.flip(2) if torch.rand(()) < 0.5 else crop, self.pieces)


def scaled(picture: Tensor, side: int) -> Tensor:
    """A square picture (3, S, S) with another side, in pixels."""
    if picture.shape[-1] == side:
        return picture
    return interpolate(picture[None], size=(side, side), mode="bilinear", antialias=True)[0]


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


def made(folder: Path, seed: int = 0) -> None:
    """Write the photographs that come with scikit-image and scikit-learn below folder/train and folder/val.

    They are the same whatever the seed. Raises MissingExtraError where one of the packages is missing.
    """
    try:
        from PIL import Image
        from skimage import data
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        name = str(error.name).partition(".")[0]
        cure = "pip install 'polymix[train,photos]'"
        raise MissingExtraError(name, str(error), cure, "Or pass --data with your own.") from error
    for part, names in BUNDLED.items():
        for name in names:
            if name.endswith(".jpg"):
                pixels = load_sample_image(name)
            else:
                pixels = data.stereo_motorcycle()[0] if name == "motorcycle" else getattr(data, name)()
            image = Image.fromarray(pixels).convert("RGB")
            image.thumbnail((2 * LARGEST, 2 * LARGEST))
            path = folder / part / f"{name.removesuffix('.jpg')}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, partial(image.save, format="PNG"))


def find(folder: Path) -> tuple[list[Path], list[Path]]:
    """The training and the test photographs of a folder: those of train and val where it has them, else every fifth.

    Raises DataError: there is no such folder, or one of the two parts has no picture file.
    """
    if not folder.is_dir():
        raise DataError("--data", folder, "a folder of photographs", "Check the path.")
    subs = {sub.name.lower(): sub for sub in sorted(folder.iterdir()) if sub.is_dir()}
    parts = [[subs[name] for name in names if name in subs][:1] for names in (TRAINING, HELD_OUT)]
    if all(parts):
        train, test = (_pictures(part[0]) for part in parts)
    else:
        files = _pictures(folder)
        train, test = [f for i, f in enumerate(files) if i % TEST_SHARE], files[::TEST_SHARE]
    if not train or not test:
        got = f"{folder} with {len(train)} photographs for training and {len(test)} for the test"
        cure = f"Put in more pictures ({', '.join(sorted(FORMATS))}), or into both of train and val."
        raise DataError("--data", got, "at least one of each", cure)
    return train, test


def check(folder: Path, layout: str | None = None) -> list[str]:
    """Every photograph that cannot be read, with the reason."""
    try:
        parts = find(Path(folder))
    except DataError as error:
        return [str(error)]
    return _read([file for part in parts for file in part])[1]


def load(recipe: JigsawRecipe, folder: Path, say: Callable[[str], None] = lambda text: None) -> Puzzles:
    """The puzzles of a recipe: from its folder, or from the photographs that `made` writes."""
    (train, test), names, skipped = _photographs(recipe, folder, say)
    return Puzzles(Crops(train, recipe.pieces, recipe.piece_size), _fixed(recipe, test), names, skipped)


def for_evaluation(
    recipe: JigsawRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> Puzzles:
    """The puzzles to measure: `limit` of those of the test photographs, or with `whole` of all photographs."""
    with TemporaryDirectory() as scratch:
        (train, test), names, skipped = _photographs(recipe, Path(scratch), say)
    few = replace(recipe, test_puzzles=min(limit or recipe.test_puzzles, recipe.test_puzzles))
    measured = _fixed(few, [*train, *test] if whole else test)
    return Puzzles(Crops(train, recipe.pieces, recipe.piece_size), measured, names, skipped)


def _photographs(
    recipe: JigsawRecipe, folder: Path, say: Callable[[str], None]
) -> tuple[list[list[Tensor]], Names, tuple[str, ...]]:
    """The photographs of both parts as bytes, their names, and a sentence for each file that cannot be read."""
    if recipe.data is None:
        source = folder / "photographs"
        if not (source / "val").is_dir():
            made(source)
    else:
        source = Path(recipe.data)
    parts, found, skipped = find(source), list[list[Tensor]](), list[str]()
    for files in parts:
        photographs, broken = _read(files)
        skipped += broken
        if not photographs:
            raise DataError("--data", f"no readable photograph: {'; '.join(broken)}", "at least one", "")
        found.append(photographs)
    for problem in skipped:
        say(f"Skipped {problem}")
    train, test = (tuple(str(file.relative_to(source)) for file in files) for files in parts)
    return found, (train, test), tuple(skipped)


def _fixed(recipe: JigsawRecipe, photographs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The same test puzzles whatever the recipe's seed."""
    crops = Crops(photographs, recipe.pieces, recipe.piece_size, recipe.test_puzzles)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pieces, places = zip(*(crops[index] for index in range(len(crops))), strict=True)
    return torch.stack(pieces), torch.stack(places)


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in FORMATS | HEIC and path.is_file())


def _read(files: Sequence[Path]) -> tuple[list[Tensor], list[str]]:
    """The photographs as bytes, and a sentence for each file that cannot be read."""
    found, problems = [], []
    for file in files:
        try:
            picture = read_picture(file)
        except UNREADABLE as error:
            problems.append(f"{file}: {str(error) or type(error).__name__}")
            continue
        factor = LARGEST / min(picture.size)
        if factor < 1:
            picture = picture.resize([max(1, round(factor * length)) for length in picture.size])
        found.append(as_tensor(picture))
    return found, problems


def from_summary(recipe: JigsawRecipe, summary: Any) -> Puzzles:
    """Puzzles without photographs, for a trained model: `predict` brings its own."""
    nothing = torch.zeros(0, recipe.pieces**2, 3, recipe.piece_size, recipe.piece_size)
    return Puzzles(Crops([], recipe.pieces, recipe.piece_size, 0), (nothing, nothing[:, :, 0, 0, 0].long()), ((), ()))
