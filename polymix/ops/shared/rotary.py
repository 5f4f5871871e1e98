"""Rotary positions: pairs of features turned by angles that grow with the position."""

from __future__ import annotations

import torch
from torch import Tensor

Turns = tuple[Tensor, Tensor]  # cosines and sines of a rotation


def rotary(position: Tensor, width: int, *, axes: int, heads: int | None, base: float = 1e4) -> Turns:
    """Cosines and sines (…, width / 2) of the angles by which the pairs of `width` features turn at a position.

    axes=1: pair k turns by position · base^(-k / (width/2)). axes=2: `position` is (…, 2); the first half of the
    features turns by the row, the second by the column, each with width/4 frequencies. A gate of `heads` scalars
    borrows the frequencies of the channels that it gates (as the PoM authors do): base^(-k / heads) in 1-D,
    base^(-4k / heads) in 2-D. Kept in float64 so that a position of a million is as exact as the first.
    """
    pairs = width // (2 * axes)
    exponent = torch.arange(pairs, dtype=torch.float64, device=position.device)
    exponent = exponent / (pairs if heads is None or axes == 2 else heads)
    angles = position.to(torch.float64).unsqueeze(-1) * base**-exponent
    angles = angles if axes == 1 else angles.flatten(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turns: Turns, *, axes: int) -> Tensor:
    """Turn the pairs (k, k + width/2) of x (…, width), within each half of the features when axes = 2."""
    cos, sin = (part.to(x.dtype) for part in turns)
    halves = x.unflatten(-1, (axes, 2, -1))  # (…, axis, first or second of the pair, pair)
    first, second = halves.unbind(-2)
    cos, sin = cos.unflatten(-1, (axes, -1)), sin.unflatten(-1, (axes, -1))
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    return turned.flatten(-3)
