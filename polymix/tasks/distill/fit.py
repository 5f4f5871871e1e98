"""Train a stage from its start or from its last checkpoint."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from polymix._io import check_device
from polymix.errors import OptionError, ResultsError, check_choice, check_int
from polymix.numbers import plural
from polymix.tasks.distill.stages import FineTuning, Imitation, Stage, Watch
from polymix.tasks.trainer import PRECISION, ModelCheckpoint, fit, placed, read_checkpoint

_STRATEGIES = re.compile(r"auto|ddp(_fork|_notebook)?(_find_unused_parameters_(true|false))?")


@dataclass(frozen=True)
class Fit:
    """Where and how both stages run, and where their checkpoints are."""

    out: Path | None
    resume: bool
    device: str
    devices: int
    strategy: str
    precision: str
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        check_choice("resume", self.resume, (True, False))
        check_device(self.device, kinds=("cpu", "cuda", "mps"), touch=False)
        check_int("devices", self.devices, 1)
        check_choice("precision", self.precision, PRECISION)
        if self.precision == "float16" and self.device.startswith("cpu"):
            raise OptionError("precision", "float16 on a CPU", "float32 or bfloat16", "Pass precision='bfloat16', say.")
        if self.devices > 1 and ":" in self.device:
            raise OptionError(
                "device", f"{self.device} with devices={self.devices}", "a device without a number", "Drop the number."
            )
        if not isinstance(self.strategy, str) or not _STRATEGIES.fullmatch(self.strategy):
            allowed = "auto, ddp, ddp_fork, ddp_notebook, or one of these with _find_unused_parameters_true"
            cure = "These return the weights: ddp to each process of a script, the others to a notebook's process."
            raise OptionError("strategy", repr(self.strategy), allowed, cure)
        if self.resume and self.out is None:
            raise OptionError("resume", True, "True with out=, where the checkpoints are", "Pass out=.")
        for stage in (Imitation, FineTuning):
            last = self._last(stage)
            if last is not None and last.exists() and not self.resume:
                got = f"{last.parent}, which has a checkpoint"
                raise ResultsError("out", got, "a folder without one", "Pass resume=True to continue from it.")

    @property
    def place(self) -> str:
        """Where to compute before and after training: on the CPU if processes are forked, which cannot inherit CUDA."""
        forks = re.search("fork|notebook", self.strategy) or (self.strategy == "auto" and hasattr(sys, "ps1"))
        return "cpu" if self.devices > 1 and forks else self.device

    def __call__(self, stage: Stage) -> tuple[float, ...]:
        """Train a stage in place. Returns the loss of each epoch."""
        stage.settings |= {"devices": self.devices, "precision": self.precision}
        stage.watch, (last, going_on) = self.watch, (self._last(stage), None)
        if last is not None and last.exists():
            content, going_on = _read(last, stage), last
            done = content["epoch"] + 1
            if done < stage.epochs:
                self.watch.say(f"Continuing {stage.name} with epoch {done + 1} of {stage.epochs}.")
            else:
                self.watch.say(f"The earlier run finished {stage.name} ({plural(stage.epochs, 'epoch')}).")
                stage.load_state_dict(content["state_dict"])
                return tuple(stage.losses.tolist())
        saving = None
        if last is not None:
            saving = ModelCheckpoint(last.parent, filename=last.stem, enable_version_counter=False)
        where = placed(self.device) | ({"devices": self.devices} if self.devices > 1 else {})
        where["strategy"] = self.strategy
        fit(
            stage, epochs=stage.epochs, where=where, precision=self.precision, clip=1.0, saving=saving, resume=going_on,
        )  # fmt: skip
        return tuple(stage.losses.tolist())

    def _last(self, stage: Stage | type[Stage]) -> Path | None:
        return None if self.out is None else self.out / stage.name / "last.ckpt"


def _read(path: Path, stage: Stage) -> dict[str, Any]:
    """A checkpoint. Raises ResultsError if it is damaged, or of a stage with other settings."""
    content = read_checkpoint(path, "polymix.distill", ("state_dict", "epoch"))
    theirs = {**content["polymix"], **_shapes(content["state_dict"])}
    ours = {**stage.settings, **_shapes(stage.state_dict())}
    for key in (*ours, *theirs):
        if theirs.get(key) != ours.get(key):
            got = f"{path}, of a run with {key}={theirs.get(key)}"
            cure = "Continue with the settings that it began with, or choose another out=."
            raise ResultsError("resume", got, f"{key}={ours.get(key)}", cure)
    return content


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor)}
