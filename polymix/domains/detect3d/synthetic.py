"""Synthetic drives of a LiDAR through streets in which cars and persons move, written as nuScenes has its tables."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy
from numpy.random import Generator

from polymix.domains.detect3d.poses import Pose, quaternion_of
from polymix.train.data.scans.lidar import HEIGHT, SURFACES, Solid, cast, street
from polymix.train.data.scans.nuscenes_tables import BRIGHTEST, LIDAR

NAME = "drives of a virtual LiDAR"
VERSION, MAP = "v1.0-synthetic", "maps/synthetic.png"
TICK, KEY = 0.05, 0.5  # seconds between sweeps, and between keyframes
KEYFRAMES = 2  # of a drive
MOUNT_YAW = -numpy.pi / 2  # of the LiDAR on the vehicle, as nuScenes has it: x is to the right
# The devkit asks for a log, a map of the ground and the levels of visibility; none of them says anything here.
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
_LEVELS = ("v0-40", "v40-60", "v60-80", "v80-100")
_ATTRIBUTES = ("vehicle.moving", "vehicle.parked", "pedestrian.moving", "pedestrian.standing")
_KINDS = {"car": "vehicle", "truck": "vehicle", "person": "pedestrian"}  # the surfaces of objects with boxes
# nuScenes' categories, in the order of the numbers that nuScenes-lidarseg gives them.
_CATEGORIES = (
    "noise", "animal", "human.pedestrian.adult", "human.pedestrian.child", "human.pedestrian.construction_worker",
    "human.pedestrian.personal_mobility", "human.pedestrian.police_officer", "human.pedestrian.stroller",
    "human.pedestrian.wheelchair", "movable_object.barrier", "movable_object.debris",
    "movable_object.pushable_pullable", "movable_object.trafficcone", "static_object.bicycle_rack", "vehicle.bicycle",
    "vehicle.bus.bendy", "vehicle.bus.rigid", "vehicle.car", "vehicle.construction", "vehicle.emergency.ambulance",
    "vehicle.emergency.police", "vehicle.motorcycle", "vehicle.trailer", "vehicle.truck", "flat.driveable_surface",
    "flat.other", "flat.sidewalk", "flat.terrain", "static.manmade", "static.other", "static.vegetation", "vehicle.ego",
)  # fmt: skip
_CATEGORY_OF = {"car": "vehicle.car", "truck": "vehicle.truck", "person": "human.pedestrian.adult",
                "road": "flat.driveable_surface",
                "sidewalk": "flat.sidewalk", "building": "static.manmade", "pole": "static.manmade",
                "vegetation": "static.vegetation"}  # fmt: skip
_NUMBERS = numpy.zeros(1 << 8, dtype=numpy.uint8)  # SemanticKITTI's to nuScenes'
for _surface, (_raw, _) in SURFACES.items():
    _NUMBERS[_raw] = _CATEGORIES.index(_CATEGORY_OF[_surface])


def synthetic(
    folder: str | Path, seed: int = 0, scenes: int = 60, test_scenes: int = 20, sweeps: int = 3, question: str = "what"
) -> Path:
    """Write drives as nuScenes has them into a folder, and return it.

    They have boxes, and labels of the keyframes' points as in nuScenes-lidarseg. Every scene is a drive of half a
    second, with two keyframes, through a street of its own. question: one of `Streets`.
    """
    folder = Path(folder)
    for kind in (f"samples/{LIDAR}", f"sweeps/{LIDAR}", f"lidarseg/{VERSION}", "maps", VERSION):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / MAP).write_bytes(base64.b64decode(_PIXEL))
    writer = _Writer(folder)
    names = [f"scene-{number:04d}" for number in range(scenes + test_scenes)]
    for number, name in enumerate(names):
        writer.drive(name, numpy.random.default_rng([seed, number, 3]), number, sweeps, question)
    for table, rows in writer.tables.items():
        (folder / VERSION / f"{table}.json").write_text(json.dumps(rows))
    splits = {"train": names[:scenes], "val": names[scenes:]}
    (folder / VERSION / "splits.json").write_text(json.dumps(splits))
    return folder


class _Writer:
    """The tables of all drives, which grow drive by drive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("scene", "sample", "sample_data", "ego_pose", "calibrated_sensor", "sensor", "sample_annotation",
                 "instance", "category", "attribute", "log", "map", "visibility", "lidarseg")  # fmt: skip
        self.tables: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self.tables["sensor"].append({"token": "lidar", "channel": LIDAR, "modality": "lidar"})
        self.mount = {"token": "mount", "sensor_token": "lidar", "translation": [0.9, 0.0, HEIGHT],
                      "rotation": quaternion_of(MOUNT_YAW), "camera_intrinsic": []}  # fmt: skip
        self.tables["calibrated_sensor"].append(self.mount)
        self.tables["log"].append({"token": "log", "logfile": "", "vehicle": "synthetic", "date_captured": "2017-07-14",
                                   "location": "synthetic"})  # fmt: skip
        self.tables["map"].append(
            {"token": "map", "category": "semantic_prior", "filename": MAP, "log_tokens": ["log"]}
        )
        self.tables["visibility"] += [{"token": str(place), "level": level, "description": ""}
                                      for place, level in enumerate(_LEVELS, 1)]  # fmt: skip
        self.tables["category"] += [{"token": name, "name": name, "description": "", "index": index}
                                    for index, name in enumerate(_CATEGORIES)]  # fmt: skip
        self.tables["attribute"] += [{"token": name, "name": name, "description": ""} for name in _ATTRIBUTES]

    def drive(self, name: str, rng: Generator, number: int, sweeps: int, question: str) -> None:
        solids, speeds = moving_street(rng, question)
        start, pace = numpy.array([rng.uniform(-3, 0), rng.uniform(-1.5, 1.5), 0.0]), rng.uniform(0, 8)
        yaw = rng.uniform(-numpy.pi, numpy.pi)
        world = Pose.of(quaternion_of(yaw), [*rng.uniform(100, 1000, 2), 0.0], name)  # of the street
        began, before = 1_500_000_000_000_000 + number * 60_000_000, ""
        samples = [f"{name}-{key}" for key in range(KEYFRAMES)]
        self.tables["scene"].append({"token": name, "name": name, "description": "synthetic", "log_token": "log",
                                     "nbr_samples": KEYFRAMES, "first_sample_token": samples[0],
                                     "last_sample_token": samples[-1]})  # fmt: skip
        for key, sample in enumerate(samples):
            stamp = began + round(key * KEY * 1e6)
            self.tables["sample"].append({"token": sample, "timestamp": stamp, "scene_token": name,
                                          "prev": samples[key - 1] if key else "",
                                          "next": samples[key + 1] if key + 1 < KEYFRAMES else ""})  # fmt: skip
            for back in reversed(range(sweeps)):
                seconds = key * KEY - back * TICK
                ego = start + numpy.array([pace * seconds, 0.0, 0.0])
                now = [_at(solid, speed, seconds) for solid, speed in zip(solids, speeds, strict=True)]
                mount = numpy.array(self.mount["translation"])
                points, surfaces, hits = cast(rng, now, ego + mount)
                token = f"{sample}-{back}"
                file = f"{'sweeps' if back else 'samples'}/{LIDAR}/{token}.pcd.bin"
                self._save(file, points)
                self.tables["ego_pose"].append({"token": token, "timestamp": stamp - round(back * TICK * 1e6),
                                                "rotation": quaternion_of(yaw),
                                                "translation": world.apply(ego).tolist()})  # fmt: skip
                row = {"token": token, "sample_token": sample, "ego_pose_token": token,
                       "calibrated_sensor_token": "mount", "timestamp": stamp - round(back * TICK * 1e6),
                       "is_key_frame": not back, "filename": file, "fileformat": "pcd", "height": 0, "width": 0,
                       "prev": before, "next": ""}  # fmt: skip
                if before:
                    self.tables["sample_data"][-1]["next"] = token
                self.tables["sample_data"].append(row)
                before = token
                if not back:
                    labelled = f"lidarseg/{VERSION}/{token}_lidarseg.bin"
                    (self.folder / labelled).write_bytes(_NUMBERS[surfaces & 0xFF].tobytes())
                    self.tables["lidarseg"].append({"token": token, "sample_data_token": token, "filename": labelled})
            self._annotate(name, key, sample, now, speeds, hits, world, yaw)

    def _save(self, file: str, points: Any) -> None:
        raw = numpy.zeros((len(points), 5), dtype=numpy.float32)
        cos, sin = numpy.cos(MOUNT_YAW), numpy.sin(MOUNT_YAW)
        raw[:, 0], raw[:, 1] = cos * points[:, 0] + sin * points[:, 1], cos * points[:, 1] - sin * points[:, 0]
        raw[:, 2], raw[:, 3] = points[:, 2], points[:, 3] * BRIGHTEST
        (self.folder / file).write_bytes(raw.tobytes())

    def _annotate(
        self, name: str, key: int, sample: str, solids: list[Solid], speeds: list[float], hits: Any, world: Pose,
        yaw: float,
    ) -> None:  # fmt: skip
        for place, (solid, speed) in enumerate(zip(solids, speeds, strict=True)):
            if solid.surface not in _KINDS:
                continue
            instance, kind = f"{name}-{place}", _KINDS[solid.surface]
            if not key:
                self.tables["instance"].append({"token": instance, "category_token": _CATEGORY_OF[solid.surface],
                                                "nbr_annotations": KEYFRAMES,
                                                "first_annotation_token": f"{instance}-0",
                                                "last_annotation_token": f"{instance}-{KEYFRAMES - 1}"})  # fmt: skip
            still = "parked" if kind == "vehicle" else "standing"
            long, wide, high = (2 * side for side in solid.half)
            self.tables["sample_annotation"].append({
                "token": f"{instance}-{key}", "sample_token": sample, "instance_token": instance,
                "attribute_tokens": [f"{kind}.{'moving' if speed else still}"], "visibility_token": str(len(_LEVELS)),
                "translation": world.apply(numpy.array(solid.centre)).tolist(), "size": [wide, long, high],
                "rotation": quaternion_of(yaw + solid.yaw), "num_lidar_pts": int((hits == place + 1).sum()),
                "num_radar_pts": 0, "prev": f"{instance}-{key - 1}" if key else "",
                "next": f"{instance}-{key + 1}" if key + 1 < KEYFRAMES else ""})  # fmt: skip


