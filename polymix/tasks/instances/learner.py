"""How Mask R-CNN learns: the sum of torchvision's losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polymix.tasks import learner


def truths(targets: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Targets as torchvision takes them: labels from 1, without crowds."""
    return [
        {"boxes": t["boxes"][~t["iscrowd"]], "labels": t["labels"][~t["iscrowd"]] + 1,
         "masks": t["masks"][~t["iscrowd"]].to(torch.uint8)} for t in targets
    ]  # fmt: skip


class Learner(learner.Learner):
    unit = "images"

    def loss(self, batch: Any) -> Tensor:
        """The losses of the proposals, the boxes, the classes and the masks, added."""
        images, targets = batch
        training = self.model.training
        self.model.train()
        losses: Mapping[str, Tensor] = self.model(list(images.float() / 255), truths(targets))
        self.model.train(training)
        return torch.stack([*losses.values()]).sum()

    def infer(self, batch: Any) -> Any:
        """Boxes, classes and masks."""
        return self.model(list(batch[0].float() / 255))
