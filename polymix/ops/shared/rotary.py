"""Rotary positions: pairs of features rotated by angles proportional to the position."""

from __future__ import annotations

import torch
from torch import Tensor

Turns = tuple[Tensor, Tensor]  # the cosines and sines of a rotation


def rotary(position: Tensor, width: int, *, axes: int, heads: int | None, base: float = 1e4) -> Turns:
    """The cosines and sines of the angles by which `rotate` turns `width` features.

    Pair k turns by position · base^(-k / (width/2)). With axes=2, the first half of the features turns by the row and
    the second half by the column, each with width/4 frequencies. The angles are float64, so that positions in the
    millions are as exact as the first ones.

    Args:
        position: (…), or (…, 2) with axes=2.
        width: the number of features.
        axes: 1 or 2.
        heads: for a gate with one scalar per head, the number of heads. The gate then uses the frequencies of the
            channels that it gates, as the code published with PoM does: base^(-k / heads) in 1-D and
            base^(-4k / heads) in 2-D.
        base: of the frequencies.
    Returns:
        Cosines and sines, (…, width / 2) each, in float64.
    """
    pairs = width // (2 * axes)
    exponent = torch.arange(pairs, dtype=torch.float64, device=position.device)
    exponent = exponent / (pairs if heads is None or axes == 2 else heads)
    angles = position.to(torch.float64).unsqueeze(-1) * base**-exponent
    angles = angles if axes == 1 else angles.flatten(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turns: Turns, *, axes: int) -> Tensor:
    """Rotate the pairs of features (k, k + width/2) of x (…, width); with axes=2, the pairs of each half."""
    cos, sin = (part.to(x.dtype) for part in turns)
    halves = x.unflatten(-1, (axes, 2, -1))  # (…, axis, first or second of the pair, pair)
    first, second = halves.unbind(-2)
    cos, sin = cos.unflatten(-1, (axes, -1)), sin.unflatten(-1, (axes, -1))
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    return turned.flatten(-3)
