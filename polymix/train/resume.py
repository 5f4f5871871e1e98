"""The checkpoint of a run: one file with plain names, and of sharded weights a folder beside it, which the file names.

Either can be resumed by one process, DDP and FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polymix.convert.saving.files import read_tensors
from polymix.convert.saving.unwrapping import bare
from polymix.errors import ResultsError, reason_of
from polymix.files import write_whole
from polymix.train.shards import PREFIX, forget_shards, known_weights, load_shards, save_shards

LAST_CHECKPOINT = Path("checkpoint") / "last.ckpt"  # in the run's folder
_FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # in the first process alone
_PARTS = {
    "settings": dict, "step": int, "slices": int, "models": dict, "optimizer": dict, "schedule": dict, "kept": dict,
    "scaler": dict, "task": dict,
}  # fmt: skip


def whole_state(model: nn.Module, *, everywhere: bool = False) -> dict[str, Any]:
    """A model's weights by plain names, on the CPU, from all processes: in the first one, or a copy in each."""
    if not everywhere:
        return get_model_state_dict(model, options=_FULL_STATE)
    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def load_whole_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Fill a model, which may be sharded, with weights by plain names."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state)


def save_checkpoint(
    path: Path, content: Mapping[str, Any], models: Mapping[str, nn.Module], optimizer: Optimizer,
    schedule: LRScheduler, *, writes: bool, sharded: bool = False,
) -> None:  # fmt: skip
    """Write the state of a run, whole or not at all; every process takes part, the first one writes.

    Args:
        content: "settings", "step" and "slices", and what else is to be kept. models: by name, "model" first.
        sharded: each process writes its shards of models and optimizer, into a folder beside the file.
    """
    states, folder = {}, f"{PREFIX}{content['step']}" if sharded else None
    if folder is not None:
        learned: Any = save_shards(path.parent / folder, models, optimizer, first=writes)
    else:
        states = {name: whole_state(model) for name, model in models.items()}
        learned = get_optimizer_state_dict(models["model"], optimizer, options=_FULL_STATE)
    if not writes:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {**content, "models": states, "optimizer": learned, "schedule": schedule.state_dict()}
    whole |= {} if folder is None else {"shards": folder}

    def save(part: Path) -> None:
        with open(part, "wb") as file:
            torch.save(whole, file)

    write_whole(path, save)
    forget_shards(path.parent, folder)


def read_checkpoint(path: Path, writer: str, *, mmap: bool = False) -> dict[str, Any]:
    """The content of a checkpoint that `writer` wrote. Raises ResultsError where it is damaged or foreign.

    mmap: leave the numbers on disk until they are used. With "shards", the folder of what the file has not.
    """
    try:
        content: dict[str, Any] = read_tensors(path, mmap=mmap)
        if not isinstance(content, dict):
            raise TypeError(type(content).__name__)
        for name, kind in _PARTS.items():
            if not isinstance(content[name], kind):
                raise TypeError(f"{name} as {type(content[name]).__name__}")
        if "shards" in content:
            content["shards"] = path.parent / Path(content["shards"]).name
        return content
    except Exception as error:  # whatever torch.load raises on a damaged file
        got = f"{path}, which cannot be read ({reason_of(error)[:200]})"
        raise ResultsError("resume", got, f"a checkpoint of {writer}", "Delete it to start a new run.") from error


def check_no_checkpoint(out: Path, resume: bool) -> None:
    """ResultsError where a fresh run in `out` would overwrite a checkpoint."""
    if (out / LAST_CHECKPOINT).exists() and not resume:
        got, allowed = f"{out}, which has a checkpoint", "a folder without a checkpoint"
        raise ResultsError("out", got, allowed, "Pass resume to continue.")


def checkpoint_to_resume(
    out: Path, resume: bool, settings: Mapping[str, Any], *, mmap: bool = False
) -> dict[str, Any] | None:
    """The content of the checkpoint from which a run in `out` goes on; None: it starts anew.

    settings: of the run, as far as they are known before its data are read. mmap: as `read_checkpoint`.
    Raises:
        ResultsError: there is a checkpoint and `resume` is False, or it is damaged or of another run.
    """
    check_no_checkpoint(out, resume)
    last = out / LAST_CHECKPOINT
    if not last.exists():
        return None
    before = read_checkpoint(last, "polymix train", mmap=mmap)
    check_same_run(last, before["settings"], settings)
    return before


def load_checkpoint(
    content: Mapping[str, Any], models: Mapping[str, nn.Module], optimizer: Optimizer, schedule: LRScheduler
) -> None:
    """Bring models, optimizer and schedule to the state of a checkpoint, whatever the number of processes.

    The optimizer knows nothing of a weight that had no gradient before the checkpoint, such as that of a layer whose
    turn had not come; PyTorch would miss it, or make up a first step.
    """
    folder = content.get("shards")
    for name, model in models.items() if folder is None else ():
        load_whole_state(model, content["models"][name])
    known = content["optimizer"].get("state", {}) if folder is None else known_weights(folder)
    weights = bare(dict(models["model"].named_parameters()))
    late = [weight for name, weight in weights.items() if weight.requires_grad and name not in known]
    try:
        for weight in late:
            weight.requires_grad_(False)
        if folder is not None:
            load_shards(folder, models, optimizer, content["optimizer"])
        else:
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(models["model"], optimizer, content["optimizer"], options=options)
    finally:
        for weight in late:
            weight.requires_grad_(True)
    schedule.load_state_dict(content["schedule"])


def check_same_run(path: Path, theirs: Mapping[str, Any], settings: Mapping[str, Any], *, alike: bool = False) -> None:
    """ResultsError unless a checkpoint is of a run with the same settings. alike: and without others."""
    for key in {**settings, **(theirs if alike else {})}:
        value = settings.get(key)
        if theirs.get(key) != value:
            cure = "Continue with the settings that it began with, or choose another out."
            if key == "data":
                raise ResultsError("resume", f"{path}, of a run on other data", "the same data", cure)
            got = f"{path}, of a run with {key}={theirs.get(key)}"
            raise ResultsError("resume", got, f"a run with {key}={value}", cure)
