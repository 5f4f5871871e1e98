"""A stage trained, from its start or from its last checkpoint."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import OptionError, ResultsError, check_choice, check_int
from polymix.tasks.distill.stages import FineTuning, Imitation, Stage
from polymix.tasks.trainer import (
    PRECISION,
    ModelCheckpoint,
    Trainer,
    WholeFiles,
    check_device,
    placed,
    quiet,
    until_interrupted,
)

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

    def __post_init__(self) -> None:
        check_choice("resume", self.resume, (True, False))
        check_device(self.device)
        check_int("devices", self.devices, 1)
        check_choice("precision", self.precision, PRECISION)
        if self.precision == "float16" and self.device.startswith("cpu"):
            raise OptionError("precision", "float16 on a CPU", "float32 or bfloat16 there", "")
        if self.devices > 1 and ":" in self.device:
            raise OptionError(
                "device", f"{self.device} with devices={self.devices}", "a kind of device", "Drop the number."
            )
        if not isinstance(self.strategy, str) or not _STRATEGIES.fullmatch(self.strategy):
            allowed = "auto, ddp, ddp_fork, ddp_notebook, or one of these with _find_unused_parameters_true"
            cure = "These bring the weights back: ddp to each process of a script, the others to a notebook's own."
            raise OptionError("strategy", repr(self.strategy), allowed, cure)
        if self.resume and self.out is None:
            raise OptionError("resume", True, "True with out=, where the checkpoints are", "Pass out=.")
        for stage in (Imitation, FineTuning):
            last = self._last(stage)
            if last is not None and last.exists() and not self.resume:
                got = f"{last.parent}, which has a checkpoint"
                raise ResultsError("out", got, "a folder without one", "Pass resume=True to go on from it.")

    @property
    def place(self) -> str:
        """Where there may be work before and after: nowhere on a GPU that processes would have to inherit."""
        forks = re.search("fork|notebook", self.strategy) or (self.strategy == "auto" and hasattr(sys, "ps1"))
        return "cpu" if self.devices > 1 and forks else self.device

    def __call__(self, stage: Stage) -> tuple[float, ...]:
        """Train a stage in place; the loss of each epoch."""
        stage.settings |= {"devices": self.devices, "precision": self.precision}
        last, going_on = self._last(stage), None
        if last is not None and last.exists():
            found, going_on = _read(last, stage), last
            if found["epoch"] + 1 == stage.epochs:
                stage.load_state_dict(found["state_dict"])
                return tuple(stage.losses.tolist())
        saving = (
            [] if last is None else [ModelCheckpoint(last.parent, filename=last.stem, enable_version_counter=False)]
        )
        where = placed(self.device) | ({"devices": self.devices} if self.devices > 1 else {})
        with quiet():
            trainer = Trainer(
                **where, strategy=self.strategy, max_epochs=stage.epochs, precision=PRECISION[self.precision],
                gradient_clip_val=1.0, logger=False, callbacks=saving, enable_checkpointing=bool(saving),
                plugins=[WholeFiles()], enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            )  # fmt: skip
            until_interrupted(lambda: trainer.fit(stage, ckpt_path=going_on))
        return tuple(stage.losses.tolist())

    def _last(self, stage: Stage | type[Stage]) -> Path | None:
        return None if self.out is None else self.out / stage.name / "last.ckpt"


def _read(path: Path, stage: Stage) -> dict[str, Any]:
    """A checkpoint, once it is known to be whole, and of such a stage with the same settings."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        said, weights, _ = found["polymix"], found["state_dict"], found["epoch"]
    except Exception as error:  # whatever torch.load says of a damaged file
        got = f"{path}, which cannot be read ({type(error).__name__}: {error})"
        raise ResultsError("resume", got, "a checkpoint of polymix.distill", "Delete it to begin anew.") from error
    theirs, ours = ({**of, **_shapes(state)} for of, state in ((said, weights), (stage.settings, stage.state_dict())))
    for key in (*ours, *theirs):
        if theirs.get(key) != ours.get(key):
            got = f"{path}, of a run with {key}={theirs.get(key)}"
            raise ResultsError(
                "resume", got, f"{key}={ours.get(key)}", "Go on with what it began with, or another out=."
            )
    return found


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor)}
