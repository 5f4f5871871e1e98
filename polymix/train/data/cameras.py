"""Cameras: their matrices in text files, and the rays through their pixels. Their axes are right, down, ahead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from polymix.errors import DataError
from polymix.train.data.pictures import middle_part
from polymix.train.data.texts import read_text

ORTHONORMAL = 1e-3  # by which a rotation may miss it: poses are often printed with four digits


def directions(intrinsics: Tensor, height: int, width: int, step: int = 1) -> Tensor:
    """From a camera through the middles of squares of `step` pixels: (height // step · width // step, 3), 1 ahead."""
    rows, columns = (torch.arange(step / 2, size, step) for size in (height, width))
    places = torch.cartesian_prod(rows, columns).flip(1)
    return torch.cat((places, torch.ones(len(places), 1)), 1) @ torch.linalg.inv(intrinsics).T


def in_middle(intrinsics: Tensor, size: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The matrix (3, 3) of a camera whose pictures of `size` become `shape` by `pictures.middle`: height and width."""
    rows, columns = middle_part(size, shape)
    moved = intrinsics.clone()
    moved[:2, 2] -= torch.tensor([columns.start, rows.start])
    scale = [shape[1] / (columns.stop - columns.start), shape[0] / (rows.stop - rows.start), 1]
    return moved * torch.tensor(scale)[:, None]


def rays(poses: Tensor, intrinsics: Sequence[Tensor], height: int, width: int, step: int) -> Tensor:
    """Place and direction (K, N, 6) of the rays of K cameras, as `directions`, in the axes of the first camera.

    poses: (K, 4, 4), from each camera's axes to those of the scene.
    """
    poses = torch.linalg.inv(poses[:1]) @ poses
    ahead = torch.stack([directions(matrix, height, width, step) for matrix in intrinsics])
    ahead = ahead @ poses[:, :3, :3].transpose(1, 2)
    return torch.cat((poses[:, None, :3, 3].expand_as(ahead), ahead), -1)


def read_matrix(path: Path | None, what: str, view: Path) -> Tensor:
    """A text file's "pose" (4, 4), from the camera's axes to the scene's, or "intrinsics" (3, 3), in pixels.

    Raises DataError: the file is missing or holds something else.
    """
    form = "a rotation, a place, 0 0 0 1" if what == "pose" else "fx 0 cx, 0 fy cy, 0 0 1"
    if path is None or not path.is_file():
        got = f"{view} without {what}{f' {path}' if path else ''}"
        raise DataError("data", got, f"a file of {form}", "Write one, or pass --set cameras=1.")
    words = re.findall(r"[^\s,;\[\]]+", read_text(path))
    try:
        matrix = torch.tensor([float(word) for word in words]).unflatten(0, (4, -1) if len(words) == 16 else (3, 3))
    except (ValueError, RuntimeError):
        matrix = torch.full((3, 3), torch.nan)
    turns, last = matrix[:3, :3], matrix[-1].tolist()
    if what == "pose":
        sound = last == [0, 0, 0, 1] and turns.det() > 0 and (turns @ turns.T - torch.eye(3)).abs().max() < ORTHONORMAL
    else:
        matrix, sound = turns, turns[0, 0] > 0 and turns[1, 1] > 0 and turns[2].tolist() == [0, 0, 1]
    if not (sound and matrix.isfinite().all()):
        raise DataError("data", f"{path}, which holds no {what}", form, "Write it again.")
    return matrix
