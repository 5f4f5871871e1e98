"""Tasks whose loss is a mean over what batches have different numbers of, such as pixels with a class."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from torch import Tensor, nn

from polymix.train.recipe import Recipe
from polymix.train.task import Data, Task

R = TypeVar("R", bound=Recipe)
D = TypeVar("D", bound="Data")


class CountedTask(Task[R, D]):
    """A task whose loss is Σ_k sums_k / counts_k, such as over the objects of each kind k; a count of 0 is taken as 1.

    The engine takes the counts of a whole step, so accumulated slices and several processes teach what one batch would.
    """

    @abstractmethod
    def counts(self, model: nn.Module, batch: Any) -> Tensor:
        """How many of each kind there are in a batch (k,). Takes no forward pass."""

    @abstractmethod
    def sums(self, model: nn.Module, batch: Any) -> Tensor:
        """The summed losses of a batch (k,)."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return over(self.sums(model, batch), self.counts(model, batch))


def over(sums: Tensor, counts: Tensor) -> Tensor:
    """Σ_k sums_k / counts_k; a count of 0 is taken as 1."""
    return (sums / counts.where(counts > 0, 1)).sum()
