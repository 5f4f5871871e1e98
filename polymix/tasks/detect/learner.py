"""How the detector learns: focal loss, GIoU and L1."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polymix.tasks import learner
from polymix.tasks.detect.losses import dense_loss


class Learner(learner.Learner):
    unit = "images"

    def loss(self, batch: Any) -> Tensor:
        """`dense_loss` of a batch."""
        images, targets = batch
        logits, boxes = self.model(images.float() / 127.5 - 1)
        return dense_loss(logits, boxes, self.model.centres, self.model.stride, targets)

    def infer(self, batch: Any) -> Any:
        """Logits and boxes."""
        return self.model(batch[0].float() / 127.5 - 1)
