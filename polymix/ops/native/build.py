"""Compiles the C files of all ops into one library with the machine's compiler, caches it, and loads it with ctypes.

The library does not link PyTorch. Its OpenMP functions are resolved to the runtime that torch has loaded, so that both
share one pool of threads. If the library cannot be built, `why_not` returns the reason, and plain PyTorch runs
instead. POLYMIX_NATIVE=0 disables the kernels.
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
PATIENCE = 120  # the compiler's time limit in seconds
HEADERS = Path(__file__).parent
log = logging.getLogger("polymix")


class Unavailable(Exception):
    """The library cannot be built; the message is the reason."""


def why_not() -> str | None:
    """Return why the kernels cannot run on this machine, or None if they can. Compiles them on the first call."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    library = _library()
    return library if isinstance(library, str) else None


def call(name: str, *args: Tensor | ctypes.Structure | int | None) -> None:
    """Call a function of the library; tensors must be contiguous.

    Raises:
        MemoryError: the function could not allocate its buffers.
        RuntimeError: the library is not available on this machine.
    """
    library = _library()
    if isinstance(library, str):  # for example, a graph that was traced on another machine
        raise RuntimeError(f"polymix: {name} has no kernel here: {library}")
    c_args = [_as_c(a) for a in args]
    if torch.autograd.profiler._is_profiler_enabled:  # the profiler does not see ctypes calls by itself
        with torch.profiler.record_function(f"polymix::{name}"):
            failed = getattr(library, name)(*c_args)
    else:
        failed = getattr(library, name)(*c_args)
    if failed:
        raise MemoryError(f"polymix: {name}: not enough memory for its buffers")


def _as_c(value: Tensor | ctypes.Structure | int | None) -> object:
    """Convert an argument for ctypes: tensors and structures are passed by address."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.byref(value) if isinstance(value, ctypes.Structure) else value


@cache
def _library() -> ctypes.CDLL | str:
    """Load the library, compiling it if necessary; or return why there is none."""
    try:
        path = _compiled()
    except Unavailable as error:
        return str(error)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # so that the next process builds it again
        return f"the library that {' '.join(_compiler())} built cannot be loaded: {error}"


def _compiled() -> Path:
    """Return the path of the compiled library in the first folder that can hold it, compiling it if necessary."""
    if sys.platform != "linux":
        raise Unavailable(f"the C kernels are built on Linux only, not on {sys.platform}")
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        raise Unavailable("the C kernels use GNU OpenMP, which this build of torch does not include")
    compiler = _compiler()
    if not compiler:
        raise Unavailable("no C compiler was found (install gcc, or set CC)")
    sources = sorted(HEADERS.parent.glob("*/*.c"))
    files = *sorted(HEADERS.parent.glob("*/*.h")), *sources
    parts = [*compiler, *FLAGS, _processor(), *(path.read_text() for path in files)]
    name = f"native-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
            if status.st_uid == os.getuid() and not status.st_mode & 0o022:  # never load a library of another user's
                return _compile(compiler, sources, folder / name)
            problem = OSError(f"other users can write to {folder}")
        except OSError as error:
            problem = error
    raise Unavailable(f"the library cannot be stored: {problem}")


def _compile(compiler: list[str], sources: list[Path], library: Path) -> Path:
    """Compile the sources into `library`, unless it exists."""
    if library.exists():
        return library
    log.info("compiling polymix's kernels for this machine, once, into %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor() as pool:

            def compile_one(source: Path, output: Path) -> None:
                _run(*compiler, *FLAGS, f"-I{HEADERS}", "-c", str(source), "-o", str(output))

            list(pool.map(compile_one, sources, objects))
        linked = Path(folder) / library.name
        _run(*compiler, "-shared", *map(str, objects), "-o", str(linked))
        os.replace(linked, library)  # atomic, because other processes may compile the same library
    return library


def _run(*command: str) -> None:
    """Run the compiler. Raises Unavailable if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {PATIENCE} s to compile the kernels") from error
    except OSError as error:
        raise Unavailable(f"{command[0]} could not be run: {error}") from error
    if result.returncode:
        output = (result.stderr or result.stdout).strip().splitlines()
        reason = output[0] if output else f"status {result.returncode}"
        raise Unavailable(f"{command[0]} failed to compile the kernels: {reason}")


def _compiler() -> list[str]:
    """The compiler's command; empty if there is none."""
    if command := os.environ.get("CC"):
        return command.split()
    return [path for name in ("gcc", "cc") if (path := shutil.which(name))][:1]


def _folders() -> list[Path]:
    """The folders that may hold the library: the user's cache, then a folder of the user's in the temporary files."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = Path(tempfile.gettempdir()) / f"polymix-{os.getuid()}"
    return [Path(cache) / "polymix", temporary] if os.path.isabs(cache) else [temporary]


def _processor() -> str:
    """Describe the processor, which -march=native depends on: machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "Features", "CPU "))
    )
