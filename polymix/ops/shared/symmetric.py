"""Symmetric powers: the monomials of a vector, weighted so that their product is a power of the dot product."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor


def symmetric_size(d: int, degree: int) -> int:
    """F, the number of monomials of this degree in d variables."""
    return math.comb(d + degree - 1, degree)


def symmetric_power(x: Tensor, degree: int) -> Tensor:
    """Compute the features φ(x) with ⟨φ(q), φ(k)⟩ = (q·k)^degree.

    They are the monomials x_i1 … x_ip with i1 ≤ … ≤ ip, in lexicographic order, each once and times the root of its
    multinomial coefficient.

    Args:
        x: (…, d).
        degree: p, at least 1.
    Returns:
        (…, F). Cost: F products for each degree from 2 to p; no multiply-adds of a matrix product.
    """
    d = x.shape[-1]
    y, lead = x, torch.arange(d, device=x.device)  # the monomials so far, and the first variable of each
    run = torch.ones_like(lead)  # how often the first variable occurs in it
    weight = torch.ones(d, device=x.device, dtype=x.dtype)
    for power in range(2, degree + 1):
        # A monomial that begins with variable i is x_i times one of those in the variables from i on, which come last.
        before = symmetric_size(d, power - 1)
        ends = torch.tensor(list(accumulate(symmetric_size(d - i, power - 1) for i in range(d))), device=x.device)
        place = torch.arange(symmetric_size(d, power), device=x.device)
        first = (place[:, None] >= ends).sum(1)
        rest = place - ends[first] + before
        run = torch.where(lead[rest] == first, run[rest] + 1, 1)
        weight = weight[rest] * (power / run.to(x.dtype)).sqrt()
        y, lead = y[..., rest] * x[..., first], first
    return y * weight
