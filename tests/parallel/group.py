"""Processes that share a sequence, started once: each test calls functions on all of them."""

import datetime
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.processes import FORKS, fork, free_port

TIMEOUT = 300  # seconds that a collective waits: a busy machine stops processes for minutes


def join(rank, world, port, timeout=TIMEOUT, shape=None):
    """Join a group of gloo processes; the mesh "cp" of all, or ("dp", "cp") of a shape."""
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    wait = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
    if shape is None:
        return DeviceMesh("cpu", list(range(world)), mesh_dim_names=("cp",))
    return DeviceMesh("cpu", torch.arange(world).view(shape), mesh_dim_names=("dp", "cp"))


def _serve(rank, world, port, pipe, shape):
    mesh = join(rank, world, port, shape=shape)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((True, function(mesh, *arguments)))
        except BaseException:
            pipe.send((False, f"process {rank}: {traceback.format_exc()}"))


class Group:
    """So many processes. A call runs a function of a module, with the mesh first, on each."""

    def __init__(self, world, shape=None):
        self.world, self.shape, self.processes = world, shape, []

    def start(self):
        port = free_port()
        ends = [FORKS.Pipe() for _ in range(self.world)]
        self.pipes = [own for own, _ in ends]
        self.processes = [fork(_serve, rank, self.world, port, ends[rank][1], self.shape) for rank in range(self.world)]
        for process in self.processes:
            process.start()

    def call(self, function, *arguments):
        """What the function returns on each process. After an error, which others may wait for, all start anew."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = [pipe.recv() if pipe.poll(3 * TIMEOUT) else (False, "no answer") for pipe in self.pipes]
        wrong = [value for good, value in answers if not good]
        if wrong:
            self.close()
            pytest.fail("\n".join(wrong), pytrace=False)
        return [value for _, value in answers]

    def close(self):
        for process in self.processes:
            process.kill()
        self.processes = []


def places(lengths, order, rank):
    """The indices of a process's tokens in the whole, written out apart from the code."""
    if order == "contiguous":
        first = sum(lengths[:rank])
        return list(range(first, first + lengths[rank]))
    halves = [(n + 1) // 2 for n in lengths] + [n // 2 for n in reversed(lengths)]
    ends = [sum(halves[: i + 1]) for i in range(len(halves))]
    spans = [list(range(end - half, end)) for end, half in zip(ends, halves, strict=True)]
    return spans[rank] + spans[2 * len(lengths) - 1 - rank]


def summed(module):
    """The gradients of a module's weights, summed over the processes; zeros where there are none."""
    totals = {}
    for name, weight in sorted(module.named_parameters()):
        totals[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        dist.all_reduce(totals[name])
    return totals


def largest(*pairs):
    """The largest difference of pairs of tensors."""
    return max([(a - b).abs().max().item() for a, b in pairs if a.numel()], default=0.0)
