"""nuScenes-lidarseg: which file labels which keyframe, the classes of its benchmark, and the names of predictions."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from polymix.errors import DataError
from polymix.files import is_file
from polymix.train.data.problems import Problems
from polymix.train.data.scans.nuscenes_tables import Tables, root_of, version_of

CLASSES = (
    "barrier", "bicycle", "bus", "car", "construction vehicle", "motorcycle", "pedestrian", "traffic cone", "trailer",
    "truck", "driveable surface", "other flat", "sidewalk", "terrain", "manmade", "vegetation",
)  # fmt: skip
# Categories to classes; those that are missing here do not count.
CATEGORIES = {
    "human.pedestrian.adult": 6, "human.pedestrian.child": 6, "human.pedestrian.construction_worker": 6,
    "human.pedestrian.police_officer": 6, "movable_object.barrier": 0, "movable_object.trafficcone": 7,
    "vehicle.bicycle": 1, "vehicle.bus.bendy": 2, "vehicle.bus.rigid": 2, "vehicle.car": 3, "vehicle.construction": 4,
    "vehicle.motorcycle": 5, "vehicle.trailer": 8, "vehicle.truck": 9, "flat.driveable_surface": 10, "flat.other": 11,
    "flat.sidewalk": 12, "flat.terrain": 13, "static.manmade": 14, "static.vegetation": 15,
}  # fmt: skip
NUMBERS = 256  # of a label's byte
TABLES = ("scene", "sample", "sample_data", "calibrated_sensor", "sensor", "category", "lidarseg")


class Labelled(NamedTuple):
    """A keyframe's points and labels; None: it has none."""

    points: Path
    labels: Path | None


def list_keyframes(root: Path, problems: Problems) -> tuple[list[Labelled], list[Labelled], tuple[int, ...]]:
    """Keyframes for training and for tests, and the class of each number of a label: -1 does not count, -2 is unknown.

    Raises DataError for a table or an entry that is missing.
    """
    folder = version_of(root)
    if folder is None:
        raise DataError("data", f"{root} without v1.*/", "the folder of nuScenes' tables", "Check the path.")
    tables = Tables(folder, TABLES)
    files = {row.get("sample_data_token"): row.get("filename") for row in tables.rows["lidarseg"].values()}
    parts = []
    for rows in tables.split(problems):
        part = []
        for row in rows:
            name = files.get(row["token"])
            labels = None if not isinstance(name, str) else root / name
            part.append(Labelled(root / row["filename"], labels if labels and is_file(labels) else None))
        parts.append(part)
    numbers = [-2] * NUMBERS
    for token, row in tables.rows["category"].items():
        index = row.get("index")
        if not isinstance(index, int) or not 0 <= index < NUMBERS:
            got = f"{folder / 'category.json'}, {token}: index {index!r}"
            raise DataError("data", got, f"0 to {NUMBERS - 1}, as nuScenes-lidarseg has it", "Restore the table.")
        numbers[index] = CATEGORIES.get(str(row.get("name")), -1)
    return parts[0], parts[1], tuple(numbers)


def output_of(file: Path, opened: dict[Path, dict[str, str]]) -> str:
    """The name that nuScenes gives to the labels of a file of points, TOKEN_lidarseg.bin; `opened` keeps tables.

    Raises DataError for a file outside nuScenes' folders, or one that sample_data.json does not have.
    """
    file = file.resolve()
    root, folder = root_of(file)
    if folder not in opened:
        rows = Tables(folder, ("sample_data",)).rows["sample_data"]
        opened[folder] = {str(row.get("filename")): token for token, row in rows.items()}
    name = file.relative_to(root).as_posix()
    if name not in opened[folder]:
        raise DataError("files", f"{file}, which sample_data.json does not have", "one of its files", "Pass another.")
    return f"{opened[folder][name]}_lidarseg.bin"
