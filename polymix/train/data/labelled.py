"""Pictures with their classes: a folder for each class, as ImageNet has it, or pixels in memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import DataError
from polymix.extras import needs
from polymix.train.data.class_names import class_name
from polymix.train.data.pictures import (
    as_image,
    as_tensor,
    find_pictures,
    middle_square,
    open_picture,
    read_picture,
    resized,
)
from polymix.train.data.problems import Problems
from polymix.train.data.splits import HELD_OUT, TRAINING

SPLIT_SEED = 0
TEST_SHARE = 0.2  # of each class, where a data set does not say which samples are for the test
DIGITS, DIGIT_NAMES, DIGIT_SIDE = "scikit-learn digits", tuple(map(str, range(10))), 8
Part = tuple[Tensor, Tensor]  # images (N, C, H, W) and their labels (N)


@dataclass(frozen=True)
class Pictures:
    """Pictures of Pillow in RGB with their classes: files, or rows (N, C, H, W) of bytes or small floats.

    Args:
        labels: (N), int64.
        files: paths; empty where rows are given. One that cannot be read is a DataError where it is used.
    """

    labels: Tensor
    files: Sequence[str] = ()
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> Any:
        if self.rows is None:
            return open_picture(Path(self.files[place]))
        pixels = self.rows[place]
        if pixels.dtype != torch.uint8:
            pixels = (pixels * (255 / max(self.highest, 1e-9))).round().clamp(0, 255).to(torch.uint8)
        return as_image(pixels.expand(3, -1, -1))

    @cached_property
    def highest(self) -> float:
        """The largest value of all rows, which becomes white."""
        return 0.0 if self.rows is None else self.rows.max().item()

    def chosen(self, places: Tensor) -> Pictures:
        """Those at some places."""
        files = [self.files[place] for place in places.tolist()] if self.rows is None else ()
        rows = None if self.rows is None else self.rows[places]
        return replace(self, labels=self.labels[places], files=files, rows=rows)

    def joined(self, other: Pictures) -> Pictures:
        """These and then others."""
        rows = None if self.rows is None or other.rows is None else torch.cat((self.rows, other.rows))
        files = [*self.files, *other.files]
        return replace(self, labels=torch.cat((self.labels, other.labels)), files=files, rows=rows)

    def fingerprint(self) -> int:
        """Tells other files, other classes or other pixels apart, without decoding."""
        crc = zlib.crc32(repr((list(self.files), self.labels.tolist())).encode())
        return crc if self.rows is None else zlib.crc32(self.rows.contiguous().numpy().tobytes(), crc)


def fitted(picture: Any, size: int) -> Tensor:
    """The middle square of a picture of Pillow as bytes (3, size, size)."""
    return middle_square(as_tensor(picture), size)


def stratified(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The places of training and of test samples, 80 : 20 in each class, by a fixed seed."""
    with needs("train"):
        from sklearn.model_selection import train_test_split
    count = max(round(TEST_SHARE * len(labels)), int(labels.max()) + 1)  # at least one test sample a class
    parts = train_test_split(range(len(labels)), test_size=count, random_state=SPLIT_SEED, stratify=labels.numpy())
    return torch.tensor(parts[0]), torch.tensor(parts[1])


def digits(size: int = DIGIT_SIDE) -> tuple[Part, Part]:
    """The 1,797 handwritten digits of scikit-learn (8 × 8 pixels, from 0 to 16) in another size: training, test."""
    with needs("train"):
        from sklearn import datasets
    bunch: Any = datasets.load_digits()
    images, labels = torch.from_numpy(bunch.images).float()[:, None], torch.from_numpy(bunch.target).long()
    images = resized(images, size, size)
    train, test = stratified(labels)
    return (images[train], labels[train]), (images[test], labels[test])


# Folders


