"""How training clouds vary: turned, flipped, scaled, stretched, thinned, jittered, and laid over each other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.domains.segment3d.curves import z_order
from polymix.domains.segment3d.layouts import Scan
from polymix.domains.segment3d.recipe import Segment3dRecipe

STRETCHES = ((0.2, 0.4), (0.8, 1.6))  # side of a cell and size of the shifts in metres: small ones, then large ones
STRETCH_PROBABILITY = 0.95  # how often `elastic` stretches a cloud
THINNED, LEFT = 0.2, 0.8  # how often `drop` takes points away, and the share that stays
MAX_JITTER = 4.0  # deviations by which `jitter` moves a point at most


def varied(points: Tensor, recipe: Segment3dRecipe, scan: Scan) -> tuple[Tensor, Tensor]:
    """Points (n, 3 + features) of a scan, changed at random as a recipe says: places (n, 3) and features.

    Normals turn with the places. Source: the augmentations of PTv3's trainings.
    """
    chance, moved, directions = torch.rand(6), points[:, :3].double(), points[:, scan.normals].double()
    for turn in _turns(recipe, chance):
        moved = moved @ turn.T
        directions = directions @ turn.T if directions.shape[1] else directions
    moved = moved * (1 + recipe.scale * (2 * float(chance[3]) - 1))
    for cell, size in STRETCHES if recipe.elastic and torch.rand(()) < STRETCH_PROBABILITY else ():
        moved = stretched(moved, cell, size)
    if recipe.jitter:
        moved = moved + recipe.jitter * torch.randn_like(moved).clamp(-MAX_JITTER, MAX_JITTER)
    changed = points.clone() if directions.shape[1] or recipe.colour else points
    changed[:, scan.normals] = directions.to(points.dtype)
    if recipe.colour:
        changed[:, 3:6] = recoloured(points[:, 3:6])
    return moved, changed[:, 3:]


def _turns(recipe: Segment3dRecipe, chance: Tensor) -> list[Tensor]:
    """The rotations and reflections (3, 3) of a cloud, in their order, from random numbers between 0 and 1."""
    done = torch.rand(3) < recipe.turned if recipe.turned < 1 else torch.ones(3, dtype=torch.bool)
    turns = [_turn(2, 2 * math.pi * float(chance[0]))] if recipe.turn and done[2] else []
    if recipe.tilt:
        turns += [_turn(axis, recipe.tilt * (2 * float(chance[4 + axis]) - 1)) for axis in (0, 1) if done[axis]]
    if recipe.flip:
        signs = [-1.0 if chance[place] < 0.5 else 1.0 for place in (1, 2)]
        turns.append(torch.diag(torch.tensor([*signs, 1.0], dtype=torch.float64)))
    return turns


def recoloured(colours: Tensor) -> Tensor:
    """Colours (n, 3) from -1 to 1, changed as PTv3's trainings on rooms do.

    With probability 0.2 mixed with those of full contrast, with 0.95 all shifted by up to a twentieth of the range, and
    with 0.95 each jittered by a twentieth of it.
    """
    chance, changed = torch.rand(3), colours
    if chance[0] < 0.2:
        low, high = changed.amin(0), changed.amax(0)
        full = 2 * (changed - low) / (high - low).clamp_min(1e-6) - 1
        changed = torch.lerp(changed, full, float(torch.rand(())))
    if chance[1] < 0.95:
        changed = (changed + 0.1 * (2 * torch.rand(1, 3) - 1)).clamp(-1, 1)
    if chance[2] < 0.95:
        changed = (changed + 0.1 * torch.randn_like(changed)).clamp(-1, 1)
    return changed


def _turn(axis: int, angle: float) -> Tensor:
    """The rotation (3, 3) about an axis, counter-clockwise."""
    first, second = [(1, 2), (2, 0), (0, 1)][axis]
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[first, first] = matrix[second, second] = math.cos(angle)
    matrix[first, second], matrix[second, first] = -math.sin(angle), math.sin(angle)
    return matrix


def stretched(places: Tensor, cell: float, size: float) -> Tensor:
    """Elastic distortion: places (n, 3) shifted by smooth noise of standard deviation `size` before it is smoothed.

    The noise has one vector a cell of this side, is averaged twice over 3³ cells, and read in between by trilinear
    interpolation. Costs O(n) and a vector for each cell of the cloud's bounding box. Source: Simard et al. 2003.
    """
    low = places.amin(0) - cell
    sides = ((places.amax(0) - low) / cell).long() + 3
    noise = size * torch.randn(1, 3, *sides.tolist())
    for _ in range(2):
        noise = F.avg_pool3d(noise, 3, stride=1, padding=1)
    at = 2 * ((places - low) / cell) / (sides - 1) - 1  # from -1 to 1 over the cells' middles
    read = F.grid_sample(noise, at.float().flip(1)[None, None, None], align_corners=True)  # z first, as the last axis
    return places + read[0, :, 0, 0].T


def thinned(count: int, recipe: Segment3dRecipe) -> Tensor | None:
    """The places of the points that stay, in order, or None if all do."""
    if not recipe.drop or torch.rand(()) >= THINNED:
        return None
    return torch.randperm(count)[: max(1, round(LEFT * count))].sort().values


class Voxels(NamedTuple):
    """The voxels of one cloud: features (V, C), places (V, 3) and labels (V,)."""

    features: Tensor
    grid: Tensor
    labels: Tensor


def laid_over(first: Voxels, second: Voxels) -> Voxels:
    """Two clouds as one, their middles in one place (Mix3D). A voxel of both keeps what the first has.

    Pointcept lays their lowest corners onto each other, and keeps both voxels in one place.

    Costs O(V log V). Source: Nekrasov et al. 2021.
    """
    middles = [(part.grid.amax(0) + part.grid.amin(0)) // 2 for part in (first, second)]
    high = torch.maximum(*middles)
    grid = torch.cat([part.grid + high - middle for part, middle in zip((first, second), middles, strict=True)])
    codes = z_order(grid)
    order = codes.argsort(stable=True)
    once = torch.ones_like(order, dtype=torch.bool)
    once[1:] = codes[order][1:] != codes[order][:-1]
    places = order[once].sort().values
    features, labels = torch.cat((first.features, second.features)), torch.cat((first.labels, second.labels))
    return Voxels(features[places], grid[places], labels[places])


def cropped(cloud: Voxels, most: int) -> Voxels:
    """The `most` voxels that are nearest to a random one of a cloud, in their order; 0: all."""
    if not most or len(cloud.grid) <= most:
        return cloud
    away = (cloud.grid - cloud.grid[torch.randint(len(cloud.grid), ())]).double().square().sum(1)
    nearest = away.topk(most, largest=False).indices.sort().values
    return Voxels(cloud.features[nearest], cloud.grid[nearest], cloud.labels[nearest])


def mixed(clouds: list[Voxels], recipe: Segment3dRecipe) -> list[Voxels]:
    """With probability `mix`, clouds laid over each other two by two; an odd one stays as it is."""
    if not recipe.mix or torch.rand(()) >= recipe.mix:
        return clouds
    pairs = [clouds[place : place + 2] for place in range(0, len(clouds), 2)]
    return [laid_over(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
