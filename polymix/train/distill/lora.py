"""Low-rank fine-tuning of mixers: W + 2 B A, of which A and B learn, and which is merged into W afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from polymix.convert import Adapter
from polymix.errors import OptionError

_SCALE = 2.0  # alpha / rank


class LowRank(nn.Module):
    """W -> W + 2 B A, with A (rank, in) random and B (out, rank) zero."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        out, inner = weight.shape
        first = torch.randn(rank, inner, generator=generator) * inner**-0.5
        self.first = nn.Parameter(first.to(weight))
        self.second = nn.Parameter(weight.new_zeros(out, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + _SCALE * (self.second @ self.first)


def matrices(adapters: Mapping[str, Adapter], rank: int, argument: str = "lora") -> list[tuple[nn.Module, str]]:
    """The matrices of the mixers that are larger than `rank`: modules and names of parameters.

    For a mixer without any, whose layer projects for it, those of the layer. Raises OptionError, which names
    `argument`, where there is none.
    """
    places = [
        place for adapter in adapters.values() for place in _matrices(adapter.mixer, rank) or _matrices(adapter, rank)
    ]
    if not places:
        got = f"{rank}, and no matrix of the mixers is larger"
        raise OptionError(argument, got, "a rank below the width of the mixers' matrices", "Try 8.")
    return places


def _matrices(part: nn.Module, rank: int) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in part.modules()
        if not isinstance(module, (nn.ParameterList, nn.ParameterDict))
        for name, value in module.named_parameters(recurse=False)
        if value.ndim == 2 and min(value.shape) > rank and value.requires_grad and value.is_floating_point()
    ]


@contextmanager
def low_rank(model: nn.Module, adapters: Mapping[str, Adapter], rank: int, seed: int) -> Iterator[int]:
    """Context manager: in it nothing learns but a low-rank term of every matrix of the mixers; then it is merged.

    The terms are parametrizations of the weights, not modules around linear layers: mixers pass their weights to
    kernels without calling such modules. Merging keeps the shapes, names and number of the model's parameters.

    Args:
        rank: of the terms; matrices with a side of at most `rank` do not learn.
        seed: of A.
    Yields:
        The number of parameters that learn.
    Raises:
        OptionError: no matrix is larger than `rank`.
    """
    generator = torch.Generator().manual_seed(seed)
    places = matrices(adapters, rank)
    learning = [p for p in model.parameters() if p.requires_grad]
    for p in learning:
        p.requires_grad_(False)
    try:
        count = 0
        for module, name in places:
            term = LowRank(getattr(module, name), rank, generator)
            parametrize.register_parametrization(module, name, term)
            count += sum(p.numel() for p in term.parameters())
        yield count
    finally:
        for module, name in places:
            if parametrize.is_parametrized(module, name):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        for p in learning:
            p.requires_grad_(True)
        for module, name in places:
            getattr(module, name).requires_grad_(True)
