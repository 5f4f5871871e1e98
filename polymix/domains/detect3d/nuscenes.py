"""nuScenes' tables: keyframes with their sweeps and boxes, and predictions in the format of its results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from polymix.domains.detect3d.frames import INPUTS, Frame, Objects
from polymix.domains.detect3d.poses import Pose, numbers, quaternion_of, yaw_of
from polymix.errors import DataError
from polymix.files import is_file, write_whole
from polymix.train.data.problems import Problems
from polymix.train.data.scans.files import read_points
from polymix.train.data.scans.nuscenes_tables import Tables, root_of, version_of

# The groups of classes of CenterPoint's head, and of OpenPCDet's for nuScenes; classes go by their order.
GROUPS = (("car",), ("truck", "construction_vehicle"), ("bus", "trailer"), ("barrier",), ("motorcycle", "bicycle"),
          ("pedestrian", "traffic_cone"))  # fmt: skip
CLASSES = tuple(name for group in GROUPS for name in group)
# Categories of the annotations that the detection task counts.
CATEGORIES = {
    "vehicle.car": "car", "vehicle.truck": "truck", "vehicle.bus.bendy": "bus", "vehicle.bus.rigid": "bus",
    "vehicle.trailer": "trailer", "vehicle.construction": "construction_vehicle", "vehicle.motorcycle": "motorcycle",
    "vehicle.bicycle": "bicycle", "movable_object.trafficcone": "traffic_cone", "movable_object.barrier": "barrier",
    "human.pedestrian.adult": "pedestrian", "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian", "human.pedestrian.police_officer": "pedestrian",
}  # fmt: skip
TABLES = ("scene", "sample", "sample_data", "ego_pose", "calibrated_sensor", "sensor", "sample_annotation",
          "instance", "category", "attribute")  # fmt: skip
LONGEST_GAP = 1.5  # seconds between two annotations that tell a velocity
MOVING_SPEED = 0.2  # metres per second from which a predicted object is said to move
MAX_BOXES = 500  # of a sample in a results file
_VEHICLES = ("car", "truck", "bus", "trailer", "construction_vehicle")


class BoxTables(Tables):
    """The tables that boxes need, and the annotations of each sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, TABLES)
        self.annotations: dict[Any, list[Mapping[str, Any]]] = {}
        for row in self.rows["sample_annotation"].values():
            self.annotations.setdefault(row.get("sample_token"), []).append(row)

    def pose(self, table: str, token: Any, asked: str) -> Pose:
        """The pose in a row of ego_pose or calibrated_sensor."""
        values = [self.get(table, token, key, asked) for key in ("rotation", "translation")]
        return Pose.of(values[0], values[1], f"{self.folder / table}.json, {token}")


def list_frames(root: Path, sweeps: int, problems: Problems) -> tuple[list[Frame], list[Frame]]:
    """Training and test keyframes, as `Tables.split` tells them. Adds what is wrong to the problems."""
    folder = version_of(root)
    if folder is None:
        raise DataError("data", f"{root} without v1.*/", "the folder of nuScenes' tables", "Check the path.")
    tables = BoxTables(folder)
    frames: list[list[Frame]] = [[], []]
    for place, rows in enumerate(tables.split(problems)):
        for row in rows:
            with problems.noting():
                frames[place].append(frame_of(tables, row, sweeps))
    return frames[0], frames[1]


def frame_of(tables: BoxTables, row: Mapping[str, Any], sweeps: int) -> Frame:
    """The frame of a keyframe of sample_data, joined with the sweeps before it, in the vehicle's frame."""
    asked = tables.where("sample_data", row)
    pose = tables.pose("ego_pose", row.get("ego_pose_token"), asked)
    chain: list[tuple[Path, Pose, Pose, float]] = []
    now = row
    while len(chain) < sweeps:
        mount = tables.pose("calibrated_sensor", now.get("calibrated_sensor_token"), asked)
        chain.append((tables.root / now["filename"], mount,
                      tables.pose("ego_pose", now.get("ego_pose_token"), asked),
                      (row["timestamp"] - now["timestamp"]) / 1e6))  # fmt: skip
        if not now.get("prev"):
            break
        before = tables.rows["sample_data"].get(now["prev"])
        if before is None or before["timestamp"] >= now["timestamp"]:
            what = "does not exist" if before is None else "is not earlier"
            raise DataError(
                "data", f"{tables.where('sample_data', now)}: prev {what}", "the sweep before it", "Restore it."
            )
        now = before
    for path, *_ in chain:
        if not is_file(path):
            got = f"{path}, which does not exist, from {asked} or the sweeps before"
            raise DataError("data", got, "the points of a sweep", "Restore it.")
    token = row["sample_token"]
    return Frame(chain[0][0], token, partial(_join, chain, pose), _objects(tables, token, pose), pose)


def _join(chain: Sequence[tuple[Path, Pose, Pose, float]], pose: Pose) -> Any:
    """All sweeps in the vehicle's frame of the keyframe: x, y, z, intensity from 0 to 255, and age in seconds."""
    parts = []
    for path, mount, ego, age in chain:
        raw = read_points(path, 5)
        places = pose.undo(ego.apply(mount.apply(raw[:, :3].astype(numpy.float64))))
        part = numpy.empty((len(raw), INPUTS), dtype=numpy.float32)
        part[:, :3], part[:, 3], part[:, 4] = places, raw[:, 3], age
        parts.append(part)
    return numpy.concatenate(parts)


