"""How the model learns: cross-entropy over the pixels that count, AdamW with a faster head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polymix.tasks import learner
from polymix.tasks.label_maps import pixel_loss
from polymix.tasks.segment.layouts import IGNORED
from polymix.tasks.trainer import rated_groups

HEADS = ("head.", "decode_head.")  # whose learning rate is `head_rate` times higher


def polynomial(step: int, steps: int, warmup: float, final: float, power: float) -> float:
    """The learning rate of a step as a share of the highest: linear × (1 - step / steps) ** power, down to `final`."""
    rising = max(1, round(warmup * steps))
    falling = final + (1 - final) * (1 - min(step / max(1, steps), 1.0)) ** power
    return falling * min(1.0, (step + 1) / rising)


class Learner(learner.Learner):
    """A model of images from -1 to 1 -> logits (B, K, H, W)."""

    unit = "images"
    weight: Tensor | float = 1.0  # of this process's pixels, among several processes

    def training_step(self, batch: Any, index: int) -> Tensor:
        """As in one process: pixels count alike, whichever process has them."""
        if self.trainer.world_size > 1:
            mine = (batch[1] != IGNORED).sum().float()
            self.weight = mine * self.trainer.world_size / self._total(mine.clone()).clamp_min(1)
        loss = super().training_step(batch, index)
        self.weight = 1.0
        return loss

    def loss(self, batch: Any) -> Tensor:
        """The mean cross-entropy of the pixels with a class."""
        images, labels = batch
        return self.weight * pixel_loss(self.model(images.float() / 127.5 - 1), labels.long(), IGNORED)

    def infer(self, batch: Any) -> Tensor:
        return self.model(batch[0].float() / 127.5 - 1)

    def optimizers_and_schedule(self) -> dict[str, Any]:
        recipe = self.recipe
        groups = rated_groups(self.model, recipe.weight_decay, recipe.learning_rate, HEADS, recipe.head_rate)
        optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.betas[0], recipe.betas[1]))
        if recipe.schedule == "cosine":
            return self.with_schedule(optimizer)
        return self.with_schedule(
            optimizer, lambda step: polynomial(step, recipe.steps, recipe.warmup, recipe.final, recipe.power)
        )
