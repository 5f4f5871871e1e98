"""Devices and floating-point types by name. PyTorch is loaded by what computes, not by help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from polymix.errors import OptionError

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def float_type(dtype: torch.dtype | str | None, argument: str = "dtype") -> torch.dtype | None:
    """A floating-point type of PyTorch, from itself or its name, such as "bfloat16". Raises OptionError for others."""
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype.isidentifier() else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(argument, repr(dtype), f"{', '.join(DTYPES)} or float64", f"Pass {argument}=torch.float32.")
    return found


def check_place(device: Any, dtype: Any) -> None:
    """Raise OptionError unless tensors can be made with these arguments: a device or None, a floating type or None."""
    import torch

    try:
        _ = None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise OptionError("device", repr(device), "a device such as cpu or cuda:1", "Pass cpu.") from None
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError("dtype", repr(dtype), "a floating-point torch.dtype", "Pass for example torch.float32.")


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
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        reason = reason if len(reason) < 160 else ""
        allowed = "a device that PyTorch can use on this machine, such as cpu"
        raise OptionError(argument, repr(device), allowed, reason) from error
    if kind == "meta":
        raise OptionError(argument, repr(device), "a device that can compute", "Use cpu or cuda.")
    return device
