"""Collectives with gradients, in which every process always takes part: one that skips a step leaves others waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polymix.errors import ParallelError

FAILED = "polymix/failed"  # the key of a process's error in the store of all
GRACE = 3.0  # seconds that a process waits for others to say that they wait, too
LOOKS = 150  # in that time
_TEXT = 400  # bytes of an error that the other processes repeat


def store_of_all() -> Any:
    """The store of all processes. PyTorch 2.6 gives it by no public call; later `ProcessGroup.get_group_store` does."""
    return dist.distributed_c10d._get_default_store()


class Processes:
    """The processes that share a sequence. `sent` counts the bytes that this one sends to others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size, self.sent = group, dist.get_rank(group), dist.get_world_size(group), 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        """Itself: a copy of a model, such as an average of its weights, has the same processes."""
        return self

    def run(self, work: Callable[[], Any]) -> None:
        """Run a collective. ParallelError, which names this process, where another is gone or does not come."""
        try:
            work()
        except RuntimeError as error:
            got = f"process {self.rank} of {self.size} waited in vain: {self._absent()} ({str(error).splitlines()[0]})"
            cure = "Look at that process: it has ended, is slower than the group's timeout, or made other calls."
            raise ParallelError("process group", got, "all processes in the same calls", cure) from error

    def _absent(self) -> str:
        """What is known of the others: the error that one left in the store, or which of them do not wait, too."""
        ranks = dist.get_process_group_ranks(self.group)
        waits = f"polymix/waits/{ranks}/"
        try:
            store = store_of_all()
            store.set(f"{waits}{self.rank}", "")
            self.group.abort()  # those who wait for this one fail now, too
            absent, looks = [r for r in range(self.size) if r != self.rank], 0
            while absent and not store.check([FAILED]) and looks < LOOKS:
                time.sleep(GRACE / LOOKS)
                absent, looks = [r for r in absent if not store.check([f"{waits}{r}"])], looks + 1
            if dist.get_rank() == 0:  # it may hold the store, which the others still read
                time.sleep(GRACE)
            if store.check([FAILED]):
                return str(store.get(FAILED).decode(errors="replace"))
        except RuntimeError:  # the store lives in the first process of all
            return "the process that holds the store, of rank 0, is gone"
        return f"process {', '.join(map(str, absent))} did not come" if absent else "no process of them got through"

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """x of each process, without gradients; the same shape everywhere."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.sent += (self.size - 1) * x.nbytes
        self.run(lambda: dist.all_gather(parts, x.contiguous(), group=self.group))
        return parts

    def agree(self, numbers: Sequence[int], error: Exception | None, device: torch.device) -> list[list[int]]:
        """The numbers of each process, in order. Where one has an error, all raise: it its own, they ParallelError."""
        text = (b"" if error is None else f"{type(error).__name__}: {error}".encode())[:_TEXT].ljust(_TEXT, b"\0")
        head = torch.tensor([error is not None, *numbers], dtype=torch.int64)
        row = torch.cat((head.view(torch.uint8), torch.tensor(list(text), dtype=torch.uint8))).to(device)
        gathered = [part.cpu().split([head.nbytes, _TEXT]) for part in self.all_gather(row)]
        rows = [part.view(torch.int64).tolist() for part, _ in gathered]
        if error is not None:
            raise error
        for rank, (_, said) in enumerate(gathered):
            if rows[rank][0]:
                message = bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")
                raise ParallelError("process group", f"process {rank} of {self.size} failed: {message}",
                                    "a call that all can make", "")  # fmt: skip
        return [other[1:] for other in rows]

    def gather(self, x: Tensor) -> Tensor:
        """x of each process, (P, …)."""
        ones = [1] * self.size
        return self.exchange(torch.stack([x] * self.size), ones, ones)

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the processes."""
        y: Tensor = _Sum.apply(self, x)
        return y

    def collect(self, x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """x (B, n, …) of each process, of n = lengths[p] tokens."""
        rows = x.transpose(0, 1)
        received = self.exchange(torch.cat([rows] * self.size), [len(rows)] * self.size, lengths)
        return [part.transpose(0, 1) for part in received.split(list(lengths))]

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send send[p] rows of x to process p, in order, and return the receive[p] rows of each."""
        y: Tensor = _Exchange.apply(self, x, list(send), list(receive))
        return y


@contextmanager
def guard(group: dist.ProcessGroup | DeviceMesh) -> Iterator[None]:
    """Within it, an error in one process ends all of them within seconds: the others raise ParallelError, which says
    which process failed, and how. Put it around a whole training."""
    try:
        yield
    except ParallelError:
        raise
    except Exception as error:
        own = group.get_group() if isinstance(group, DeviceMesh) else group
        text = f"process {dist.get_rank(own)} of {dist.get_world_size(own)} failed: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the store may be gone
            store_of_all().set(FAILED, text[:_TEXT])
        if dist.get_rank() == 0:  # which may hold the store: the others read it first
            time.sleep(GRACE)
        raise


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, x: Tensor) -> Tensor:
        ctx.processes = processes
        return _reduced(processes, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _reduced(ctx.processes, grad)


def _reduced(processes: Processes, x: Tensor) -> Tensor:
    x = x.contiguous().clone()
    processes.sent += 2 * (processes.size - 1) * x.nbytes // processes.size  # of a ring
    processes.run(lambda: dist.all_reduce(x, group=processes.group))
    return x


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.processes, ctx.send, ctx.receive = processes, send, receive
        return _exchanged(processes, x, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, _exchanged(ctx.processes, grad, ctx.receive, ctx.send), None, None


def _exchanged(processes: Processes, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
    y = x.new_empty(sum(receive), *x.shape[1:])
    away = sum(send) - send[processes.rank]
    processes.sent += away * x[:1].numel() * x.element_size() if len(x) else 0
    processes.run(lambda: dist.all_to_all_single(y, x.contiguous(), receive, send, group=processes.group))
    return y
