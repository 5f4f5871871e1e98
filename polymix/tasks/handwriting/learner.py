"""How HTR-VT learns: CTC on masked tokens, with augmentation, and perhaps sharpness-aware minimisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polymix.tasks import learner
from polymix.tasks.handwriting.decode import BLANK
from polymix.tasks.trainer import decay_groups


class Sam(torch.optim.AdamW):
    """AdamW on the gradient at the worst place near the weights: sharpness-aware minimisation.

        g' = ∇L(w + ρ g / ‖g‖),   g = ∇L(w)

    Every step takes a closure and calls it twice. Source: Foret et al. 2021, Eq. 2-3.
    """

    def __init__(self, groups: Any, *, radius: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.radius = radius

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            closure()
        weights = [w for group in self.param_groups for w in group["params"] if w.grad is not None]
        with torch.no_grad():
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(w.grad) for w in weights]))
            moves = [w.grad * (self.radius / (norm + 1e-12)) for w in weights]
            torch._foreach_add_(weights, moves)
        with torch.enable_grad():
            result = closure()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
        super().step()
        return result


class Learner(learner.Learner):
    """HTR-VT with CTC."""

    unit = "lines"
    passes = 0  # of the present step: SAM's second pass sees the same lines

    def loss(self, batch: dict[str, Any]) -> Tensor:
        images = augmented(batch["images"]) if self.recipe.augment and self.model.training else batch["images"]
        logits = self.model(images).float().log_softmax(-1).transpose(0, 1)  # (N, B, classes)
        tokens = torch.full((logits.shape[1],), logits.shape[0])
        return F.ctc_loss(
            logits, batch["labels"], tokens, batch["lengths"].cpu(), blank=BLANK, zero_infinity=True
        )  # fmt: skip

    def infer(self, batch: dict[str, Any]) -> Tensor:
        return self.model(batch["images"])

    def size(self, batch: dict[str, Any]) -> int:
        return int(batch["lines"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.passes = 0

    def training_step(self, batch: Any, index: int) -> Tensor:
        seen = self.seen
        loss = super().training_step(batch, index)
        self.seen, self.passes = seen if self.passes else self.seen, self.passes + 1
        return loss

    def optimizers_and_schedule(self) -> dict[str, Any]:
        recipe = self.recipe
        if not recipe.sam:
            return super().optimizers_and_schedule()
        groups = decay_groups(self.model, recipe.weight_decay)
        options = {"lr": recipe.learning_rate, "betas": (recipe.betas[0], recipe.betas[1])}
        return self.with_schedule(Sam(groups, radius=recipe.sam, **options))


def augmented(images: Tensor) -> Tensor:
    """Warps, thickens or thins, and fades a batch, each with a chance of one half. Values stay in 0 to 1."""
    if torch.rand(()) < 0.5:
        images = _warped(images)
    if torch.rand(()) < 0.5:
        images = _stroked(images)
    if torch.rand(()) < 0.5:
        brightness, contrast = (
            torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(0.6, 1.4) for _ in "ab"
        )
        images = images * brightness
        mean = images.mean((1, 2, 3), keepdim=True)
        images = ((images - mean) * contrast + mean).clamp(0, 1)
    return images


def _warped(images: Tensor, pixels: float = 8.0) -> Tensor:
    """A projective warp that moves each corner by up to `pixels`, the same for the batch; outside is white."""
    from polymix.compat import cure_torchvision

    cure_torchvision()
    from torchvision.transforms.v2 import functional

    high, wide = images.shape[-2:]
    corners = [[0, 0], [wide - 1, 0], [wide - 1, high - 1], [0, high - 1]]
    reach = min(pixels, high / 8)
    moved = [[x + dx, y + dy] for (x, y), (dx, dy) in
             zip(corners, torch.empty(4, 2).uniform_(-reach, reach).tolist(), strict=True)]  # fmt: skip
    return functional.perspective(images, corners, moved, fill=[1.0])


def _stroked(images: Tensor) -> Tensor:
    """Thicker or thinner strokes, by a window of 2 pixels in one or both axes."""
    size = [1 + int(side) for side in torch.randint(2, (2,))]
    padded = F.pad(images, (0, size[1] - 1, 0, size[0] - 1), value=1.0)
    if torch.rand(()) < 0.5:
        return -F.max_pool2d(-padded, size, 1)  # dark is ink: the least value spreads it
    return F.max_pool2d(padded, size, 1)
