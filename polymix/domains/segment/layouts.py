"""Pictures with label maps on disk: ADE20K, Cityscapes, VOC, and two folders of equal names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import DataError
from polymix.files import is_file, write_whole
from polymix.train.data.class_names import distinct, own_names
from polymix.train.data.pictures import SUFFIXES, TURNED, find_pictures, read_header, read_labels, turn, write_png
from polymix.train.data.problems import Problems
from polymix.train.data.texts import composed, named_file, read_names, read_text

LAYOUTS = ("ade20k", "cityscapes", "voc", "folders")
IGNORED = 255  # the label of pixels that do not count, in training and in the metric
NAMES_FILE = "objectInfo150.txt"
ADE_CLASSES = 150
CITYSCAPES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
_MARKERS = {"ade20k": ("images/training", "annotations"), "cityscapes": ("leftImg8bit",), "voc": ("JPEGImages",)}


class Pair(NamedTuple):
    """A picture and its label map.

    Attributes:
        zero_ignored: label 0 means "other", and k means class k - 1.
        size: width and height as the picture is shown. orientation: how EXIF turns the label map to fit the picture.
        colours: of the classes, for label maps that are pictures in these.
    """

    picture: Path
    labels: Path
    zero_ignored: bool = False
    size: tuple[int, int] = (0, 0)
    orientation: int = 1
    colours: tuple[tuple[int, ...], ...] = ()

    def read_labels(self) -> Tensor:
        """The classes from 0, IGNORED where no class counts: bytes (H, W). Raises DataError: it is no label map."""
        labels = turn(read_labels(self.labels, self.colours), self.orientation)
        return labels - 1 if self.zero_ignored else labels  # bytes: 0 - 1 is 255, IGNORED


@dataclass(frozen=True)
class Listing:
    """The pairs of a data set, and its classes by name; count: None if only the labels tell how many there are."""

    train: tuple[Pair, ...]
    test: tuple[Pair, ...]
    names: tuple[str, ...]
    count: int | None


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
    raise DataError("data", got, allowed, "See docs/domains/segment.md for the layouts.")


def list_pairs(folder: Path, layout: str | None, problems: Problems) -> Listing:
    """The sound pairs of a folder; why others are not sound is noted. Reads names and headers, no pixels."""
    layout = layout_of(folder, layout)
    parts = [_SPLITS[layout](folder, split, problems) for split in ("train", "val")]
    names, count, colours = _names(folder, layout, problems)
    train, test = (tuple(_sound([pair._replace(colours=colours) for pair in part], problems)) for part in parts)
    return Listing(train, test, names, count)


def _sound(pairs: Sequence[Pair], problems: Problems) -> Iterator[Pair]:
    """The pairs whose files can be opened and have one size."""
    for pair in pairs:
        if not is_file(pair.labels):
            problems.add(pair.picture, "", f"has no label map {pair.labels}")
            continue
        with problems.noting():
            labels, picture = read_header(pair.labels), read_header(pair.picture)
            orientation = picture.turn_for((labels.width, labels.height))
            if orientation is None:
                size = f"is {picture.width} × {picture.height} pixels"
                problems.add(pair.picture, "", f"{size}, and {labels.width} × {labels.height} in {pair.labels}")
                continue
            if picture.fits_both((labels.width, labels.height)) and labels.orientation == 1:
                problems.note(pair.picture, TURNED)
            yield pair._replace(size=(picture.width, picture.height), orientation=orientation)


def _pictures(folder: Path, problems: Problems) -> list[Path]:
    """The picture files below a folder; that there are none is noted."""
    if not folder.is_dir():
        problems.add(folder, "", "there is no such folder")
        return []
    files = find_pictures(folder)
    if not files:
        problems.add(folder, "", "has no pictures")
    return files


def _matched(pictures: Path, labels: Path, problems: Problems, zero_ignored: bool = False) -> list[Pair]:
    """Pairs of equal stems below two folders; label maps without a picture are noted."""
    files = _pictures(pictures, problems)
    if not labels.is_dir():
        problems.add(labels, "", "there is no such folder: the pictures have no annotations")
        return []
    maps = {composed(str(path.relative_to(labels).with_suffix(""))): path for path in find_pictures(labels)}
    pairs = []
    for file in files:
        stem = str(file.relative_to(pictures).with_suffix(""))
        pairs.append(Pair(file, maps.pop(composed(stem), labels / f"{stem}.png"), zero_ignored))
    for path in maps.values():
        problems.add(path, "", f"has no picture in {pictures}")
    return pairs


def _ade20k(folder: Path, split: str, problems: Problems) -> list[Pair]:
    part = {"train": "training", "val": "validation"}[split]
    return _matched(folder / "images" / part, folder / "annotations" / part, problems, zero_ignored=True)


def _cityscapes(folder: Path, split: str, problems: Problems) -> list[Pair]:
    pictures, pairs = folder / "leftImg8bit" / split, []
    for file in _pictures(pictures, problems):
        stem = file.stem.removesuffix("_leftImg8bit")
        city = folder / "gtFine" / split / file.relative_to(pictures).parent
        labels = city / f"{stem}_gtFine_labelTrainIds.png"
        if not labels.is_file() and (city / f"{stem}_gtFine_labelIds.png").is_file():
            text = f"has only labelIds in {city}; make labelTrainIds by createTrainIdLabelImgs of cityscapesscripts"
            problems.add(file, "", text)
            continue
        pairs.append(Pair(file, labels))
    return pairs


def _voc(folder: Path, split: str, problems: Problems) -> list[Pair]:
    names_file = folder / "ImageSets" / "Segmentation" / f"{split}.txt"
    if not is_file(names_file):
        problems.add(names_file, "", "there is no such file")
        return []
    pairs = []
    for number, line in enumerate(read_names(names_file).splitlines(), 1):
        name = line.strip()
        if not name:
            continue
        files = [named_file(folder / "JPEGImages", f"{name}{suffix}") for suffix in (".jpg", *sorted(SUFFIXES))]
        picture = next((path for path in files if is_file(path)), None)
        if picture is None:
            problems.add(names_file, f"line {number}", f"{files[0]} does not exist")
            continue
        pairs.append(Pair(picture, named_file(folder / "SegmentationClass", f"{name}.png")))
    if not pairs:
        problems.add(names_file, "", "names no picture")
    return pairs


def _part(folder: Path, split: str, what: str) -> Path:
    """train/images, or images/train where that is how the folder is arranged."""
    other = folder / what / split
    return other if other.is_dir() else folder / split / what


def _folders(folder: Path, split: str, problems: Problems) -> list[Pair]:
    return _matched(_part(folder, split, "images"), _part(folder, split, "labels"), problems)


_SPLITS = {"ade20k": _ade20k, "cityscapes": _cityscapes, "voc": _voc, "folders": _folders}


def _names(
    folder: Path, layout: str, problems: Problems
) -> tuple[tuple[str, ...], int | None, tuple[tuple[int, ...], ...]]:
    """The names of the classes, how many there are (None where only the labels tell), and their colours in label maps.

    A data set's own file of names comes before the names of the benchmark that has its layout.
    """
    colours: tuple[tuple[int, ...], ...] = ()
    if layout == "ade20k" and (file := folder / NAMES_FILE).is_file():  # a table: Idx, Ratio, Train, Val, Stuff, Name
        rows = [line for line in read_text(file).splitlines() if line.strip()][1:]
        names = distinct(row.split("\t")[-1].split(",")[0].split(";")[0].strip() for row in rows)
    elif own := own_names(folder):
        names, colours, file = own
    else:
        names = {"cityscapes": CITYSCAPES, "voc": VOC}.get(layout, ())
        return names, len(names) or (ADE_CLASSES if layout == "ade20k" else None), ()
    if len(names) < 2:
        problems.add(file, "", f"names {len(names)} class; two or more are needed")
    elif len(names) > IGNORED:
        problems.add(file, "", f"names {len(names)} classes; at most {IGNORED} are possible")
    return names, len(names), colours


def check_labels(pair: Pair, classes: int, problems: Problems) -> set[int]:
    """The classes that occur in a label map; what is wrong with its numbers is noted."""
    with problems.noting():
        labels = pair.read_labels()
        counts = torch.bincount(labels.flatten().long(), minlength=IGNORED + 1)
        counts[IGNORED] = 0
        occurring = set(counts.nonzero()[:, 0].tolist())
        odd = sorted(label for label in occurring if label >= classes)
        if odd:
            shift = int(pair.zero_ignored)
            where = (labels == odd[0]).nonzero()[0].tolist()
            last = classes - 1 + shift
            text = (
                f"is not a label from {shift} to {last} of {classes} classes, nor {0 if shift else IGNORED} (ignored)"
            )
            problems.add(pair.labels, f"label {odd[0] + shift} at row {where[0]}, column {where[1]}", text)
        return occurring
    return set()


def write_ade20k(folder: Path, split: str, scenes: Iterable[Mapping[str, Any]]) -> None:
    """Write scenes as ADE20K has them, with PNG files for pictures: images/SPLIT/*.png, annotations/SPLIT/*.png.

    split: "training" or "validation". scenes: each with `image`, bytes (3, H, W), and `classes` (H, W) from 0,
        IGNORED where none counts.
    """
    for name in ("images", "annotations"):
        (folder / name / split).mkdir(parents=True, exist_ok=True)
    for place, scene in enumerate(scenes):
        stem = f"ADE_{split[:-3] if split == 'training' else 'val'}_{place + 1:08d}.png"
        write_png(folder / "images" / split / stem, scene["image"])
        write_png(folder / "annotations" / split / stem, scene["classes"].to(torch.uint8) + 1)  # IGNORED + 1 is 0


def write_names(folder: Path, names: Sequence[str]) -> None:
    """Write the table of classes as ADE20K has it."""
    rows = [f"{place}\t0\t0\t0\t0\t{name}" for place, name in enumerate(names, 1)]
    write_whole(folder / NAMES_FILE, "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]) + "\n")
