"""Running averages of weights: how fast their decay rises, and what is averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

# How the decay of averaged weights rises, after n steps: our way, HTR-VT's, EfficientViT's, and not at all.
RISES: Mapping[str, Callable[[float, int], float]] = {
    "steps": lambda decay, n: min(decay, (1 + n) / (10 + n)),
    "half_steps": lambda decay, n: min(decay, (1 + n / 2) / (10 + n / 2)),
    "exponential": lambda decay, n: decay * -math.expm1(-n / 2000),
    "none": lambda decay, n: decay,
}


def averaged(model: nn.Module, decay: float, rise: str = "steps", buffers: bool = False) -> AveragedModel:
    """A running average of the weights, with a lower decay in the first steps, so that the first weights fade soon.

    Args:
        rise: one of `RISES`. buffers: whether floating-point buffers are averaged too; otherwise they are the last.
    """

    def mix(means: Any, values: Any, count: Any) -> None:
        if not means[0].is_floating_point():  # such as the number of batches that a norm has seen
            torch._foreach_copy_(means, values)
            return
        share = 1 - RISES[rise](decay, int(count))
        for sharded in (False, True):  # buffers are not sharded, and one call takes no mixture
            pairs = [pair for pair in zip(means, values, strict=True) if isinstance(pair[0], DTensor) == sharded]
            if pairs:
                torch._foreach_lerp_([mean for mean, _ in pairs], [value for _, value in pairs], share)

    average = AveragedModel(model, multi_avg_fn=mix, use_buffers=buffers).requires_grad_(False).eval()
    average.n_averaged += 1  # the fresh weights count, or the first update would replace them
    return average
