"""The large part of a checkpoint, where each process has a shard of it: a folder that all of them write."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from polymix.errors import ResultsError, reason_of
from polymix.files import writing

PREFIX = "step-"  # of the folder's name, before the step
_KNOWN = {"torch.Size", "torch.serialization._get_layout"}  # beside torch.distributed.checkpoint, paths and dtypes


def save_shards(folder: Path, models: Mapping[str, nn.Module], optimizer: Optimizer, *, first: bool) -> dict[str, Any]:
    """Write the tensors of models and optimizer, each process its own; return what of the optimizer are no tensors.

    first: whether this is the first process, which removes what an interrupted run has left there.
    """
    if first:
        shutil.rmtree(folder, ignore_errors=True)  # before any other writes: saving begins with an exchange
    state, rest = _state(models, optimizer)
    with writing(folder.parent), _plain_errors():
        save(state, checkpoint_id=folder)
    return rest


def load_shards(folder: Path, models: Mapping[str, nn.Module], optimizer: Optimizer, rest: Mapping[str, Any]) -> None:
    """Bring models and optimizer to what `save_shards` wrote, whatever the number of processes, sharded or not.

    rest: what it returned. Raises ResultsError where the folder is damaged or foreign.
    """
    state, _ = _state(models, optimizer)
    with _readable(folder), _plain_errors():
        load(state, storage_reader=_Reader(folder))
    for name, model in models.items():
        set_model_state_dict(model, state["models"][name])
    learned: Any = {name: {**values, **rest["state"].get(name, {})} for name, values in state["optimizer"].items()}
    whole = {"state": learned, "param_groups": rest["param_groups"]}
    set_optimizer_state_dict(models["model"], optimizer, whole)


def known_weights(folder: Path) -> set[str]:
    """The names of the weights of which the optimizer had a state. Raises as `load_shards`."""
    with _readable(folder):
        paths = _Reader(folder).read_metadata().planner_data.values()
        return {path[1] for path in paths if path[0] == "optimizer"}


def forget_shards(checkpoints: Path, but: str | None) -> None:
    """Remove the shards of earlier steps, once the checkpoint's file names others, or none."""
    for folder in checkpoints.glob(f"{PREFIX}*"):
        if folder.name != but:
            shutil.rmtree(folder, ignore_errors=True)


def _state(models: Mapping[str, nn.Module], optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of models and optimizer, as this process has them, and the rest of the optimizer.

    The rest is not for the folder, where it would be pickled.
    """
    for part in (part for model in models.values() for part in model.modules()):
        if isinstance(part, FSDPModule):
            part.reshard()  # an evaluation leaves the weights of the outermost part whole
    learned: Any = get_optimizer_state_dict(models["model"], optimizer)
    tensors, rest = {}, {}
    for name, values in learned["state"].items():
        tensors[name] = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        rest[name] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
    state = {"models": {name: get_model_state_dict(model) for name, model in models.items()}, "optimizer": tensors}
    return state, {"state": rest, "param_groups": learned["param_groups"]}


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever PyTorch raises on a damaged file
        got = f"{folder}, which cannot be read ({reason_of(error)[:200]})"
        raise ResultsError("resume", got, "the shards of polymix train", "Delete it to start a new run.") from error


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what failed in a process, in place of CheckpointException, which is no Exception. One process is enough."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise (cause if isinstance(cause, Exception) else RuntimeError(str(cause))) from None


class _Reader(FileSystemReader):
    """A reader that runs no code of the folder: its list of tensors is pickled."""

    def read_metadata(self, *arguments: Any, **options: Any) -> Any:
        with open(Path(self.path) / ".metadata", "rb") as file:
            _Known(file).load()
        return super().read_metadata(*arguments, **options)


class _Known(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        found = f"{module}.{name}"
        kinds = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        path = module.partition(".")[0] == "pathlib" and name.endswith("Path")
        if not (found in _KNOWN or module in kinds or dtype or path):
            raise pickle.UnpicklingError(f"it names {found}")
        return super().find_class(module, name)
