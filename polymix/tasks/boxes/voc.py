"""Pictures annotated in PASCAL VOC's format: an XML file for each."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from polymix.errors import DataError
from polymix.tasks.boxes.pictures import SUFFIXES, Mistakes, Picture, Thing, check_box, check_file

Objects = list[tuple[str, tuple[float, float, float, float], bool]]


def read(folder: Path, mistakes: Mistakes) -> tuple[tuple[Picture, ...], tuple[Picture, ...], tuple[str, ...]]:
    """Training pictures, test pictures (val) and classes, in alphabetical order, of a folder such as VOC2012.

    `JPEGImages/`, `Annotations/*.xml` and `ImageSets/Main/train.txt` and `val.txt`. Corners count from 1 and belong to
    the box: xmin 1 and xmax 10 are the pixels 0 to 10. Objects marked difficult count neither for nor against, as
    crowds do.

    Raises DataError if a list is missing or empty.
    """
    parts: dict[str, list[tuple[Path, int, int, Objects]]] = {}
    for split in ("train", "val"):
        file = folder / "ImageSets" / "Main" / f"{split}.txt"
        names = [line.split()[0] for line in _text(file).splitlines() if line.strip()]
        if not names:
            raise DataError("data", f"{file} with no name in it", "a name of a picture in each line", "")
        found = [_picture(folder, name, mistakes) for name in names]
        parts[split] = [picture for picture in found if picture is not None]
    classes = tuple(sorted({label for rows in parts.values() for row in rows for label, _, _ in row[3]}))
    place = {name: number for number, name in enumerate(classes)}

    def pictures(split: str) -> tuple[Picture, ...]:
        return tuple(
            Picture(file, number, width, height, tuple(
                Thing(box, place[label], None, difficult, (box[2] - box[0]) * (box[3] - box[1]))
                for label, box, difficult in objects
            ))
            for number, (file, width, height, objects) in enumerate(parts[split])
        )  # fmt: skip

    if not classes:
        raise DataError("data", f"{folder} without any object", "at least one", "Check the export.")
    return pictures("train"), pictures("val"), classes


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        got = f"{file}, which cannot be read"
        raise DataError("data", got, "ImageSets/Main/train.txt and val.txt, as VOC has them", "") from error


def _picture(folder: Path, name: str, mistakes: Mistakes) -> tuple[Path, int, int, Objects] | None:
    source = folder / "Annotations" / f"{name}.xml"
    try:
        root = ElementTree.fromstring(source.read_bytes())
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
        mistakes.add(source, "", f"cannot be read ({error})")
        return None
    candidates = [folder / "JPEGImages" / str(root.findtext("filename"))]
    candidates += [folder / "JPEGImages" / f"{name}{suffix}" for suffix in (".jpg", *sorted(SUFFIXES))]
    file = next((path for path in candidates if path.is_file()), folder / "JPEGImages" / f"{name}.jpg")
    said = (root.findtext("size/width"), root.findtext("size/height"))
    size = (int(said[0]), int(said[1])) if all(text and text.isdigit() and int(text) for text in said) else None  # type: ignore[arg-type]
    size = check_file(file, size, source.name, mistakes)
    if size is None:
        return None
    objects: Objects = []
    for place, row in enumerate(root.findall("object"), 1):
        try:
            label = (row.findtext("name") or "").strip()
            if not label:
                raise ValueError("an object without a name")
            x1, y1, x2, y2 = (float(row.findtext(f"bndbox/{key}") or "nan") for key in ("xmin", "ymin", "xmax", "ymax"))
            objects.append((label, check_box((x1 - 1, y1 - 1, x2, y2), *size), row.findtext("difficult") == "1"))
        except ValueError as error:
            mistakes.add(source, f"object {place}", str(error))
    return file, *size, objects