def _sub_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        allowed = "an existing folder with one sub-folder of images per class"
        raise DataError("--data", str(folder), allowed, "Check the path.")
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def find_splits(folder: Path) -> tuple[Path, Path | None]:
    """The folders of the training and of the test images, where `folder` holds such, as ImageNet does; else itself.

    That is, where all of its sub-folders have names such as train, val and test, and hold folders themselves.
    Raises DataError where train has a folder per class and val has none, as ImageNet's archives, or does not exist.
    """
    subs = _sub_folders(folder)
    training = [sub for sub in subs if sub.name.lower() in TRAINING and _sub_folders(sub)]
    held_out = [sub for name in HELD_OUT for sub in subs if sub.name.lower() == name and _sub_folders(sub)]
    flat = [sub for sub in subs if sub.name.lower() in HELD_OUT and sub not in held_out]
    if training and not held_out and len(subs) == 1 + len(flat):
        got = f"{flat[0]} without a folder per class" if flat else f"{folder} with {training[0].name} and without val"
        cure = "Sort its pictures into the folders of its classes." if flat else f"Pass {training[0]} to split it."
        raise DataError("--data", got, "train/CLASS/… and val/CLASS/…", cure)
    if len(training) != 1 or not held_out or len(subs) != 1 + len(held_out):
        return folder, None
    return training[0], held_out[0]


def find_images(folder: Path) -> dict[str, list[Path]]:
    """Image files by class. Each sub-folder is a class and is searched to any depth, in sorted order.

    In a folder with train and val (see `find_splits`) those are the classes of train.
    """
    return by_class(find_splits(folder)[0])


def by_class(folder: Path) -> dict[str, list[Path]]:
    """Image files by sub-folder; those without any are left out."""
    classes: dict[str, list[Path]] = {}
    for sub in _sub_folders(folder):
        if files := find_pictures(sub):
            classes.setdefault(class_name(sub.name), []).extend(files)  # a disk may hold both of Unicode's forms
    return classes


def list_folder(folder: Path) -> tuple[tuple[str, ...], Pictures, Pictures]:
    """The classes, in sorted order as ImageNet's, and the training and test files. No file is opened.

    Raises DataError: no such folder, fewer than two classes with two images each, or other classes in val.
    """
    training, held_out = find_splits(folder)
    files, tests = by_class(training), None if held_out is None else by_class(held_out)
    check_classes({name: len(part) for name, part in files.items()})
    if tests is None:
        whole = _pictures(files, tuple(files))
        train, test = stratified(whole.labels)
        return tuple(files), whole.chosen(train), whole.chosen(test)
    check_same(set(files), set(tests), training, held_out)
    return tuple(files), _pictures(files, tuple(files)), _pictures(tests, tuple(files))


def _pictures(files: Mapping[str, Sequence[Path]], classes: Sequence[str]) -> Pictures:
    labels = torch.tensor([place for place, name in enumerate(classes) for _ in files[name]])
    return Pictures(labels, [str(file) for name in classes for file in files[name]])


def check_classes(counts: Mapping[str, int], unreadable: Sequence[str] = ()) -> None:
    """DataError unless two classes or more have images, each of them two or more."""
    classes = [name for name, count in counts.items() if count]
    if len(classes) < 2 or min(counts[name] for name in classes) < 2:
        short = {name: count for name, count in counts.items() if len(classes) < 2 or count < 2}
        got = "readable images by class: " + (", ".join(f"{name}: {count}" for name, count in short.items()) or "none")
        cure = "Put each class into its own sub-folder, or remove classes with a single image."
        cure += f" Unreadable: {'; '.join(unreadable)}" if unreadable else ""
        raise DataError("--data", got, "two or more classes with two or more readable images each", cure)


def check_same(training_classes: set[str], test_classes: set[str], training: Path, held_out: Path | None) -> None:
    """DataError unless both parts of a folder have the same classes."""
    if training_classes != test_classes:
        odd = ", ".join(sorted(training_classes ^ test_classes))
        raise DataError("--data", f"{odd} in one of {training} and {held_out} alone", "the same classes in both", "")


def folder_problems(folder: Path) -> list[str]:
    """Every problem of a folder with a folder for each class, in sentences; reads all pictures."""
    problems = Problems()
    training: Path | None = None
    held_out: Path | None = None
    try:
        training, held_out = find_splits(folder)
    except DataError as error:
        problems.lines.append(str(error))
        training = next((folder / name for name in TRAINING if (folder / name).is_dir()), None)
    if training is None:
        return problems.lines
    parts = [by_class(part) for part in (training, held_out) if part is not None]
    for file in (file for part in parts for files in part.values() for file in files):
        with problems.noting():
            read_picture(file)
    if len(parts[0]) < 2:
        problems.add(training, "", f"{len(parts[0])} classes with images; two or more are needed")
    if len(parts) == 2:
        for here, classes, others in ((held_out, parts[0], parts[1]), (training, parts[1], parts[0])):
            for name in classes:
                if name not in others:
                    problems.add(str(here), "", f"no images of the class {name}")
    return problems.lines