def _objects(tables: BoxTables, sample: str, pose: Pose) -> Objects:
    """The boxes of a sample that count, in the vehicle's frame."""
    boxes, labels, attributes, points = [], [], [], []
    for row in tables.annotations.get(sample, []):
        asked = tables.where("sample_annotation", row)
        category = tables.get("instance", row.get("instance_token"), "category_token", asked)
        name = CATEGORIES.get(tables.get("category", category, "name", asked))
        if name is None:
            continue
        placed = Pose.of(row.get("rotation", ()), row.get("translation", ()), asked)
        size = numbers(row.get("size"), 3, f"{asked}: size")
        if (size <= 0).any():
            raise DataError("data", f"{asked}: size {size.tolist()}", "sides above 0", "Correct it.")
        speed = _velocity(tables, row) @ pose.turn
        centre = pose.undo(placed.place)
        yaw = yaw_of(pose.turn.T @ placed.turn)
        boxes.append([*centre, size[1], size[0], size[2], yaw, speed[0], speed[1]])
        labels.append(CLASSES.index(name))
        tokens = row.get("attribute_tokens") or [""]
        attributes.append(tables.get("attribute", tokens[0], "name", asked) if tokens[0] else "")
        points.append(int(row.get("num_lidar_pts", 0)) + int(row.get("num_radar_pts", 0)))
    return Objects(numpy.array(boxes, dtype=numpy.float32).reshape(-1, 9), numpy.array(labels, dtype=numpy.int64),
                   attributes, numpy.array(points, dtype=numpy.int64))  # fmt: skip


def _velocity(tables: BoxTables, row: Mapping[str, Any]) -> Any:
    """Metres per second (3,) between the annotations before and after; not a number where they tell none."""
    ends = [tables.rows["sample_annotation"].get(row.get(key, "")) or row for key in ("prev", "next")]
    names = [tables.where("sample_annotation", end) for end in ends]
    times = [
        tables.get("sample", end.get("sample_token"), "timestamp", name) / 1e6
        for end, name in zip(ends, names, strict=True)
    ]
    gap = times[1] - times[0]
    longest = LONGEST_GAP * (2 if ends[0] is not row and ends[1] is not row else 1)
    if not 0 < gap <= longest:
        return numpy.full(3, math.nan)
    first, last = (
        numbers(end.get("translation"), 3, f"{name}: translation") for end, name in zip(ends, names, strict=True)
    )
    return (last - first) / gap


def attribute_of(name: str, speed: float) -> str:
    """The attribute of a predicted object, told by its speed; "" for classes that have none."""
    if name in _VEHICLES:
        return "vehicle.moving" if speed > MOVING_SPEED else "vehicle.parked"
    if name == "pedestrian":
        return "pedestrian.moving" if speed > MOVING_SPEED else "pedestrian.standing"
    if name in ("motorcycle", "bicycle"):
        return "cycle.with_rider" if speed > MOVING_SPEED else "cycle.without_rider"
    return ""


def write_results(path: Path, predictions: Iterable[tuple[Frame, Mapping[str, Any]]], classes: Sequence[str]) -> None:
    """Predictions of frames as nuScenes' results have them, in the world's frame; the best 500 of a sample."""
    results: dict[str, list[dict[str, Any]]] = {}
    for frame, row in predictions:
        pose: Any = frame.pose
        boxes = row["boxes"].double().numpy()
        centres = pose.apply(boxes[:, :3])
        speeds = numpy.concatenate((boxes[:, 7:9], numpy.zeros((len(boxes), 1))), 1) @ pose.turn.T
        results[frame.token] = [
            {"sample_token": frame.token, "translation": centre.tolist(), "size": box[[4, 3, 5]].tolist(),
             "rotation": quaternion_of(box[6] + yaw_of(pose.turn)), "velocity": speed[:2].tolist(),
             "detection_name": classes[label], "detection_score": score,
             "attribute_name": attribute_of(classes[label], float(numpy.hypot(*speed[:2])))}
            for centre, box, speed, label, score in list(zip(
                centres, boxes, speeds, row["labels"].tolist(), row["scores"].tolist(), strict=True))[:MAX_BOXES]
        ]  # fmt: skip
    meta = {f"use_{name}": name == "lidar" for name in ("camera", "lidar", "radar", "map", "external")}
    write_whole(path, json.dumps({"meta": meta, "results": results}))


def frame_at(file: Path, sweeps: int, opened: dict[Path, BoxTables]) -> Frame:
    """The keyframe whose points are in `file`, by the tables of its data set; `opened` keeps them."""
    file = file.resolve()
    root, folder = root_of(file)
    if folder not in opened:
        opened[folder] = BoxTables(folder)
    name = file.relative_to(root).as_posix()
    for row in opened[folder].keyframes(Problems()):
        if row["filename"] == name:
            return frame_of(opened[folder], row, sweeps)
    raise DataError("files", f"{file}, no keyframe of sample_data.json", "samples/LIDAR_TOP/*.pcd.bin", "Pass another.")
