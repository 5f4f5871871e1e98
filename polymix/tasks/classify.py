"""Train an image classifier, the same way whatever its mixer, on Lightning."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polymix.errors import MissingExtraError
from polymix.tasks.images import ImageData
from polymix.tasks.trainer import PRECISION, decay_groups, one_cycle, placed, quiet, until_interrupted

try:
    import lightning
    from torchmetrics.classification import MulticlassAccuracy
except ImportError as error:
    raise MissingExtraError("lightning, torchmetrics", str(error), "pip install 'polymix[train]'") from error


@dataclass(frozen=True)
class Recipe:
    """How every mixer is trained: AdamW, linear warm-up and cosine decay, cross-entropy with label smoothing."""

    epochs: int = 30
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.2  # share of the steps
    label_smoothing: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """One training run: test accuracy (None if the loss left the finite numbers), seconds, the loss of each epoch."""

    accuracy: float | None
    seconds: float
    losses: tuple[float, ...]


class Classifier(lightning.LightningModule):
    """A model and its recipe."""

    def __init__(self, model: nn.Module, recipe: Recipe, data: ImageData, on_epoch: Callable[[int], None]) -> None:
        super().__init__()
        self.model, self.recipe, self.data, self.on_epoch = model, recipe, data, on_epoch
        self.loss = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
        self.accuracy = MulticlassAccuracy(len(data.classes), average="micro")
        self.losses: list[float] = []
        self.diverged = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        images, labels = batch
        loss: Tensor = self.loss(self.model(self.data.normalise(images)), labels)
        if index == 0:
            self.losses.append(loss.item())
            if not loss.isfinite():
                self.diverged = self.trainer.should_stop = True
                return None
        return loss

    def on_train_epoch_end(self) -> None:
        self.on_epoch(self.current_epoch + 1)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.accuracy.update(self.model(self.data.normalise(images)), labels)

    def configure_optimizers(self) -> dict[str, Any]:
        recipe = self.recipe
        groups = decay_groups(self.model, recipe.weight_decay)
        return one_cycle(groups, recipe.learning_rate, recipe.warmup, self.trainer)


def train(
    build: Callable[[], nn.Module],
    data: ImageData,
    recipe: Recipe,
    *,
    seed: int,
    device: str = "cpu",
    dtype: str = "float32",
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> tuple[nn.Module, Outcome]:
    """Build a model under `seed`, train it by `recipe`, test it once at the end.

    The same seed gives every mixer the same order of images. Raises KeyboardInterrupt when the user interrupts.
    """
    lightning.seed_everything(seed, verbose=False)
    model = build()
    classifier = Classifier(model, recipe, data, on_epoch)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(*data.train), recipe.batch_size, shuffle=True, generator=order)
    test = DataLoader(TensorDataset(*data.test), 4 * recipe.batch_size)
    with quiet():
        trainer = lightning.Trainer(
            **placed(device),
            max_epochs=recipe.epochs,
            precision=PRECISION[dtype],
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        start = time.perf_counter()
        until_interrupted(lambda: trainer.fit(classifier, loader))
        seconds = time.perf_counter() - start
        if classifier.diverged:
            return model, Outcome(None, seconds, tuple(classifier.losses))
        until_interrupted(lambda: trainer.test(classifier, test, verbose=False))
    return model, Outcome(classifier.accuracy.compute().item(), seconds, tuple(classifier.losses))
