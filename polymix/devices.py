"""Devices, processes, and floating-point types by name. PyTorch is loaded by what computes, not by help."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from polymix.errors import OptionError, shown
from polymix.numbers import plural

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

# What PyTorch raises for a device that it does not know, was built without, or does not find.
_UNUSABLE = (RuntimeError, AssertionError, ImportError, NotImplementedError, OverflowError, TypeError, ValueError)


def processes() -> tuple[int, int]:
    """This process's rank and the number of processes, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_all_share(shares: int) -> int:
    """The number of processes. OptionError unless all that torchrun has started share each sequence."""
    world = processes()[1]
    if world != shares:
        got = f"{shares} with {plural(world, 'process')}"
        raise OptionError("sequence_parallel", got, "the number of processes", "Start as many with torchrun.")
    return world


def join_processes() -> None:
    """Find the other processes that torchrun started, where there are some and that has not been done."""
    import torch
    from torch import distributed

    if distributed.is_initialized() or "WORLD_SIZE" not in os.environ:
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        distributed.init_process_group(backend)
        return
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    # One agent of torchrun keeps its store when it starts processes again, with the addresses of those that have died.
    store, rank, world = next(iter(rendezvous("env://")))
    start = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    distributed.init_process_group(backend, store=start, rank=rank, world_size=world)


def float_type(dtype: torch.dtype | str | None, argument: str = "dtype") -> torch.dtype | None:
    """A floating-point type of PyTorch, from itself or its name, such as "bfloat16". Raises OptionError for others."""
    import torch

    torch_type = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype.isidentifier() else dtype
    if torch_type is None and dtype is None:
        return None
    if not isinstance(torch_type, torch.dtype) or not torch_type.is_floating_point:
        raise OptionError(argument, repr(dtype), f"{', '.join(DTYPES)} or float64", f"Pass {argument}=torch.float32.")
    return torch_type


def check_dtype(dtype: Any) -> None:
    """Raise OptionError unless dtype is None or a floating-point torch.dtype."""
    import torch

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError("dtype", shown(dtype), "a floating-point torch.dtype", "Pass for example torch.float32.")


def check_place(device: Any, dtype: Any) -> torch.device | None:
    """The device, after checking that tensors can be made with these arguments: a device or None, a type or None.

    Raises:
        OptionError: the device is none, or not of this machine, or the type is no floating-point torch.dtype.
    """
    import torch

    check_dtype(dtype)
    if device is None:
        return None
    try:
        place = torch.device(device)
    except _UNUSABLE:
        raise OptionError("device", shown(device), "a device such as cpu or cuda:1", "Pass cpu.") from None
    if place.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=place)
        except _UNUSABLE as error:
            raise _unusable("device", device, error) from error
    return place


def _unusable(argument: str, device: Any, error: Exception) -> OptionError:
    reason = (str(error).splitlines() or [""])[0]
    allowed = "a device that PyTorch can use on this machine, such as cpu"
    return OptionError(argument, shown(device), allowed, reason if len(reason) < 160 else "Pass cpu.")


def check_device(device: str, argument: str = "device", kinds: Sequence[str] = (), touch: bool = True) -> str:
    """Return the name of a device after checking that PyTorch can compute on it.

    Args:
        device: such as "cpu" or "cuda:1".
        argument: the option that the error names.
        kinds: the kinds of device that are accepted, such as ("cpu", "cuda"); empty accepts all.
        touch: False only counts the devices. CUDA is then not started, so that the process can still fork.
    Raises:
        OptionError: the device is unavailable, cannot compute (meta), or is of another kind.
    """
    import torch

    kind, _, index = str(device).partition(":")
    if (kinds and kind not in kinds) or not (index or "0").isdecimal():
        allowed = f"one of {', '.join(kinds)}" if kinds else "a device such as cpu or cuda:1"
        raise OptionError(argument, repr(device), allowed, f"For example, pass {kinds[0] if kinds else 'cpu'}.")
    if not touch:
        counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if int(index or 0) >= counts.get(kind, 1):
            allowed = f"one of the {counts[kind]} {kind} devices of this machine"
            raise OptionError(argument, repr(device), allowed, "For example, pass cpu.")
        return device
    try:
        torch.zeros(1, device=device).add_(1)
    except _UNUSABLE as error:
        raise _unusable(argument, device, error) from error
    if kind == "meta":
        raise OptionError(argument, repr(device), "a device that can compute", "Use cpu or cuda.")
    return device
