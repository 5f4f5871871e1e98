"""How the detector learns: focal loss of the heat map, and L1 of the boxes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import AdamW

from polymix.models.points.center_head import center_loss, center_targets
from polymix.tasks import learner
from polymix.tasks.trainer import decay_groups


class Learner(learner.Learner):
    """A model (points, offsets) -> heat and boxes."""

    unit = "scans"

    def loss(self, batch: Any) -> Tensor:
        points, offsets, objects = batch
        found, model = self.model(points, offsets), self.model
        classes = found["heat"].shape[1]
        targets = [center_targets(boxes, labels, classes, model.extent, model.stride) for boxes, labels in objects]
        return center_loss(found, targets, model.head.group_of)

    def optimizers_and_schedule(self) -> dict[str, Any]:
        recipe = self.recipe
        groups = decay_groups(self.model, recipe.weight_decay)
        return self.cycled_or_scheduled(AdamW(groups, lr=recipe.learning_rate, betas=tuple(recipe.betas)))

    def infer(self, batch: Any) -> Any:
        return self.model(batch[0], batch[1])
