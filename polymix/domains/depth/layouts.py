"""Pictures with depth files on disk: NYU Depth v2, KITTI, ViSP's frames, and folders of equal names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from polymix.errors import DataError, reason_of
from polymix.files import regular
from polymix.train.data.arrays import read_array
from polymix.train.data.pictures import SUFFIXES, find_pictures, read_deep
from polymix.train.data.problems import Problems
from polymix.train.data.splits import HELD_OUT, find_parts, natural
from polymix.train.data.texts import composed

UNITS = {"nyu": 0.001, "kitti": 1 / 256, "visp": 1.0}  # of the layouts' numbers: metres, but for ViSP, which names none
LAYOUTS = ("folders", *UNITS)
MILLIMETRES = 0.001  # what integers of the layout `folders` are taken for
INTRINSICS = "intrinsics.txt"
WHAT = "a folder of pictures and depth files"


class View(NamedTuple):
    """A picture and its depth file, a view of a scene; the files of its pose and its camera's matrix, if there are any.

    unit: of the depth file's numbers; None: by their type. size: width and height in pixels.
    """

    picture: Path
    depth: Path
    scene: str
    unit: float | None = None
    pose: Path | None = None
    intrinsics: Path | None = None
    size: tuple[int, int] = (0, 0)


def layout_of(folder: Path, layout: str | None) -> str:
    """The layout of a folder, by its files. Raises DataError if it has none of them."""
    parts = [part for part in find_parts(folder, WHAT) if part]
    if layout is not None:
        return layout
    if all((part / "images").is_dir() and (part / "depth").is_dir() for part in parts):
        return "folders"
    for name, pattern in (("nyu", "sync_depth_*.png"), ("kitti", "proj_depth"), ("visp", "*epth*_[0-9]*.bin")):
        if next(folder.rglob(pattern), None):
            return name
    allowed = "images/ and depth/, sync_depth_*.png, proj_depth/groundtruth or *depth*_0000.bin"
    raise DataError("data", f"{folder} of no known layout", allowed, "See docs/domains/depth.md.")


def list_views(folder: Path, layout: str, problems: Problems) -> tuple[list[View], list[View]]:
    """The views for training and for the test, none where the folder does not say; what lacks its partner is noted."""
    read = {"folders": list_folders, "nyu": _nyu, "kitti": _kitti, "visp": _visp}[layout]
    training, test = find_parts(folder, WHAT) if layout == "folders" else (folder, None)
    if test is not None:
        return [*read(training, problems)], [*read(test, problems)]
    parts: tuple[list[View], list[View]] = [], []
    for view in read(folder, problems):
        parts[bool(set(HELD_OUT) & set(view.depth.relative_to(folder).parts))].append(view)
    return parts if parts[0] else (parts[1], [])


def list_folders(folder: Path, problems: Problems, with_depth: bool = True) -> Iterator[View]:
    """images/SCENE/NAME.png, depth/SCENE/NAME of any suffix, poses/SCENE/NAME.txt, and the nearest intrinsics.txt."""
    images, depths, there = folder / "images", folder / "depth", {}
    for part in (images, depths) if with_depth else (images,):
        if not part.is_dir():
            return problems.add(part, "", "there is no such folder")
    for path in sorted(depths.rglob("*")):
        if path.suffix.lower() in SUFFIXES | {".npy", ".bin"}:
            there[composed(str(path.relative_to(depths).with_suffix("")))] = path
    for picture in sorted(find_pictures(images), key=lambda path: natural(str(path))):
        name = picture.relative_to(images)
        depth = there.pop(composed(str(name.with_suffix(""))), None) if with_depth else picture
        if depth is None:
            problems.add(picture, "", f"has no depth file {depths / name.with_suffix('.png')}")
            continue
        near = [*(folder / "poses" / part for part in name.parents), folder, folder.parent]
        matrix = next((part / INTRINSICS for part in near if (part / INTRINSICS).is_file()), folder / INTRINSICS)
        yield View(picture, depth, str(name.parent), None, folder / "poses" / name.with_suffix(".txt"), matrix)
    for depth in there.values() if with_depth else ():
        problems.add(depth, "", f"has no picture in {images}")
    return None


def _nyu(folder: Path, problems: Problems) -> Iterator[View]:
    """rgb_NUMBER.jpg beside sync_depth_NUMBER.png in millimetres, as BTS distributes NYU Depth v2: a folder a scene."""
    for depth in sorted(folder.rglob("sync_depth_*.png")):
        picture = depth.with_name(depth.name.replace("sync_depth_", "rgb_"))
        yield from _paired([picture.with_suffix(".jpg"), picture], depth, folder, "nyu", problems)


def _kitti(folder: Path, problems: Problems) -> Iterator[View]:
    """SPLIT/DRIVE/proj_depth/groundtruth/image_02/NUMBER.png, and below any folder DRIVE/image_02/data/NUMBER.png."""
    raw = {(data.parents[1].name, data.parent.name): data for data in folder.rglob("image_0[23]/data")}
    for depth in sorted(folder.rglob("proj_depth/groundtruth/image_0[23]/*.png")):
        drive, camera = depth.parents[3].name, depth.parent.name
        picture = raw.get((drive, camera), Path(drive) / camera / "data") / depth.name
        yield from _paired([picture, picture.with_suffix(".jpg")], depth, folder, "kitti", problems)


def _visp(folder: Path, problems: Problems) -> Iterator[View]:
    """A depth file's picture has its number, and lies beside it or in a folder Images beside its own."""
    for depth in sorted(folder.rglob("*epth*_[0-9]*.bin")):
        number = f"*_{depth.stem.rpartition('_')[2]}.p[gnp]m"
        near = [*depth.parent.glob(number), *depth.parent.with_name("Images").glob(number), depth.with_name(number)]
        yield from _paired(near, depth, folder, "visp", problems)


