"""The compiled kernels: which library this processor can run, and how its functions are called."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from polymix.ops.native import compile as compiled

SWITCH = "POLYMIX_NATIVE"  # 0: no kernels; the name of a level: that one
_BUILD = "run `polymix build-kernels` (it needs gcc)"
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
# What a processor must have, by the names of /proc/cpuinfo.
NEEDS = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
    "armv8-a": frozenset({"asimd"}),
}


def why_not() -> str | None:
    """Why the C kernels cannot run on this machine, or None where they can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    library = _library()
    return library if isinstance(library, str) else None


def loaded() -> Path | None:
    """The file that the kernels were loaded from; None where there are none."""
    library = _library()
    return None if isinstance(library, str) else Path(library._name)


def call(name: str, *args: Tensor | ctypes.Structure | int | None) -> None:
    """Call a function of the library with contiguous tensors, structures and numbers.

    Raises MemoryError where it could not allocate its buffers, RuntimeError where there is no library.
    """
    library = _library()
    if isinstance(library, str):  # a graph that holds the operator, on another machine than it was traced on
        raise RuntimeError(f"polymix: {name} has no kernel here: {library}")
    values = [_as_c(a) for a in args]
    if torch.autograd.profiler._is_profiler_enabled:  # which would not see it otherwise
        with torch.profiler.record_function(f"polymix::{name}"):
            failed = getattr(library, name)(*values)
    else:
        failed = getattr(library, name)(*values)
    if failed:
        raise MemoryError(f"polymix: {name}: not enough memory for its buffers")


def _as_c(value: Tensor | ctypes.Structure | int | None) -> object:
    """Arrays and structures by their addresses."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.byref(value) if isinstance(value, ctypes.Structure) else value


def processor_flags() -> frozenset[str]:
    """What this processor can do, by the names of /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))),
                          []))  # fmt: skip


def usable_levels() -> list[str]:
    """The processor levels with kernels that this machine can run, best first."""
    flags = processor_flags()
    return [level for level in compiled.levels() if flags >= NEEDS[level]]


@cache
def _library() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    wanted = os.environ.get(SWITCH, "")
    wanted = "" if wanted == "0" else wanted  # `why_not` sees to it, in every call
    if not compiled.levels():
        return f"there are no C kernels for {sys.platform} on this processor"
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return "the C kernels need GNU OpenMP, which this build of PyTorch does not use"
    levels = usable_levels()
    if not levels:
        return f"the C kernels need a processor with {' or '.join(compiled.levels())}"
    if wanted and wanted not in levels:
        return f"{SWITCH}={wanted}, but this processor runs {', '.join(levels)}"
    failures = []
    for level in [wanted] if wanted else levels:
        path = compiled.library_path(level)
        if not path.is_file():
            continue
        try:
            if not _whole(path):
                raise OSError(f"{path} is cut off")
            return ctypes.CDLL(str(path))
        except OSError as error:
            failures.append(f"{error}; {_BUILD}")
    if failures:
        return failures[0]
    if any(compiled.LIBRARIES.glob("kernels-*.so")) and not wanted:
        return f"the C kernels were built from other sources; {_BUILD}"
    return f"the C kernels are not built; {_BUILD}"


def _whole(path: Path) -> bool:
    """Whether an ELF file reaches the end of its section table, its last part. Loading a cut one ends in SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    (offset,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return path.stat().st_size >= offset + size * count
