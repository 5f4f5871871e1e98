"""Synthetic clips whose class no single frame shows: where a disc heads, whether two shapes bounce, which one hides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

from polymix.train.data.sampling import number

SIDE = 32  # pixels
DISC, SQUARE = 4.0, 3.5  # half their width: as large as each other in area
KINDS = {
    "direction": ("right", "down", "left", "up"),
    "collision": ("bounce", "pass"),
    "hidden": ("disc", "square"),
}


def discs(places: Tensor, wraps: bool = False) -> Tensor:
    """Frames (…, 32, 32) from 0 to 1, of a disc around each of places (…, 2), x before y."""
    away = torch.arange(SIDE) + 0.5 - places[..., None]
    away = (away + SIDE / 2) % SIDE - SIDE / 2 if wraps else away
    return torch.sigmoid(2 * (DISC - (away[..., 0, None, :] ** 2 + away[..., 1, :, None] ** 2).sqrt()))


def squares(places: Tensor, half: float = SQUARE) -> Tensor:
    """As `discs`, of squares."""
    away = (torch.arange(SIDE) + 0.5 - places[..., None]).abs()
    return torch.sigmoid(2 * (half - torch.maximum(away[..., 0, None, :], away[..., 1, :, None])))


def direction(labels: Tensor, frames: int, draw: torch.Generator) -> Tensor:
    """A disc that leaves at one edge and comes back at the other: where it is says nothing of where it heads."""
    count = len(labels)
    steps = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])[labels]
    speed = 2 + 2 * torch.rand(count, 1, 1, generator=draw)
    start = SIDE * torch.rand(count, 1, 2, generator=draw)
    time = torch.arange(frames)[None, :, None]
    return discs((start + time * speed * steps[:, None]) % SIDE, wraps=True)


def collision(labels: Tensor, frames: int, draw: torch.Generator) -> Tensor:
    """A disc and a square meet in the middle, and bounce off or pass: only who saw the beginning knows."""
    count = len(labels)
    time = torch.linspace(-1, 1, frames)[None, :]
    side = 1 - 2 * torch.randint(2, (count, 1), generator=draw)  # of the disc, in the beginning
    height = 6 + (SIDE - 12) * torch.rand(count, 1, generator=draw)
    far = 9 + 3 * torch.rand(count, 1, generator=draw)
    along = torch.where(labels[:, None] == 0, time.abs(), -time) * far * side
    place = torch.stack((SIDE / 2 + along, height.expand(-1, frames)), -1)
    other = torch.stack((SIDE / 2 - along, height.expand(-1, frames)), -1)
    return torch.maximum(discs(place), squares(other))


def hidden(labels: Tensor, frames: int, draw: torch.Generator) -> Tensor:
    """A disc and a square; one goes behind the screen and the other leaves, so that the screen alone is left."""
    count = len(labels)
    done = (2 * torch.arange(frames) / (frames - 1)).clamp_max(1)[None, :, None]
    side = 1 - 2 * torch.randint(2, (count, 1, 1), generator=draw)  # from which the hidden one comes
    heights = 5 + (SIDE - 10) * torch.rand(2, count, 1, 1, generator=draw)
    middle = torch.tensor(SIDE / 2)
    into = torch.cat((middle - 12 * side * (1 - done), middle + (heights[0] - middle) * (1 - done)), -1)
    away = torch.cat((middle + side * (12 + 12 * done), heights[1].expand(-1, frames, -1)), -1)
    is_disc = labels[:, None, None] == 0
    shapes = torch.maximum(discs(torch.where(is_disc, into, away)), squares(torch.where(is_disc, away, into)))
    screen = squares(middle.expand(2), 7.0)
    return shapes * (1 - screen) + 0.5 * screen


MOVES: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "direction": direction, "collision": collision, "hidden": hidden,
}  # fmt: skip


def write(folder: Path, kind: str, seed: int, frames: int, train: int, test: int) -> None:
    """train/CLASS/clips.npy and test/CLASS/clips.npy: bytes (N, frames, 32, 32)."""
    for part, count in (("train", train), ("test", test)):
        draw = torch.Generator().manual_seed(number(kind, part, seed))
        for label, name in enumerate(KINDS[kind]):
            labels = torch.full((count // len(KINDS[kind]) + (label < count % len(KINDS[kind])),), label)
            clips = torch.cat([MOVES[kind](few, frames, draw) for few in labels.split(500)])
            (folder / part / name).mkdir(parents=True)
            numpy.save(folder / part / name / "clips.npy", (255 * clips).round().to(torch.uint8).numpy())
