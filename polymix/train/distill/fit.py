"""Train a stage from its start or from its last checkpoint, in this process or in several that are forked for it."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import multiprocessing, nn
from torch.multiprocessing.spawn import start_processes

from polymix.devices import check_device, processes
from polymix.errors import OptionError, ResultsError, check_choice, check_int
from polymix.files import write_whole
from polymix.numbers import plural
from polymix.train.distill.stages import FineTuning, Imitation, Listener, Stage
from polymix.train.loop import Watch, fit
from polymix.train.place import AUTOCAST, Place
from polymix.train.recipe import Recipe
from polymix.train.resume import check_same_run, load_whole_state, read_checkpoint

WARMUP, WARMUP_STEPS = 0.1, 20  # share of the steps; so many at the least, in half of a shorter training
LOOKS = 5  # at what was held back, in a stage


@dataclass(frozen=True)
class Fit:
    """Where and how both stages run, and where their checkpoints are."""

    out: Path | None
    resume: bool
    device: str
    devices: int
    precision: str
    listener: Listener = field(default_factory=Listener)

    def __post_init__(self) -> None:
        check_choice("resume", self.resume, (True, False))
        check_device(self.device, kinds=("cpu", "cuda", "mps"), touch=False)
        check_int("devices", self.devices, 1)
        check_choice("precision", self.precision, AUTOCAST)
        if self.precision == "float16" and not self.device.startswith("cuda"):
            got = f"float16 on {self.device}"
            raise OptionError("precision", got, "float32 or bfloat16", "Pass precision='bfloat16', say.")
        if self.devices > 1 and ":" in self.device:
            got = f"{self.device} with devices={self.devices}"
            raise OptionError("device", got, "a device without a number", "Drop the number.")
        if self.devices > 1 and processes()[1] > 1:
            got = f"{self.devices} in a process of torchrun"
            raise OptionError("devices", got, "1: torchrun has started the processes", "Leave it out.")
        if self.forks:
            self._check_fork()
        if self.resume and self.out is None:
            raise OptionError("resume", True, "True with out=, where the checkpoints are", "Pass out=.")
        for last in (self.samples, *(self._last(stage.name) for stage in (Imitation, FineTuning))):
            if last is not None and last.exists() and not self.resume:
                got = f"{last.parent}, which has a checkpoint"
                raise ResultsError("out", got, "a folder without a checkpoint", "Pass resume=True to continue from it.")

    @property
    def forks(self) -> bool:
        """Whether a stage runs in processes that are forked for it."""
        return self.devices > 1

    @property
    def world(self) -> int:
        """The processes that train together."""
        return self.devices if self.forks else processes()[1]

    @property
    def place(self) -> str:
        """Where to compute before and after training: on the CPU if processes are forked, which cannot inherit CUDA."""
        return "cpu" if self.forks else self.device

    @property
    def samples(self) -> Path | None:
        """Where drawn batches are kept; nowhere under torchrun, where each process draws the same."""
        return None if processes()[1] > 1 else self._last("samples")

    def _check_fork(self) -> None:
        cure = "Start the script as torchrun --nproc-per-node N instead, and leave devices out."
        if "fork" not in multiprocessing.get_all_start_methods() or not torch.distributed.is_available():
            raise OptionError("devices", self.devices, "1 on a system without fork", cure)
        if self.device.startswith("cuda") and torch.cuda.is_initialized():
            raise OptionError("devices", f"{self.devices} after CUDA was used", "1, or to be first", cure)

    def recipe(
        self, loader: Any, epochs: int, learning_rate: float, weight_decay: float, seed: int, keep: str = "best"
    ) -> Recipe:
        """The options of a stage: an epoch is as many steps as each process has batches."""
        steps = len(loader) // self.world
        total = epochs * steps
        return Recipe(
            batch_size=self.world, steps=total, learning_rate=learning_rate, weight_decay=weight_decay, final=0.0,
            warmup=max(WARMUP, min(0.5, WARMUP_STEPS / total)), betas=(0.9, 0.999), seed=seed, device=self.device,
            precision=self.precision, checkpoint_every=steps, evaluate_every=math.ceil(total / LOOKS), log_every=total,
            keep=keep,
        )  # fmt: skip

    def __call__(self, stage: Stage) -> tuple[float, ...]:
        """Train a stage in place. Returns the loss of each epoch."""
        settings = {**stage.settings_of_run, "processes": self.world}
        settings |= {f"model.{name}": tuple(value.shape) for name, value in stage.model.state_dict().items()}
        last, before = self._last(stage.name), None
        if last is not None and last.exists():
            before = read_checkpoint(last, "polymix.distill")
            check_same_run(last, before["settings"], settings, alike=True)
            done = before["step"] // stage.epoch_steps
            if before["step"] >= stage.recipe.steps:
                stage.say(f"The earlier run finished {stage.name} ({plural(stage.epochs, 'epoch')}).")
                load_whole_state(stage.model, before["models"]["model"])
                stage.load_state(stage.data, before["task"])
                return tuple(stage.losses)
            stage.say(f"Continuing {stage.name} with epoch {done + 1} of {stage.epochs}.")
        if self.forks:
            with TemporaryDirectory() as scratch:
                result = Path(scratch) / "result.pt"
                arguments = (self.devices, _free_port(), stage, settings, last, before, result)
                start_processes(_forked, arguments, self.devices, start_method="fork")
                content = torch.load(result, weights_only=True)
            load_whole_state(stage.model, content["model"])
            stage.load_state(stage.data, content["state"])
        else:
            _train(stage, settings, last, before)
        return tuple(stage.losses)

    def _last(self, stage: str) -> Path | None:
        return None if self.out is None else self.out / stage / "last.ckpt"


def _train(stage: Stage, settings: dict[str, Any], last: Path | None, before: dict[str, Any] | None) -> nn.Module:
    place = Place(stage.recipe)
    for module in stage.beside:
        module.to(place.device)
    watch = Watch(on_step=stage.after_step)
    fit(stage, stage.data, stage.model, place, watch, settings=settings, checkpoint=last, before=before)
    return stage.model


def _forked(
    rank: int, world: int, port: int, stage: Stage, settings: dict[str, Any], last: Path | None,
    before: dict[str, Any] | None, result: Path,
) -> None:  # fmt: skip
    """One of the processes: train, and in the first one leave the weights for the process that waits."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and waiting for them hangs
    model = _train(stage, settings, last, before)
    if rank == 0:
        content = {"model": model.to("cpu").state_dict(), "state": stage.state(stage.data)}
        write_whole(result, lambda part: torch.save(content, part))
    torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
