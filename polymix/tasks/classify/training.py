"""Train an image classifier in memory, in the same way whatever its mixer is, so that mixers can be compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polymix.errors import MissingExtraError
from polymix.renamed import renamed
from polymix.tasks.classify.data import ImageData
from polymix.tasks.classify.recipe import Schedule
from polymix.tasks.classify.stream import StreamedImages
from polymix.tasks.trainer import LightningModule, decay_groups, fit, one_cycle, placed, quiet, until_interrupted

try:
    import lightning
    from torchmetrics.classification import MulticlassAccuracy
except ImportError as error:
    raise MissingExtraError("lightning, torchmetrics", str(error), "pip install 'polymix[train]'") from error

__getattr__ = renamed(__name__, Recipe="Schedule", Classifier="Trial")


@dataclass(frozen=True)
class Outcome:
    """One training run: test accuracy (None if it diverged), seconds, a loss from each epoch, and the answers.

    predictions: the class that was answered for each test image, in their order; empty if the run diverged.
    """

    accuracy: float | None
    seconds: float
    losses: tuple[float, ...]
    predictions: tuple[int, ...] = ()


class Trial(LightningModule):
    """A model, the images and the schedule."""

    def __init__(self, model: nn.Module, schedule: Schedule, data: ImageData | StreamedImages,
                 on_epoch: Callable[[int], None]) -> None:  # fmt: skip
        super().__init__()
        self.model, self.schedule, self.data, self.on_epoch = model, schedule, data, on_epoch
        self.loss = nn.CrossEntropyLoss(label_smoothing=schedule.label_smoothing)
        self.accuracy = MulticlassAccuracy(len(data.classes), average="micro")
        self.losses: list[float] = []
        self.predictions: list[int] = []
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
        logits = self.model(self.data.normalise(images))
        self.accuracy.update(logits, labels)
        self.predictions += logits.argmax(1).tolist()

    def configure_optimizers(self) -> dict[str, Any]:
        schedule = self.schedule
        groups = decay_groups(self.model, schedule.weight_decay)
        return one_cycle(groups, schedule.learning_rate, schedule.warmup, self.trainer)


def train(
    build: Callable[[], nn.Module],
    data: ImageData | StreamedImages,
    schedule: Schedule,
    *,
    seed: int,
    device: str = "cpu",
    dtype: str = "float32",
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> tuple[nn.Module, Outcome]:
    """Build a model under `seed`, train it, and test it once at the end.

    With the same seed every model sees the images in the same order. Raises KeyboardInterrupt on Ctrl-C.
    """
    lightning.seed_everything(seed, verbose=False)
    model = build()
    trial = Trial(model, schedule, data, on_epoch)
    order = torch.Generator().manual_seed(seed)
    training, held_out = data.data_sets()
    loader = DataLoader(training, schedule.batch_size, shuffle=True, generator=order)
    test = DataLoader(held_out, 4 * schedule.batch_size)
    start = time.perf_counter()
    trainer = fit(
        trial, loader, epochs=schedule.epochs, where=placed(device), precision=dtype, clip=1.0,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if trial.diverged:
        return model, Outcome(None, seconds, tuple(trial.losses))
    with quiet():
        until_interrupted(lambda: trainer.test(trial, test, verbose=False))
    return model, Outcome(trial.accuracy.compute().item(), seconds, tuple(trial.losses), tuple(trial.predictions))
