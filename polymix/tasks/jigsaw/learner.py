"""How the puzzle solver learns: cross-entropy between the places and the true place of each piece."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from polymix.tasks import learner


class Learner(learner.Learner):
    """A model of pieces (B, n², 3, p, p) -> (B, n², n²)."""

    unit = "puzzles"

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pieces, places = batch
        return cross_entropy(self.model(pieces).flatten(0, 1), places.flatten())

    def infer(self, batch: Any) -> Any:
        return self.model(batch[0])
