"""WIDER FACE's own files: lists of faces, and the lists of those that count as easy, medium and hard."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from polymix.errors import DataError, one_line
from polymix.extras import needs
from polymix.files import write_whole
from polymix.train.data.boxes.annotations import AnnotatedPicture, Annotation, Frame, check_file
from polymix.train.data.pictures import write_png
from polymix.train.data.problems import Problems
from polymix.train.data.texts import named_file, read_names

SUBSETS = ("easy", "medium", "hard")
LIST_NAME = "wider_face_{}_bbx_gt.txt"
SUBSET_FILE = "wider_{}_val.mat"
LIST_FOLDERS = (".", "wider_face_split", "ground_truth", "eval_tools/ground_truth")  # where the lists lie in a folder
# The numbers after x, y, width and height, and their largest values.
ATTRIBUTES = {"blur": 2, "expression": 1, "illumination": 1, "invalid": 1, "occlusion": 2, "pose": 1}
Counted = dict[str, tuple[frozenset[int], ...]]  # for each subset and each picture the faces that count, from 0


def find(folder: Path, name: str) -> Path | None:
    """A list in one of the places in which people have it; None if it is in none of them."""
    return next((path for place in LIST_FOLDERS if (path := folder / place / name).is_file()), None)


def read(folder: Path, split: str, problems: Problems) -> tuple[AnnotatedPicture, ...]:
    """The pictures of "train" or "val" with their faces, in the order of the list.

    Every line keeps its place, because the subsets count lines. A face is marked as a crowd, which is no target, if it
    is invalid, has no area, or has a mistake. The line of zeros after a count of 0 is no face.

    Raises:
        DataError: there is no list, or it is no list of WIDER FACE.
    """
    source = find(folder, LIST_NAME.format(split))
    images = folder / f"WIDER_{split}" / "images"
    if source is None:
        got = f"{folder} without {LIST_NAME.format(split)}"
        raise DataError("data", got, "a folder in WIDER FACE's layout", "It may also lie in wider_face_split/.")
    if not images.is_dir():
        raise DataError("data", f"{folder} without WIDER_{split}/images", "the pictures of the list", "Unpack them.")
    lines = read_names(source).splitlines()
    pictures: list[AnnotatedPicture] = []
    seen: set[str] = set()
    row = 0
    while row < len(lines):
        name = lines[row].strip()
        if not name:
            row += 1
            continue
        where = f"line {row + 1}, {name}"
        if not _is_name(name):
            problems.add(source, where, "expected the name of a picture; a count before it is wrong")
            row += 1
            continue
        count = lines[row + 1].strip() if row + 1 < len(lines) else ""
        if not re.fullmatch(r"\d{1,9}", count):
            problems.add(source, where, f"is followed by {count!r}, not by the number of its faces")
            row += 1
            continue
        first = row + 2
        row = min(first + max(1, int(count)), len(lines))
        rows = lines[first:row]
        for place, line in enumerate(rows):
            if _is_name(line.strip()):
                rows, row = rows[:place], first + place
                break
        if int(count) == 0:
            if rows and any(word not in ("0", "") for word in rows[0].split()):
                problems.add(source, f"line {first + 1}, {name}", "a face after a count of 0")
            rows = []
        elif len(rows) < int(count):
            problems.add(source, where, f"says {count} faces, and {len(rows)} lines follow")
        if name in seen:
            problems.add(source, where, "the picture occurs twice")
            continue
        seen.add(name)
        file = named_file(images, name)
        frame = check_file(file, None, where, problems)
        if frame is not None:
            faces = tuple(_face(line, frame, source, f"line {first + place + 1}, face {place + 1} of {name}", problems)
                          for place, line in enumerate(rows))  # fmt: skip
            pictures.append(AnnotatedPicture(file, len(pictures), frame.width, frame.height, faces))
    if not pictures and not problems.lines:
        raise DataError("data", f"{source} without a picture", "a list of WIDER FACE", "Check the file.")
    return tuple(pictures)


def _is_name(line: str) -> bool:
    """Whether a line names a picture."""
    return line.lower().endswith((".jpg", ".jpeg", ".png"))


def _face(line: str, frame: Frame, source: Path, entry: str, problems: Problems) -> Annotation:
    """The face of a line; a crowd without area where the line is wrong."""
    none = Annotation((0.0, 0.0, 0.0, 0.0), 0, crowd=True)
    try:
        numbers = [int(word) for word in line.split()]
    except ValueError:
        problems.add(source, entry, f"{line.strip()!r} is not ten whole numbers")
        return none
    if len(numbers) not in (4, 4 + len(ATTRIBUTES)):
        problems.add(source, entry, f"has {len(numbers)} numbers, not ten: x, y, w, h, {', '.join(ATTRIBUTES)}")
        return none
    x, y, width, height = numbers[:4]
    attributes = dict(zip(ATTRIBUTES, numbers[4:], strict=False))
    odd = [name for name, value in attributes.items() if not 0 <= value <= ATTRIBUTES[name]]
    if odd:
        problems.add(source, entry, f"{odd[0]} is {attributes[odd[0]]}, expected 0 to {ATTRIBUTES[odd[0]]}")
        return none
    if width < 0 or height < 0:
        problems.add(source, entry, f"a box of {width} × {height}")
        return none
    empty = not width or not height
    if not empty and (x >= frame.width or y >= frame.height or x + width <= 0 or y + height <= 0):
        sides = f"{frame.width} × {frame.height}"
        problems.add(source, entry, f"a box outside the picture: {x}, {y}, {width} × {height} in {sides}")
        return none
    box = (float(x), float(y), float(x + width), float(y + height))
    return Annotation(box, 0, attributes or None, bool(empty or attributes.get("invalid")), float(width * height))


def read_subsets(folder: Path, pictures: Sequence[AnnotatedPicture], problems: Problems) -> Counted:
    """Which faces count, by subset and picture. Without the three files: {"all": every face that is no crowd}.

    A file has `event_list`, `file_list` and `gt_list`: for each event and picture the places of the faces that count,
    from 1. Raises MissingExtraError without scipy.
    """
    files = {name: find(folder, SUBSET_FILE.format(name)) for name in SUBSETS}
    missing = [SUBSET_FILE.format(name) for name, path in files.items() if path is None]
    if len(missing) == len(SUBSETS):
        every = tuple(frozenset(i for i, face in enumerate(p.objects) if not face.crowd) for p in pictures)
        return {"all": every}
    if missing:
        problems.add(folder, "", f"has no {missing[0]}, but another of the three")
    counted: Counted = {}
    for name, path in files.items():
        lists = {} if path is None else _lists(path, problems)
        rows = []
        for picture in pictures:
            key = (picture.file.parent.name, picture.file.stem)
            if key not in lists and path is not None and lists:
                problems.add(path, "/".join(key), "is not in the file")
            places = lists.get(key, frozenset())
            wrong = [place for place in places if not 0 <= place < len(picture.objects)]
            if wrong:
                entry, number = "/".join(key), len(picture.objects)
                problems.add(str(path), entry, f"counts face {wrong[0] + 1}, and the picture has {number}")
            rows.append(frozenset(places - set(wrong)))
        counted[name] = tuple(rows)
    return counted


def _lists(path: Path, problems: Problems) -> dict[tuple[str, str], frozenset[int]]:
    """The places of a subset's faces, from 0, by event and picture; nothing after noting why it cannot be read."""
    with needs("photos", "WIDER FACE's subsets are read with it."):
        from scipy.io import loadmat
    places_of: dict[tuple[str, str], frozenset[int]] = {}
    try:
        content = loadmat(path)
        events, files, faces = (content[name].ravel() for name in ("event_list", "file_list", "gt_list"))
        for event, names, lists in zip(events, files, faces, strict=True):
            for name, places in zip(names.ravel(), lists.ravel(), strict=True):
                key = (str(event.item()), str(name.item()))
                places_of[key] = frozenset(int(place) - 1 for place in numpy.asarray(places).ravel())
    except Exception as error:  # whatever scipy raises on a damaged file
        problems.add(path, "", f"cannot be read ({one_line(error)[:200] or type(error).__name__})")
        return {}
    return places_of


