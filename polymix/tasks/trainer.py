"""The trainer of every task: Lightning's, without its banners, with whole checkpoints and a Ctrl-C that is heard."""

from __future__ import annotations

import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymix._io import one_line, write_whole
from polymix.compat import cure_torchvision
from polymix.errors import MissingExtraError, ResultsError

cure_torchvision()  # before lightning and torchmetrics, which import it
try:
    from lightning import LightningModule as LightningModule
    from lightning import Trainer as Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.utilities.seed import isolate_rng as isolate_rng
except ImportError as error:
    raise MissingExtraError("lightning", str(error), "pip install 'polymix[train]'") from error

# The parts of a checkpoint that a training continues from.
_PARTS = {"polymix": dict, "global_step": int, "state_dict": dict, "optimizer_states": list, "lr_schedulers": list}
PRECISION = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}


def fit(
    module: LightningModule,
    data: Any = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    where: dict[str, Any] | None = None,
    precision: str = "float32",
    clip: float | None = None,
    accumulate: int = 1,
    saving: ModelCheckpoint | None = None,
    resume: Path | None = None,
    logger: Any = None,
) -> Trainer:
    """Train a module for a number of steps or epochs; the only place that makes a trainer.

    Args:
        data: a loader; None: the module's own.
        where: accelerator, devices and strategy as Lightning names them; default: the CPU.
        clip: largest norm of the gradient, unless the module clips by itself.
        accumulate: batches in a step.
        saving: writes checkpoints, each whole or not at all; None: none are written.
        resume: the checkpoint to continue from.
        logger: of Lightning; None: no logger.
    Raises KeyboardInterrupt when the user interrupts, and SystemExit with a status of its own on SIGTERM.
    """
    with quiet():
        trainer = Trainer(
            **(where or placed("cpu")), max_steps=-1 if steps is None else steps, max_epochs=epochs,
            precision=PRECISION[precision], gradient_clip_val=clip, accumulate_grad_batches=accumulate,
            logger=logger or False, callbacks=[] if saving is None else [saving],
            enable_checkpointing=saving is not None, plugins=[WholeFiles()], enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, limit_val_batches=0,
        )  # fmt: skip
        until_interrupted(lambda: trainer.fit(module, data, ckpt_path=resume))
    return trainer


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters with and without weight decay. Vectors have none, nor what a module's `no_weight_decay` names."""
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


def rated_groups(
    model: nn.Module, weight_decay: float, learning_rate: float, prefixes: tuple[str, ...], share: float
) -> list[dict[str, Any]]:
    """`decay_groups`, and the parameters whose names start with a prefix learn at `share` times the rate."""
    named = {id(value) for name, value in model.named_parameters() if name.startswith(prefixes)}
    groups = []
    for group in decay_groups(model, weight_decay):
        for factor, mine in ((share, True), (1.0, False)):
            parameters = [value for value in group["params"] if (id(value) in named) == mine]
            if parameters:
                groups.append({**group, "params": parameters, "lr": learning_rate * factor})
    return groups


def one_cycle(groups: list[dict[str, Any]], learning_rate: float, warmup: float, trainer: Trainer) -> dict[str, Any]:
    """AdamW with OneCycleLR, whose warm-up is a share of the trainer's steps, as configure_optimizers returns it."""
    return cycled(torch.optim.AdamW(groups, lr=learning_rate), int(trainer.estimated_stepping_batches), warmup)


def cycled(optimizer: Any, steps: int, warmup: float, start: float = 1 / 25, final: float = 1 / 25e4) -> dict[str, Any]:
    """An optimizer with OneCycleLR, as configure_optimizers returns it; each group keeps its rate as the highest.

    warmup: share of the steps in which the rates rise. start, final: of the first and last step, as shares of the
    highest. The first beta goes from 0.95 to 0.85 and back.
    """
    warmup = 0.99 * warmup if warmup * steps == 1 else warmup  # at one step of it OneCycleLR divides 0 by 0
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=steps, pct_start=warmup,
        div_factor=1 / start, final_div_factor=start / final if final else math.inf,
    )  # fmt: skip
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def placed(device: str) -> dict[str, Any]:
    """The trainer's arguments for a device such as "cuda:1"."""
    accelerator, _, index = device.partition(":")
    numbered = bool(index) and accelerator != "cpu"
    return {"accelerator": {"cuda": "gpu"}.get(accelerator, accelerator), "devices": [int(index)] if numbered else 1}


class WholeFiles(TorchCheckpointIO):
    """Writes each checkpoint whole or not at all, so that a full disk or a kill leaves the previous one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)

        def save(part: Path) -> None:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)

        write_whole(path, save)


def read_checkpoint(path: Path, writer: str, names: Sequence[str], **options: Any) -> dict[str, Any]:
    """The parts `names` of a checkpoint that `writer` wrote. Raises ResultsError where it is damaged or foreign."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, **options)
        if not isinstance(content, dict):
            raise TypeError(type(content).__name__)
        for name, kind in _PARTS.items():
            if not isinstance(content[name], kind):
                raise TypeError(f"{name} as {type(content[name]).__name__}")
        return {name: content[name] for name in ("polymix", *names)}
    except Exception as error:  # whatever torch.load raises on a damaged file
        got = f"{path}, which cannot be read ({one_line(error)[:200]})"
        cure = "Delete it to start a new run."
        raise ResultsError("resume", got, f"a checkpoint of {writer}", cure) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's banners, and its hints about workers and validation, which do not apply here."""
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
    """Run, and let KeyboardInterrupt through, which Lightning turns into exit(1), ignoring the next Ctrl-C.

    SIGTERM, which Lightning turns into an exit that looks like success, becomes exit status 143.
    """
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
