"""Train an image classifier, the same way whatever its mixer, on Lightning."""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polymix.compat import cure_torchvision
from polymix.errors import MissingExtraError
from polymix.mixers import TokenMixer
from polymix.tasks.images import ImageData

cure_torchvision()  # before lightning and torchmetrics, which import it
try:
    import lightning
    from torchmetrics.classification import MulticlassAccuracy
except ImportError as error:
    raise MissingExtraError("lightning, torchmetrics", str(error), "pip install 'polymix[train]'") from error

PRECISION = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}


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


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay: vectors and what a mixer's `no_weight_decay` names go without."""
    exempt = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, TokenMixer)
        for name, parameter in module.named_parameters()
        if name in module.no_weight_decay()
    }
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in exempt]
    rest = [p for p in model.parameters() if p.ndim <= 1 or id(p) in exempt]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


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
        optimizer = torch.optim.AdamW(decay_groups(self.model, recipe.weight_decay), lr=recipe.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            recipe.learning_rate,
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=recipe.warmup,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning without its banners; its hints about workers and validation do not apply to data in memory."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
    accelerator, _, index = device.partition(":")
    with _quiet():
        trainer = lightning.Trainer(
            accelerator={"cuda": "gpu"}.get(accelerator, accelerator),
            devices=[int(index)] if index else 1,
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
        _until_interrupted(trainer, lambda: trainer.fit(classifier, loader))
        seconds = time.perf_counter() - start
        if classifier.diverged:
            return model, Outcome(None, seconds, tuple(classifier.losses))
        _until_interrupted(trainer, lambda: trainer.test(classifier, test, verbose=False))
    return model, Outcome(classifier.accuracy.compute().item(), seconds, tuple(classifier.losses))


def _until_interrupted(trainer: lightning.Trainer, run: Callable[[], Any]) -> None:
    """Lightning turns Ctrl-C into exit(1) and goes deaf to the next one: turn it back."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        run()
    except SystemExit as stop:
        raise KeyboardInterrupt from stop
    finally:
        signal.signal(signal.SIGINT, handler)