def _paired(pictures: list[Path], depth: Path, folder: Path, layout: str, problems: Problems) -> Iterator[View]:
    """The view of a depth file with the first of the pictures that exists; that there is none is noted."""
    picture = next((file for file in pictures if file.is_file()), None)
    if picture is None:
        problems.add(depth, "", f"has no picture {pictures[-1]}")
    else:
        yield View(picture, depth, str(depth.parent.relative_to(folder)), UNITS[layout])


def read_depth(path: Path, unit: float | None) -> Tensor:
    """float32 (H, W) in its unit, 0 where none is known: of a deep PNG or TIFF, a .npy, or a frame of ViSP's (.bin).

    Raises DataError: the file is not depth, or not all numbers are finite and 0 or more.
    """
    suffix = path.suffix.lower()
    values = read_array(path) if suffix == ".npy" else _frame(path) if suffix == ".bin" else read_deep(path, "depth")
    if values.ndim != 2 or not values.size:
        raise DataError("data", f"{path} of shape {values.shape}", "(height, width)", "Write a file for each picture.")
    own = MILLIMETRES if values.dtype.kind in "biu" else 1.0
    values = values.astype(numpy.float32) * numpy.float32(own if unit is None else unit)
    wrong = ~(numpy.isfinite(values) & (values >= 0))
    if wrong.any():
        row, column = numpy.argwhere(wrong)[0].tolist()
        got = f"{path}, row {row}, column {column}: the depth {values[row, column]}"
        raise DataError("data", got, "finite depths of at least 0", "Write 0 where depth is not known.")
    return torch.from_numpy(values)


def _frame(path: Path) -> Any:
    """ViSP's frame: two uint32, rows and columns, then uint16 row by row, all of them little-endian."""
    try:
        content = regular(path).read_bytes()
    except OSError as error:
        raise DataError("data", f"{path}: {reason_of(error)}", "a depth file", "Check the path.") from error
    rows, columns = numpy.frombuffer(content[:8].ljust(8, b"\0"), "<u4").tolist()
    if len(content) != 8 + 2 * rows * columns:
        got = f"{path} with {len(content):,} bytes, which says that it has {rows:,} rows of {columns:,}"
        raise DataError("data", got, f"{8 + 2 * rows * columns:,} bytes", "It may be cut off.")
    return numpy.frombuffer(content[8:], "<u2").reshape(rows, columns)