def moving_street(rng: Generator, question: str = "what") -> tuple[list[Solid], list[float]]:
    """A street, and how fast each of its solids moves along x, in metres per second; half of the cars and persons do.

    Cars have sides of their own, and stand or drive to the right of the road.
    """
    solids, speeds = [], []
    for solid in street(rng, question):
        speed = 0.0
        if solid.surface in ("car", "truck"):
            onwards = solid.centre[1] < 0  # traffic keeps to the right
            long, wide, high = (side * rng.uniform(0.85, 1.2) for side in solid.half)
            yaw = solid.yaw + (0.0 if onwards else numpy.pi)
            solid = solid._replace(half=(long, wide, high), yaw=yaw, centre=(*solid.centre[:2], high))
            speed = (1 if onwards else -1) * rng.uniform(2, 8) * (rng.random() < 0.5)
        elif solid.surface == "person":
            onwards = rng.random() < 0.5
            solid = solid._replace(yaw=0.0 if onwards else numpy.pi)
            speed = (1 if onwards else -1) * rng.uniform(0.8, 1.8) * (rng.random() < 0.5)
        solids.append(solid)
        speeds.append(float(speed))
    return solids, speeds


def _at(solid: Solid, speed: float, seconds: float) -> Solid:
    x, y, z = solid.centre
    return solid._replace(centre=(x + speed * seconds, y, z))
