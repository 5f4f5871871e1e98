"""How an image classifier learns: cross-entropy with label smoothing."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from polymix.tasks import learner


class Learner(learner.Learner):
    """A model (B, C, H, W) -> (B, classes)."""

    unit = "images"

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = self.model(self.data.images.normalise(images))
        return cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
