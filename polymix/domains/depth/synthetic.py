"""Synthetic rooms with true depth: boxes in a room of any size, seen by one or several cameras.

Colours, the length of the pattern and the light are drawn for each surface of each room, and nothing fades with
distance: a wall's own pixels say little of how far away it is. Where it meets the floor does.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize, one_hot

from polymix.train.data.cameras import directions
from polymix.train.data.pictures import write_png
from polymix.train.data.sampling import number

FIELD, EYE = 1.6, 1.2  # width of a picture over the focal length (77 degrees); metres of the cameras above the floor
BOXES, SURFACES = 3, 6  # of a room; floor, ceiling, walls, and the boxes
SPOTS, CLEAR = 8, 1.6  # places tried for a box, and metres from the cameras to its middle, where one is so far away
UNIT, CHUNK = 0.001, 100  # metres of one step of the depth files; rooms that are cast at once


class Rooms(NamedTuple):
    """n rooms, from corner 0 to `size` (n, 3) in metres, z upwards, and their cameras' poses (n, K, 4, 4)."""

    size: Tensor
    poses: Tensor
    middles: Tensor  # of the boxes (n, BOXES, 3)
    halves: Tensor  # half their sides
    colours: Tensor  # two of each surface (n, SURFACES, 2, 3)
    waves: Tensor  # length of the pattern on each surface (n, SURFACES)
    light: Tensor  # direction from which it comes (n, 3)


def draw_rooms(count: int, cameras: int, draw: torch.Generator) -> Rooms:
    """Rooms by chance. The cameras of one room stand at most 0.7 m apart and look at most 20 degrees apart."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=draw)

    size = torch.cat((uniform(3, 9, 2), uniform(2.4, 3.2, 1)), 1)
    place = (1 + (size[:, :2] - 2) * uniform(0, 1, 2))[:, None] + uniform(-0.25, 0.25, cameras, 2)
    yaw = uniform(-math.pi, math.pi, 1) + uniform(-1, 1, cameras) * math.pi / 18
    ahead = torch.stack((yaw.cos(), yaw.sin(), torch.zeros_like(yaw)), -1)
    down = torch.tensor([0.0, 0.0, -1.0]).expand_as(ahead)
    poses = torch.eye(4).repeat(count, cameras, 1, 1)
    poses[..., :3, :3] = torch.stack((torch.linalg.cross(down, ahead), down, ahead), -1)
    poses[..., :2, 3], poses[..., 2, 3] = place, EYE
    halves = uniform(0.2, 0.6, BOXES, 3)
    spots = 0.6 + (size[:, None, None, :2] - 1.2) * uniform(0, 1, BOXES, SPOTS, 2)
    away = (spots[:, :, :, None] - place[:, None, None]).norm(dim=-1).amin(-1).clamp_max(CLEAR)
    chosen = spots.gather(2, away.argmax(-1)[..., None, None].expand(-1, -1, 1, 2))[:, :, 0]
    waves, light = 0.4 * 4 ** uniform(0, 1, SURFACES), normalize(torch.randn(count, 3, generator=draw), dim=1)
    middles = torch.cat((chosen, halves[..., 2:]), -1)  # they stand on the floor
    return Rooms(size, poses, middles, halves, uniform(0.1, 1, SURFACES, 2, 3), waves, light)


def lens(height: int, width: int) -> Tensor:
    """The matrix (3, 3) of the rooms' cameras."""
    return torch.tensor([[width / FIELD, 0, width / 2], [0, width / FIELD, height / 2], [0, 0, 1]])


def cast(rooms: Rooms, start: Tensor, ray: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where rays (n, p, 3) from (n, 1, 3) end: after so many of themselves; its normal (…, 3), and its surface."""
    ray = torch.where(ray.abs() < 1e-9, 1e-9, ray)
    away, axis = ((torch.where(ray > 0, rooms.size[:, None], 0.0) - start) / ray).min(-1)
    surface = torch.where(axis < 2, 2, (ray[..., 2] > 0).long())
    for box in range(BOXES):
        to, half = rooms.middles[:, box, None] - start, rooms.halves[:, box, None] * ray.sign()
        near, face = ((to - half) / ray).max(-1)
        hit = (near > 0) & (near < ((to + half) / ray).amin(-1)) & (near < away)
        away, axis = torch.where(hit, near, away), torch.where(hit, face, axis)
        surface = torch.where(hit, 3 + box, surface)
    return away, -one_hot(axis, 3) * ray.sign(), surface


def render(rooms: Rooms, camera: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """What a camera sees of each room: bytes (n, 3, height, width), and the depth along its axis (n, height, width)."""
    turn, start = rooms.poses[:, camera, :3, :3].transpose(1, 2), rooms.poses[:, camera, None, :3, 3]
    fine = (2 * height, 2 * width)  # four rays a pixel, against jagged edges
    ray = directions(lens(*fine), *fine) @ turn
    away, normal, surface = cast(rooms, start, ray)
    place, wave = start + away[..., None] * ray, rooms.waves.gather(1, surface)[..., None]
    pattern = 0.25 + (2 * math.pi * place / wave).cos().mean(-1, keepdim=True) / 4
    chosen = surface[..., None].expand(-1, -1, 3)
    one, other = (rooms.colours[:, :, k].gather(1, chosen) for k in range(2))
    shade = 0.7 + 0.3 * (normal * rooms.light[:, None]).sum(-1, keepdim=True)
    picture = avg_pool2d((255 * shade * torch.lerp(one, other, pattern)).transpose(1, 2).unflatten(2, fine), 2)
    depth = cast(rooms, start, directions(lens(height, width), height, width) @ turn)[0]
    return picture.round().to(torch.uint8), depth.unflatten(1, (height, width))


def write(folder: Path, seed: int, cameras: int, height: int, width: int, train: int, test: int) -> None:
    """train and test as `folders` has them: images/ROOM/CAMERA.png, and of these names depth/ and poses/."""
    for part, count in (("train", train), ("test", test)):
        draw = torch.Generator().manual_seed(number("rooms", part, seed))
        (folder / part).mkdir()
        numpy.savetxt(folder / part / "intrinsics.txt", lens(height, width).numpy(), "%.9g")
        for first in range(0, count, CHUNK):
            rooms = draw_rooms(min(CHUNK, count - first), cameras, draw)
            for camera in range(cameras):
                views = zip(*render(rooms, camera, height, width), rooms.poses[:, camera], strict=True)
                for place, (picture, depth, pose) in enumerate(views, first):
                    files = [folder / part / kind / f"{place:05d}" for kind in ("images", "depth", "poses")]
                    for file in files:
                        file.mkdir(parents=True, exist_ok=True)
                    write_png(files[0] / f"{camera}.png", picture)
                    write_png(files[1] / f"{camera}.png", (depth / UNIT).round().to(torch.int32).to(torch.uint16))
                    numpy.savetxt(files[2] / f"{camera}.txt", pose.numpy(), "%.9g")
