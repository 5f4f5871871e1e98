"""Pictures annotated in COCO's format: read, checked and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polymix.errors import DataError
from polymix.files import read_json, write_whole
from polymix.train.data.boxes.annotations import (
    AnnotatedPicture,
    Annotation,
    Frame,
    check_box,
    check_file,
    check_shape,
    is_number,
    stored_sides,
)
from polymix.train.data.boxes.masks import box_of, decode, encode
from polymix.train.data.class_names import distinct
from polymix.train.data.pictures import write_png
from polymix.train.data.problems import Problems
from polymix.train.data.texts import named_file

PARTS = ("images", "annotations", "categories")
ROBOFLOW_FILE = "_annotations.coco.json"
TEST_PICTURES = 5000  # of COCO's val2017, by which its published figures are measured


def is_coco_2017(folder: str | None) -> bool:
    """Whether a folder is COCO of 2017 itself, by its files and the number of its test pictures."""
    if folder is None or not all((Path(folder) / f"annotations/instances_{part}2017.json").is_file()
                                 for part in ("train", "val")):  # fmt: skip
        return False
    return sum(1 for _ in (Path(folder) / "val2017").glob("*.jpg")) == TEST_PICTURES


def split(folder: Path, name: str) -> tuple[Path, Path]:
    """The json and the folder of pictures of "train" or "val", by COCO's names, such as instances_train2017.json.

    Or as Roboflow writes them, both in one folder: train/_annotations.coco.json, valid/_annotations.coco.json.

    Raises DataError if one of the two is missing.
    """
    together = (folder / part / ROBOFLOW_FILE for part in ((name, "valid") if name == "val" else (name,)))
    if file := next(filter(Path.is_file, together), None):
        return file, file.parent
    files = sorted((folder / "annotations").glob(f"instances_{name}*.json"))
    if len(files) != 1:
        got = f"{folder / 'annotations'} with {len(files)} files instances_{name}*.json"
        cure = "For one json beside one folder pass annotations=FILE.json and images=FOLDER."
        raise DataError("data", got, "one each for train and val", cure)
    pictures = folder / files[0].stem.removeprefix("instances_")
    if not pictures.is_dir():
        raise DataError("data", f"{folder} without the folder {pictures.name}", "the pictures of each json", "")
    return files[0], pictures


def read(
    source: Path, folder: Path, problems: Problems, masks: bool = True
) -> tuple[tuple[AnnotatedPicture, ...], tuple[str, ...]]:
    """Pictures and classes of a json and a folder. What is wrong is left out and noted.

    Ids may have gaps, and be text or floats; the classes are in the order of the ids. Polygons, and run-length codes as
    lists and as strings, are kept as shapes. Crowds are marked. What is read of an annotation is its bbox (the smallest
    box around the shape where it has none), image_id and category_id, and iscrowd and area where it has them.

    Args:
        masks: read the segmentations. Without it they may be missing, empty or wrong.
    Raises:
        DataError: the json cannot be read, has another form, or has no categories or no annotations.
    """
    allowed = "a json with the lists images, annotations and categories"
    content = read_json(source, DataError, "data", allowed)
    for part in PARTS:
        rows = content.get(part) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DataError("data", f"{source} without a list of objects {part!r}", allowed, "")
        if not rows:
            raise DataError("data", f"{source} with no {part}", f"at least one of the {part}", "Check the export.")
    names: dict[Any, str] = {}
    for row in content["categories"]:
        number, name = _id(row.get("id")), row.get("name")
        if number is None or not (name is None or isinstance(name, str) or is_number(name)):
            problems.add(
                source, f"category {row.get('id')!r}, {name!r}", "its id or its name is neither a number nor text"
            )
            continue
        if number in names:
            problems.add(source, f"category {number}", "the id belongs to another category, too")
        names.setdefault(number, str(number if name is None else name))
    order = {number: place for place, number in enumerate(sorted(names, key=_by_number))}
    frames: dict[Any, tuple[Path, Frame]] = {}
    seen: set[Any] = set()
    for row in content["images"]:
        number, entry = _id(row.get("id")), f"image {row.get('id')}"
        if not isinstance(row.get("file_name"), str) or number is None:
            problems.add(source, entry, "has no id or no file_name")
            continue
        if number in seen:
            problems.add(source, f"{entry}, {row['file_name']}", "another image has this id")
            continue
        seen.add(number)
        file = _picture(folder, row["file_name"])
        frame = check_file(file, _size(row), f"{source}, {entry}", problems)
        if frame is not None:
            frames[number] = (file, frame)
    objects: dict[Any, list[Annotation]] = {number: [] for number in frames}
    for row in content["annotations"]:
        entry = f"annotation {row.get('id')}"
        number, label = _id(row.get("image_id")), _id(row.get("category_id"))
        if number not in seen:
            problems.add(source, entry, f"there is no image {row.get('image_id')}")
        elif label not in names:
            problems.add(source, entry, f"there is no category {row.get('category_id')}")
        elif number in frames:
            file, frame = frames[number]
            where = f"{entry} of {file.name}"
            annotation = _annotation(row, order[label], frame, source, where, problems, masks)
            if annotation is not None:
                objects[number].append(annotation)
    pictures = tuple(
        AnnotatedPicture(file, number if isinstance(number, int) else place, frame.width, frame.height,
                         tuple(objects[number]), frame.orientation, source)
        for place, (number, (file, frame)) in enumerate(frames.items())
    )  # fmt: skip
    return pictures, distinct(names[number] for number in order)


def _number(value: Any) -> Any:
    """A number, also one that is written as text; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return value if is_number(value) else None


