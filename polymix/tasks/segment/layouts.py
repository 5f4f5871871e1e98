"""Pictures with label maps on disk: ADE20K, Cityscapes, VOC, and two folders of equal names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from polymix._io import write_whole
from polymix.errors import DataError
from polymix.tasks.boxes.pictures import SUFFIXES, Mistakes, check_file

LAYOUTS = ("ade20k", "cityscapes", "voc", "folders")
IGNORED = 255  # the label of pixels that do not count, in training and in the metric
NAMES_FILE, CLASSES_FILE = "objectInfo150.txt", "classes.txt"
ADE_CLASSES = 150
CITYSCAPES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
_MAPS = {"1", "L", "P"}  # modes of Pillow with one number of at most 8 bits a pixel
_MARKERS = {"ade20k": ("images/training", "annotations"), "cityscapes": ("leftImg8bit",), "voc": ("JPEGImages",)}


@dataclass(frozen=True)
class Pair:
    """A picture and its label map. zero_ignored: label 0 means "other", and k means class k - 1."""

    picture: Path
    labels: Path
    zero_ignored: bool = False
    size: tuple[int, int] = (0, 0)  # width and height

    def read_labels(self) -> Tensor:
        """The classes from 0, IGNORED where no class counts: bytes (H, W).

        Raises OSError or ValueError for a file that is no label map.
        """
        return as_classes(read_map(self.labels), self.zero_ignored)


@dataclass(frozen=True)
class Found:
    """The pairs of a data set, and its classes by name; count: None if only the labels tell how many there are."""

    train: tuple[Pair, ...]
    test: tuple[Pair, ...]
    names: tuple[str, ...]
    count: int | None


def read_map(file: Path) -> Any:
    """The numbers in a label map (H, W). Raises OSError or ValueError for a file that is none."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            if image.format == "JPEG":
                raise ValueError("is a JPEG, which changes labels; save label maps as PNG")
            if image.mode not in _MAPS:
                deep = image.mode[0] in "IF"
                what = "has more than 8 bits a pixel" if deep else f"is a colour picture ({image.mode})"
                raise ValueError(f"{what} instead of a label map: one number from 0 to 255 for each pixel")
            return numpy.array(image, dtype=numpy.uint8)
    except (SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot be read ({' '.join(str(error).split())})") from error


def as_classes(numbers: Any, zero_ignored: bool) -> Tensor:
    """The classes of the numbers in a file."""
    labels = torch.from_numpy(numbers)
    return labels - 1 if zero_ignored else labels  # bytes: 0 - 1 is 255, IGNORED


def layout_of(folder: Path, layout: str | None) -> str:
    """The layout of a folder. Raises DataError if it has none of them."""
    if not folder.is_dir():
        raise DataError(
            "data", f"{folder}, which is no folder", "a folder of pictures and label maps", "Check the path."
        )
    if layout is not None:
        return layout
    for name, marks in _MARKERS.items():
        if all((folder / mark).is_dir() for mark in marks):
            return name
    if any(_part(folder, split, "images").is_dir() for split in ("train", "val")):
        return "folders"
    allowed = "images/training and annotations, leftImg8bit, JPEGImages, or train/images and train/labels"
    got = f"{folder} without the folders of a known layout"
    raise DataError("data", got, allowed, "See docs/tasks/segment.md for the layouts.")


def find(folder: Path, layout: str | None, mistakes: Mistakes) -> Found:
    """The sound pairs of a folder; why others are not sound is noted. Reads names and headers, no pixels."""
    layout = layout_of(folder, layout)
    parts = [_SPLITS[layout](folder, split, mistakes) for split in ("train", "val")]
    names, count = _names(folder, layout, mistakes)
    train, test = (tuple(_sound(part, mistakes)) for part in parts)
    return Found(train, test, names, count)


def _sound(pairs: Sequence[Pair], mistakes: Mistakes) -> Iterator[Pair]:
    """The pairs whose files can be opened and have one size."""
    from PIL import Image

    for pair in pairs:
        if not pair.labels.is_file():
            mistakes.add(pair.picture, "", f"has no label map {pair.labels}")
            continue
        try:
            with Image.open(pair.labels) as image:
                size = image.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            mistakes.add(pair.labels, "", f"cannot be read ({' '.join(str(error).split())})")
            continue
        if check_file(pair.picture, None, "", mistakes) is None:
            continue
        wrong = Mistakes()
        if check_file(pair.picture, size, "", wrong) is None:
            text = wrong.lines[0].replace("in the annotations", f"in {pair.labels}")
            mistakes.lines.append(text)
            continue
        yield Pair(pair.picture, pair.labels, pair.zero_ignored, size)


def _pictures(folder: Path, mistakes: Mistakes) -> list[Path]:
    """The picture files below a folder; that there are none is noted."""
    if not folder.is_dir():
        mistakes.add(folder, "", "there is no such folder")
        return []
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        mistakes.add(folder, "", "has no pictures")
    return files


def _matched(pictures: Path, labels: Path, mistakes: Mistakes, zero_ignored: bool = False) -> list[Pair]:
    """Pairs of equal stems below two folders; label maps without a picture are noted."""
    files = _pictures(pictures, mistakes)
    if not labels.is_dir():
        mistakes.add(labels, "", "there is no such folder: the pictures have no annotations")
        return []
    maps = {path.relative_to(labels).with_suffix(""): path for path in sorted(labels.rglob("*"))
            if path.suffix.lower() in SUFFIXES}  # fmt: skip
    pairs = []
    for file in files:
        stem = file.relative_to(pictures).with_suffix("")
        pairs.append(Pair(file, maps.pop(stem, labels / f"{stem}.png"), zero_ignored))
    for path in maps.values():
        mistakes.add(path, "", f"has no picture in {pictures}")
    return pairs


def _ade20k(folder: Path, split: str, mistakes: Mistakes) -> list[Pair]:
    part = {"train": "training", "val": "validation"}[split]
    return _matched(folder / "images" / part, folder / "annotations" / part, mistakes, zero_ignored=True)


def _cityscapes(folder: Path, split: str, mistakes: Mistakes) -> list[Pair]:
    pictures, pairs = folder / "leftImg8bit" / split, []
    for file in _pictures(pictures, mistakes):
        stem = file.stem.removesuffix("_leftImg8bit")
        city = folder / "gtFine" / split / file.relative_to(pictures).parent
        labels = city / f"{stem}_gtFine_labelTrainIds.png"
        if not labels.is_file() and (city / f"{stem}_gtFine_labelIds.png").is_file():
            text = f"has only labelIds in {city}; make labelTrainIds by createTrainIdLabelImgs of cityscapesscripts"
            mistakes.add(file, "", text)
            continue
        pairs.append(Pair(file, labels))
    return pairs


def _voc(folder: Path, split: str, mistakes: Mistakes) -> list[Pair]:
    listed = folder / "ImageSets" / "Segmentation" / f"{split}.txt"
    if not listed.is_file():
        mistakes.add(listed, "", "there is no such file")
        return []
    pairs = []
    for number, line in enumerate(listed.read_text("utf-8", errors="replace").splitlines(), 1):
        name = line.strip()
        if not name:
            continue
        picture = folder / "JPEGImages" / f"{name}.jpg"
        if not picture.is_file():
            mistakes.add(listed, f"line {number}", f"{picture} does not exist")
            continue
        pairs.append(Pair(picture, folder / "SegmentationClass" / f"{name}.png"))
    if not pairs:
        mistakes.add(listed, "", "names no picture")
    return pairs


def _part(folder: Path, split: str, what: str) -> Path:
    """train/images, or images/train where that is how the folder is arranged."""
    other = folder / what / split
    return other if other.is_dir() else folder / split / what


def _folders(folder: Path, split: str, mistakes: Mistakes) -> list[Pair]:
    return _matched(_part(folder, split, "images"), _part(folder, split, "labels"), mistakes)


_SPLITS = {"ade20k": _ade20k, "cityscapes": _cityscapes, "voc": _voc, "folders": _folders}


def _names(folder: Path, layout: str, mistakes: Mistakes) -> tuple[tuple[str, ...], int | None]:
    """The names of the classes, and how many the layout has; None where only the labels tell."""
    if layout == "cityscapes":
        return CITYSCAPES, len(CITYSCAPES)
    if layout == "voc":
        return VOC, len(VOC)
    file = folder / (NAMES_FILE if layout == "ade20k" else CLASSES_FILE)
    if not file.is_file():
        return (), ADE_CLASSES if layout == "ade20k" else None
    lines = [line for line in file.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    if layout == "ade20k":  # a table with a header: Idx, Ratio, Train, Val, Stuff, Name
        lines = [line.split("\t")[-1].split(",")[0].split(";")[0] for line in lines[1:]]
    names = tuple(line.strip() for line in lines)
    if len(names) < 2:
        mistakes.add(file, "", f"names {len(names)} class; two or more are needed")
    elif len(names) > IGNORED:
        mistakes.add(file, "", f"names {len(names)} classes; at most {IGNORED} are possible")
    return names, len(names)


def check_labels(pair: Pair, classes: int, mistakes: Mistakes) -> set[int]:
    """The classes that occur in a label map; what is wrong with its numbers is noted."""
    try:
        labels = pair.read_labels()
    except (OSError, ValueError) as error:
        mistakes.add(pair.labels, "", " ".join(str(error).split()))
        return set()
    counts = torch.bincount(labels.flatten().long(), minlength=IGNORED + 1)
    counts[IGNORED] = 0
    there = set(counts.nonzero()[:, 0].tolist())
    odd = sorted(label for label in there if label >= classes)
    if odd:
        shift = int(pair.zero_ignored)
        where = (labels == odd[0]).nonzero()[0].tolist()
        last = classes - 1 + shift
        text = f"is not a label from {shift} to {last} of {classes} classes, nor {0 if shift else IGNORED} (ignored)"
        mistakes.add(pair.labels, f"label {odd[0] + shift} at row {where[0]}, column {where[1]}", text)
    return there


def write_ade20k(folder: Path, split: str, scenes: Sequence[Mapping[str, Any]]) -> None:
    """Write scenes as ADE20K has them, with PNG files for pictures: images/SPLIT/*.png, annotations/SPLIT/*.png.

    split: "training" or "validation". scenes: each with `image`, bytes (3, H, W), and `classes` (H, W) from 0,
        IGNORED where none counts.
    """
    from PIL import Image

    for name in ("images", "annotations"):
        (folder / name / split).mkdir(parents=True, exist_ok=True)
    for place, scene in enumerate(scenes):
        stem = f"ADE_{split[:-3] if split == 'training' else 'val'}_{place + 1:08d}.png"
        picture = Image.fromarray(scene["image"].permute(1, 2, 0).contiguous().numpy())
        picture.save(folder / "images" / split / stem, compress_level=1)
        labels = Image.fromarray((scene["classes"].to(torch.uint8) + 1).numpy())  # IGNORED + 1 is 0
        labels.save(folder / "annotations" / split / stem, compress_level=1)


def write_names(folder: Path, names: Sequence[str]) -> None:
    """Write the table of classes as ADE20K has it."""
    rows = [f"{place}\t0\t0\t0\t0\t{name}" for place, name in enumerate(names, 1)]
    write_whole(folder / NAMES_FILE, "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]) + "\n")
