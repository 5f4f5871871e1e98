"""The C files of all ops as one library: compiled by the machine's compiler, cached, loaded with ctypes.

They need nothing of PyTorch but its threads: OpenMP's functions are left open and found in the runtime that torch has
loaded, so that there are no two sets of threads. Where there is no compiler, `why_not` says so and plain PyTorch runs;
POLYMIX_NATIVE=0 says the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
SWITCH = "POLYMIX_NATIVE"
PATIENCE = 120  # seconds for the compiler
HEADERS = Path(__file__).parent
log = logging.getLogger("polymix")


class Unavailable(Exception):
    """Why there is no library."""


def why_not() -> str | None:
    """Why the kernels cannot run on this machine, or None where they can; compiles them when they never were."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    found = _found()
    return found if isinstance(found, str) else None


def call(name: str, *args: Tensor | ctypes.Structure | int | None) -> None:
    """A function of the library; one that returns other than zero had no memory. Tensors are contiguous."""
    library = _found()
    if isinstance(library, str):  # a graph with the operator in it, elsewhere than where it was traced
        raise RuntimeError(f"polymix: {name} has no kernel here: {library}")
    given = [_as_c(a) for a in args]
    if torch.autograd.profiler._is_profiler_enabled:  # which would not see it otherwise
        with torch.profiler.record_function(f"polymix::{name}"):
            failed = getattr(library, name)(*given)
    else:
        failed = getattr(library, name)(*given)
    if failed:
        raise MemoryError(f"polymix: {name}: not enough memory for its buffers")


def _as_c(given: Tensor | ctypes.Structure | int | None) -> object:
    """An array and a structure by their addresses."""
    if isinstance(given, Tensor):
        return ctypes.c_void_p(given.data_ptr())
    return ctypes.byref(given) if isinstance(given, ctypes.Structure) else given


@cache
def _found() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        path = _compiled()
    except Unavailable as error:
        return str(error)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # what is broken is built anew by the next process
        return f"what {' '.join(_compiler())} built cannot be loaded: {error}"


def _compiled() -> Path:
    if sys.platform != "linux":
        raise Unavailable(f"its kernels are built on Linux, not on {sys.platform}")
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        raise Unavailable("its threads are GNU OpenMP's, which this build of torch does not have")
    compiler = _compiler()
    if not compiler:
        raise Unavailable("no C compiler was found to build it (install gcc, or set CC)")
    sources = sorted(HEADERS.parent.glob("*/*.c"))
    files = *sorted(HEADERS.parent.glob("*/*.h")), *sources
    parts = [*compiler, *FLAGS, _processor(), *(path.read_text() for path in files)]
    name = f"native-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = folder.stat()
            if found.st_uid == os.getuid() and not found.st_mode & 0o022:  # what is loaded was put there by this user
                return _compile(compiler, sources, folder / name)
            refused = OSError(f"others can write to {folder}")
        except OSError as error:
            refused = error
    raise Unavailable(f"there is no place to keep it: {refused}")


def _compile(compiler: list[str], sources: list[Path], library: Path) -> Path:
    if library.exists():
        return library
    log.info("compiling polymix's kernels for this machine, once, into %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor() as side_by_side:
            commands = zip(sources, objects, strict=True)
            list(
                side_by_side.map(
                    lambda its: _run(*compiler, *FLAGS, f"-I{HEADERS}", "-c", str(its[0]), "-o", str(its[1])), commands
                )
            )
        whole = Path(folder) / library.name
        _run(*compiler, "-shared", *map(str, objects), "-o", str(whole))
        os.replace(whole, library)  # whole or not at all, whoever else compiles it now
    return library


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {PATIENCE} s to build it") from error
    except OSError as error:
        raise Unavailable(f"{command[0]} could not be run to build it: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{command[0]} failed to build it: {said[0] if said else f'status {done.returncode}'}")


def _compiler() -> list[str]:
    """The command, empty where there is none."""
    if given := os.environ.get("CC"):
        return given.split()
    return [found for name in ("gcc", "cc") if (found := shutil.which(name))][:1]


def _folders() -> list[Path]:
    """Where the library may be kept: the user's cache, or else a place of the user's own among temporary files."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = Path(tempfile.gettempdir()) / f"polymix-{os.getuid()}"
    return [Path(cache) / "polymix", temporary] if os.path.isabs(cache) else [temporary]


def _processor() -> str:
    """What -march=native depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "Features", "CPU "))
    )
