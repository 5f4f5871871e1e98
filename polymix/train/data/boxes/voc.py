"""Pictures annotated in PASCAL VOC's format: an XML file for each."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from polymix.errors import DataError
from polymix.files import is_file, regular
from polymix.train.data.boxes.annotations import AnnotatedPicture, Annotation, Box, Frame, Parts, check_box, check_file
from polymix.train.data.class_names import class_name
from polymix.train.data.pictures import SUFFIXES
from polymix.train.data.problems import Problems
from polymix.train.data.texts import named_file, read_names

Objects = list[tuple[str, Box, bool]]


def read(folder: Path, problems: Problems) -> Parts:
    """Training pictures, test pictures (val) and classes, in alphabetical order, of a folder such as VOC2012.

    `JPEGImages/`, `Annotations/*.xml` and `ImageSets/Main/train.txt` and `val.txt`. Corners count from 1 and belong to
    the box: xmin 1 and xmax 10 are the pixels 0 to 10. Objects marked difficult count neither for nor against, as
    crowds do.

    Raises DataError if a list is missing or empty.
    """
    parts: dict[str, list[tuple[Path, Path, Frame, Objects]]] = {}
    for split in ("train", "val"):
        file = folder / "ImageSets" / "Main" / f"{split}.txt"
        names = {f"line {place} of {file}": line.split()[0]
                 for place, line in enumerate(_names(file).splitlines(), 1) if line.strip()}  # fmt: skip
        if not names:
            raise DataError("data", f"{file} with no name in it", "a name of a picture in each line", "")
        rows = [_picture(folder, name, entry, problems) for entry, name in names.items()]
        parts[split] = [row for row in rows if row is not None]
    classes = tuple(sorted({label for rows in parts.values() for row in rows for label, _, _ in row[3]}))
    place = {name: number for number, name in enumerate(classes)}

    def pictures(split: str) -> tuple[AnnotatedPicture, ...]:
        return tuple(
            AnnotatedPicture(file, number, frame.width, frame.height, tuple(
                Annotation(box, place[label], None, difficult, (box[2] - box[0]) * (box[3] - box[1]))
                for label, box, difficult in objects
            ), source=source)
            for number, (source, file, frame, objects) in enumerate(parts[split])
        )  # fmt: skip

    if not classes:
        raise DataError("data", f"{folder} without any object", "at least one", "Check the export.")
    return pictures("train"), pictures("val"), classes


def _names(file: Path) -> str:
    try:
        return read_names(file)
    except DataError as error:
        raise DataError("data", error.got, "ImageSets/Main/train.txt and val.txt, as VOC has them", "") from error


def _picture(folder: Path, name: str, entry: str, problems: Problems) -> tuple[Path, Path, Frame, Objects] | None:
    """The annotations of a name, their picture, its frame and objects; None after noting why. entry: has the name."""
    source = named_file(folder / "Annotations", f"{name}.xml")
    try:
        root = ElementTree.fromstring(regular(source).read_bytes())
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
        problems.add(source, entry, f"cannot be read ({error})")
        return None
    candidates = [str(root.findtext("filename")), *(f"{name}{suffix}" for suffix in (".jpg", *sorted(SUFFIXES)))]
    files = (named_file(folder / "JPEGImages", candidate) for candidate in candidates)
    file = next((path for path in files if is_file(path)), folder / "JPEGImages" / f"{name}.jpg")
    sides = [
        text for key in ("width", "height") if re.fullmatch(r"\d{1,9}", text := root.findtext(f"size/{key}") or "")
    ]
    size = (int(sides[0]), int(sides[1])) if len(sides) == 2 and all(map(int, sides)) else None
    frame = check_file(file, size, str(source), problems)
    if frame is None:
        return None
    objects: Objects = []
    for place, row in enumerate(root.findall("object"), 1):
        try:
            label = class_name((row.findtext("name") or "").strip())
            if not label:
                raise ValueError("an object without a name")
            x1, y1, x2, y2 = (float(row.findtext(f"bndbox/{key}") or "nan") for key in ("xmin", "ymin", "xmax", "ymax"))
            objects.append((label, check_box((x1 - 1, y1 - 1, x2, y2), frame), row.findtext("difficult") == "1"))
        except ValueError as error:
            problems.add(source, f"object {place}", str(error))
    return source, file, frame, objects
