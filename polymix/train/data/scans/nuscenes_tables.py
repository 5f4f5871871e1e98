"""nuScenes' tables, which boxes and labels of points share: rows by their tokens, keyframes, and the splits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polymix.errors import DataError
from polymix.files import read_json
from polymix.train.data.problems import Problems

LIDAR, BRIGHTEST = "LIDAR_TOP", 255.0
# The scenes for tests of the published versions; all others that the tables have are for training.
VALIDATION = {
    "v1.0-trainval": "3 12-18 35-36 38-39 92-110 221 268-278 329-332 344-346 519-524 552-565 625-627 629-630 632-638 "
    "770-771 775 777-778 780-784 794-800 802 904-917 919-931 962-963 966-969 971-972 1059-1073",
    "v1.0-mini": "103 916",
}

_TEXTS = (
    "token", "sample_token", "sample_data_token", "scene_token", "ego_pose_token", "calibrated_sensor_token",
    "sensor_token", "instance_token", "category_token", "filename", "name", "channel", "prev", "next",
)  # fmt: skip
_NUMBERS = ("timestamp", "num_lidar_pts", "num_radar_pts", "index")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


_TYPES = (
    *((key, _is_text, "text") for key in _TEXTS),
    *((key, _is_number, "a whole number") for key in _NUMBERS),
    ("attribute_tokens", lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of texts"),
)


class Tables:
    """Some tables of one version, each row by its token. Raises DataError for a table or a token that is missing."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.root = folder, folder.parent
        self.rows: dict[str, dict[str, Mapping[str, Any]]] = {}
        for name in names:
            path = folder / f"{name}.json"
            rows = read_json(path, DataError, "data", "a table of nuScenes")
            if not isinstance(rows, list) or not all(isinstance(row, dict) and "token" in row for row in rows):
                raise DataError("data", f"{path} without rows", "a list of rows, each with a token", "Restore it.")
            for key, is_right, what in _TYPES:
                odd = next((row for row in rows if key in row and not is_right(row[key])), None)
                if odd is not None:
                    got = f"{path}, token {odd['token']!r}: {key} {odd[key]!r}"
                    raise DataError("data", got, what, "Restore it.")
            self.rows[name] = {row["token"]: row for row in rows}

    def where(self, table: str, row: Mapping[str, Any]) -> str:
        """A row as errors name it."""
        return f"{self.folder / table}.json, {row['token']}"

    def get(self, table: str, token: Any, key: str, asked: str) -> Any:
        """One field of a row. `asked` says who asks, for the error."""
        row = self.rows[table].get(token)
        if row is None or key not in row:
            what = f"has no {key!r}" if row is not None else "does not exist"
            got = f"{asked}: {table} {token!r} {what} in {self.folder / table}.json"
            raise DataError("data", got, f"a row of {table}.json", "Restore it.")
        return row[key]

    def keyframes(self, problems: Problems) -> list[Mapping[str, Any]]:
        """The keyframes of the LiDAR on the roof, in the order of time. A sample that has none is a problem.

        Needs the tables sample, sample_data, calibrated_sensor and sensor.
        """
        rows, seen, others = [], set(), set()
        for row in self.rows["sample_data"].values():
            asked = self.where("sample_data", row)
            mount = row.get("calibrated_sensor_token")
            sensor = self.get("calibrated_sensor", mount, "sensor_token", asked)
            channel = self.get("sensor", sensor, "channel", self.where("calibrated_sensor", {"token": mount}))
            others.add(channel)
            if channel == LIDAR and row.get("is_key_frame"):
                self.get("sample", row.get("sample_token"), "timestamp", asked)
                for key in ("timestamp", "filename"):
                    self.get("sample_data", row["token"], key, asked)
                rows.append(row)
                seen.add(row["sample_token"])
        missing = [token for token in self.rows["sample"] if token not in seen]
        if missing:
            there = ", ".join(sorted(others)) or "no sensor"
            text = f"it has no keyframe of {LIDAR}; the tables have {there}"
            problems.add(self.folder / "sample_data.json", f"sample {missing[0]}", text)
        return sorted(rows, key=lambda row: (row["timestamp"], row["token"]))

    def split(self, problems: Problems) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        """The keyframes for training and for tests, by the scenes that splits.json names, or by the published splits.

        Needs the table scene too. Raises DataError for a version of one's own without splits.json.
        """
        names = {row["token"]: row.get("name") for row in self.rows["scene"].values()}
        scenes, parts = set(names.values()), []
        path = self.folder / "splits.json"
        splits: Any = published_split(self.folder.name, scenes) if not path.is_file() else None
        if splits is None:
            splits = read_json(path, DataError, "data", '{"train": [names of scenes], "val": [names of scenes]}')
        for part in ("train", "val"):
            named = splits.get(part) if isinstance(splits, dict) else None
            if not isinstance(named, list) or not named:
                problems.add(path, part, "it has no scenes")
                named = []
            missing = [name for name in named if not isinstance(name, str) or name not in scenes]
            if missing:
                problems.add(path, part, f"it names {missing[0]}, which scene.json does not have")
            parts.append({token for token, name in names.items() if name in named})
        rows = self.keyframes(problems)
        owners = [self.rows["sample"][row["sample_token"]].get("scene_token") for row in rows]
        train, test = ([row for row, scene in zip(rows, owners, strict=True) if scene in part] for part in parts)
        return train, test


def version_of(root: Path) -> Path | None:
    """The folder with the tables: v1.0-trainval before v1.0-mini before others."""
    versions = sorted(path for path in root.glob("v1.*") if path.is_dir())
    first = [path for name in ("trainval", "mini") for path in versions if path.name.endswith(name)]
    return next(iter([*first, *versions]), None)


def root_of(file: Path) -> tuple[Path, Path]:
    """The data set that a file of points belongs to, and the folder of its tables. Raises DataError for none."""
    for root in file.resolve().parents:
        if (folder := version_of(root)) is not None:
            return root, folder
    raise DataError("files", f"{file}, outside nuScenes' folders", "samples/LIDAR_TOP/*.pcd.bin", "Check the path.")


def published_split(version: str, scenes: set[Any]) -> dict[str, list[Any]] | None:
    """The published splits of the scenes that are there; None for a version that has none."""
    if version not in VALIDATION:
        return None
    tests = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", VALIDATION[version]):
        tests |= {f"scene-{number:04d}" for number in range(int(first), int(last or first) + 1)}
    return {"train": sorted(scenes - tests), "val": sorted(scenes & tests)}
