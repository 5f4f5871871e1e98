"""Videos as bytes in memory: files that PyAV decodes, folders of frames, arrays of clips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from polymix.errors import DataError, one_line
from polymix.extras import needs
from polymix.files import regular
from polymix.train.data.arrays import read_array
from polymix.train.data.pictures import SUFFIXES as PICTURES
from polymix.train.data.pictures import middle_square, read_picture
from polymix.train.data.splits import natural

VIDEOS = frozenset({".mp4", ".mkv", ".webm", ".mov", ".avi", ".mpg", ".mpeg", ".m4v"})
ARRAYS = frozenset({".npy"})
MAX_JITTER = 0.5  # of the usual time between two frames, by which one may come early or late
MAX_IRREGULAR = 0.05  # share of the frames that may: files that were cut begin with a gap
WHAT, CURE = "a video, a folder of frames, or an array of clips", "Repair or remove it."


def find_videos(folder: Path) -> list[Path]:
    """What `read` takes, in a folder and below it: files, and folders that have pictures or nothing at all in them."""
    entries = []
    for path in sorted(folder.rglob("*"), key=lambda path: natural(str(path))):
        if path.is_dir():
            inside = [*path.iterdir()]
            entries += [path] if not inside or any(map(_is_picture, inside)) else []
        elif path.suffix.lower() in VIDEOS | ARRAYS:
            entries.append(path)
    return entries


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES and not path.name.startswith(".")


def read(path: Path, size: int) -> list[Tensor]:
    """The clips of an entry: bytes (T, C, size, size) each, the middle square of every frame.

    Raises DataError: it cannot be read or has no frames; frames of other sizes, or at irregular times.
    """
    if path.suffix.lower() in ARRAYS:
        return _read_array(path, size)
    frames = list(_folder(path, size) if path.is_dir() else _decoded(path, size))
    if not frames:
        raise DataError("data", f"{path}, which has no frames", WHAT, CURE)
    return [torch.stack(frames)]


def _folder(path: Path, size: int) -> Iterator[Tensor]:
    first: tuple[int, ...] | None = None
    for file in sorted(filter(_is_picture, path.iterdir()), key=lambda file: natural(file.name)):
        frame = read_picture(file)
        first = first or tuple(frame.shape)
        if tuple(frame.shape) != first:
            got = f"{file}, which is {frame.shape[2]} × {frame.shape[1]}, after frames of {first[2]} × {first[1]}"
            raise DataError("data", got, "frames of one size in a folder", "Sort clips into folders of their own.")
        yield middle_square(frame, size)


def _decoded(path: Path, size: int) -> Iterator[Tensor]:
    """The frames of a video file, at regular times."""
    with needs("video", "Videos are read with it."):
        import av
    times: list[float] = []
    try:
        with av.open(str(regular(path))) as container:
            if not container.streams.video:
                raise DataError("data", f"{path}, which has no pictures", WHAT, CURE)
            for frame in container.decode(container.streams.video[0]):
                times += [] if frame.time is None else [frame.time]
                yield middle_square(_upright(frame), size)
    except DataError:
        raise
    except Exception as error:  # FFmpeg's errors, and what PyAV raises on what they leave behind
        raise DataError("data", f"{path}, which cannot be read ({one_line(error)})", WHAT, CURE) from error
    _check_regular(path, times)


def _upright(frame: Any) -> Tensor:
    """A frame of PyAV as it is shown: phones write down how they were held."""
    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
    return torch.rot90(pixels, round(frame.rotation / 90), (1, 2))


def _check_regular(path: Path, times: list[float]) -> None:
    steps = numpy.diff(times)
    if not len(steps):
        return
    usual = float(numpy.median(steps))
    odd = numpy.flatnonzero(numpy.abs(steps - usual) > MAX_JITTER * usual)
    if len(odd) > MAX_IRREGULAR * len(steps):
        place = int(odd[0])
        got = f"{path}, whose frame {place + 2:,} comes after {steps[place]:.3f} s instead of {usual:.3f} s"
        cure = "Convert it, for example with ffmpeg -i IN.mp4 -r 25 OUT.mp4."
        raise DataError("data", got, "frames at regular times", cure)


def _read_array(path: Path, size: int) -> list[Tensor]:
    clips = read_array(path, mapped=True)
    if clips.dtype != numpy.uint8 or clips.ndim not in (4, 5) or (clips.ndim == 5 and clips.shape[-1] != 3):
        got = f"{path} with {clips.dtype} {clips.shape}"
        raise DataError("data", got, "bytes (clips, frames, height, width), with 3 colours last or none", CURE)
    if 0 in clips.shape:
        raise DataError("data", f"{path}, which has no frames: {clips.shape}", WHAT, CURE)
    several = (torch.from_numpy(numpy.array(clip)) for clip in clips)
    return [middle_square(clip.permute(0, 3, 1, 2) if clip.ndim == 4 else clip[:, None], size) for clip in several]
