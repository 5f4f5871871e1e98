"""Loads the compiled C kernels for this processor, and calls their functions with arrays that it has checked."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Sequence
from ctypes import Array, Structure, byref, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from polymix.errors import ShapeError
from polymix.ops.native import compile as compiled
from polymix.ops.native import functions
from polymix.ops.shared.tensors import Linear

SWITCH = "POLYMIX_NATIVE"  # 0 disables the kernels; the name of a processor level selects it
_BUILD = "run `polymix build-kernels` (it needs gcc)"
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
# The processor features that each level needs, with the names of /proc/cpuinfo.
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AMX = "x86-64-amx"
FEATURES_OF_LEVEL = {
    AMX: _V4 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "x86-64-v4": _V4,
    "x86-64-v3": _V3,
    "armv8-a": frozenset({"asimd"}),
}
_T = TypeVar("_T")


def run_by_the_compiler(function: Callable[[], _T]) -> Callable[[], _T]:
    """Mark a function that torch.compile runs instead of tracing it.

    It does what torch.compiler.assume_constant_result does, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


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


@run_by_the_compiler  # a graph does not outlive the process
def multiplies_bf16() -> bool:
    """Whether the kernels here use the fastest bfloat16 products of the processor: AMX, else AVX512_BF16."""
    level, flags = loaded_level(), processor_flags()
    return level == AMX or (level == "x86-64-v4" and "avx512_bf16" in flags and "amx_bf16" not in flags)


def loaded_level() -> str | None:
    """The processor level of the kernels that are loaded; None without kernels."""
    path = loaded()
    return None if path is None else path.stem.removeprefix("kernels-").rpartition("-")[0]


@cache
def tiles_are_permitted() -> bool:
    """Ask the system for AMX's tiles: once in a process, before its first instruction on them.

    False where it refuses: Linux before 5.16, and containers and emulators without AMX.
    """
    arch_prctl, request, tile_data = 158, 0x1023, 18  # SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


@cache
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
    levels = [level for level in compiled.levels() if flags >= FEATURES_OF_LEVEL[level]]
    return [level for level in levels if level != AMX or tiles_are_permitted()]


@cache
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


# -- calling


_Argument = Tensor | Linear | Structure | ctypes.c_double | int | None


def call(name: str, *args: _Argument) -> None:
    """Call a function of the library with tensors, linear maps, structures and numbers.

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


class Address(ctypes.Structure):
    """Base of the structs that hold addresses. Each keeps the tensors that it was made of, so that they can be checked.

    Attributes:
        kinds: the kinds of `functions.FUNCTIONS` that the struct stands for.
        tensors: what its addresses point into.
    """

    kinds: ClassVar[tuple[str, ...]]
    tensors: tuple[Tensor, ...]

    def fits(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether the struct describes an array of this shape and dtype."""
        raise NotImplementedError


def addresses(function: str, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a C function as ctypes takes them: arrays and structs by address.

    Raises:
        ShapeError: an argument is no array of the dtype and size that C takes it for.
    """
    pointers, sizes = functions.read(function)
    bf16, pairs, *shapes = sizes(*arguments)
    of_call = torch.bfloat16 if bf16 else torch.float32
    values = list(arguments)
    for (position, name, kind, dtype, optional), shape in zip(pointers, shapes, strict=True):
        value, dtype = values[position], dtype or of_call
        array: Any = None  # the address, or the struct; None for what C must not get
        if value is None:
            if optional:
                continue
        elif isinstance(value, Address):
            array = byref(value) if kind in value.kinds and value.fits(shape, dtype) else None
        elif kind in functions.STRIDED:
            array = strided(value, shape, dtype)
        elif kind in functions.LINEAR:
            weight, bias = value
            of_weight = torch.bfloat16 if kind == "linear" and pairs else dtype
            place = address(weight, shape[0] * shape[1], of_weight) if weight.shape == shape else None
            beside = 0 if bias is None else address(bias, shape[0], dtype)
            if place is not None and beside is not None:  # in memory the struct Linear
                array = (c_int64 * 4)(place, beside, *shape)
        elif (place := address(value, shape, dtype)) is not None:
            array = c_void_p(place)
        if array is None:
            raise _misfit(function, name, value, f"{kind} of {dtype}", shape)
        values[position] = array
    if isinstance(values[-1], Structure):
        values[-1] = byref(values[-1])
    return values


def address(x: Tensor, elements: int, dtype: torch.dtype) -> int | None:
    """The address of x if C finds so many elements of the dtype there, one after the other; otherwise None."""
    if x.dtype is not dtype or x.numel() != elements or not x.is_cpu or not x.is_contiguous():
        return None
    return x.data_ptr() or (None if elements else 0)  # no address: freed, as FSDP frees parameters


def strided(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Array[c_int64] | None:
    """The address of x and its strides but the last, if C finds an array of this shape and dtype there whose channels
    are contiguous; otherwise None. In memory these are the structs Tokens and Heads.
    """
    if x.dtype is not dtype or x.shape != shape or not x.is_cpu:
        return None
    *strides, last = x.stride()
    place = x.data_ptr()
    if (last != 1 and shape[-1] != 1) or (place == 0 and 0 not in shape):
        return None
    return (c_int64 * len(shape))(place, *strides)


def _misfit(function: str, name: str, value: Any, kind: str, shape: Any) -> ShapeError:
    """The error for an argument that C must not get."""
    parts = value.tensors if isinstance(value, Address) else value if isinstance(value, tuple) else (value,)
    got = " and ".join(f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else str(part)
                       for part in parts)  # fmt: skip
    size = shape if isinstance(shape, tuple) else f"{shape} elements"
    cure = "Pass tensors of the dtypes and sizes that the operator documents."
    return ShapeError(f"{function}: {name}", got, f"{kind}, {size}, in the memory of the CPU", cure)


def scratch_bytes() -> int:
    """The bytes that this thread's last call allocated for itself, besides its results; 0 without kernels.

    Convolutions are not counted: they take at most 1 MiB per thread.
    """
    library = _library()
    if isinstance(library, str):
        return 0
    library.scratch_of_last_call.restype = ctypes.c_int64
    return int(library.scratch_of_last_call())
