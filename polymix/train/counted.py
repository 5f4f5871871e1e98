"""A task whose loss is a mean over what batches have different numbers of, and that mean over all slices of a step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from torch import Tensor, nn

from polymix.train.recipe import Recipe
from polymix.train.task import Data, Task

R = TypeVar("R", bound=Recipe)
D = TypeVar("D", bound="Data")


class CountedTask(Task[R, D]):
    """A task whose loss is Σ_k sums_k / counts_k: of pixels with a class, of the objects of each kind.

    The engine counts over a step, so accumulated slices and several processes learn what the whole batch would teach.
    """

    @abstractmethod
    def counts(self, model: nn.Module, batch: Any) -> Tensor:
        """How many of each there are in a batch (k,), which takes no forward pass. Of 0 the sum is 0."""

    @abstractmethod
    def sums(self, model: nn.Module, batch: Any) -> Tensor:
        """The summed losses of a batch (k,)."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return over(self.sums(model, batch), self.counts(model, batch))


def over(sums: Tensor, counts: Tensor) -> Tensor:
    """Σ_k sums_k / counts_k; what was counted 0 times is divided by 1."""
    return (sums / counts.where(counts > 0, 1)).sum()
