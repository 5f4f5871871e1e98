"""The Lovász-softmax loss, which extends 1 - IoU to shares of classes."""

from __future__ import annotations

import torch
from torch import Tensor


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
        intersection = sorted_true.sum() - sorted_true.cumsum(0)
        union = sorted_true.sum() + (1 - sorted_true).cumsum(0)
        jaccard = 1 - intersection / union
        losses.append((errors * torch.cat((jaccard[:1], jaccard.diff()))).sum())
    return torch.stack(losses).mean() if losses else shares.sum() * 0
