"""Pictures with a class for every pixel: digits on photographs, or a folder in one of four layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from polymix.domains.segment.augment import vary
from polymix.domains.segment.layouts import Pair, check_labels, layout_of, list_pairs
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.domains.segment.synthetic import NAME, synthetic
from polymix.errors import DataError
from polymix.train.data.kept import Kept
from polymix.train.data.pictures import read_picture
from polymix.train.data.problems import Problems
from polymix.train.data.scenes import MAX_SIDE
from polymix.train.data.splits import checksum_of, spread
from polymix.train.data.synthetic import cached
from polymix.train.task import Data, Say, silent

UNUSED_SCENES = 8  # training scenes that are written where only the test scenes are measured
Sample = tuple[Tensor, Tensor]


class Pairs(Kept[Sample]):
    """Whole pictures (3, H, W) and labels (H, W) of bytes."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = tuple(pairs)
        super().__init__(4 * sum(pair.size[0] * pair.size[1] for pair in self.pairs))

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, place: int) -> Sample:
        pair = self.pairs[place]
        return read_picture(pair.picture), pair.read_labels()


class Crops(Dataset[Sample]):
    """Training samples: a part of each picture, varied anew each time (see `vary`)."""

    def __init__(self, pairs: Pairs, recipe: SegmentRecipe) -> None:
        self.pairs, self.recipe = pairs, recipe

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, place: int) -> Sample:
        return vary(*self.pairs[place], self.recipe)


@dataclass(frozen=True)
class SegmentData(Data):
    """Pictures to train on and to test on, and the names of their classes."""

    name: str
    classes: tuple[str, ...]
    train: Crops
    test: Pairs

    def fingerprint(self) -> list[Any]:
        """The number of training pictures and a checksum of 64 of them with their label maps, as they lie on disk."""
        pairs = self.train.pairs.pairs

        def contents() -> Iterator[bytes]:
            for place in spread(len(pairs), 64):
                yield pairs[place].picture.read_bytes()
                yield pairs[place].labels.read_bytes()

        return [len(pairs), checksum_of(contents())]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs, and how many pictures there were."""
        return {"name": self.name, "classes": list(self.classes), "train": len(self.train), "test": len(self.test)}


def load(recipe: SegmentRecipe, folder: Path, say: Callable[[str], None], classes: int | None = None) -> SegmentData:
    """The pictures of a recipe: those of --data, or of the default data, which are written below `folder`.

    Every label map is read, and every picture's header. classes: how many there are at most, where it is known.

    Raises:
        DataError: the first mistake, by file and entry. OptionError: an option of the default data, with others.
    """
    if recipe.data is None:
        settings: dict[str, Any] = {"seed": recipe.seed, "question": recipe.question, "count": recipe.scenes,
                                    "tests": recipe.test_scenes, "size": min(recipe.crop, MAX_SIDE)}  # fmt: skip
        source = cached(folder, "segment", settings, lambda place: synthetic(place, **settings))
        say(f"{NAME}, in the layout of ADE20K: {source}")
    else:
        source = Path(recipe.data)
    problems = Problems()
    train, test, names = read(source, recipe.layout, classes or recipe.classes, problems)
    problems.settle(say=say)
    name = NAME if recipe.data is None else str(recipe.data)
    return SegmentData(name, names, Crops(Pairs(train), recipe), Pairs(test))


def read(
    folder: Path, layout: str | None, classes: int | None, problems: Problems
) -> tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[str, ...]]:
    """Training pairs, test pairs and the classes of a folder; reads every label map. classes: None: as many as it has.

    Raises DataError for a folder of no layout.
    """
    listing = list_pairs(folder, layout_of(folder, layout), problems)
    count = listing.count if classes is None else classes
    occurring: list[set[int]] = [set(), set()]
    for labels, pairs in zip(occurring, (listing.train, listing.test), strict=True):
        for pair in pairs:
            labels |= check_labels(pair, 255 if count is None else count, problems)
    if not problems:
        for split, labels in zip(("training", "test"), occurring, strict=True):
            if not labels:
                problems.add(folder, f"the {split} pictures", "have no label that counts")
            elif split == "training" and len(labels) == 1:
                text = f"have one class, {min(labels)}; two or more are needed"
                problems.add(folder, "the training pictures", text)
    count = max(occurring[0] | occurring[1], default=0) + 1 if count is None else count
    names = (*listing.names[:count], *(f"class {place}" for place in range(len(listing.names), count)))
    return listing.train, listing.test, names


def list_problems(
    folder: str | Path, layout: str | None = None, classes: int | None = None, say: Say = silent
) -> list[str]:
    """All mistakes in a data set, each a line that names file and entry. Every picture and label map is read.

    say: is told of what could be meant otherwise.
    """
    problems = Problems()
    try:
        train, test, _ = read(Path(folder), layout, classes, problems)
    except DataError as error:
        return [str(error.got)]
    for pair in (*train, *test):
        with problems.noting():
            read_picture(pair.picture)
    problems.tell(say)
    return problems.lines


def for_evaluation(
    recipe: SegmentRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> SegmentData:
    """Pictures to measure a trained model on. Raises DataError for a label that the model has no class for."""
    names = tuple(summary["classes"])
    if recipe.data is None and not whole:
        recipe = recipe.changed(scenes=min(recipe.scenes, UNUSED_SCENES))
    with TemporaryDirectory() as scratch:
        data = load(recipe, Path(scratch), say, len(names))
        pairs = (*data.train.pairs.pairs, *data.test.pairs) if whole else data.test.pairs
        test = Pairs(pairs[:limit])
        if recipe.data is None:
            test.decoded = {place: test[place] for place in range(len(test))}
    return replace(data, classes=names, test=test)


def from_summary(recipe: SegmentRecipe, summary: Mapping[str, Any]) -> SegmentData:
    """The data of a finished run without its pictures: what building its model needs."""
    none = Pairs(())
    return SegmentData(str(summary["name"]), tuple(summary["classes"]), Crops(none, recipe), none)
