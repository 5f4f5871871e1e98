"""What fits into this machine: models and inputs are sized before anything is allocated."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from polymix.errors import MOST_TOKENS as LONGEST
from polymix.errors import OptionError, PolymixError

__all__ = [
    "LAYERS", "LONGEST", "Unfilled", "bounded", "check_counts", "check_memory", "check_model", "memory_of", "too_large",
]  # fmt: skip
MODULES = 200_000  # of one model; the largest open models have about half
LAYERS = 10_000
_TOO_LARGE = re.compile("[Oo]verflow|memory|invalid shape|too (large|big)|negative dimension|out of range")
_FILLS = {"normal_", "uniform_", "fill_", "zero_", "copy_", "mul_", "add_", "sub_", "div_", "clamp_", "erfinv_"}
_COUNTS = re.compile(r"(^|_)(n_|num_)?(\w*layers?|\w*depths?|\w*blocks?|stages?)$")
_NO_COUNTS = re.compile(r"size|dim|period|step|freq|norm|scale|type|index|indices|drop|std|init|interval|length")


class Unfilled(TorchFunctionMode):
    """Skip the initialisation of parameters, which saved weights will replace or nobody will read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        fills = getattr(func, "__module__", None) == "torch.nn.init" or getattr(func, "__name__", None) in _FILLS
        return target if fills and isinstance(target, nn.Parameter) else func(*args, **kwargs)


def memory_of(device: str = "cpu") -> int:
    """Bytes of memory of a device; on the CPU the machine's memory, or the limit of its container."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [1 << 40]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such limit
            continue
    return min(sizes)


def check_memory(argument: str, what: str, size: float, device: str = "cpu", cure: str = "Use smaller sizes.") -> None:
    """Raise OptionError if `what`, of `size` bytes, does not fit into the memory of the device."""
    there = memory_of(device)
    if size > there:
        allowed = f"at most the {there / 2**30:,.1f} GiB of memory of this machine"
        raise OptionError(argument, f"{what}, which needs {size / 2**30:,.1f} GiB", allowed, cure)


def too_large(error: BaseException) -> bool:
    """Whether an error says that a size does not fit into memory, or not into 64 bits."""
    return isinstance(error, (MemoryError, OverflowError)) or _TOO_LARGE.search(str(error)) is not None


@contextmanager
def bounded(argument: str, what: str, cure: str = "Use smaller sizes.") -> Iterator[list[int]]:
    """Stop a model that is being built once it is larger than the machine's memory, or has more than 200,000 modules.

    Yields a list whose only entry is the size of its tensors so far, in bytes.

    Raises:
        OptionError: about `argument`, with both sizes.
    """
    there, held, modules = memory_of(), [0], 0

    def add(module: nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            held[0] += tensor.numel() * tensor.element_size()
            if held[0] > there:
                check_memory(argument, what, held[0], cure=cure)

    def count(module: nn.Module, name: str, child: Any) -> None:
        nonlocal modules
        modules += 1
        if modules > MODULES:
            raise OptionError(argument, f"{what} with over {MODULES:,} modules", f"at most {MODULES:,} modules", cure)

    hooks = [
        register_module_parameter_registration_hook(add), register_module_buffer_registration_hook(add),
        register_module_module_registration_hook(count),
    ]  # fmt: skip
    try:
        yield held
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, PolymixError) or not too_large(error):
            raise
        allowed = f"at most the {there / 2**30:,.1f} GiB of memory of this machine"
        raise OptionError(argument, f"{what}, which cannot be allocated", allowed, cure) from error
    finally:
        for hook in hooks:
            hook.remove()


def check_model(build: Callable[[], Any], argument: str, what: str, cure: str = "Use smaller sizes.") -> int:
    """Raise OptionError if the model that `build` returns does not fit into this machine's memory.

    It is built on the meta device, so that nothing is allocated. Some models cannot be built there; for them, and for
    all other errors, the caller's own call of `build`, inside of `bounded`, decides.

    Returns:
        the bytes of its parameters and buffers.
    """
    with bounded(argument, what, cure) as held, torch.device("meta"), Unfilled():
        try:
            build()
        except ImportError:  # some of PyTorch's formulas for the meta device need NumPy
            pass
        except RuntimeError as error:
            if not re.search("meta|item", str(error), re.IGNORECASE):
                raise
    return held[0]


def check_counts(content: Any, argument: str, what: str, name: str = "") -> None:
    """Raise OptionError if a number in a model's config cannot be meant: over 10,000 layers, or beyond 64 bits.

    Configs make lists of this length before a model is built.

    Args:
        content: the config as JSON has it.
    """
    if isinstance(content, Mapping):
        for key, value in content.items():
            check_counts(value, argument, what, str(key))
    elif isinstance(content, (list, tuple)):
        for value in content:
            check_counts(value, argument, what, name)
    elif isinstance(content, int) and not isinstance(content, bool):
        counts = _COUNTS.search(name) and not _NO_COUNTS.search(name)
        most = LAYERS if counts else 2**63 - 1
        if abs(content) > most:
            got = f"{what}, with {name}={content:,}"
            raise OptionError(argument, got, f"{name} of at most {most:,}", "Fetch or save it again.")
