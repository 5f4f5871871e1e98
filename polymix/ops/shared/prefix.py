"""Tokens that lie outside a grid of tokens (class token, registers), in a map that mixes the grid."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polymix.ops.shared.tensors import accumulator, count_real


class PrefixMap(NamedTuple):
    """What becomes of the P tokens in front of the grid: own ⊙ the token itself + mean ⊙ the mean of the grid tokens.

    own, mean: (P, D) each.
    """

    own: Tensor
    mean: Tensor

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The prefix tokens (B, P, D) of the result.

        Args:
            x: (B, P + N, D), with zeros for the tokens that are not real.
            mask: (B, P + N), True for real tokens, or None.
        """
        p = len(self.own)
        tokens, real = x[:, p:], None if mask is None else mask[:, p:]
        mean = tokens.sum(1, keepdim=True, dtype=accumulator(x.dtype)) / count_real(tokens, real, ndim=3)
        return self.combine(x[:, :p], mean.to(x.dtype))

    def combine(self, first: Tensor, mean: Tensor) -> Tensor:
        """The same for the prefix tokens `first` (B, P, D) and the mean of the grid tokens (B, 1, D)."""
        return torch.addcmul(self.own * first, self.mean, mean)