def _id(value: Any) -> int | str | None:
    """An id: whole numbers as such, also where they are written as text or as floats."""
    number = _number(value)
    if number is not None and number == int(number):
        return int(number)
    return value if isinstance(value, str) else None if number is None else str(value)


def _by_number(number: int | str) -> tuple[bool, int, str]:
    """The key by which ids are in order: numbers first."""
    return (False, number, "") if isinstance(number, int) else (True, 0, str(number))


def _size(row: Mapping[str, Any]) -> tuple[int, int] | None:
    """Width and height of an image's entry; None where it does not say both."""
    sides = [_number(row.get(name)) for name in ("width", "height")]
    known = all(side is not None and side > 0 for side in sides)
    return (int(sides[0]), int(sides[1])) if known else None


def _picture(folder: Path, name: str) -> Path:
    """The file of an image: below the folder, or else, as tools write paths of another machine, by its last part."""
    posix = name.replace("\\", "/")
    files = (named_file(folder, each) for each in dict.fromkeys((name, posix, posix.rpartition("/")[2])) if each)
    return next((file for file in files if file.is_file()), folder / name)


def _annotation(
    row: Mapping[str, Any], label: int, frame: Frame, source: Path, entry: str, problems: Problems, masks: bool
) -> Annotation | None:
    """An annotation, or None after noting what is wrong with it."""
    shape, box = row.get("segmentation") or None, row.get("bbox") or None
    try:
        if box is None and shape is not None:
            box = box_of(encode(decode(shape, *stored_sides(*frame)[::-1])))
        numbers = [_number(value) for value in box] if isinstance(box, list) else []
        if len(numbers) != 4 or None in numbers:
            raise ValueError(f"bbox {row.get('bbox')!r}, which is not four numbers")
        x, y, width, height = numbers
        corners = check_box((x, y, x + width, y + height), frame)
    except ValueError as error:
        problems.add(source, entry, str(error))
        return None
    area, crowd = _number(row.get("area")), _number(row.get("iscrowd"))
    if not (area and area > 0):  # some tools write 0
        area = (corners[2] - corners[0]) * (corners[3] - corners[1])
    if masks and shape is not None and not check_shape(shape, frame, source, entry, problems):
        return None
    return Annotation(corners, label, shape if masks else None, bool(crowd or row.get("iscrowd") is True), float(area))


def write(folder: Path, split: str, scenes: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> None:
    """Write scenes as COCO has them: {split}/*.png and annotations/instances_{split}.json.

    Args:
        scenes: each with `image`, bytes (3, height, width), `labels`, and `masks` (n, height, width), which are the
            visible parts.
    """
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / split).mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for place, scene in enumerate(scenes):
        height, width = scene["image"].shape[1:]
        name = f"{place:06d}.png"
        write_png(folder / split / name, scene["image"])
        images.append({"id": place + 1, "file_name": name, "width": width, "height": height})
        for mask, label in zip(scene["masks"], scene["labels"], strict=True):
            code = encode(mask)
            annotations.append({
                "id": len(annotations) + 1, "image_id": place + 1, "category_id": int(label) + 1, "iscrowd": 0,
                "bbox": box_of(code), "area": int(mask.sum()), "segmentation": code,
            })  # fmt: skip
    categories = [{"id": place + 1, "name": name} for place, name in enumerate(classes)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write_whole(folder / "annotations" / f"instances_{split}.json", json.dumps(content))