def write(folder: Path, split: str, scenes: Sequence[Mapping[str, Any]]) -> None:
    """Write scenes as WIDER FACE has them, and with "val" the three subsets.

    Args:
        scenes: each with `image`, bytes (3, height, width), `boxes`, lists of x, y, width and height, and `subsets`,
            the places of the faces of each subset.
    """
    from scipy.io import savemat

    event = "0--Scenes"
    images = folder / f"WIDER_{split}" / "images" / event
    images.mkdir(parents=True, exist_ok=True)
    lines, names = [], []
    for number, scene in enumerate(scenes):
        name = f"0_Scenes_{number:05d}"
        write_png(images / f"{name}.png", scene["image"])
        rows = [" ".join(map(str, (*box, *[0] * len(ATTRIBUTES)))) for box in scene["boxes"]]
        lines += [f"{event}/{name}.png", str(len(rows)), *(rows or [" ".join("0" * 10)])]
        names.append(name)
    lists = folder / "wider_face_split"
    lists.mkdir(exist_ok=True)
    write_whole(lists / LIST_NAME.format(split), "\n".join(lines) + "\n")
    for subset in SUBSETS if split == "val" else ():
        places = [numpy.array([[i + 1] for i in scene["subsets"][subset]], dtype=numpy.uint16).reshape(-1, 1)
                  for scene in scenes]  # fmt: skip
        content = {"event_list": _cell([event]), "file_list": _cell([_cell(names)]), "gt_list": _cell([_cell(places)])}
        savemat(lists / SUBSET_FILE.format(subset), content, do_compression=True)


def _cell(values: Sequence[Any]) -> Any:
    """MATLAB's cell array (n, 1)."""
    cell = numpy.empty((len(values), 1), dtype=object)
    for place, value in enumerate(values):
        cell[place, 0] = value
    return cell
