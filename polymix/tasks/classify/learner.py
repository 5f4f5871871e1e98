"""How an image classifier learns: the loss, the optimizer, and timm's mixing and erasing of images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from polymix.convert.adapters.libraries import load_library
from polymix.errors import OptionError
from polymix.tasks import learner
from polymix.tasks.order import Endless, Seeded, number
from polymix.tasks.trainer import decay_groups

_NORM_BATCH = 100  # images at once where batch norms are estimated


class Learner(learner.Learner):
    """A model (B, C, H, W) -> (B, classes).

    A training batch is normalised, parts of it are erased, it is resized to one of the recipe's sizes, and its images
    are mixed in pairs with their labels. Each part is off by default.
    """

    unit = "images"

    def __init__(self, model: Any, recipe: Any, data: Any) -> None:
        super().__init__(model, recipe, data)
        self.classes = len(data.images.classes)
        self.erase, self.mix, self.binary = _erasing(recipe), _mixing(recipe, self.classes), _binary(recipe)
        if recipe.repeats > 1:
            self.order_class = partial(RepeatedOrder, repeats=recipe.repeats)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        x, targets = self.data.images.normalise(images), labels
        if self.model.training:
            x = self._resized(x)
            if self.erase is not None:
                x = self.erase(x)
            if self.mix is not None:
                x, targets = self._mixed(x, labels)
        logits = self.model(x)
        if self.binary is not None:
            return self.binary(logits, targets.to(logits.dtype) if targets.ndim == 2 else targets)
        smoothing = 0.0 if targets.ndim == 2 else self.recipe.label_smoothing  # mixed labels are smooth already
        return cross_entropy(logits, targets, label_smoothing=smoothing)

    def infer(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model(self.data.images.normalise(batch[0]))

    def optimizers_and_schedule(self) -> dict[str, Any]:
        """AdamW or SGD at the rate for this batch size, with the recipe's schedule."""
        recipe = self.recipe
        groups, rate = decay_groups(self.model, recipe.weight_decay), recipe.scaled_rate
        optimizer: torch.optim.Optimizer
        if recipe.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=rate, momentum=recipe.momentum, nesterov=recipe.momentum > 0)
        else:
            optimizer = torch.optim.AdamW(groups, lr=rate, betas=(recipe.betas[0], recipe.betas[1]))
        if recipe.schedule == "cosine":
            return self.with_schedule(optimizer)
        return self.with_milestones(optimizer, recipe.milestones)

    @torch.no_grad()
    def before_measuring(self, model: nn.Module) -> None:
        """Estimate the batch norms anew, from the same training images whatever the seed of the training."""
        norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        count = min(self.recipe.norm_images, len(self.data.train))
        if not norms or not count:
            return
        before = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all batches
            norm.train()
        samples = Seeded(self.data.train, number(self.recipe.seed, "norms"))
        drawn = torch.randperm(len(self.data.train), generator=torch.Generator().manual_seed(0))[:count]
        for part in drawn.split(_NORM_BATCH):
            if len(part) > 1 or count == 1:
                images = torch.stack([samples[int(place), int(place)][0] for place in part])
                model(self.data.images.normalise(images.to(self.device)))
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.eval()

    def _resized(self, x: Tensor) -> Tensor:
        """A batch with one of the recipe's sizes, drawn for each batch."""
        sizes = self.recipe.sizes
        if not sizes:
            return x
        side = sizes[int(torch.randint(len(sizes), ()))]
        return x if side == x.shape[-1] else interpolate(x, size=side, mode="bicubic", antialias=True)

    def _mixed(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if len(x) % 2:
            got = f"{self.recipe.batch_size}, of which a process gets {len(x)} at once"
            raise OptionError("batch_size", got, "an even number with mixup or cutmix", "They are mixed in pairs.")
        return self.mix(x, labels)


class RepeatedOrder(Endless):
    """Each image `repeats` times in a row, by timm's RepeatAugSampler. An epoch still has `size` samples."""

    def __init__(self, size: int, *arguments: Any, repeats: int, **others: Any) -> None:
        super().__init__(size, *arguments, **others)
        self.repeats = repeats

    def order(self, epoch: int) -> list[int]:
        kind = load_library("timm.data.distributed_sampler").RepeatAugSampler
        sampler = kind(
            range(self.size), num_replicas=1, rank=0, num_repeats=self.repeats, selected_round=0, selected_ratio=1
        )
        sampler.set_epoch(number(self.seed, "order", epoch))
        return list(sampler)


def _erasing(recipe: Any) -> Any:
    if not recipe.erasing:
        return None
    kind = load_library("timm.data.random_erasing").RandomErasing
    return kind(recipe.erasing, mode="pixel", device=recipe.device)


def _mixing(recipe: Any, classes: int) -> Any:
    if not recipe.mixup and not recipe.cutmix:
        return None
    return load_library("timm.data.mixup").Mixup(
        mixup_alpha=recipe.mixup, cutmix_alpha=recipe.cutmix, switch_prob=recipe.switch,
        label_smoothing=recipe.label_smoothing, num_classes=classes,
    )  # fmt: skip


def _binary(recipe: Any) -> Any:
    return load_library("timm.loss").BinaryCrossEntropy(recipe.label_smoothing) if recipe.loss == "bce" else None
