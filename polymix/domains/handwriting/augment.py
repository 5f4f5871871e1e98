"""Handwriting in training: warped, thicker or thinner, faded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WARP = 8.0  # pixels by which a corner moves at most


def augmented(images: Tensor) -> Tensor:
    """Warps, thickens or thins, and fades a batch, each with a chance of one half. Values stay in 0 to 1."""
    if torch.rand(()) < 0.5:
        images = _warped(images)
    if torch.rand(()) < 0.5:
        images = _stroked(images)
    if torch.rand(()) < 0.5:
        images = _faded(images)
    return images


def _warped(images: Tensor) -> Tensor:
    """Each image by a projective warp of its own along one axis, with what it covers scaled to fill the image again.

    Every corner moves by up to 8 pixels; outside is white.
    """
    count, (high, wide) = len(images), images.shape[-2:]
    reach = min(WARP, high / 8)
    moves = torch.empty(count, 4, 2, dtype=torch.float64).uniform_(-reach, reach)
    moves *= torch.eye(2, dtype=torch.float64)[torch.randint(2, (count,))][:, None]
    unit = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=torch.float64)
    sizes = torch.tensor([wide, high], dtype=torch.float64)
    corners = unit * sizes + moves
    low, far = corners.amin(1), corners.amax(1)
    steps, start = ((far - low + 1) / sizes).to(images)[:, None], (low - 0.5).to(images)[:, None]
    maps = _homographies(corners, unit * (sizes - 1)).to(images).transpose(1, 2)  # small; the rest is on the device
    axes = (torch.arange(side, device=images.device) + 0.5 for side in (high, wide))
    rows, columns = torch.meshgrid(*axes, indexing="ij")
    places = F.pad(torch.stack((columns, rows), -1).view(1, -1, 2) * steps + start, (0, 1), value=1.0)
    x, y, one = (places @ maps).unbind(2)
    grid = torch.stack((2 * x / one / (wide - 1) - 1, 2 * y / one / (high - 1) - 1), 2).view(count, high, wide, 2)
    return (1 - F.grid_sample(1 - images, grid, align_corners=True)).clamp(0, 1)


def _homographies(corners: Tensor, targets: Tensor) -> Tensor:
    """(B, 3, 3): the projective maps that take four corners (B, 4, 2) to targets (4, 2)."""
    (x, y), (u, v) = corners.unbind(2), targets.expand_as(corners).unbind(2)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    equations = torch.cat((
        torch.stack((x, y, one, zero, zero, zero, -x * u, -y * u), 2),
        torch.stack((zero, zero, zero, x, y, one, -x * v, -y * v), 2),
    ), 1)  # fmt: skip
    solved = torch.linalg.solve(equations, torch.cat((u, v), 1))
    return torch.cat((solved, one[:, :1]), 1).view(-1, 3, 3)


def _stroked(images: Tensor) -> Tensor:
    """Thicker or thinner strokes, by a window of 2 pixels in one or both axes."""
    size = [1 + int(side) for side in torch.randint(2, (2,))]
    padded = F.pad(images, (size[1] - 1, 0, size[0] - 1, 0), mode="replicate")
    if torch.rand(()) < 0.5:
        return -F.max_pool2d(-padded, size, 1)  # dark is ink: the least value spreads it
    return F.max_pool2d(padded, size, 1)


def _faded(images: Tensor) -> Tensor:
    """Brightness and contrast of each image times 0.6 to 1.4, in either order."""
    brightness, contrast = torch.empty(2, len(images), 1, 1, 1).uniform_(0.6, 1.4).to(images.device)
    bright_first = (torch.rand(len(images), 1, 1, 1) < 0.5).to(images.device)

    def brighter(x: Tensor) -> Tensor:
        return (x * brightness).clamp(0, 1)

    def stronger(x: Tensor) -> Tensor:
        mean = x.mean((1, 2, 3), keepdim=True)
        return ((x - mean) * contrast + mean).clamp(0, 1)

    return torch.where(bright_first, stronger(brighter(images)), brighter(stronger(images)))
