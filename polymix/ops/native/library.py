"""Loads the compiled C kernels for this processor, and calls their functions."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from polymix.ops.native import compile as compiled
from polymix.ops.native.pointers import addresses
from polymix.ops.shared.tensors import Linear

SWITCH = "POLYMIX_NATIVE"  # 0 disables the kernels; the name of a processor level selects it
_BUILD = "run `polymix build-kernels` (it needs gcc)"
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
# The processor features that each level needs, with the names of /proc/cpuinfo.
NEEDS = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
    "armv8-a": frozenset({"asimd"}),
}


T = TypeVar("T")


class once(Generic[T]):
    """A function without arguments that is called once. Dynamo warns of functools.cache in what it traces."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function, self.answers, self.__doc__ = function, list[T](), function.__doc__

    def __call__(self) -> T:
        if not self.answers:
            self.answers.append(self.function())
        return self.answers[0]

    def cache_clear(self) -> None:
        """Forget the answer."""
        self.answers.clear()


def why_not() -> str | None:
    """Return why the C kernels cannot run on this machine, or None if they can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    library = _library()
    return library if isinstance(library, str) else None


def loaded() -> Path | None:
    """Return the file that the kernels were loaded from, or None if they are not available."""
    library = _library()
    return None if isinstance(library, str) else Path(library._name)


def multiplies_bf16() -> bool:
    """Whether the kernels here use the processor's bfloat16 products (AVX512_BF16)."""
    library = _library()
    return isinstance(library, ctypes.CDLL) and "x86-64-v4" in library._name and "avx512_bf16" in processor_flags()


_Argument = Tensor | Linear | ctypes.Structure | ctypes.c_double | int | None


def call(name: str, *args: _Argument) -> None:
    """Call a function of the library with contiguous tensors, structures and numbers.

    Every C kernel is called here, and no tensor reaches C but through `addresses`.

    Raises:
        ShapeError: a tensor has another dtype or size than the function takes it for.
        MemoryError: the function could not allocate its buffers.
        RuntimeError: the library is not available on this machine.
    """
    library = _library()
    if isinstance(library, str):  # for example, a graph that was traced on another machine
        raise RuntimeError(f"polymix: {name} has no kernel here: {library}")
    values = addresses(name, args)
    if torch.autograd.profiler._is_profiler_enabled:  # the profiler does not see ctypes calls by itself
        with torch.profiler.record_function(f"polymix::{name}"):
            failed = getattr(library, name)(*values)
    else:
        failed = getattr(library, name)(*values)
    if failed:
        raise MemoryError(f"polymix: {name}: not enough memory for its buffers")


def scratch_bytes() -> int:
    """The bytes that this thread's last call allocated for itself, besides its results; 0 without kernels.

    Convolutions are not counted: they take at most 1 MiB per thread.
    """
    library = _library()
    if isinstance(library, str):
        return 0
    library.scratch_of_last_call.restype = ctypes.c_int64
    return int(library.scratch_of_last_call())


@once
def processor_flags() -> frozenset[str]:
    """The features of this processor, with the names of /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))),
                          []))  # fmt: skip


def usable_levels() -> list[str]:
    """The processor levels whose kernels this machine can run, best first."""
    flags = processor_flags()
    return [level for level in compiled.levels() if flags >= NEEDS[level]]


@once
def _library() -> ctypes.CDLL | str:
    """Load the library, or return the reason why it is not available."""
    requested = os.environ.get(SWITCH, "")
    requested = "" if requested == "0" else requested  # `why_not` handles 0 on every call
    if not compiled.levels():
        return f"there are no C kernels for {sys.platform} on this processor"
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return "the C kernels need GNU OpenMP, which this build of PyTorch does not use"
    levels = usable_levels()
    if not levels:
        return f"the C kernels need a processor with {' or '.join(compiled.levels())}"
    if requested and requested not in levels:
        return f"{SWITCH}={requested}, but this processor runs {', '.join(levels)}"
    failures = []
    for level in [requested] if requested else levels:
        path = compiled.library_path(level)
        if not path.is_file():
            continue
        try:
            if not _is_complete(path):
                raise OSError(f"{path} is cut off")
            return ctypes.CDLL(str(path))
        except OSError as error:
            failures.append(f"{error}; {_BUILD}")
    if failures:
        return failures[0]
    if any(compiled.LIBRARIES.glob("kernels-*.so")) and not requested:
        return f"the C kernels were built from other sources; {_BUILD}"
    return f"the C kernels are not built; {_BUILD}"


def _is_complete(path: Path) -> bool:
    """Whether an ELF file includes its section table, its last part. Loading a truncated file would end in SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    (offset,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return path.stat().st_size >= offset + size * count
