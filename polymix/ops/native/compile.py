"""Compiles the C files of all ops into one library for each processor level.

This runs when polymix is installed, when its wheel is built (hatch_build.py), and by `polymix build-kernels`, but
never when a mixer is called. It needs only the standard library, because PyTorch may not be installed when a wheel is
built.

The libraries do not link PyTorch. Their OpenMP functions are resolved to the runtime that PyTorch has loaded, so both
share one pool of threads.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

OPS = Path(__file__).resolve().parents[1]
HEADERS = OPS / "native"
LIBRARIES = HEADERS / "libraries"
_V4 = ("-march=x86-64-v4",)
# Best first. Compiling with -march=native is not faster, as measured. x86-64-amx is v4 with tiles for bfloat16.
LEVELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {
        "x86-64-amx": (*_V4, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "x86-64-v4": _V4,
        "x86-64-v3": ("-march=x86-64-v3",),
    },
    "aarch64": {"armv8-a": ("-march=armv8-a",)},
}
OPTIONAL = ("x86-64-amx",)  # left out where the compiler does not know its options: gcc before 11, clang before 12
FLAGS = ("-O3", "-std=gnu11", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
COMPILER_SECONDS = 300  # for one file, before it is stopped


class CompileError(Exception):
    """The libraries cannot be built; the message is the reason."""


def levels() -> Mapping[str, tuple[str, ...]]:
    """The processor levels of this machine's architecture and their compiler options; empty if there are none."""
    return LEVELS.get(platform.machine(), {}) if sys.platform == "linux" else {}


@cache
def fingerprint() -> str:
    """A hash of the sources and flags, so that a library built from other sources is not loaded."""
    files = [*sorted(OPS.glob("*/*.h")), *_sources()]
    parts = [*FLAGS, *(f"{path.name}\0{path.read_text('utf-8')}" for path in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def library_path(level: str, folder: Path | None = None) -> Path:
    """The path of the library for a processor level, in `folder` or by default in LIBRARIES."""
    return (folder or LIBRARIES) / f"kernels-{level}-{fingerprint()}.so"


def build(folder: Path | None = None, level_options: Mapping[str, tuple[str, ...]] | None = None) -> list[Path]:
    """Compile a library for each processor level with CC, gcc or cc, whichever succeeds first.

    Files are written atomically, and libraries built from other sources are removed.

    Args:
        folder: where the libraries go; by default LIBRARIES, where the loader looks.
        level_options: the levels and their compiler options; by default all levels of this architecture.
    Returns:
        The paths of the libraries.
    Raises:
        CompileError: no compiler succeeded. The message has the reason of each.
    """
    folder, level_options = folder or LIBRARIES, levels() if level_options is None else level_options
    if not level_options:
        raise CompileError(f"there are kernels for Linux on x86-64 and aarch64, not for {sys.platform} on "
                           f"{platform.machine()}")  # fmt: skip
    reasons = []
    for compiler in compilers():
        try:
            return _build(compiler, folder, level_options)
        except CompileError as error:
            reasons.append(str(error))
        except OSError as error:
            raise CompileError(f"cannot write to {folder}: {error.strerror or error}") from error
    raise CompileError("; ".join(reasons) or "no C compiler was found: install gcc, or set CC")


def compilers() -> list[list[str]]:
    """The compiler commands to try, in order: CC (a path, or a command with options), gcc, cc."""
    import shlex  # only needed here; `import polymix` should load nothing that PyTorch has not loaded

    cc = os.environ.get("CC", "").strip()
    commands = [[cc] if Path(cc).is_file() else shlex.split(cc)] if cc else []
    commands += [[path] for name in ("gcc", "cc") if (path := shutil.which(name))]
    return [command for index, command in enumerate(commands) if command not in commands[:index]]


def _sources() -> list[Path]:
    return sorted(OPS.glob("*/*.c"))


def _build(compiler: list[str], folder: Path, level_options: Mapping[str, tuple[str, ...]]) -> list[Path]:
    """Compile and link all levels that one compiler knows."""
    folder.mkdir(parents=True, exist_ok=True)
    level_options = {level: options for level, options in level_options.items()
                     if level not in OPTIONAL or _knows(compiler, options)}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as room, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {}
        for level, options in level_options.items():
            for source in _sources():
                target = Path(room) / f"{level}-{source.stem}.o"
                command = (*compiler, *FLAGS, *options, f"-I{HEADERS}", "-c", str(source), "-o", str(target))
                jobs[target] = (level, pool.submit(_run, command))
        try:
            for _, job in jobs.values():
                job.result()
        except CompileError:
            for _, job in jobs.values():
                job.cancel()
            raise
        built = []
        for level in level_options:
            library = Path(room) / f"{level}.so"
            objects = [str(target) for target, (of, _) in jobs.items() if of == level]
            _run((*compiler, "-shared", *objects, "-o", str(library)))
            with library.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(library, library_path(level, folder))
            built.append(library_path(level, folder))
    for old in folder.glob("kernels-*.so"):
        if not old.stem.endswith(fingerprint()):
            old.unlink()
    return built


def _knows(compiler: list[str], options: tuple[str, ...]) -> bool:
    """Whether a compiler accepts these options."""
    try:
        _run((*compiler, *options, "-E", "-x", "c", os.devnull, "-o", os.devnull))
    except CompileError:
        return False
    return True


def _run(command: Sequence[str]) -> None:
    """Run a compiler command. Raises CompileError if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} took more than {COMPILER_SECONDS} s") from error
    except OSError as error:
        raise CompileError(f"{command[0]} could not be run: {error.strerror or error}") from error
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        first = next((line for line in lines if "error" in line), *lines[:1] or [f"exit status {result.returncode}"])
        raise CompileError(f"{command[0]} failed: {first}")
