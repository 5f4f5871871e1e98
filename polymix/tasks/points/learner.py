"""How PTv3 learns: cross-entropy and the Lovász-softmax loss, with a learning rate of its own for the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from polymix.tasks import learner
from polymix.tasks.points.layouts import VOID
from polymix.tasks.trainer import rated_groups

BLOCKS = ("encoder.", "decoder.")  # whose learning rate is `block_rate` times the others'


def lovasz_softmax(shares: Tensor, labels: Tensor) -> Tensor:
    """The mean over the classes that occur of the Lovász extension of 1 - IoU.

    For a class with errors e_i = |[y_i = k] - p_ik| in falling order: Σ_i e_i (J_i - J_(i-1)), where J_i is the Jaccard
    loss if the first i points are wrong. Costs O(K n log n). Source: Berman et al. 2018, Section 3 and Algorithm 1.

    Args:
        shares: probabilities (n, K). labels: int64 (n,).
    """
    losses = []
    for k in labels.unique().tolist():
        true = (labels == k).to(shares.dtype)
        errors, order = (true - shares[:, k]).abs().sort(descending=True)
        sorted_true = true[order]
        kept = sorted_true.sum() - sorted_true.cumsum(0)
        union = sorted_true.sum() + (1 - sorted_true).cumsum(0)
        jaccard = 1 - kept / union
        losses.append((errors * torch.cat((jaccard[:1], jaccard.diff()))).sum())
    return torch.stack(losses).mean() if losses else shares.sum() * 0


class Learner(learner.Learner):
    """A model (features, voxels, offsets) -> logits (V, K)."""

    unit = "points"

    def loss(self, batch: Any) -> Tensor:
        features, grid, offsets, labels, _ = batch
        logits = self.model(features, grid, offsets).float()
        counted = labels != VOID
        logits, labels = logits[counted], labels[counted]
        if not len(labels):
            return logits.sum() * 0
        loss = cross_entropy(logits, labels)
        weight = self.recipe.lovasz
        return loss + weight * lovasz_softmax(logits.softmax(1), labels) if weight else loss

    def infer(self, batch: Any) -> Tensor:
        return self.model(*batch[:3])

    def size(self, batch: Any) -> Any:
        return batch[4]

    def optimizers_and_schedule(self) -> dict[str, Any]:
        recipe = self.recipe
        groups = rated_groups(self.model, recipe.weight_decay, recipe.learning_rate, BLOCKS, recipe.block_rate)
        return self.cycled_or_scheduled(torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=tuple(recipe.betas)))
