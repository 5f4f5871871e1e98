"""How the detector learns: focal loss, GIoU and L1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polymix.tasks import learner
from polymix.tasks.detect.detr import detr_loss, inputs
from polymix.tasks.detect.losses import dense_loss


class Learner(learner.Learner):
    unit = "images"

    def loss(self, batch: Any) -> Tensor:
        """`dense_loss` or `detr_loss` of a batch."""
        images, targets = batch
        if self.recipe.host != "dense":
            return detr_loss(self.model, images, targets)
        logits, boxes = self.model(images.float() / 127.5 - 1)
        return dense_loss(logits, boxes, self.model.centres, self.model.stride, targets)

    def infer(self, batch: Any) -> Any:
        """Logits and boxes."""
        if self.recipe.host != "dense":
            return self.model(**inputs(batch[0], torch.stack([target["size"] for target in batch[1]])))
        return self.model(batch[0].float() / 127.5 - 1)

    def optimizers_and_schedule(self) -> dict[str, Any]:
        """The base class's; for DETR two rates of AdamW, all weights decaying, and a drop to a tenth at `drop_at`."""
        recipe = self.recipe
        if recipe.host == "dense":
            return super().optimizers_and_schedule()
        learning = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in learning if (".backbone." in name) == own], "lr": rate}
            for own, rate in ((False, recipe.learning_rate), (True, recipe.backbone_learning_rate))
        ]
        optimizer = torch.optim.AdamW(groups, betas=tuple(recipe.betas), weight_decay=recipe.weight_decay)
        rising, drop = max(1, round(recipe.warmup * recipe.steps)), round(recipe.drop_at * recipe.steps)
        return self.with_schedule(
            optimizer, lambda step: min(1.0, (step + 1) / rising) * (0.1 if step >= drop else 1.0)
        )
