"""Several processes under torchrun: who prepares the data, and how the trainer brings them together."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from polymix.errors import OptionError
from polymix.tasks.recipe import TaskRecipe
from polymix.tasks.trainer import placed

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """One of `world` processes that train together, and its device; `total` sums a tensor over all of them."""

    device: Any = "cpu"
    rank: int = 0
    world: int = 1
    total: Callable[[Tensor], Tensor] = lambda value: value


def processes() -> tuple[int, int]:
    """This process's rank and the number of processes, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_processes(recipe: TaskRecipe) -> None:
    """OptionError unless the recipe fits the processes that torchrun has started."""
    world = processes()[1]
    if recipe.strategy != "auto" and "WORLD_SIZE" not in os.environ:
        cure = "Start it as torchrun --nproc-per-node 2 -m polymix.cli train …"
        raise OptionError("strategy", f"{recipe.strategy} in one process", "auto, or processes of torchrun", cure)
    if recipe.batch_size % (recipe.accumulate * world):
        got = f"{recipe.batch_size} for {world} processes with accumulate={recipe.accumulate}"
        raise OptionError("batch_size", got, f"a multiple of {recipe.accumulate * world}", "Change one of them.")
    if world > 1 and ":" in recipe.device:
        got = f"{recipe.device} with {world} processes"
        raise OptionError("device", got, "a device without a number", "Drop the number.")


def first_of_all(work: Callable[[], T]) -> T:
    """Run `work` in the first process, then in the others, which find what the first one wrote."""
    rank, world = processes()
    if world == 1:
        return work()
    if not distributed.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    result = work() if rank == 0 else None
    distributed.broadcast_object_list([None], device=torch.device("cpu"))
    return work() if result is None else result


def spread(recipe: TaskRecipe) -> dict[str, Any]:
    """The arguments of Lightning's Trainer that place a run on its devices."""
    world = processes()[1]
    if "WORLD_SIZE" not in os.environ:
        return placed(recipe.device)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    strategy: Any = "ddp" if world > 1 or recipe.strategy == "ddp" else "auto"
    if recipe.strategy == "fsdp":
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(world, 1, save_distributed_checkpoint=False)
    return placed(recipe.device) | {"devices": local, "num_nodes": world // local, "strategy": strategy}


def shard(model: nn.Module, mesh: Any, learns: bool) -> None:
    """Shard a model in place with FSDP2: each of its blocks (`_no_split_modules`) by itself, then the rest.

    A model that does not learn has no backward pass, so it is sharded again after every forward pass.
    """
    from torch.distributed.fsdp import fully_shard

    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if learns else True)
