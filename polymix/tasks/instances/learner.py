"""How Mask R-CNN learns: the losses of the proposals, the boxes, the classes and the masks, added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polymix.tasks.boxes.detectors import DetectorLearner
from polymix.tasks.trainer import decay_groups

MOMENTUM = 0.9


class Learner(DetectorLearner):
    def optimizers_and_schedule(self) -> dict[str, Any]:
        """AdamW, or SGD as torchvision's reference has it; a cosine, or tenths after the recipe's milestones."""
        recipe = self.recipe
        groups: Any = decay_groups(self.model, recipe.weight_decay)
        optimizer: torch.optim.Optimizer
        if recipe.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=MOMENTUM)
        else:
            optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.betas[0], recipe.betas[1]))
        if recipe.milestones:
            return self.with_milestones(optimizer, recipe.milestones)
        return self.with_schedule(optimizer)

    def truths(self, targets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Targets with labels from 1 and masks of bytes, without crowds."""
        return [
            {"boxes": t["boxes"][~t["iscrowd"]], "labels": t["labels"][~t["iscrowd"]] + 1,
             "masks": t["masks"][~t["iscrowd"]].to(torch.uint8)} for t in targets
        ]  # fmt: skip
