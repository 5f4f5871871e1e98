"""What every training shares: Lightning's trainer without its banners, the optimizer and its schedule, Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymix.compat import cure_torchvision
from polymix.errors import MissingExtraError, OptionError

cure_torchvision()  # before lightning and torchmetrics, which import it
try:
    from lightning import LightningModule as LightningModule
    from lightning import Trainer as Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.utilities.seed import isolate_rng as isolate_rng
except ImportError as error:
    raise MissingExtraError("lightning", str(error), "pip install 'polymix[train]'") from error

PRECISION = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay: vectors and what `no_weight_decay` of a part names go without."""
    exempt = {
        id(parameter)
        for module in model.modules()
        if callable(named := getattr(module, "no_weight_decay", None))
        for name, parameter in module.named_parameters()
        if name in named()
    }
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in exempt]
    rest = [p for p in model.parameters() if p.ndim <= 1 or id(p) in exempt]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def one_cycle(groups: list[dict[str, Any]], learning_rate: float, warmup: float, trainer: Trainer) -> dict[str, Any]:
    """AdamW with a linear warm-up over a share of the trainer's steps and a cosine decay, for configure_optimizers."""
    optimizer = torch.optim.AdamW(groups, lr=learning_rate)
    steps = int(trainer.estimated_stepping_batches)
    warmup = 0.99 * warmup if warmup * steps == 1 else warmup  # at one step of it OneCycleLR divides 0 by 0
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=warmup)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def check_device(device: str) -> None:
    """OptionError unless PyTorch knows such a device, Lightning trains on it, and there is one."""
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    kind, _, index = str(device).partition(":")
    if kind not in counts or not (index or "0").isdecimal():
        raise OptionError("device", repr(device), '"cpu", "cuda", "cuda:1" or "mps"', 'Pass device="cpu", say.')
    if int(index or 0) >= counts[kind]:
        raise OptionError("device", repr(device), f"one of the {counts[kind]} that are here", 'Pass device="cpu", say.')


def placed(device: str) -> dict[str, Any]:
    """`device`, such as "cuda:1", as the trainer's arguments."""
    accelerator, _, index = device.partition(":")
    numbered = bool(index) and accelerator != "cpu"
    return {"accelerator": {"cuda": "gpu"}.get(accelerator, accelerator), "devices": [int(index)] if numbered else 1}


class WholeFiles(TorchCheckpointIO):
    """Checkpoints written beside their place and renamed: a full disk or a kill leaves the one before whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        try:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def quiet() -> Iterator[None]:
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


def until_interrupted(run: Callable[[], Any]) -> None:
    """Lightning turns Ctrl-C into exit(1) and goes deaf to the next one: turn it back. SIGTERM, which it turns into an
    exit that looks like success, is one with a code of its own."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        run()
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from stop
        raise SystemExit(128 + signal.SIGTERM if stop.code is None else stop.code) from stop
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():  # others may set none
            signal.signal(signal.SIGINT, handler)
