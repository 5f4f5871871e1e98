"""Random numbers of processes that share a sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from polymix.parallel.collectives import Processes


@torch.compiler.disable
def with_own_draws(run: Callable[[Tensor], Tensor], processes: Processes, x: Tensor) -> Tensor:
    """run(x) with random numbers of this process's own, of which tokens' dropout is drawn.

    The common generator goes on by one number, whatever x is: what is drawn for a sample, such as a depth, stays the
    same on all processes that began with the same seed.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.manual_seed(seed + processes.rank)
        return run(x)


def drop_apart(module: nn.Dropout, processes: Processes) -> None:
    """Let a dropout of tokens draw apart on each process."""
    plain = module.forward
    apart = partial(with_own_draws, plain, processes)
    module.forward = lambda input: (apart if module.training and module.p else plain)(input)  # type: ignore[method-assign]
