"""Pictures annotated in COCO's format: read, checked and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polymix._io import read_json, write_whole
from polymix.errors import DataError
from polymix.tasks.boxes.masks import box_of, encode
from polymix.tasks.boxes.pictures import Mistakes, Picture, Thing, check_box, check_file, check_shapes

PARTS = ("images", "annotations", "categories")


def split(folder: Path, name: str) -> tuple[Path, Path]:
    """The json and the folder of pictures of "train" or "val", by COCO's names, such as instances_train2017.json.

    Raises DataError if one of the two is missing.
    """
    files = sorted((folder / "annotations").glob(f"instances_{name}*.json"))
    if len(files) != 1:
        got = f"{folder / 'annotations'} with {len(files)} files instances_{name}*.json"
        cure = "For one json beside one folder pass annotations=FILE.json and images=FOLDER."
        raise DataError("data", got, "one each for train and val", cure)
    pictures = folder / files[0].stem.removeprefix("instances_")
    if not pictures.is_dir():
        raise DataError("data", f"{folder} without the folder {pictures.name}", "the pictures of each json", "")
    return files[0], pictures


def read(source: Path, folder: Path, mistakes: Mistakes) -> tuple[tuple[Picture, ...], tuple[str, ...]]:
    """Pictures and classes of a json and a folder. What is wrong is left out and noted.

    Ids of categories may have gaps; the classes are in the order of the ids. Polygons, and run-length codes as lists
    and as strings, are kept as shapes. Crowds are marked.

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
        if row.get("id") in names:
            mistakes.add(source, f"category {row.get('id')}", "the id belongs to another category, too")
        names.setdefault(row.get("id"), str(row.get("name", row.get("id"))))
    order = {number: place for place, number in enumerate(sorted(names, key=lambda n: (not isinstance(n, int), n)))}
    sizes: dict[Any, tuple[Path, int, int]] = {}
    seen: set[Any] = set()
    for row in content["images"]:
        entry = f"image {row.get('id')}"
        if not isinstance(row.get("file_name"), str) or "id" not in row:
            mistakes.add(source, entry, "has no id or no file_name")
            continue
        if row["id"] in seen:
            mistakes.add(source, f"{entry}, {row['file_name']}", "another image has this id")
            continue
        seen.add(row["id"])
        said = (row.get("width"), row.get("height"))
        size = check_file(
            folder / row["file_name"], said if None not in said else None, f"{source.name}, {entry}", mistakes
        )
        if size is not None:
            sizes[row["id"]] = (folder / row["file_name"], *size)
    things: dict[Any, list[Thing]] = {number: [] for number in sizes}
    for row in content["annotations"]:
        entry = f"annotation {row.get('id')}"
        if row.get("image_id") not in seen:
            mistakes.add(source, entry, f"there is no image {row.get('image_id')}")
        elif row.get("category_id") not in names:
            mistakes.add(source, entry, f"there is no category {row.get('category_id')}")
        elif row["image_id"] in sizes:
            thing = _thing(row, order, sizes[row["image_id"]], source, entry, mistakes)
            if thing is not None:
                things[row["image_id"]].append(thing)
    pictures = tuple(
        Picture(file, number if isinstance(number, int) else place, width, height, tuple(things[number]))
        for place, (number, (file, width, height)) in enumerate(sizes.items())
    )
    return pictures, tuple(names[number] for number in order)


def _thing(
    row: Mapping[str, Any], order: Mapping[Any, int], where: tuple[Path, int, int], source: Path, entry: str,
    mistakes: Mistakes,
) -> Thing | None:  # fmt: skip
    """The object of an annotation, or None after noting what is wrong."""
    _, width, height = where
    box = row.get("bbox")
    try:
        if not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, (int, float)) for v in box):
            raise ValueError(f"bbox {box!r}, which is not four numbers")
        corners = check_box((box[0], box[1], box[0] + box[2], box[1] + box[3]), width, height)
    except ValueError as error:
        mistakes.add(source, f"{entry} of {where[0].name}", str(error))
        return None
    area = row.get("area")
    area = float(area) if isinstance(area, (int, float)) else (corners[2] - corners[0]) * (corners[3] - corners[1])
    thing = Thing(corners, order[row["category_id"]], row.get("segmentation") or None, bool(row.get("iscrowd")), area)
    if thing.shape is not None and not check_shapes(
        mistakes, source, f"{entry} of {where[0].name}", thing, width, height
    ):
        return None
    return thing


def write(folder: Path, split: str, scenes: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> None:
    """Write scenes as COCO has them: {split}/*.png and annotations/instances_{split}.json.

    Args:
        scenes: each with `image`, bytes (3, height, width), `labels`, and `masks` (n, height, width), which are the
            visible parts.
    """
    from PIL import Image

    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / split).mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for place, scene in enumerate(scenes):
        height, width = scene["image"].shape[1:]
        name = f"{place:06d}.png"
        raw = bytes(scene["image"].permute(1, 2, 0).contiguous().flatten().tolist())
        Image.frombytes("RGB", (width, height), raw).save(folder / split / name, compress_level=1)
        images.append({"id": place + 1, "file_name": name, "width": width, "height": height})
        for mask, label in zip(scene["masks"], scene["labels"], strict=True):
            annotations.append({
                "id": len(annotations) + 1, "image_id": place + 1, "category_id": int(label) + 1, "iscrowd": 0,
                "bbox": box_of(mask), "area": int(mask.sum()), "segmentation": encode(mask),
            })  # fmt: skip
    categories = [{"id": place + 1, "name": name} for place, name in enumerate(classes)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write_whole(folder / "annotations" / f"instances_{split}.json", json.dumps(content))
