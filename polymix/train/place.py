"""Where a training runs: the device, the processes that torchrun started, and the precision. PyTorch alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from polymix.devices import check_device, join_processes, processes
from polymix.errors import OptionError
from polymix.numbers import plural
from polymix.train.recipe import Recipe
from polymix.train.task import Process, Task

T = TypeVar("T")
AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_place(recipe: Recipe) -> None:
    """OptionError unless the recipe fits the device and the processes that torchrun has started."""
    check_device(recipe.device, kinds=("cpu", "cuda", "mps"), touch=False)
    world, shares = processes()[1], recipe.sequence_parallel
    if world % shares:
        got, cure = f"{shares} with {plural(world, 'process')}", "Start more with torchrun --nproc-per-node."
        raise OptionError("sequence_parallel", got, "a divisor of the number of processes", cure)
    if recipe.strategy != "auto" and "WORLD_SIZE" not in os.environ:
        cure = "Start it as torchrun --nproc-per-node 2 -m polymix train …"
        raise OptionError("strategy", f"{recipe.strategy} in one process", "auto, or processes of torchrun", cure)
    if processes()[1] > 1 and ":" in recipe.device:
        got = f"{recipe.device} with {processes()[1]} processes"
        raise OptionError("device", got, "a device without a number", "Drop the number.")
    if recipe.precision == "float16" and not recipe.device.startswith("cuda"):
        cure = "Pass precision=bfloat16."
        raise OptionError("precision", f"float16 on {recipe.device}", "float32 or bfloat16 there", cure)


def check_batch(recipe: Recipe) -> None:
    """OptionError unless the processes that share a batch, and its parts, divide it."""
    world = processes()[1] // recipe.sequence_parallel
    if recipe.batch_size % (recipe.accumulate * world):
        got = f"{recipe.batch_size} for {world} processes with accumulate={recipe.accumulate}"
        raise OptionError("batch_size", got, f"a multiple of {recipe.accumulate * world}", "Change one of them.")


def slices_of(recipe: Recipe, world: int, before: Mapping[str, Any] | None) -> int:
    """Into how many slices a batch is cut: what the run began with, or `accumulate` for each process.

    Raises OptionError where they cannot be shared among the processes.
    """
    total = recipe.accumulate * world if before is None else int(before["slices"])
    if total % world:
        got = f"{world} processes for a run that cuts each batch into {total} slices"
        raise OptionError("resume", got, f"a number of processes that divides {total}", "Start another number of them.")
    return total


def first_of_all(work: Callable[[], T]) -> T:
    """Run `work` in the first process, then in the others, which use what the first one wrote."""
    rank, world = processes()
    if world == 1:
        return work()
    join_processes()
    result = work() if rank == 0 else None
    distributed.broadcast_object_list([None], device=torch.device("cpu"))
    return work() if result is None else result


class Place:
    """The device, the other processes and the precision of one run.

    Attributes:
        device: of this process. rank, world: which of how many processes this is. shares: how many share a sequence.
        batch_rank, batch_world: which of how many parts of the batch this process has; those that share a sequence have
            the same one. mesh: all processes as ("dp", "cp"), parts of the batch × of a sequence; None: shares is 1.
    """

    def __init__(self, recipe: Recipe) -> None:
        join_processes()
        self.rank, self.world = processes()
        self.shares = recipe.sequence_parallel
        self.batch_rank, self.batch_world = self.rank // self.shares, self.world // self.shares
        self.device = torch.device(recipe.device)
        if self.device.type == "cuda" and self.world > 1:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self.mesh: Any = None
        if self.shares > 1:
            from torch.distributed.device_mesh import init_device_mesh

            sizes = (self.batch_world, self.shares)
            self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp", "cp"))
        self.dtype = AUTOCAST[recipe.precision]
        self.sharded = recipe.strategy == "fsdp"
        self.parallel = self.world > 1 or recipe.strategy == "ddp"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.precision == "float16")

    @property
    def process(self) -> Process:
        """What measures need to know, of a model that every process has whole."""
        return Process(self.device, self.rank, self.world, self.total)

    def process_of(self, task: Task[Any, Any]) -> Process:
        """What measures need to know, of a model that `split` has split."""
        if self.mesh is None:
            return self.process
        group = distributed.group.WORLD if task.splits == "tokens" else self.mesh["dp"].get_group()

        def total(value: Tensor) -> Tensor:
            distributed.all_reduce(value, group=group)
            return value

        return Process(self.device, self.batch_rank, self.batch_world, total, lambda batch: self.local(task, batch))

    def split(self, task: Task[Any, Any], model: nn.Module) -> None:
        """Let the processes of a sequence share it in this model. Raises CapabilityError: a mixer cannot be split."""
        if self.mesh is None:
            return
        from polymix.parallel import parallelize
        from polymix.parallel.blocks import split_blocks

        if task.splits == "blocks":
            for run in task.shared_blocks(model):
                split_blocks(run, self.mesh["cp"])
        else:
            parallelize(model, self.mesh["cp"])

    def alone(self, task: Task[Any, Any], model: nn.Module) -> AbstractContextManager[None]:
        """Within it, a process with some tokens of each sequence computes all of them, such as to write a text."""
        if self.mesh is None or task.splits != "tokens":
            return nullcontext()
        from polymix.parallel import alone

        return alone(model)

    def local(self, task: Task[Any, Any], batch: Any) -> Any:
        """What this process computes of a batch: its tokens, or all."""
        if self.mesh is None or task.splits != "tokens":
            return batch
        from polymix.parallel import shard

        return task.local(batch, partial(shard, group=self.mesh["cp"].get_group()))

    def shard(self, model: nn.Module, learns: bool = True) -> nn.Module:
        """A model on the device, in place; with strategy=fsdp sharded, each block (`_no_split_modules`) by itself.

        A model that does not learn has no backward pass, so it is sharded again after every forward pass.
        """
        model.to(self.device)
        if not self.sharded:
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        names = set(getattr(model, "_no_split_modules", None) or ())
        for module in [*model.modules()][1:]:
            if type(module).__name__ in names:
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=None if learns else True)
        return model

    def in_step(self, learner: nn.Module) -> nn.Module:
        """A module whose gradients are averaged over all processes."""
        if self.sharded or not self.parallel:
            return learner
        devices = [self.device] if self.device.type == "cuda" else None
        # A process may have a batch that some parts of the model take no part in, such as pictures without objects.
        return nn.parallel.DistributedDataParallel(learner, devices, find_unused_parameters=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the activations."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)

    @contextmanager
    def unsynchronised(self, learner: Any, enabled: bool) -> Iterator[None]:
        """Gradients that are kept here until the last part of a step, where `enabled`."""
        if self.sharded:
            learner.model.set_requires_gradient_sync(not enabled)
            yield
            return
        with learner.no_sync() if enabled and self.parallel else nullcontext():
            yield

    def move(self, batch: Any) -> Any:
        """A batch on the device: tensors, and what has a method `to`, at any depth of lists and dicts."""
        if callable(getattr(batch, "to", None)):
            return batch.to(self.device)
        if isinstance(batch, dict):
            return type(batch)({name: self.move(part) for name, part in batch.items()})
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(self.move(part) for part in batch))
        if isinstance(batch, (list, tuple)):
            return type(batch)(self.move(part) for part in batch)
        return batch

    def total(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.world > 1:
            distributed.all_reduce(value)
        return value

    def mean(self, values: Sequence[Tensor], slices: int) -> Tensor:
        """The mean over all slices of a step, of which this process has `values`."""
        return self.total(torch.stack([*values]).sum(0)) / (self.shares * slices)
