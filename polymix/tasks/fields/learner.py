"""How TSViT learns: cross-entropy over the pixels that are not void."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polymix.tasks import learner
from polymix.tasks.fields.pastis import VOID
from polymix.tasks.label_maps import pixel_loss

KM2 = 1e-4  # of a pixel of 10 × 10 m


class Learner(learner.Learner):
    """A model (images, days, present) -> logits (B, K, H, W)."""

    unit = "km2"

    def loss(self, batch: Any) -> Tensor:
        series, days, present, labels, _ = batch
        return pixel_loss(self.model(series, days, present), labels, VOID)

    def infer(self, batch: Any) -> Tensor:
        return self.model(*batch[:3])

    def size(self, batch: Any) -> Any:
        return batch[3].numel() * KM2
